"""Adds to the residual, normalises and quantises."""
