"""Configurations of runs, each a lab record; `base` has all values."""
