"""Held-out accuracy, with the rollout's engine and weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jetrl_jax.core.typing import PRNGKey
from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rewards import RewardPool, RewardResult
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.environment import EnvironmentConfig
from jetrl_jax.rl.rollout.scheduler import StopCheck, rollout
from jetrl_jax.rl.scoring import evaluation_metrics, experience
from jetrl_jax.rl.scoring.scorer import Scorer, scorer
from jetrl_jax.rl.types import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graded:
  """Sampled and graded answers to P prompts, G each.

  Attributes:
    prompts: the prompts.
    completions: P * G, prompt by prompt.
    results: their rewards and accuracies, in the same order.
    num_generations: G.
  """

  prompts: list[Prompt]
  completions: list[Completion]
  results: list[RewardResult]
  num_generations: int

  @functools.cached_property
  def accuracy_PG(self) -> np.ndarray:
    """float64 [P, G], in [0, 1]; NaN where no reward applies."""
    return self._shaped([r.accuracy for r in self.results])

  @functools.cached_property
  def reward_PG(self) -> np.ndarray:
    """float64 [P, G]."""
    return self._shaped([r.score for r in self.results])

  def _shaped(self, values: list[float | None]) -> np.ndarray:
    shape = len(self.prompts), self.num_generations
    return np.asarray(values, np.float64).reshape(shape)

  @functools.cached_property
  def answers(self) -> list[list[str | None]]:
    """P rows of G extracted answers; None if a response has no answer."""
    return [
        [r.prediction or None for r in self.of_prompt(p, self.results)]
        for p in range(len(self.prompts))
    ]

  def of_prompt(self, prompt: int, values: list) -> list:
    """Returns the G entries of `values` that belong to a prompt."""
    n = self.num_generations
    return values[prompt * n : (prompt + 1) * n]


def grade(
    engine: Engine,
    params: PolicyParams,
    prompts: list[Prompt],
    pool: RewardPool | None,
    tokenizer: Tokenizer,
    *,
    num_generations: int,
    temperature: float,
    base_key: PRNGKey,
    should_stop: StopCheck,
    environment: EnvironmentConfig | None = None,
    watch: Callable[[Scorer], None] = lambda scores: None,
) -> Graded:
  """Samples answers and grades them; changes no weight and no scale.

  Args:
    engine: samples.
    params: weights and activation scales.
    prompts: P prompts.
    pool: the reward workers; None with an environment.
    tokenizer: the policy's tokenizer.
    num_generations: answers per prompt, G.
    temperature: 0 is greedy.
    base_key: key with address (seed, step).
    should_stop: called at each host visit of the rollout; raises to stop.
    environment: answers the turns; by default a response is one turn.
    watch: called as often as `should_stop`, with what is scored so far.
  """

  def visit() -> None:
    should_stop()
    watch(scores)

  with scorer(prompts, pool, tokenizer, visit) as scores:
    completions = rollout(
        engine,
        params,
        prompts,
        num_generations=num_generations,
        temperature=temperature,
        base_key=base_key,
        weight_version=0,
        should_stop=scores.visit,
        on_end=scores.add,
        environment=environment,
    )
    results = scores.results(completions)
  return Graded(
      prompts=prompts,
      completions=completions,
      results=results,
      num_generations=num_generations,
  )


def evaluate(
    engine: Engine,
    params: PolicyParams,
    prompts: list[Prompt],
    pool: RewardPool | None,
    tokenizer: Tokenizer,
    *,
    environment: EnvironmentConfig | None = None,
    **how: Any,
) -> tuple[dict[str, float], list[dict]]:
  """Grades held-out prompts; see `grade`.

  Returns:
    (metrics of every data source, see `evaluation_metrics.py`, samples): a
    sample is a dict of prompt, response, answer, accuracy and finish_reason,
    for the reader.
  """
  how |= {'environment': environment}
  graded = grade(engine, params, prompts, pool, tokenizer, **how)
  answers = graded.answers
  metrics = {}
  for source in sorted({prompt.source for prompt in prompts}):
    rows = [i for i, prompt in enumerate(prompts) if prompt.source == source]
    metrics |= evaluation_metrics.evaluation_metrics(
        graded.accuracy_PG[rows], [answers[i] for i in rows], source=source
    )
    if environment is not None:
      metrics |= evaluation_metrics.reward_metrics(
          graded.reward_PG[rows], source=source
      )
  samples = []
  for i, prompt in enumerate(prompts):
    completion = graded.of_prompt(i, graded.completions)[0]
    samples.append(
        {
            'prompt': prompt.text,
            'response': experience.response_text(completion, tokenizer),
            'answer': prompt.answer,
            'accuracy': graded.of_prompt(i, graded.results)[0].accuracy,
            'finish_reason': completion.finish_reason,
        }
    )
  return metrics, samples


def headline(metrics: dict[str, float]) -> float | None:
  """Returns the mean over sources of mean@k, which defines "best"; or None.

  It is measured in the rollout's precision; the metrics of
  `trainer.val_recipes` have other names.
  """
  means = [
      value
      for name, value in metrics.items()
      if name.startswith('val-core/')
      and '/acc/mean@' in name
      and not name.endswith('/ci95')
  ]
  return float(np.mean(means)) if means else None
