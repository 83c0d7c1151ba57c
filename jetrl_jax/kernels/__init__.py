"""Operations: each a folder with its kernels, reference and derivative."""

from jetrl_jax.kernels.quantized_dot.linear import dot, unscaled_dot
from jetrl_jax.kernels.quantized_dot.weights import (
    prepare_weights,
    renew_weights,
)

__all__ = ['dot', 'prepare_weights', 'renew_weights', 'unscaled_dot']
