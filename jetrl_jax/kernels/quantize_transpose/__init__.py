"""Quantises a matrix and its transpose in one pass."""
