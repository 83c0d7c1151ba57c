"""Numbers: formats, scales, the quantised dot and its gradient, recipes."""

from jetrl_jax.fp8.formats import E4M3, E5M2
from jetrl_jax.fp8.linear import dot, unscaled_dot
from jetrl_jax.fp8.products import Unscaled
from jetrl_jax.fp8.quantization import (
    QTensor,
    dequantize,
    quantize,
    scale_from_amax,
)
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.fp8.slots import init_state, observe, observe_kernels, roll
from jetrl_jax.fp8.weights import prepare_weights, renew_weights

__all__ = [
    'E4M3',
    'E5M2',
    'QTensor',
    'Recipe',
    'Unscaled',
    'dequantize',
    'dot',
    'init_state',
    'observe',
    'observe_kernels',
    'prepare_weights',
    'quantize',
    'renew_weights',
    'roll',
    'scale_from_amax',
    'unscaled_dot',
]
