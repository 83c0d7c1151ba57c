"""One AdamW step of a leaf whose moments are stored in 8 bits.

    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,     g = gradient * clip
    w = w - lr (m i1 / (sqrt(v i2) + eps) + decay w),    i = 1 / (1 - b^t)

float32 throughout; masters are rounded once to their dtype, to the nearest or
at random, and moments are encoded in groups of 128 (`reference.py`). A step
that is skipped leaves everything as it was.

A kernel updates a parameter group that `fits`. All other groups are updated by
their optax optimiser; `reference.adamw` is one with the same formulas.
"""

from typing import Any

from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.kernels import dispatch
from jetrl_jax.kernels.adamw import groups, reference
from jetrl_jax.kernels.adamw.reference import EncodedMoment


def fits(
    optimizer: Any, masters: PyTree, gradients: PyTree, moments: list[PyTree]
) -> bool:
  """Whether a kernel updates a parameter group.

  Args:
    optimizer: an optax transformation; only `reference.adamw` is known to be
      AdamW.
    masters: the group's masters.
    gradients: the gradients of `masters`.
    moments: trees of first and of second moments.
  """
  return dispatch.has_kernel('adamw') and groups.fits(
      optimizer, masters, gradients, moments
  )


def update(
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
  """Returns (master, first moment, second moment, amax of the master) after it.

  The amax of a skipped step has no meaning.

  Args:
    master: the master, of a shape that `fits`.
    gradient: its gradient, of the same shape.
    mu: first moment.
    nu: second moment.
    numbers: float32 [8]: 1, or 0 for a step that is skipped; the clip factor;
      the learning rate; i1; i2; the rest is not read.
    rounding_keys: uint32 [4], a bfloat16 master's key and the index of its
      first element here and padding, to round at random; None rounds to the
      nearest.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root.
    decay: weight decay of this leaf.
  """
  run = reference.update
  if dispatch.has_kernel('adamw'):
    from jetrl_jax.kernels.adamw import mosaic_sm90

    run = mosaic_sm90.update
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
