"""The MLP's first half: gate_up's dot, SwiGLU, and h quantised for down.

    gate|up = x8_MD W8_GD^T
    h_MF = silu(gate * s) * (up * s),    s = x8.scale * W8.scale
    q_MF = E4M3(clip(h / step))

gate|up has float32 sums, in the order of additions that the backend's FP8 dot
has for every number of rows, and is rounded to the compute dtype; scales are
powers of two; h is float32 and rounded once. Without a derivative: a decode
step's. Training keeps gate|up, so it has the dot and SwiGLU apart
(`kernels/mlp`).
"""

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.gate_up import reference


def _kernel():
  """Returns the module of the kernel in use; None for the reference."""
  match dispatch.implementation('gate_up'):
    case 'mosaic_sm90':
      from jetrl_jax.kernels.gate_up import mosaic_sm90

      return mosaic_sm90
    case 'triton_sm90':
      from jetrl_jax.kernels.gate_up import triton_sm90

      return triton_sm90
    case _:
      return None


def fits(rows: int, dims: tuple[int, ...]) -> bool:
  """Whether one kernel makes h, and is faster than a dot and SwiGLU.

  Args:
    rows: of x.
    dims: (D, F), of x and of h.
  """
  kernel = _kernel()
  return kernel is not None and kernel.fits(rows, dims)


def gate_up(x8: QTensor, weight: QTensor, step: Array, dtype) -> QTensor:
  """Returns h [M, F] in E4M3 on the scale `step`.

  Args:
    x8: [M, D] in E4M3 on one scale; of two copies [2, M, D] the dot is in two
      parts, gate and up, which for few rows may be tiled better.
    weight: [2 F, D], gate's rows before up's; as x8. Scales are powers of two.
    step: float32 scalar.
    dtype: that gate|up is rounded to; bfloat16 for the kernel.
  """
  kernel = _kernel()
  dims = x8.values.shape[-1], weight.values.shape[0] // 2
  if kernel and x8.values.ndim == 2 and kernel.fits(len(x8.values), dims):

    def run(x8, weight, step):
      with jax.named_scope('gate_up'):
        return kernel.hidden(x8, weight, step)

    def plain(x8, weight, step):
      return reference.hidden(x8, weight, step, dtype)[0]

    name = dispatch.implementation('gate_up')
    return stands_for.kernel('gate_up', name, run, plain, x8, weight, step)
  return reference.hidden(x8, weight, step, dtype)[0]
