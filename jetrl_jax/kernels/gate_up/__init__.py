"""The MLP's first half: gate_up's dot, SwiGLU, and h quantised for down.

    gate|up = x8_MD W8_GD^T
    h_MF = silu(gate * s) * (up * s),    s = x8.scale * W8.scale
    q_MF = E4M3(clip(h / out_scale))

gate|up is summed in float32, in the one order that the backend's FP8 dot has
for every number of rows, and rounded to the compute dtype. Scales are powers of
two. h is computed in float32 and rounded once. The operation has no derivative:
only a decode step uses it. Training keeps gate|up, so it runs the dot and
SwiGLU one after the other (`kernels/mlp`).
"""

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.gate_up import reference


def _kernel():
  """Returns the module of the kernel in use; None for the reference."""
  if not dispatch.has_kernel('gate_up'):
    return None
  from jetrl_jax.kernels.gate_up import mosaic_sm90

  return mosaic_sm90


def fits(rows: int, dims: tuple[int, ...]) -> bool:
  """Whether one kernel makes h, and is faster than a dot and SwiGLU.

  Args:
    rows: number of rows of x.
    dims: (D, F): columns of x and of h.
  """
  kernel = _kernel()
  return kernel is not None and kernel.fits(rows, dims)


def gate_up(x8: QTensor, weight: QTensor, out_scale: Array, dtype) -> QTensor:
  """Returns h [M, F] in E4M3 on the scale `out_scale`.

  Args:
    x8: [M, D] in E4M3 on one scale, a power of two. With two copies [2, M, D]
      the dot computes gate and up as two parts, which for few rows may be tiled
      better.
    weight: [2 F, D] in the same format; gate's rows come before up's.
    out_scale: float32 scalar.
    dtype: dtype to which gate|up is rounded; the kernel takes only bfloat16.
  """
  kernel = _kernel()
  dims = x8.values.shape[-1], weight.values.shape[0] // 2
  if kernel and x8.values.ndim == 2 and kernel.fits(len(x8.values), dims):

    def run(x8, weight, out_scale):
      with jax.named_scope('gate_up'):
        return kernel.hidden(x8, weight, out_scale)

    def plain(x8, weight, out_scale):
      return reference.hidden(x8, weight, out_scale, dtype)[0]

    name = dispatch.implementation('gate_up')
    return stands_for.kernel('gate_up', name, run, plain, x8, weight, out_scale)
  return reference.hidden(x8, weight, out_scale, dtype)[0]
