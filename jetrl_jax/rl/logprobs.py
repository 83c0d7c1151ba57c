"""Log-probs and entropy of tempered logits, never [T, V] at once.

Decode and training both get their log-sum-exp from `row_stats`, which reads
a row of float32 logits in one fixed order (see `models/norm.py` for why a
plain XLA reduction will not do). Training goes through chunks of rows and
recomputes each chunk's logits in the backward pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jetrl_jax.compilation import kernel_options, on_gpu
from jetrl_jax.models.norm import row_sum
from jetrl_jax.typing import Array, Float, Int

# Logits that a program reads at a time: as many as its 8 warps have room for,
# since the next ones are asked for only when these have arrived.
_CHUNK = 4096


def _stats_kernel(z_ref, lse_ref, mean_ref, *, vocab: int):
  """One row: online log-sum-exp and mean logit, lane by lane, then joined."""
  lanes = jnp.arange(_CHUNK)

  def body(i, carry):
    top, total, weighted = carry
    at = i * _CHUNK + lanes
    z = jnp.where(at < vocab, z_ref[pl.ds(i * _CHUNK, _CHUNK)], -jnp.inf)
    new_top = jnp.maximum(top, z)
    decay, p = jnp.exp(top - new_top), jnp.exp(z - new_top)
    p_z = jnp.where(p > 0, p * z, 0.0)
    return new_top, total * decay + p, weighted * decay + p_z

  low = jnp.full((_CHUNK,), -1e30, jnp.float32)
  zeros = jnp.zeros((_CHUNK,), jnp.float32)
  top, total, weighted = lax.fori_loop(
      0, pl.cdiv(vocab, _CHUNK), body, (low, zeros, zeros)
  )
  row_top = jnp.max(top)
  scale = jnp.exp(top - row_top)
  row_total = jnp.sum(total * scale)
  lse_ref[...] = row_top + jnp.log(row_total)
  mean_ref[...] = jnp.sum(weighted * scale) / row_total


def row_stats_kernel(z_MV, *, interpret: bool = False):
  """The GPU form of `row_stats`: one program per row."""
  rows, vocab = z_MV.shape
  # A block that is a multiple of the chunk; the tail is masked in the kernel.
  padded = pl.cdiv(vocab, _CHUNK) * _CHUNK
  if interpret:
    z_MV = jnp.pad(z_MV, ((0, 0), (0, padded - vocab)))
  out = jax.ShapeDtypeStruct((rows,), jnp.float32)
  one = pl.BlockSpec((None,), lambda i: (i,))
  return pl.pallas_call(
      functools.partial(_stats_kernel, vocab=vocab),
      grid=(rows,),
      in_specs=[pl.BlockSpec((None, z_MV.shape[1]), lambda i: (i, 0))],
      out_specs=[one, one],
      out_shape=[out, out],
      name='row_stats',
      **kernel_options(interpret, num_warps=8),
  )(z_MV)


def _stats(z_MV):
  if on_gpu():
    return row_stats_kernel(z_MV)
  top_M1 = jnp.max(z_MV, axis=1, keepdims=True)
  p_MV = jnp.exp(z_MV - top_M1)
  total_M1 = row_sum(p_MV)
  mean_M1 = row_sum(p_MV * z_MV) / total_M1
  return (top_M1 + jnp.log(total_M1))[:, 0], mean_M1[:, 0]


@jax.custom_vjp
def row_stats(
    z_MV: Float[Array, 'M V'],
) -> tuple[Float[Array, ' M'], Float[Array, ' M']]:
  """Returns (log-sum-exp, softmax-weighted mean) of each row of logits.

      lse = log sum_v exp(z_v),    mean = sum_v softmax(z)_v z_v

  so that the entropy is lse - mean, in nats.

  Args:
    z_MV: float32 tempered logits; M a multiple of 16.
  """
  return _stats(z_MV)


def _stats_fwd(z_MV):
  lse_M, mean_M = _stats(z_MV)
  return (lse_M, mean_M), (z_MV, lse_M, mean_M)


def _stats_bwd(residuals, cotangents):
  z_MV, lse_M, mean_M = residuals
  ct_lse, ct_mean = cotangents
  p_MV = jnp.exp(z_MV - lse_M[:, None])
  centred = 1.0 + z_MV - mean_M[:, None]
  return (p_MV * (ct_lse[:, None] + ct_mean[:, None] * centred),)


row_stats.defvjp(_stats_fwd, _stats_bwd)


def temper(logits_MV: Array, temperature) -> Array:
  """Returns logits / temperature; temperature 0 (greedy) leaves them."""
  safe = jnp.where(temperature > 0, temperature, 1.0)
  # The maximum changes no finite value. Without it the product and the
  # subtraction of the row's maximum are fused into one multiply-add, which
  # skips the product's rounding - in some programs and not in others.
  return jnp.maximum(logits_MV * (1.0 / safe), jnp.finfo(jnp.float32).min)


@jax.custom_vjp
def pick(z_MV: Array, targets_M: Array) -> Array:
  """Returns each row's value at its target."""
  return jnp.take_along_axis(z_MV, targets_M[:, None], axis=1)[:, 0]


def _pick_fwd(z_MV, targets_M):
  return pick(z_MV, targets_M), (targets_M, jnp.zeros((0, z_MV.shape[1])))


def _pick_bwd(residuals, ct_M):
  # Elementwise, so that it joins the fusion that makes the logits' gradient;
  # a scatter-add in a fixed order is a sort on a GPU.
  targets_M, like = residuals
  token_V = jnp.arange(like.shape[1], dtype=jnp.int32)
  here_MV = token_V[None, :] == targets_M[:, None]
  return jnp.where(here_MV, ct_M[:, None], 0.0), None


pick.defvjp(_pick_fwd, _pick_bwd)


def target_logprobs(
    head,
    hidden_MD: Float[Array, 'M D'],
    targets_M: Int[Array, ' M'],
    temperature: Float[Array, ''],
    *,
    chunk_rows: int,
    show: bool = False,
) -> tuple[Array, ...]:
  """Returns each target's log-prob and the entropy at its row, in nats.

      log pi(y) = z_y - logsumexp(z),    z = logits / temperature

  Args:
    head: hidden rows [m, D] to float32 logits [m, V]; differentiated through.
    hidden_MD: final hidden states.
    targets_M: int32 token ids.
    temperature: float32 scalar, an argument of the compiled function.
    chunk_rows: rows whose logits are in memory at once; a multiple of 16.
    show: return the tempered logits [M, V] and their log-sum-exp [M] as well,
      to look at; all logits are then in memory.

  Returns:
    (log-probs [M], entropies [M]), float32, and what `show` adds.
  """
  rows = hidden_MD.shape[0]
  chunk = min(chunk_rows, rows)
  pad = -rows % chunk
  hidden_MD = jnp.pad(hidden_MD, ((0, pad), (0, 0)))
  targets_M = jnp.pad(targets_M, (0, pad))

  @jax.checkpoint
  def one(args):
    hidden, targets = args
    with jax.named_scope('head'):
      z_MV = temper(head(hidden), temperature)
      lse_M, mean_M = row_stats(z_MV)
      found = pick(z_MV, targets) - lse_M, lse_M - mean_M
      return (*found, z_MV, lse_M) if show else found

  parts = (
      hidden_MD.reshape(-1, chunk, hidden_MD.shape[1]),
      targets_M.reshape(-1, chunk),
  )
  if parts[0].shape[0] == 1:
    return tuple(x[:rows] for x in one((parts[0][0], parts[1][0])))
  found = lax.map(one, parts)
  return tuple(x.reshape(-1, *x.shape[2:])[:rows] for x in found)
