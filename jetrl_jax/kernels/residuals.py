"""Marks the arrays that selective recomputation keeps for the backward pass.

`models/remat.py` has the modes; 'selective' keeps what is marked here.
"""

import jax
from jax import ad_checkpoint

_KEPT = 'kept'
ONLY_KEPT = jax.checkpoint_policies.save_only_these_names(_KEPT)


def keep(tree):
  """Marks arrays that 'selective' does not compute again.

  Everything that the backward reads of them must be made of the result: what
  is made of the argument has the argument computed again.
  """
  return ad_checkpoint.checkpoint_name(tree, _KEPT)
