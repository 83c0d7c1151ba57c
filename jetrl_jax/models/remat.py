"""What of a block waits in memory for its backward, and what is computed again.

    none       everything waits
    selective  what attention's backward reads and the residual stream after
               attention wait; norms, quantising and the MLP's first half are
               computed again
    full       only the block's input waits

The MLP's last dot is never computed again: no backward reads its result.
Names as Megatron has them; 'selective' is other there, where it is the
attention core that is computed again, which a fused kernel has no need of.

References:
  Korthikanti et al. 2022, arXiv:2205.05198, section 5 (selective activation
  recomputation).
"""

import jax
from flax import linen as nn

from jetrl_jax.kernels.residuals import ONLY_KEPT, keep

__all__ = ['MODES', 'all_but_kept', 'check', 'keep', 'wrap']

MODES = ('none', 'selective', 'full')


def check(mode: str) -> None:
  """Refuses what is no mode.

  Raises:
    ValueError: that.
  """
  if mode not in MODES:
    raise ValueError(f'remat is {mode!r}; allowed: {", ".join(MODES)}')


def all_but_kept(function):
  """Returns the function, whose backward computes again what is not marked."""
  return jax.checkpoint(function, policy=ONLY_KEPT)


def wrap(block: type[nn.Module], mode: str) -> type[nn.Module]:
  """Returns the module, recomputed in its backward as the mode says."""
  check(mode)
  if mode == 'none':
    return block
  policy = ONLY_KEPT if mode == 'selective' else None
  return nn.remat(block, prevent_cse=True, policy=policy)
