"""Log-probs and entropy of tempered logits, never [T, V] at once.

Decode and training both get their log-sum-exp from `row_stats`
(`kernels/log_sum_exp`), which reads a row of float32 logits in one fixed order.
Training goes through chunks of rows and recomputes each chunk's logits in the
backward pass.

Devices of `tensor` have some columns of the logits each. They exchange them for
whole rows, a share each, and then the rows' results. Their derivative is that
of a device's own columns, so nothing travels for it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.collectives import ALONE, Axes
from jetrl_jax.core.typing import Array, Float, Int, PyTree
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels import log_sum_exp
from jetrl_jax.kernels.log_sum_exp import row_stats, temper
from jetrl_jax.models import remat


def inverse_temperature(temperature) -> Array:
  """Returns 1 / temperature; temperature 0 (greedy) leaves logits alone."""
  return 1.0 / jnp.where(temperature > 0, temperature, 1.0)


@jax.custom_vjp
def pick(logits_MV: Array, targets_M: Array) -> Array:
  """Returns each row's logit at its target."""
  return jnp.take_along_axis(logits_MV, targets_M[:, None], axis=1)[:, 0]


def _pick_fwd(logits_MV, targets_M):
  like = jnp.zeros((0, logits_MV.shape[1]))
  return pick(logits_MV, targets_M), (targets_M, like)


def _pick_bwd(residuals, ct_M):
  targets_M, like = residuals
  return _placed(ct_M, targets_M, like.shape[1]), None


def _placed(ct_M: Array, targets_M: Array, columns: int) -> Array:
  """Returns [M, columns], with each row's number at its target."""
  # Elementwise, so that it joins the fusion that makes the logits' gradient;
  # a scatter-add in a fixed order is a sort on a GPU.
  token_V = jnp.arange(columns, dtype=jnp.int32)
  here_MV = token_V[None, :] == targets_M[:, None]
  return jnp.where(here_MV, ct_M[:, None], 0.0)


pick.defvjp(_pick_fwd, _pick_bwd)


def _target_stats(
    axes: Axes, logits_MV: Array, targets_M: Array, inverse_M: Array
) -> tuple[Array, Array, Array]:
  """Returns (log-sum-exp, mean, target's logit) of each row.

  Args:
    axes: devices.
    logits_MV: float32, this device's columns.
    targets_M: int32 token ids.
    inverse_M: float32, 1 / temperature of each row.
  """
  if axes.tensor > 1:
    return _shared_stats(axes, logits_MV, targets_M, inverse_M)
  lse_M, mean_M = row_stats(logits_MV, inverse_M)
  return lse_M, mean_M, pick(logits_MV, targets_M)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shared_stats(axes, logits_MV, targets_M, inverse_M):
  own = axes.own_rows
  rows_MV = axes.whole_rows(logits_MV)
  stats = row_stats(rows_MV, own(inverse_M))
  picked_M = pick(rows_MV, own(targets_M))
  return tuple(axes.all_rows((*stats, picked_M), logits_MV.shape[0]))


def _shared_stats_fwd(axes, logits_MV, targets_M, inverse_M):
  # Kept, and returned as what is kept: nothing is exchanged a second time.
  found = remat.keep(_shared_stats(axes, logits_MV, targets_M, inverse_M))
  return found, (logits_MV, targets_M, inverse_M, found[:2])


def _shared_stats_bwd(axes, residuals, cotangents):
  logits_MV, targets_M, inverse_M, stats = residuals
  *ct_stats, ct_picked_M = cotangents
  d_MV = log_sum_exp.gradient(logits_MV, inverse_M, stats, tuple(ct_stats))
  columns = logits_MV.shape[1]
  here_M = targets_M - axes.first_column(columns)
  return d_MV + _placed(ct_picked_M, here_M, columns), None, None


_shared_stats.defvjp(_shared_stats_fwd, _shared_stats_bwd)


def chunk_of(rows: int, chunk_rows: int) -> int:
  """Returns rows per chunk: as many chunks as are needed, of equal size."""
  chunks = -(-rows // chunk_rows)
  unit = math.gcd(chunk_rows, 128)
  return min(-(-rows // (chunks * unit)) * unit, rows)


def target_logprobs(
    head,
    hidden_MD: Float[Array, 'M D'],
    targets_M: Int[Array, ' M'],
    temperature: Float[Array, ''],
    *,
    chunk_rows: int,
    row_mask_M: Float[Array, ' M'],
    fp8_state: PyTree,
    axes: Axes = ALONE,
    show: bool = False,
) -> tuple[Array, ...]:
  """Returns each target's log-prob and the entropy at its row, in nats.

      log pi(y) = z_y - logsumexp(z),    z = logits / temperature

  Args:
    head: (hidden rows [m, D], their mask [m], scaling state) to float32 logits
      [m, V], of which it returns this device's columns; differentiated through.
    hidden_MD: final hidden states.
    targets_M: int32 token ids.
    temperature: float32 scalar, an argument of the compiled function.
    chunk_rows: most rows whose logits are in memory at once; a multiple of 16.
    row_mask_M: float32, 0 on rows that are padding.
    fp8_state: the head's scaling state under its name; {} in high precision.
    axes: devices.
    show: return the tempered logits [M, V] and their log-sum-exp [M] as well,
      to look at; all logits are then in memory.

  Returns:
    (log-probs [M], entropies [M]), float32, and what `show` adds.
  """
  rows = hidden_MD.shape[0]
  chunk = chunk_of(rows, chunk_rows)
  pad = -rows % chunk
  hidden_MD = jnp.pad(hidden_MD, ((0, pad), (0, 0)))
  targets_M = jnp.pad(targets_M, (0, pad))
  row_mask_M = jnp.pad(row_mask_M, (0, pad))

  inverse = inverse_temperature(temperature)

  @remat.all_but_kept
  def one(args):
    hidden, targets, mask, state = args
    with jax.named_scope('head'):
      logits_MV = head(hidden, mask, state)
      lse_M, mean_M, picked_M = _target_stats(
          axes, logits_MV, targets, jnp.broadcast_to(inverse, (chunk,))
      )
      found = temper(picked_M, inverse) - lse_M, lse_M - mean_M
      if not show:
        return found
      whole_MV = axes.gather_outputs(logits_MV)
      return (*found, temper(whole_MV, inverse), lse_M)

  if chunk == hidden_MD.shape[0]:
    whole = one((hidden_MD, targets_M, row_mask_M, fp8_state))
    return tuple(x[:rows] for x in whole)
  parts = (
      hidden_MD.reshape(-1, chunk, hidden_MD.shape[1]),
      targets_M.reshape(-1, chunk),
      row_mask_M.reshape(-1, chunk),
  )
  uses = parts[0].shape[0]
  found = lax.map(one, (*parts, scaling_state.spread(fp8_state, uses)))
  return tuple(x.reshape(-1, *x.shape[2:])[:rows] for x in found)
