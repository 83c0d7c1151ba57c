"""Accuracy of a checkpoint: `python -m jetrl_jax.evaluate`."""
