"""Trains language models by reinforcement learning in one FP8 precision flow.

docs/design.md shows the rooms; each says in its `__init__` what it is
for. Nothing is imported here, so that reward workers start without JAX.
"""

__all__ = []
