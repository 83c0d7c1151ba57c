"""A step's mismatch, split by cause: `python -m jetrl_jax.mismatch`."""
