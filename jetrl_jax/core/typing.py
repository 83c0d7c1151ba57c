"""The shape letters and the array aliases of the whole package.

The name of an array of known rank ends in its letters (`logits_BTV`,
`advantage_B`). Einsum letters and jaxtyping dimension names are the same.

    P prompts             G samples per prompt   B sequences or packed rows
    T query tokens        S key tokens           M rows of a dot (B * T, padded)
    D model width         N query heads          K key/value heads
    H head size           F feed-forward width   V vocabulary
    L layers              A amax history length  I / O a dot's in / out features
"""

from typing import Any, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped, UInt8

Array: TypeAlias = jax.Array
NpArray: TypeAlias = np.ndarray
# A nested dict of arrays (parameters, gradients, FP8 state).
PyTree: TypeAlias = Any
# A typed key made by `rng.key`.
PRNGKey: TypeAlias = jax.Array

__all__ = [
    'Array',
    'Bool',
    'Float',
    'Int',
    'NpArray',
    'PRNGKey',
    'PyTree',
    'Shaped',
    'UInt8',
]
