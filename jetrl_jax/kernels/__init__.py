"""Operations: each a folder with its signature, reference and kernels.

`<op>/__init__.py` has the signature, the formula and the derivative, and asks
`dispatch.py` which implementation runs. `<op>/reference.py` is plain JAX: it
runs everywhere, and the tests hold all kernels to it. `<op>/mosaic*.py` are
kernels. Only the operation imports its kernels, and only when one runs, so no
other file needs their backend.
"""

from jetrl_jax.kernels.quantized_dot.linear import dot, unscaled_dot
from jetrl_jax.kernels.quantized_dot.weights import (
    prepare_weights,
    requantize_weights,
)

__all__ = ['dot', 'prepare_weights', 'requantize_weights', 'unscaled_dot']
