"""Prompts drawn, answered by the policy and scored: what a step learns from.

The held-out prompts of an evaluation are answered by the same engine, with the
same arrays.
"""

import collections
import dataclasses

import numpy as np

from jetrl_jax.core import rng
from jetrl_jax.data import Prompt, PromptSampler
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl import synthetic
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck, rollout
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.run.other_precision import OtherPrecision
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import dynamic_sampling, evaluation, experience
from jetrl_jax.rl.scoring.dynamic_sampling import SampledBatch
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.scoring.scorer import Scorer, scorer
from jetrl_jax.rl.types import Completion


class Collector:
  """Samples with one engine and scores with one pool of workers.

  Args:
    spec: what the run is made of.
    engine: samples; its policy is that of `spec`.
    sampler: draws the prompts; its position moves.
    pool: scores; None with an environment.
    should_stop: called at the rollouts' host visits; raises to give up.
    timer: gets the phases' seconds.
  """

  def __init__(
      self,
      spec: RunSpec,
      engine: Engine,
      sampler: PromptSampler,
      pool: RewardPool | None,
      should_stop: StopCheck,
      timer: Timer,
  ):
    self.engine = engine
    self._parts = spec
    self._sampler = sampler
    self._pool = pool
    self._should_stop = should_stop
    self._timer = timer
    # Engines of `val_recipes`, made at the first evaluation.
    self._others: list[OtherPrecision] = []

  def collect(self, step: int, state: TrainState) -> SampledBatch:
    """Samples and scores the step's prompts, once or until they teach.

    Raises:
      NotEnoughGroupsError: see `dynamic_sampling.fill`.
    """
    spec, size = self._parts, self._parts.run.train_batch_size
    met: set[int] = set()
    preempted = 0

    def generate() -> Experience | None:
      nonlocal preempted
      left = len(spec.train_set) - len(met)
      if not left:
        return None
      indices = self._sampler.next_batch(min(size, left), exclude=met)
      met.update(indices)
      prompts = [spec.train_set[i] for i in indices]
      pool = None if spec.run.synthetic else self._pool
      with scorer(prompts, pool, spec.tokenizer, self._should_stop) as scores:
        with self._timer('gen'):
          completions = self.rollout(step, prompts, state, scores)
        preempted += self.engine.pages.times_preempted
        return self.score(step, prompts, completions, scores)

    filled = dynamic_sampling.fill(generate, groups=size, config=spec.algorithm)
    metrics = filled.metrics | {'rollout/num_preempted': preempted}
    return dataclasses.replace(filled, metrics=metrics)

  def rollout(
      self, step: int, prompts: list[Prompt], state: TrainState, scores: Scorer
  ) -> list[Completion]:
    """Returns num_generations answers to each prompt, prompt by prompt.

    Each goes to `scores` as soon as it has ended.
    """
    run = self._parts.run
    limits = None
    if run.synthetic:
      limits = synthetic.response_limits(
          run.seed,
          step,
          prompts,
          run.num_generations,
          self._parts.engine.max_response_length,
          run.synthetic_lengths,
      )
    return rollout(
        self.engine,
        mixed_flow.rollout_params(state),
        prompts,
        num_generations=run.num_generations,
        temperature=run.temperature,
        base_key=rng.key(run.seed, rng.ROLLOUT, step),
        weight_version=int(state.opt_step),
        limits=limits,
        should_stop=scores.visit,
        on_end=scores.add,
        environment=self._parts.environment,
    )

  def score(
      self,
      step: int,
      prompts: list[Prompt],
      completions: list[Completion],
      scores: Scorer,
  ) -> Experience:
    """Returns the answers with their scores and advantages."""
    run, errors = self._parts.run, collections.Counter[str]()
    with self._timer('reward'):
      if run.synthetic:
        values = synthetic.scores(run.seed, step, prompts, run.num_generations)
        accuracy = np.zeros_like(values)
      else:
        results = scores.results(completions)
        values = np.asarray([r.score for r in results])
        accuracy = np.asarray([r.accuracy for r in results])
        errors.update(r.error for r in results if r.error)
    with self._timer('adv'):
      return experience.from_scores(
          prompts, completions, values, accuracy, errors, self._parts.algorithm
      )

  def evaluate(self, state: TrainState) -> tuple[dict[str, float], list[dict]]:
    """Returns held-out metrics and the answers; both empty without a val_set.

    In the rollout's precision, and in each of `val_recipes`; the answers are
    those of the rollout's. Nothing is learnt and no scale moves.
    """
    spec = self._parts
    if spec.val_set is None:
      return {}, []
    if not self._others:
      self._others = [
          OtherPrecision(spec, name, state) for name in spec.run.val_recipes
      ]
    with self._timer('testing'):
      metrics, samples = self._evaluate_in(
          self.engine, mixed_flow.rollout_params(state)
      )
      found = dict(metrics)
      for other in self._others:
        numbers = metrics
        if other.name != spec.rollout_policy.recipe.name:
          numbers, _ = self._evaluate_in(other.engine, other.params(state))
        found |= other.renamed(numbers)
    return found, samples

  def _evaluate_in(
      self, engine: Engine, params: PolicyParams
  ) -> tuple[dict[str, float], list[dict]]:
    run, spec = self._parts.run, self._parts
    assert spec.val_set is not None
    return evaluation.evaluate(
        engine,
        params,
        list(spec.val_set),
        self._pool,
        spec.tokenizer,
        num_generations=run.val_num_generations,
        temperature=run.val_temperature,
        # The same noise at every step: curves then differ by the policy.
        base_key=rng.key(run.seed, rng.EVALUATION, 0),
        should_stop=self._should_stop,
        environment=spec.environment,
    )
