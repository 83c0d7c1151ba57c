"""Sums over the sequences of a packed row.

A row holds several sequences, and packing decides where they start. A
sequence's sum must not depend on that. So its tokens are added one after
another, from first to last; a tree of additions over the row would depend on
where the sequence starts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jetrl_jax.core.typing import Array, Float, Int

# Scan steps that are compiled into one body, so that fewer kernels run per row.
_UNROLL = 16


def segment_sum(
    values_T: Float[Array, ' T'], segment_ids_T: Int[Array, ' T']
) -> Float[Array, ' T']:
  """Returns at each token the sum over its segment.

      sum_t = sum over s with segment_ids_s = segment_ids_t of values_s

  Values are added from left to right in float32. The bits depend only on the
  segment's values, not on its place in the row or on its neighbours. This takes
  T additions in sequence, so it is meant for one number per token and not for
  activations.

  Args:
    values_T: values to add; must be 0 where the loss mask is 0.
    segment_ids_T: as in `TrainBatch`: a segment is contiguous and its id is
      unique in the row and in [1, T]; padding has id 0 and may be anywhere.

  Returns:
    The sums; 0 on padding.

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
  # Each segment has one number and zeros, so any order of addition is exact.
  per_segment = jax.ops.segment_sum(
      total_T, segment_ids_T, num_segments=len(values_T) + 1
  )
  return per_segment[segment_ids_T]


def segment_mean(
    values_T: Float[Array, ' T'],
    mask_T: Float[Array, ' T'],
    segment_ids_T: Int[Array, ' T'],
) -> Float[Array, ' T']:
  """Returns at each token the mean over its segment's masked tokens.

  Args:
    values_T: values to average; not read where the mask is 0.
    mask_T: 1 on the tokens that count.
    segment_ids_T: see `segment_sum`.

  Returns:
    The means; 0 in a segment whose mask is empty.
  """
  kept_T = jnp.where(mask_T > 0, values_T, 0.0)
  count_T = segment_sum(mask_T, segment_ids_T)
  return segment_sum(kept_T, segment_ids_T) / jnp.maximum(count_T, 1.0)
