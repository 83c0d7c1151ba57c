"""One HTML page of a run: `python -m jetrl_jax.report`."""
