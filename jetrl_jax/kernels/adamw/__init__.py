"""One AdamW step of a leaf whose moments rest in 8 bits.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,     g = gradient * shrink
    w = w - lr (m i1 / (sqrt(v i2) + eps) + decay w),    i = 1 / (1 - b^t)

float32 throughout; masters are rounded once to their dtype, to the nearest or
at random, and moments are encoded in groups of 128 (`reference.py`). A step
that is skipped leaves everything as it was.

A kernel moves a part of the model that `fits`. Everything else moves by
`reference.adamw`, an optax transformation of the whole tree with the same
formulas, since an optimiser may be any.
"""

from typing import Any

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.adamw import reference
from jetrl_jax.kernels.adamw.reference import EncodedMoment


def fits(
    optimizer: Any, masters: PyTree, gradients: PyTree, moments: list[PyTree]
) -> bool:
  """Whether a kernel moves a part of the model.

  Args:
    optimizer: any; only `reference.adamw` is known to be AdamW.
    masters: the part's.
    gradients: of `masters`.
    moments: trees of first and of second moments.
  """
  match dispatch.implementation('adamw'):
    case 'triton':
      from jetrl_jax.kernels.adamw import triton

      return triton.fits(optimizer, masters, gradients, moments)
    case _:
      return False


def move(
    master: Array,
    gradient: Array,
    mu: EncodedMoment,
    nu: EncodedMoment,
    numbers: Array,
    rounding_keys: Array | None,
    *,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> tuple[Array, EncodedMoment, EncodedMoment, Array]:
  """Returns one leaf, its moments and its amax after a step.

  The amax of a step that is skipped is anything.

  Args:
    master: of any shape that `fits`.
    gradient: of that shape.
    mu: first moment.
    nu: second moment.
    numbers: float32 [8]: 1 or, for a step that is skipped, 0; shrink; learning
      rate; i1; i2; the rest is not read.
    rounding_keys: uint32 [4], a bfloat16 master's key and the index of its
      first element here and padding, to round at random; None rounds to the
      nearest.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root.
    decay: weight decay of this leaf.
  """
  match dispatch.implementation('adamw'):
    case 'triton':
      from jetrl_jax.kernels.adamw import triton

      run = triton.move
    case _:
      run = reference.move
  return run(
      master,
      gradient,
      mu,
      nu,
      numbers,
      rounding_keys,
      b1=b1,
      b2=b2,
      eps=eps,
      decay=decay,
  )
