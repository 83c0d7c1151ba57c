"""Aggregates token losses into one number, by a weight per token.

Each `loss_agg_mode` is a weighted sum over tokens, and the weights depend only
on the response lengths of the whole mini-batch. They are computed here once, on
the host, and become `TrainBatch.loss_weight`. Micro-batches, packed rows and
devices then only add, so none of them can change the loss.
"""

from collections.abc import Sequence

import numpy as np

from jetrl_jax.core.typing import Float, Int, NpArray

MODES = (
    'token-mean',
    'seq-mean-token-mean',
    'seq-mean-token-sum',
    'seq-mean-token-sum-norm',
)


def loss_weights(
    response_lengths: Int[NpArray, ' B'] | Sequence[int],
    mode: str,
    *,
    loss_scale_factor: float | None,
) -> Float[NpArray, ' B']:
  """Returns the loss weight of each token of each sequence of a mini-batch.

  With B sequences of n_1 ... n_B tokens in their loss masks, N in total:

      token-mean                 1 / N
      seq-mean-token-mean        1 / (B n_i)
      seq-mean-token-sum         1 / B
      seq-mean-token-sum-norm    1 / (B loss_scale_factor)

  so that loss = sum_i sum_t weight_i loss_it. In the last mode
  `loss_scale_factor` is a constant, usually max_response_length, as in Dr.
  GRPO: a token's loss does not depend on the length of its response.

  A sequence with an empty mask (a truncated completion that is masked out) adds
  no tokens to N but counts in B. TRL and verl's trainer do the same; there, B
  is the mini-batch size times num_generations. (verl's `agg_loss` called
  without `global_batch_size` does not count such sequences in B. Before
  February 2026 its last mode did not divide by B.)

  Args:
    response_lengths: tokens in the loss mask, per sequence of the mini-batch.
    mode: one of `MODES`.
    loss_scale_factor: tokens; only 'seq-mean-token-sum-norm' reads it.

  Returns:
    float32 weights, 0 for sequences with an empty mask.

  Raises:
    ValueError: an unknown mode, a negative length, or a missing or
      non-positive `loss_scale_factor`.

  References:
    token-mean: DAPO, arXiv:2503.14476, eq. 8. Constant divisor: Dr. GRPO,
    arXiv:2503.20783.
  """
  lengths_B = np.asarray(response_lengths, np.int64)
  if (lengths_B < 0).any():
    raise ValueError(f'A response length is {lengths_B.min()}, below 0.')
  # An empty mask gets weight 0 below, so its divisor does not matter.
  safe_B = np.maximum(lengths_B, 1)
  count = max(len(lengths_B), 1)
  match mode:
    case 'token-mean':
      weights_B = np.full(safe_B.shape, 1.0 / max(lengths_B.sum(), 1))
    case 'seq-mean-token-mean':
      weights_B = 1.0 / (count * safe_B)
    case 'seq-mean-token-sum':
      weights_B = np.full(safe_B.shape, 1.0 / count)
    case 'seq-mean-token-sum-norm':
      if loss_scale_factor is None or not loss_scale_factor > 0:
        raise ValueError(
            f'loss_scale_factor is {loss_scale_factor}; seq-mean-token-sum-norm'
            ' needs a number above 0, e.g. max_response_length.'
        )
      weights_B = np.full(safe_B.shape, 1.0 / (count * loss_scale_factor))
    case _:
      raise ValueError(
          f'loss_agg_mode is {mode!r}; allowed are {", ".join(MODES)}.'
      )
  return np.where(lengths_B > 0, weights_B, 0.0).astype(np.float32)
