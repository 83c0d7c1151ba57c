"""Which of a block's activations are kept for its backward pass.

    none       all are kept
    selective  kept: what attention's backward reads, and the residual stream
               after attention. Recomputed: norms, quantising, and the first
               half of the MLP
    full       only the block's input is kept

The MLP's last dot is never recomputed, because no backward reads its result.
The names are Megatron's. There 'selective' recomputes the attention core. Our
attention kernels do not store it.

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
  """Raises a ValueError if `mode` is not one of `MODES`."""
  if mode not in MODES:
    raise ValueError(f'remat is {mode!r}; allowed: {", ".join(MODES)}')


def all_but_kept(function):
  """Returns the function; its backward recomputes values without `keep`."""
  return jax.checkpoint(function, policy=ONLY_KEPT)


def wrap(block: type[nn.Module], mode: str) -> type[nn.Module]:
  """Returns the module with the recomputation that `mode` asks for."""
  check(mode)
  if mode == 'none':
    return block
  policy = ONLY_KEPT if mode == 'selective' else None
  return nn.remat(block, prevent_cse=True, policy=policy)
