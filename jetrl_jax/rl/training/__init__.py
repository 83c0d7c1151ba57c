"""The training loop: collect a rollout, learn from it, guard, write."""
