"""gate_up's dot, and SwiGLU of its result."""

import jax

from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels.quantized_dot import per_tensor
from jetrl_jax.kernels.swiglu import swiglu_of


def hidden(
    x8: QTensor, weight: QTensor, out_scale: Array, dtype
) -> tuple[QTensor, DeferredScale]:
  """Returns (h, gate|up before it is scaled), see the package's `gate_up`."""
  with jax.named_scope('gate_up'):
    product = per_tensor.unscaled(x8, weight, dtype)
  return QTensor(values=swiglu_of(product, out_scale), scale=out_scale), product
