"""Log-probs and entropy of tempered logits, never [T, V] at once.

Decode and training both get their log-sum-exp from `row_stats`
(`kernels/log_sum_exp`), which reads a row of float32 logits in one fixed order.
Training goes through chunks of rows and recomputes each chunk's logits in the
backward pass.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float, Int, PyTree
from jetrl_jax.fp8 import scaling_state
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
  # Elementwise, so that it joins the fusion that makes the logits' gradient;
  # a scatter-add in a fixed order is a sort on a GPU.
  targets_M, like = residuals
  token_V = jnp.arange(like.shape[1], dtype=jnp.int32)
  here_MV = token_V[None, :] == targets_M[:, None]
  return jnp.where(here_MV, ct_M[:, None], 0.0), None


pick.defvjp(_pick_fwd, _pick_bwd)


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
    show: bool = False,
) -> tuple[Array, ...]:
  """Returns each target's log-prob and the entropy at its row, in nats.

      log pi(y) = z_y - logsumexp(z),    z = logits / temperature

  Args:
    head: (hidden rows [m, D], their mask [m], scaling state) to float32 logits
      [m, V]; differentiated through.
    hidden_MD: final hidden states.
    targets_M: int32 token ids.
    temperature: float32 scalar, an argument of the compiled function.
    chunk_rows: most rows whose logits are in memory at once; a multiple of 16.
    row_mask_M: float32, 0 on rows that are padding.
    fp8_state: the head's scaling state under its name; {} in high precision.
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
      lse_M, mean_M = row_stats(logits_MV, jnp.broadcast_to(inverse, (chunk,)))
      z_M = temper(pick(logits_MV, targets), inverse)
      found = z_M - lse_M, lse_M - mean_M
      return (*found, temper(logits_MV, inverse), lse_M) if show else found

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
