"""Attention over packed rows and over the cache."""
