"""Rotates queries and keys and appends keys and values to the cache."""
