"""Quantises moved masters again and updates the weights in place."""
