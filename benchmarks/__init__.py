"""Measurements, one command each; docs/performance.md lists them."""
