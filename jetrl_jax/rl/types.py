"""The pytrees and records that flow through one training step.

They live apart from the functions that use them because a runtime type hook
on a pytree dataclass breaks under `jax.tree.map`.
"""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from jetrl_jax.core.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeResult:
  """What an episode in an environment came to.

  Attributes:
    reward: sum over its turns; 0 if the environment failed.
    accuracy: the last one the environment gave, else the reward.
    turns: turns of the policy that the environment was given.
    error: None, 'environment_raised' or 'environment_timeout'.
  """

  reward: float
  accuracy: float
  turns: int
  error: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """One sampled response, on the host; with an environment a whole episode.

  Attributes:
    prompt_id: `Prompt.id`.
    sample: index of the sample within its group, in [0, G).
    prompt_tokens: int32 [prompt_length].
    tokens: int32 [response_length], the stop token included.
    sampled: bool [response_length], False on the tokens of observations. Only
      sampled tokens have a loss and count in metrics of the policy.
    log_mu: float32 [response_length], nats: log-prob under the distribution
      really sampled (after temperature, top-p, top-k, min-p); of an
      observation's tokens a copy of `logprobs`.
    logprobs: float32 [response_length], nats: log-prob under the tempered
      softmax over the whole vocabulary, as the rollout computed it.
    weight_version: int32 [response_length], optimiser steps the weights had
      seen when the token was sampled.
    finish_reason: 'stop' (a stop token; an environment that is done), 'length'
      (no room for another token), and of episodes also 'turns' (max_turns) or
      'error' (the environment failed).
    episode: what the environment said; None without one.
  """

  prompt_id: int
  sample: int
  prompt_tokens: np.ndarray
  tokens: np.ndarray
  log_mu: np.ndarray
  logprobs: np.ndarray
  weight_version: np.ndarray
  finish_reason: str
  sampled: np.ndarray
  episode: EpisodeResult | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
  """Packed rows of tokens; every array is [B, T] and aligned with its token.

  A row holds several segments, each starting at a multiple of the attention
  tile; a segment is one sequence (prompt and response, or a conversation).
  The value at index t speaks of token t, which the hidden state at t - 1
  predicted; `loss_mask` is 0 on a segment's first token.

  Attributes:
    tokens: int32 token ids, 0 on padding.
    positions: int32 position within the segment, from 0.
    segment_ids: int32, 1, 2, ... within the row; 0 on padding.
    loss_mask: float32, 1 on sampled tokens (the stop token included).
    loss_weight: float32, the weight of the token's loss in the mini-batch's
      objective. `loss_agg_mode` becomes these numbers (see
      `rl/aggregation.py`), so that micro-batches, packing and devices only sum.
    advantages: float32.
    log_mu: float32 nats, see `Completion`.
    rollout_logprobs: float32 nats, the rollout's untruncated log-probs.
    old_logprobs: float32 nats, log pi_old; the denominator of the ratio.
    ref_logprobs: float32 nats, log pi_ref; all 0 and unread without a KL term.
    weight_version: int32.
  """

  tokens: Array
  positions: Array
  segment_ids: Array
  loss_mask: Array
  loss_weight: Array
  advantages: Array
  log_mu: Array
  rollout_logprobs: Array
  old_logprobs: Array
  ref_logprobs: Array
  weight_version: Array

  @classmethod
  def of_shapes(cls, rows: int, tokens: int) -> Self:
    """Returns a micro-batch without numbers, for what is only traced."""
    integers = ('tokens', 'positions', 'segment_ids', 'weight_version')
    shapes: dict[str, Any] = {
        field.name: jax.ShapeDtypeStruct(
            (rows, tokens), np.int32 if field.name in integers else np.float32
        )
        for field in dataclasses.fields(cls)
    }
    return cls(**shapes)
