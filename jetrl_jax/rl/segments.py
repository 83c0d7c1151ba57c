"""Sums over the sequences of a packed row.

A row holds several sequences, wherever packing put them. What a sequence sums
to must be a property of the sequence, so its tokens are added one after the
other, from its first to its last; a tree of additions over the row would
depend on where in the row the sequence starts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float, Int

# Steps of the scan that are compiled into one body: fewer kernels per row.
_UNROLL = 16


def segment_sum(
    values_T: Float[Array, ' T'], segment_ids_T: Int[Array, ' T']
) -> Float[Array, ' T']:
  """Sums each segment, and hands every token the sum of its own.

      sum_t = sum over s with segment_ids_s = segment_ids_t of values_s

  Added from left to right in float32: the bits depend on the segment's values
  alone, not on its place in the row or on its neighbours. Takes T dependent
  additions; meant for one number per token, not for activations.

  Args:
    values_T: what to add; put 0 where the loss mask is 0.
    segment_ids_T: as in `TrainBatch`: a segment is contiguous, its id unique
      in the row and in [0, T]; padding has 0, anywhere.

  Returns:
    The sums; on padding 0.

  Example:
    values 1 2 4 9 8, ids 1 1 1 0 2 give 7 7 7 0 8.
  """
  starts_T = segment_ids_T != jnp.concatenate(
      [jnp.full((1,), -1, segment_ids_T.dtype), segment_ids_T[:-1]]
  )

  def add(running, token):
    value, starts = token
    running = jnp.where(starts, value, running + value)
    return running, running

  _, running_T = lax.scan(
      add,
      jnp.zeros((), values_T.dtype),
      (values_T, starts_T),
      unroll=_UNROLL,
  )
  ends_T = jnp.concatenate([starts_T[1:], jnp.ones((1,), bool)])
  total_T = jnp.where(ends_T & (segment_ids_T > 0), running_T, 0.0)
  # One number per segment and zeros: exact in any order of addition.
  per_segment = jax.ops.segment_sum(
      total_T, segment_ids_T, num_segments=len(values_T) + 1
  )
  return per_segment[segment_ids_T]


def segment_mean(
    values_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
) -> Float[Array, ' T']:
  """Averages each segment over its masked tokens, as `segment_sum` sums.

  Args:
    values_T: what to average; not read where the mask is 0.
    mask_T: 1 on the tokens that count.
    segment_ids_T: see `segment_sum`.

  Returns:
    The averages, at every token of the segment; 0 for a segment whose mask is
    empty.
  """
  kept_T = jnp.where(mask_T > 0, values_T, 0.0)
  count_T = segment_sum(mask_T, segment_ids_T)
  return segment_sum(kept_T, segment_ids_T) / jnp.maximum(count_T, 1.0)
