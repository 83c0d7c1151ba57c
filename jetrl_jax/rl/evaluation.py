"""Held-out accuracy, through the same engine and weights as the rollout."""

import numpy as np

from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl import evaluation_metrics, experience
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import StopCheck, rollout
from jetrl_jax.typing import PRNGKey


def evaluate(
    engine: Engine,
    params: PolicyParams,
    prompts: list[Prompt],
    pool: RewardPool,
    tokenizer: Tokenizer,
    *,
    num_generations: int,
    temperature: float,
    base_key: PRNGKey,
    should_stop: StopCheck,
) -> tuple[dict[str, float], list[dict]]:
  """Samples held-out prompts and scores them.

  Nothing is learnt and no activation scale moves.

  Returns:
    (metrics by METHODS' names for every data source, samples): a sample is a
    dict of prompt, response, answer and accuracy, for the reader.
  """
  completions = rollout(
      engine,
      params,
      prompts,
      num_generations=num_generations,
      temperature=temperature,
      base_key=base_key,
      weight_version=0,
      should_stop=should_stop,
  )
  results = experience.score_completions(prompts, completions, pool, tokenizer)
  shape = (len(prompts), num_generations)
  accuracy_PG = np.asarray([r.accuracy for r in results]).reshape(shape)
  answers = [
      [r.prediction or None for r in results[p * shape[1] : (p + 1) * shape[1]]]
      for p in range(shape[0])
  ]
  metrics = {}
  for source in sorted({prompt.source for prompt in prompts}):
    rows = [i for i, prompt in enumerate(prompts) if prompt.source == source]
    metrics |= evaluation_metrics.evaluation_metrics(
        accuracy_PG[rows], [answers[i] for i in rows], source=source
    )
  samples = [
      {
          'prompt': prompt.text,
          'response': experience.response_text(completion, tokenizer),
          'answer': prompt.answer,
          'accuracy': result.accuracy,
      }
      for prompt, completion, result in zip(
          prompts, completions[:: shape[1]], results[:: shape[1]], strict=True
      )
  ]
  return metrics, samples


def headline(metrics: dict[str, float]) -> float:
  """Returns the mean over sources of mean@k: what "best" means."""
  means = [
      value
      for name, value in metrics.items()
      if '/acc/mean@' in name and not name.endswith('/ci95')
  ]
  return float(np.mean(means))
