"""The loop: rollout, reward, advantage, update, evaluation, checkpoint.

A run is a function of its config, checkpoint and data. Everything that a step
reads is in the training state, in the sampler's position or in an address of
randomness, so a run that is killed and resumed continues to the same bits.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

from absl import logging

from jetrl_jax.checkpoint.arrays import OtherStateError
from jetrl_jax.core.interrupt import Interrupt, StopRequested
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.apply import UpdateInfo
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import fp8_support, preflight
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run import state as states
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import evaluation
from jetrl_jax.rl.scoring.dynamic_sampling import NotEnoughGroupsError
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training import (
    guard_actions,
    guard_state,
    initialize,
    step_metrics,
)
from jetrl_jax.rl.training.collector import Collector
from jetrl_jax.rl.training.guard_state import GuardState
from jetrl_jax.rl.training.learner import Learner
from jetrl_jax.rl.training.workdir import EXPORT, RunFolder


class Trainer:
  """One run in one workdir.

  Args:
    spec: what the run is made of.
    workdir: metrics, checkpoints and rollouts go here; a run that was
      interrupted there is resumed.
  """

  def __init__(self, spec: RunSpec, workdir: str | pathlib.Path):
    if problem := fp8_support.of_run(spec):
      raise ValueError(problem)
    workdir = pathlib.Path(workdir)
    source, export = spec.export_source, workdir / EXPORT
    if source is not None and source.resolve() == export.resolve():
      raise ValueError(
          f'model.path is {source}, which the export of this run will replace:'
          ' name another --workdir, or copy the checkpoint'
      )
    workdir.mkdir(parents=True, exist_ok=True)
    # A run that has begun keeps the precision it settled on.
    policy = run_precision.resolve(workdir, spec.policy, spec.invariant_scale)
    self.spec = spec.with_policy(policy)
    self.loss = functools.partial(policy_loss, spec.loss)
    self.sampler = spec.prompt_sampler()
    self.folder = RunFolder(workdir, spec.run, spec.wandb)
    self.interrupt = Interrupt()
    self.timer = Timer()
    self.skipped_in_row = 0
    self.guard = GuardState()
    # Why the run ends at this step, once it does.
    self.given_up = ''
    # Held-out, of the state at hand; None until that is evaluated.
    self.accuracy: float | None = None
    # Metrics of a step that has no line yet.
    self.pending: dict | None = None

  # --- the story ----------------------------------------------------------

  def train(self, started: Callable[[], None] = lambda: None) -> None:
    """Runs to total_training_steps, from where the workdir stands.

    Args:
      started: called once the run is known to go on: not refused.

    Raises:
      StopRequested: SIGTERM came; a checkpoint was saved.
      RuntimeError: max_skipped_updates non-finite updates in a row, or the
        guard has rolled the run back max_rollbacks times.
      NotEnoughGroupsError: dynamic sampling did not fill a batch; a checkpoint
        was saved.
    """
    run = self.spec.run
    with (
        self.interrupt,
        contextlib.closing(self),
        self.spec.make_rewards() as self.pool,
    ):
      state, step = self._start()
      self._check(state, self.guard)
      started()
      position = self.sampler.state()
      try:
        if self.pending is not None:
          self._finish(step, state, self.pending)
        while step < run.total_training_steps:
          position = self.sampler.state()
          state = self._act(state)
          state, metrics = self._train_step(step, state)
          step, position = step + 1, self.sampler.state()
          self._finish(step, state, metrics)
        if not run.synthetic:  # Made-up rewards leave nothing worth keeping.
          self._save(step, state)
          self._export(state)
      except (StopRequested, NotEnoughGroupsError):
        # Raised only where the state still is that of the step's start.
        self.sampler.restore(position)
        self._save(step, state)
        raise
    self.state = state

  def _train_step(
      self, step: int, state: TrainState
  ) -> tuple[TrainState, dict]:
    """One rollout and its updates; the paper's algorithm box."""
    sampled = self.collector.collect(step, state)
    self.interrupt.check()
    self._release()
    self.accuracy = None
    # Compressed while the device learns from it.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      saved = pool.submit(self._save_rollouts, step + 1, sampled.experience)
      state, learnt = self.learner.learn(state, sampled.experience)
    saved.result()
    self._count_skipped(learnt.infos)
    metrics = step_metrics.step_metrics(
        self.spec, sampled, learnt, state, self.timer
    )
    metrics |= self._watch(step + 1, metrics)
    return state, metrics

  def _save_rollouts(self, step: int, exp: Experience) -> None:
    if self.spec.run.save_rollouts:
      self.folder.save_rollouts(step, exp)

  def _finish(self, step: int, state: TrainState, metrics: dict) -> None:
    """Evaluates where due, writes the step's line, saves where due."""
    run = self.spec.run
    last = step == run.total_training_steps
    due = run.test_freq and (last or step % run.test_freq == 0)
    # Saved with the state if the evaluation is given up; then done again.
    self.pending = metrics
    if due and not self.given_up:
      metrics = metrics | self._evaluate(step, state)
    self.folder.log(step, metrics | self.timer.take())
    self.pending = None
    if self.given_up:
      raise RuntimeError(self.given_up)
    if step == self.folder.saved_step:
      self.folder.checkpoints.amend(
          step, self._host_state(), metric=self.accuracy
      )
    elif step and run.save_freq and step % run.save_freq == 0:
      self._save(step, state)

  def _evaluate(self, step: int, state: TrainState) -> dict:
    metrics, samples = self.collector.evaluate(state)
    if metrics:
      self.accuracy = evaluation.headline(metrics)
      self.folder.save_samples(step, samples)
    return metrics

  def _count_skipped(self, infos: list[UpdateInfo]) -> None:
    for info in infos:
      self.skipped_in_row = 0 if info.applied else self.skipped_in_row + 1
      if self.skipped_in_row >= self.spec.run.max_skipped_updates:
        self.given_up = step_metrics.not_finite(self.skipped_in_row, info)

  def _watch(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
    """Lets the guard decide what the step's metrics ask for."""
    if not self.spec.guard.enable:
      return {}
    decision = guard_actions.decide(self.spec, self.guard, step, metrics)
    self._remember(decision.state)
    if decision.breaches:
      logging.warning('Step %d: %s', step, decision.sentence())
    if decision.exhausted:
      self.given_up = decision.sentence()
    return decision.metrics()

  def _act(self, state: TrainState) -> TrainState:
    """Does what the guard decided behind the last step, if anything.

    A stop leaves it undone: it is saved with the step and done after a resume.
    """
    action = self.guard.due
    if action is None:
      return state
    done = self.guard.done()
    self._release()
    with self.timer('guard'):
      engine, reference = self.collector.engine, self.learner.reference
      self.spec, state = guard_actions.act(
          action,
          self.base,
          self.spec,
          engine,
          state,
          self.folder.checkpoints,
          self.interrupt.check,
      )
      self.accuracy = None
      if action.name == 'high_precision':
        engine = self._engine()
      self._assemble(engine, state, reference)
      if action.name == 'high_precision':
        self._check(state, done)
    if action.name == 'rollback':
      self.skipped_in_row = 0
    self._remember(done)
    return state

  def _remember(self, state: GuardState) -> None:
    self.guard = state
    # Retention must not take what a rollback may need; 0 is none.
    needed = {state.good, state.candidate} - {0}
    self.folder.checkpoints.pinned = frozenset(needed)

  # --- start, save --------------------------------------------------------

  def _start(self) -> tuple[TrainState, int]:
    """Resumes from the workdir, or calibrates a cold start."""
    folder = self.folder
    # In the precision of the cold start, before any action of the guard.
    self.base = self.spec
    reference = None
    try:
      resumed = initialize.resume(self.base, folder.checkpoints)
      if resumed is not None:
        reference = self._reference(resumed.state, cold=False)
    except OtherStateError as error:
      changed = folder.changed(self.spec.config_text)
      if not changed:
        raise
      raise ValueError(
          f'{folder.path} cannot go on: its checkpoints hold another state than'
          f' these settings have. Changed are: {"; ".join(changed)}. Set back'
          ' what is of the model, its precision or the optimiser, or name'
          ' another --workdir'
      ) from error
    if resumed is None:
      folder.begin(self.spec.config_text)
      engine = self._engine()
      with self.timer('calibration'):
        state = initialize.cold_start(self.spec, engine, self.interrupt.check)
        chosen, state = initialize.settle_precision(
            self.spec, state, folder.path
        )
      if chosen is not self.spec:
        self.spec = self.base = chosen
        engine = self._engine()
      # Not evaluated yet: step 0 has a line only once that is done.
      step, self.pending = 0, {}
      reference = self._reference(state, cold=True)
    else:
      self.spec = resumed.spec
      engine = self._engine()
      state, step = resumed.state, resumed.step
      self._restore_host_state(resumed.host_state)
      # Only now: a start that is refused leaves the run's own config behind.
      folder.write_config(self.spec.config_text)
      folder.saved_step = step
      folder.drop_after(step, is_whole=self.pending is None)
      logging.info('Resuming from step %d in %s', step, folder.path)
    self._assemble(engine, state, reference)
    return state, step

  def _reference(self, state: TrainState, *, cold: bool) -> PolicyParams | None:
    if not self.spec.needs_reference:
      return None
    return states.reference(self.folder.path / 'reference', state, cold=cold)

  def _engine(self) -> Engine:
    spec = self.spec
    return Engine(spec.rollout_policy, spec.engine, spec.mesh)

  def _assemble(
      self, engine: Engine, state: TrainState, reference: PolicyParams | None
  ) -> None:
    """Makes what samples and what learns, under the precision of `spec`."""
    self.collector = Collector(
        self.spec,
        engine,
        self.sampler,
        self.pool,
        self.interrupt.check,
        self.timer,
    )
    self.learner = Learner(self.spec, self.loss, state, reference, self.timer)

  def _check(self, state: TrainState, guard: GuardState) -> None:
    """Compares rollout and training before a token is spent."""
    preflight.check(
        self.spec,
        self.loss,
        self.collector.engine,
        self.learner.score,
        state,
        self.interrupt.check,
        guard.high_precision,
    )

  def _host_state(self) -> dict[str, Any]:
    """Returns what a checkpoint holds beside the arrays."""
    pending = None
    if self.pending is not None:
      # As text: the numbers need not be finite.
      pending = json.dumps(self.pending, default=float)
    saved = {
        'sampler': self.sampler.state(),
        'skipped_in_row': self.skipped_in_row,
        'pending': pending,
    }
    if self.guard != GuardState():
      saved['guard'] = self.guard.to_json()
    return saved

  def _restore_host_state(self, saved: dict[str, Any]) -> None:
    self.sampler.restore(saved['sampler'])
    self.skipped_in_row = saved['skipped_in_row']
    guarded = guard_state.of_checkpoint(saved)
    config = self.spec.guard
    allowed = config.actions if config.enable else ()
    if guarded.due is not None and guarded.due.name not in allowed:
      logging.warning(
          'The guard had decided on %s, which guard.enable and guard.actions no'
          ' longer allow: it is left undone',
          guarded.due.name,
      )
      guarded = dataclasses.replace(guarded, due=None)
    self._remember(guarded)
    if saved['pending'] is not None:
      self.pending = json.loads(saved['pending'])

  def _save(self, step: int, state: TrainState) -> None:
    with self.timer('save_checkpoint'):
      self.folder.save(step, state, self._host_state(), metric=self.accuracy)

  def _release(self) -> None:
    """Waits until no checkpoint reads the state, which is changed from here."""
    if self.folder.checkpoints.is_copying:
      with self.timer('save_checkpoint'):
        self.folder.checkpoints.wait_for_copy()

  def _export(self, state: TrainState) -> None:
    """Writes the trained policy, if it came from a checkpoint."""
    if self.spec.export_source is not None:
      with self.timer('export'):
        self.folder.export(self.spec, state, self.spec.export_source)

  def close(self) -> None:
    """Waits for the checkpoint, and lets go of the files."""
    self.folder.close()
