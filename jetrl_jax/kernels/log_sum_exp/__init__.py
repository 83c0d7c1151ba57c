"""The log-sum-exp of tempered logits and their mean, in one pass.

    z_v = max(logits_v * inverse, lowest float32)        float32, rounded
    lse = log sum_v exp(z_v)                             float32, nats
    mean = sum_v exp(z_v - lse) z_v

so that a target's log-prob is z_y - lse and the entropy lse - mean. Sums have
one order for every number of rows (see `row_sum` for why XLA's own reduction
will not do). The derivative is that of the formula, from z and both results:

    dz_v = exp(z_v - lse) (dlse + dmean (1 + z_v - mean))
"""

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array, Float
from jetrl_jax.kernels import dispatch, stands_for
from jetrl_jax.kernels.log_sum_exp import reference
from jetrl_jax.kernels.log_sum_exp.reference import temper
from jetrl_jax.kernels.residuals import keep

__all__ = ['gradient', 'row_stats', 'temper']


def _stats(logits_MV: Array, inverse_M: Array) -> tuple[Array, Array]:
  name = dispatch.implementation('log_sum_exp')
  if name == dispatch.REFERENCE:
    return reference.row_stats(logits_MV, inverse_M)
  from jetrl_jax.kernels.log_sum_exp import mosaic_sm90

  functions = mosaic_sm90.row_stats, reference.row_stats
  return stands_for.kernel(
      'log_sum_exp', name, *functions, logits_MV, inverse_M
  )


@jax.custom_vjp
def row_stats(
    logits_MV: Float[Array, 'M V'], inverse_M: Float[Array, ' M']
) -> tuple[Float[Array, ' M'], Float[Array, ' M']]:
  """Returns (log-sum-exp, softmax-weighted mean) of each row, in nats.

  Args:
    logits_MV: float32; M a multiple of 16.
    inverse_M: float32, 1 / temperature of each row.
  """
  return _stats(logits_MV, inverse_M)


def _stats_fwd(logits_MV, inverse_M):
  stats = _stats(logits_MV, inverse_M)
  # `keep` saves the results for the backward, which computes the logits again.
  # The returned results are not the marked ones: a mark is one more operation,
  # which the training forward would have and decode would not.
  return stats, (logits_MV, inverse_M, *keep(stats))


def gradient(
    logits_MV: Array, inverse_M: Array, stats: tuple, cotangents: tuple
) -> Array:
  """Returns the derivative by any columns of logits.

  Args:
    logits_MV: float32, some columns or all.
    inverse_M: as for `row_stats`.
    stats: what `row_stats` returned of all columns.
    cotangents: of both.
  """
  lse_M, mean_M = stats
  ct_lse, ct_mean = cotangents
  z_MV = temper(logits_MV, inverse_M[:, None])
  p_MV = jnp.exp(z_MV - lse_M[:, None])
  centred = 1.0 + z_MV - mean_M[:, None]
  dz_MV = p_MV * (ct_lse[:, None] + ct_mean[:, None] * centred)
  return dz_MV * inverse_M[:, None]


def _stats_bwd(residuals, cotangents):
  logits_MV, inverse_M, *stats = residuals
  return gradient(logits_MV, inverse_M, tuple(stats), cotangents), None


row_stats.defvjp(_stats_fwd, _stats_bwd)
