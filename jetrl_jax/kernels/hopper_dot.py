"""A dot of 8-bit floats inside a Pallas kernel, by Hopper's own instruction.

Pallas asks Triton for dots with full float32 sums, and for these Triton widens
FP8 to float16, at half of the tensor core's speed. cuBLAS uses the tensor
core's own sums. Triton's dot has an attribute that allows them, but no argument
of Pallas sets it. So this file adds an operation of its own to Pallas' Triton
backend.

That takes a part of JAX that is not public, `register_lowering`. No public name
does the same. `jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM` asks
for such sums, but the backend refuses it (jax 0.10.2 to 0.12.0.1).
`jax.extend.pallas` registers how a whole kernel is lowered, not one operation,
and `triton.elementwise_inline_asm` has no matrix instructions.
`tests/kernels/test_block_scaled_dot.py` lowers the operation in every version
of JAX that is tested. If a version has moved the part, `is_there` is False and
other implementations run. Mosaic has such a dot, so this file goes when JAX
removes the Triton backend.
"""

import functools

import jax.numpy as jnp
from jax.extend import core

from jetrl_jax.core.typing import Array

# Products that the tensor core may add before their sum goes to float32.
_ANY_NUMBER = 2**30


@functools.cache
def _primitive() -> core.Primitive:
  """Returns the operation (a, b, start) -> start + a . b^T, see below."""
  # Imported here, so that nothing else breaks if a version of JAX has moved
  # them.
  from jax._src.pallas.triton import lowering
  from jaxlib.triton import dialect

  dot_p = core.Primitive('hopper_dot')

  @dot_p.def_abstract_eval
  def shape(a, b, start):
    del a, b
    return start

  @lowering.register_lowering(dot_p)
  def lower(ctx, a, b, start):
    del ctx
    transposed = dialect.trans(b, (1, 0))
    return dialect.dot(a, transposed, start, max_num_imprecise_acc=_ANY_NUMBER)

  del shape, lower
  return dot_p


@functools.cache
def is_there() -> bool:
  """Whether this jax has the parts that the operation is made of."""
  try:
    _primitive()
  except (ImportError, AttributeError):
    return False
  return True


def hopper_dot(
    a_MC: Array, b_NC: Array, start_MN: Array, *, interpret: bool
) -> Array:
  """Returns start + a . b^T, float32, added in order by the tensor core.

  Args:
    a_MC: E4M3 or E5M2; M is a multiple of 64.
    b_NC: E4M3 or E5M2; N is a multiple of 16.
    start_MN: float32, what the products are added to.
    interpret: the kernel runs on a CPU, for tests.
  """
  if interpret:
    a_MC, b_NC = a_MC.astype(jnp.float32), b_NC.astype(jnp.float32)
    product = jnp.dot(a_MC, b_NC.T, preferred_element_type=jnp.float32)
    return start_MN + product
  return _primitive().bind(a_MC, b_NC, start_MN)
