"""Draws prompts, samples responses and rewards them: the first half of a step.

An evaluation answers its held-out prompts with the same engine and the same
arrays.
"""

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

from jetrl_jax.core import processes, rng
from jetrl_jax.core.compile_ahead import CompileAhead
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
from jetrl_jax.rl.scoring.scorer import Scorer, scorer, without_answer
from jetrl_jax.rl.types import Completion


class Collector:
  """Samples with one engine and computes rewards with one pool of workers.

  Args:
    spec: the run's specification.
    engine: the rollout engine; its policy is that of `spec`.
    sampler: draws the prompts; its position moves.
    pool: the reward workers; None with an environment.
    should_stop: called at each host visit of a rollout; raises to stop.
    timer: records the seconds of each phase.
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
    self._spec = spec
    self._sampler = sampler
    self._pool = pool
    self._should_stop = should_stop
    self._timer = timer
    self._times_preempted = 0
    # Engines for `val_recipes`, built when they are first needed.
    self._others: list[OtherPrecision] = []

  def collect(self, step: int, state: TrainState) -> SampledBatch:
    """Returns the step's responses with their rewards and advantages.

    With dynamic sampling, prompts are drawn until enough groups have a learning
    signal; otherwise once.

    Raises:
      NotEnoughGroupsError: see `dynamic_sampling.fill`.
    """
    self._times_preempted = 0
    filled = dynamic_sampling.fill(
        self._batches(step, state),
        groups=self._spec.run.train_batch_size,
        config=self._spec.algorithm,
    )
    preempted = {'rollout/num_preempted': self._times_preempted}
    return dataclasses.replace(filled, metrics=filled.metrics | preempted)

  def _batches(self, step: int, state: TrainState) -> Iterator[Experience]:
    """Samples and rewards the next prompts, until all have been drawn."""
    spec = self._spec
    pool = None if spec.run.synthetic else self._pool
    drawn: set[int] = set()
    while left := len(spec.train_set) - len(drawn):
      size = min(spec.run.train_batch_size, left)
      indices = self._sampler.next_batch(size, exclude=drawn)
      drawn.update(indices)
      prompts = [spec.train_set[i] for i in indices]
      with scorer(prompts, pool, spec.tokenizer, self._should_stop) as scores:
        with self._timer('gen'):
          completions = self.rollout(step, prompts, state, scores)
        preempted = processes.together(
            'counting', lambda: self.engine.pages.times_preempted
        )
        self._times_preempted += sum(self.engine.group.leaders(preempted))
        rewarded = self.score(step, prompts, completions, scores)
      yield rewarded

  def rollout(
      self, step: int, prompts: list[Prompt], state: TrainState, scores: Scorer
  ) -> list[Completion]:
    """Returns num_generations completions of each prompt, prompt by prompt.

    Each completion goes to `scores` as soon as it has ended.
    """
    run = self._spec.run
    limits = None
    if run.synthetic:
      limits = synthetic.response_limits(
          run.seed,
          step,
          prompts,
          run.num_generations,
          self._spec.engine.max_response_length,
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
        environment=self._spec.environment,
    )

  def score(
      self,
      step: int,
      prompts: list[Prompt],
      completions: list[Completion],
      scores: Scorer,
  ) -> Experience:
    """Returns the completions with their rewards and advantages."""
    run, errors = self._spec.run, collections.Counter[str]()
    parts: dict[str, np.ndarray] = {}
    with self._timer('reward'):
      if run.synthetic:
        values = synthetic.scores(run.seed, step, prompts, run.num_generations)
        accuracy = np.zeros_like(values)
      else:
        results = scores.results(completions)
        # None, where no reward applies, becomes NaN.
        values = np.asarray([r.score for r in results], np.float64)
        accuracy = np.asarray([r.accuracy for r in results], np.float64)
        parts = {
            name: np.asarray([r.parts.get(name) for r in results], np.float64)
            for name in sorted({name for r in results for name in r.parts})
        }
        errors.update(r.error for r in results if r.error)
        errors.update('unscored' for r in results if r.score is None)
        errors.update('no_answer' for _ in without_answer(results, self._pool))
    with self._timer('adv'):
      return experience.from_scores(
          prompts,
          completions,
          values,
          accuracy,
          errors,
          self._spec.algorithm,
          parts,
      )

  def compile_ahead(self, ahead: CompileAhead, state: TrainState) -> None:
    """Compiles what an evaluation in `val_recipes` calls, on other threads.

    The rollout's own programs are the engine's to compile.

    Args:
      ahead: the threads.
      state: an example.
    """
    if self._spec.val_set is None:
      return
    lengths = [len(prompt.tokens) for prompt in self._spec.val_set]
    for other in self._other_precisions(state):
      if not self._is_rollouts(other):
        other.compile_ahead(ahead, state, lengths)

  def _other_precisions(self, state: TrainState) -> list[OtherPrecision]:
    if not self._others:
      self._others = [
          OtherPrecision(self._spec, name, state)
          for name in self._spec.run.val_recipes
      ]
    return self._others

  def _is_rollouts(self, other: OtherPrecision) -> bool:
    """Whether it is the precision in which the rollout samples anyway."""
    return other.name == self._spec.rollout_policy.recipe.name

  def evaluate(self, state: TrainState) -> tuple[dict[str, float], list[dict]]:
    """Returns (held-out metrics, samples); both are empty without a val_set.

    The metrics are measured in the rollout's precision and in each of
    `val_recipes`. The samples come from the rollout's precision. An evaluation
    changes no weight and no scale.
    """
    spec = self._spec
    if spec.val_set is None:
      return {}, []
    others = self._other_precisions(state)
    with self._timer('testing'):
      metrics, samples = self._evaluate_in(
          self.engine, mixed_flow.rollout_params(state)
      )
      found = dict(metrics)
      for other in others:
        numbers = metrics
        if not self._is_rollouts(other):
          numbers, _ = self._evaluate_in(other.engine, other.params(state))
        found |= other.renamed(numbers)
    return found, samples

  def _evaluate_in(
      self, engine: Engine, params: PolicyParams
  ) -> tuple[dict[str, float], list[dict]]:
    run, spec = self._spec.run, self._spec
    assert spec.val_set is not None
    return evaluation.evaluate(
        engine,
        params,
        list(spec.val_set),
        self._pool,
        spec.tokenizer,
        num_generations=run.val_num_generations,
        temperature=run.val_temperature,
        # The noise is the same at every step, so only the policy changes.
        base_key=rng.key(run.seed, rng.EVALUATION, 0),
        should_stop=self._should_stop,
        environment=spec.environment,
    )
