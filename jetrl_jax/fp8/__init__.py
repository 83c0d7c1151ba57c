"""8-bit numbers: formats, scales, recipes and the scaling state."""

from jetrl_jax.fp8.formats import E4M3, E5M2
from jetrl_jax.fp8.products import DeferredScale
from jetrl_jax.fp8.quantization import (
    QTensor,
    dequantize,
    quantize,
    scale_from_amax,
)
from jetrl_jax.fp8.recipes import Recipe
from jetrl_jax.fp8.scaling_state import (
    init_state,
    observe,
    observe_kernels,
    roll,
    stack_observations,
)

__all__ = [
    'E4M3',
    'E5M2',
    'QTensor',
    'Recipe',
    'DeferredScale',
    'dequantize',
    'init_state',
    'observe',
    'observe_kernels',
    'quantize',
    'roll',
    'scale_from_amax',
    'stack_observations',
]
