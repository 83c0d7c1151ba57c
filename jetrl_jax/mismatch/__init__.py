"""Splits a step's mismatch by cause: `python -m jetrl_jax.mismatch`."""
