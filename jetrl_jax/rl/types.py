"""The pytrees and records that pass through one training step.

They have a file of their own, because a runtime type check on a pytree
dataclass breaks under `jax.tree.map`.
"""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from jetrl_jax.core.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeResult:
  """The result of an episode in an environment.

  Attributes:
    reward: sum over its turns; 0 if the environment failed.
    accuracy: the last one that the environment gave; if none, the reward.
    turns: turns of the policy that the environment received.
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
    tokens: int32 [response_length], with the stop token.
    sampled: bool [response_length], False on the tokens of observations. Only
      sampled tokens have a loss and count in the policy's metrics.
    log_mu: float32 [response_length], nats: log-prob under the distribution
      that was sampled (after temperature, top-p, top-k, min-p). For an
      observation's tokens it equals `logprobs`.
    logprobs: float32 [response_length], nats: log-prob under the softmax of all
      tempered logits, as the rollout computed it.
    weight_version: int32 [response_length], optimiser steps of the weights that
      sampled the token.
    finish_reason: 'stop' (a stop token, or the environment is done), 'length'
      (the length limit), and for episodes also 'turns' (max_turns) or 'error'
      (the environment failed).
    episode: the episode's result; None without an environment.
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

  A row holds several segments, and each starts at a multiple of the attention
  tile. A segment is one sequence: prompt and response, or a conversation. The
  value at index t belongs to token t, which the hidden state at t - 1
  predicted. `loss_mask` is 0 on a segment's first token.

  Attributes:
    tokens: int32 token ids, 0 on padding.
    positions: int32 position within the segment, from 0.
    segment_ids: int32, 1, 2, ... within the row; 0 on padding.
    loss_mask: float32, 1 on sampled tokens (with the stop token).
    loss_weight: float32, the weight of the token's loss in the mini-batch's
      objective; `loss_agg_mode` determines it (see `rl/aggregation.py`).
    advantages: float32.
    log_mu: float32 nats, see `Completion`.
    rollout_logprobs: float32 nats, the rollout's untruncated log-probs.
    old_logprobs: float32 nats, log pi_old; the denominator of the ratio.
    ref_logprobs: float32 nats, log pi_ref; 0 and not used without a KL term.
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
    """Returns the shapes of a micro-batch, for tracing."""
    integers = ('tokens', 'positions', 'segment_ids', 'weight_version')
    shapes: dict[str, Any] = {
        field.name: jax.ShapeDtypeStruct(
            (rows, tokens), np.int32 if field.name in integers else np.float32
        )
        for field in dataclasses.fields(cls)
    }
    return cls(**shapes)
