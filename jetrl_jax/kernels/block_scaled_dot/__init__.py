"""The product of 8-bit operands that have a scale per group of 128.

    y_MN = sum_g (a_g . b_g^T) * scale_a_g * scale_b_g,    g = 0, 1, ...

Each group's product and their sum are float32; the order of the sum is the
order of the groups, for every number of rows, and the result is rounded once.
This is the dot of the recipe `fp8_block`, forward and backward; it has no
derivative of its own.
"""

from jetrl_jax.core.typing import Array
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.block_scaled_dot import reference


def block_dot(
    a_MK: Array,
    scale_a_MG: Array,
    b_NK: Array,
    scale_b_NG: Array,
    out_dtype,
    *,
    power_of_two: bool,
) -> Array:
  """Returns a . b^T [M, N], summed in groups of 128 that have scales.

  Args:
    a_MK: 8-bit floats; K is a multiple of 128.
    scale_a_MG: float32, of each row's G = K / 128 groups.
    b_NK: as a; N is a multiple of 128.
    scale_b_NG: as a's, or of 128 rows at a time [N / 128, G].
    out_dtype: the dtype of the result, rounded once.
    power_of_two: the scales are powers of two.
  """
  operands = a_MK, scale_a_MG, b_NK, scale_b_NG
  static = {'out_dtype': out_dtype, 'power_of_two': power_of_two}
  name = dispatch.implementation('block_scaled_dot')
  if not _has_kernel(scale_b_NG, b_NK.shape[0]):
    return reference.grouped_dot(*operands, **static)
  from jetrl_jax.kernels.block_scaled_dot import mosaic_sm90

  functions = mosaic_sm90.block_dot, reference.grouped_dot
  return stands_for.kernel(
      'block_scaled_dot', name, *functions, *operands, **static
  )


def _has_kernel(scale_b_NG: Array, columns: int) -> bool:
  """Whether a kernel runs, for all numbers of rows."""
  if not dispatch.has_kernel('block_scaled_dot'):
    return False
  from jetrl_jax.kernels.block_scaled_dot import mosaic_sm90

  return mosaic_sm90.fits(scale_b_NG, columns)
