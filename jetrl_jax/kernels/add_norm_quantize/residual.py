"""The residual stream between two dots: add, normalise, quantise.

    x' = x + delta
    y  = x' / sqrt(mean(x'^2) + eps) * gain
    y8 = E4M3(y / scale)

where scale is that on which the dot that reads y quantises it. In training XLA
adds, and the norm may quantise. In a decode step on a GPU one kernel does all
three, and takes the scales of the product delta as well.
"""

import dataclasses

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import AS_ARRAY, DeferredScale, Reads, Rows
from jetrl_jax.kernels.add_norm_quantize import norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unadded:
  """The residual stream, and a product that the next norm adds to it.

  Attributes:
    x_MD: the stream so far.
    delta: [M, D] in float32.
  """

  x_MD: Array
  delta: DeferredScale


def add(x_MD: Array, delta: Array | DeferredScale) -> Array | Unadded:
  """Returns x + delta, [M, D], or both where the next norm's kernel adds."""
  if isinstance(delta, DeferredScale):
    return Unadded(x_MD, delta)
  return x_MD + delta


def add_norm_quantize(
    residual: Array | Unadded,
    gain_D: Array,
    eps: float,
    master_D: Array | None = None,
    reads: Reads = AS_ARRAY,
) -> tuple[Array, Rows]:
  """Returns (x' [M, D], the rows for the dot that follows).

  Args:
    residual: x' [M, D], or what `add` left to be added.
    gain_D: in x's dtype.
    eps: added to the mean square.
    master_D: receives the gain's derivative in its dtype; its values are not
      read. None where no derivative is wanted.
    reads: what the dot that follows wants.
  """
  if not isinstance(residual, Unadded):
    y_MD, y8_MD = norm.rms_norm(residual, gain_D, eps, master_D, reads.scale)
    return residual, Rows(y_MD, y8_MD)
  x_MD, y_MD, y8_MD = norm.rms_norm_kernel(
      residual.x_MD,
      gain_D,
      eps,
      reads.scale,
      residual.delta,
      copies=reads.parts,
  )
  # Where the FP8 values are known nobody reads the others.
  return x_MD, Rows(x_MD if y_MD is None else y_MD, y8_MD)
