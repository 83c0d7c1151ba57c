"""Operations: each a folder with its signature, reference and kernels.

`<op>/__init__.py` has the signature, the formula and the derivative, and asks
`dispatch.py` which implementation runs; `<op>/reference.py` is plain JAX, runs
everywhere and is the truth of the tests; `<op>/triton*.py` are kernels. They
are imported where one runs, and nothing else imports their backend.
"""

from jetrl_jax.kernels.quantized_dot.linear import dot, unscaled_dot
from jetrl_jax.kernels.quantized_dot.weights import (
    prepare_weights,
    renew_weights,
)

__all__ = ['dot', 'prepare_weights', 'renew_weights', 'unscaled_dot']
