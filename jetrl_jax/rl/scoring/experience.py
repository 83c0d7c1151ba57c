"""Completions and rewards to weighted training sequences, and their metrics."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.rl import advantages, aggregation, packing
from jetrl_jax.rl.scoring import reward_shaping
from jetrl_jax.rl.settings import AlgorithmConfig
from jetrl_jax.rl.types import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experience:
  """One rewarded rollout; P prompts, G samples each.

  Attributes:
    prompts: the P prompts.
    completions: P * G, prompt by prompt.
    scores_PG: float64, what the reward functions said; NaN where no function
      applied, and then rewards and accuracy are NaN too.
    overlong_PG: float64, at most 0: the overlong penalty; 0 without one.
    kl_penalty_PG: float64, see `kl_reward`; 0 without one.
    rewards_PG: float64, scores_PG + overlong_PG - kl_penalty_PG, from which the
      advantages are computed.
    accuracy_PG: float64 in [0, 1].
    errors: reward errors by name ('timeout', ...), counted; with 'unscored'
      and 'no_answer'.
    advantages_PG: float32, 0 where there is no score.
    parts_PG: float64, what each reward function said, before its weight; NaN
      where it did not apply.
  """

  prompts: list[Prompt]
  completions: list[Completion]
  scores_PG: np.ndarray
  overlong_PG: np.ndarray
  kl_penalty_PG: np.ndarray
  rewards_PG: np.ndarray
  accuracy_PG: np.ndarray
  errors: dict[str, int]
  advantages_PG: np.ndarray
  parts_PG: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  @property
  def scored_PG(self) -> np.ndarray:
    """bool, False where a response has no score and teaches nothing."""
    return ~np.isnan(self.scores_PG)


def response_text(completion: Completion, tokenizer: Tokenizer) -> str:
  """Returns a response as text, without its stop token."""
  tokens = completion.tokens
  if len(tokens) and tokens[-1] in tokenizer.eos_ids:
    tokens = tokens[:-1]
  return tokenizer.decode(tokens)


def join_sampled(
    completions: list[Completion], values: Iterable[np.ndarray]
) -> np.ndarray:
  """Joins per-token values of responses, without those of observations.

  Args:
    completions: the responses.
    values: one array [response_length] each.
  """
  return np.concatenate(
      [v[c.sampled] for c, v in zip(completions, values, strict=True)]
  )


def from_scores(
    prompts: list[Prompt],
    completions: list[Completion],
    scores: np.ndarray,
    accuracy: np.ndarray,
    errors: dict[str, int],
    config: AlgorithmConfig,
    parts: Mapping[str, np.ndarray] | None = None,
) -> Experience:
  """Adds advantages to flat scores [P * G]; NaN is no score."""
  scores_PG = np.asarray(scores, np.float64).reshape(len(prompts), -1)
  overlong_PG = np.zeros_like(scores_PG)
  if config.overlong_buffer.enable:
    overlong_PG = reward_shaping.overlong_penalty(
        np.asarray([len(c.tokens) for c in completions]).reshape(
            scores_PG.shape
        ),
        max_response_length=config.overlong_buffer.max_response_length,
        buffer_length=config.overlong_buffer.len,
        penalty_factor=config.overlong_buffer.penalty_factor,
    )
  rewards_PG = scores_PG + overlong_PG
  return Experience(
      prompts=prompts,
      completions=completions,
      scores_PG=scores_PG,
      overlong_PG=overlong_PG,
      kl_penalty_PG=np.zeros_like(scores_PG),
      rewards_PG=rewards_PG,
      accuracy_PG=np.asarray(accuracy, np.float64).reshape(scores_PG.shape),
      errors=errors,
      advantages_PG=estimate_advantages(
          rewards_PG, ~np.isnan(scores_PG), completions, config
      ),
      parts_PG={
          name: np.asarray(values, np.float64).reshape(scores_PG.shape)
          for name, values in (parts or {}).items()
      },
  )


def estimate_advantages(
    rewards_PG: np.ndarray,
    scored_PG: np.ndarray,
    completions: list[Completion],
    config: AlgorithmConfig,
) -> np.ndarray:
  """Returns the advantages [P, G] of the run's estimator."""
  lengths_B = _counted_lengths(completions, scored_PG, config)
  return advantages.estimate(
      rewards_PG,
      lengths_B.reshape(rewards_PG.shape),
      adv_estimator=config.adv_estimator,
      norm_by_std=config.norm_adv_by_std,
      scored_PG=scored_PG,
  )


def _counted_lengths(
    completions: list[Completion],
    scored_PG: np.ndarray,
    config: AlgorithmConfig,
) -> np.ndarray:
  """Returns the tokens [P * G] in each response's loss mask."""
  masked = config.mask_truncated_completions
  return np.asarray(
      [
          packing.masked_response_length(
              completion, mask_truncated=masked, is_scored=bool(is_scored)
          )
          for completion, is_scored in zip(
              completions, scored_PG.reshape(-1), strict=True
          )
      ]
  )


def mini_batches(
    experience: Experience,
    config: AlgorithmConfig,
    *,
    mini_batch_size: int,
    max_response_length: int,
) -> list[list[packing.Sequence]]:
  """Splits a rollout by prompts into mini-batches of weighted sequences.

  Args:
    experience: a rewarded rollout.
    config: how token losses are aggregated.
    mini_batch_size: prompts per optimiser step.
    max_response_length: default of loss_scale_factor.

  Returns:
    One list of sequences per mini-batch; `origin` is the completion's index.
  """
  per_batch = mini_batch_size * experience.scores_PG.shape[1]
  lengths_B = _counted_lengths(
      experience.completions, experience.scored_PG, config
  )
  advantages_B = experience.advantages_PG.reshape(-1)
  scored_B = experience.scored_PG.reshape(-1)
  batches = []
  for start in range(0, len(lengths_B), per_batch):
    indices = range(len(lengths_B))[start : start + per_batch]
    weights_B = aggregation.loss_weights(
        lengths_B[start : start + per_batch],
        config.loss_agg_mode,
        loss_scale_factor=config.loss_scale_factor or max_response_length,
    )
    batches.append(
        [
            packing.sequence_from_completion(
                experience.completions[i],
                advantage=float(advantages_B[i]),
                loss_weight=float(weight),
                mask_truncated=config.mask_truncated_completions,
                origin=i,
                is_scored=bool(scored_B[i]),
            )
            for i, weight in zip(indices, weights_B, strict=True)
        ]
    )
  return batches


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
  return {
      f'{name}/mean': float(values.mean()),
      f'{name}/max': float(values.max()),
      f'{name}/min': float(values.min()),
  }


def experience_metrics(experience: Experience) -> dict[str, float]:
  """Returns the reward, advantage and length metrics of a rollout."""
  completions = experience.completions
  lengths = np.asarray([len(c.tokens) for c in completions])
  prompt_lengths = np.asarray([len(p.tokens) for p in experience.prompts])
  truncated = [c.finish_reason == 'length' for c in completions]
  metrics = {
      **_score_metrics(experience),
      **_spread('response_length', lengths),
      'response_length/clip_ratio': float(np.mean(truncated)),
      **_spread('prompt_length', prompt_lengths),
  }
  metrics |= _episode_metrics(completions)
  if experience.kl_penalty_PG.any():
    metrics['critic/kl_penalty/mean'] = float(experience.kl_penalty_PG.mean())
  overlong_PG = experience.overlong_PG
  if overlong_PG.any():
    metrics['critic/overlong_penalty/mean'] = float(overlong_PG.mean())
    metrics['critic/overlong_penalty/frac'] = float((overlong_PG < 0).mean())
  for error, count in experience.errors.items():
    metrics[f'reward/{error}'] = count
  for name, values_PG in experience.parts_PG.items():
    if not np.isnan(values_PG).all():
      metrics[f'rewards/{name}/mean'] = float(np.nanmean(values_PG))
  return metrics


def _score_metrics(experience: Experience) -> dict[str, float]:
  """Returns the metrics of the responses that have a score."""
  scored_PG = experience.scored_PG
  if not scored_PG.any():
    return {}
  advantages_B = experience.advantages_PG[scored_PG]
  lowest_P = np.where(scored_PG, experience.rewards_PG, np.inf).min(axis=1)
  highest_P = np.where(scored_PG, experience.rewards_PG, -np.inf).max(axis=1)
  return {
      'critic/acc/mean': float(experience.accuracy_PG[scored_PG].mean()),
      **_spread('critic/score', experience.scores_PG[scored_PG]),
      **_spread('critic/rewards', experience.rewards_PG[scored_PG]),
      **_spread('critic/advantages', advantages_B),
      'critic/advantages/std': float(advantages_B.std()),
      'critic/mixed_group_frac': float((highest_P > lowest_P).mean()),
      'alarm/swapped': int(
          _may_be_swapped(
              experience.scores_PG[scored_PG], experience.accuracy_PG[scored_PG]
          )
      ),
  }


def _may_be_swapped(scores_B: np.ndarray, accuracy_B: np.ndarray) -> bool:
  """Returns whether a reward's score and accuracy look like each other.

  Every score is 0 or 1, as an accuracy is, and a wholly right answer by the
  score is only partly right by the accuracy. (A score of 1 for "all tests
  passed" beside the share of tests as the accuracy does not look so.)
  """
  is_right_B = scores_B == 1
  partly_B = (accuracy_B > 0) & (accuracy_B < 1)
  return bool(
      (is_right_B | (scores_B == 0)).all() and partly_B[is_right_B].any()
  )


def _episode_metrics(completions: list[Completion]) -> dict[str, float]:
  """Returns the metrics that only episodes have: turns and observations."""
  episodes = [c.episode for c in completions if c.episode is not None]
  if not episodes:
    return {}
  reasons = [c.finish_reason for c in completions]
  tokens = sum(len(c.tokens) for c in completions)
  observed = tokens - sum(int(c.sampled.sum()) for c in completions)
  return {
      **_spread('num_turns', np.asarray([e.turns for e in episodes])),
      'environment/observation_frac': observed / max(tokens, 1),
      'environment/turn_limit_frac': reasons.count('turns') / len(reasons),
  }
