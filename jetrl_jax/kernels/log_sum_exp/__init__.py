"""The log-sum-exp of logits and what goes with it, in one pass."""
