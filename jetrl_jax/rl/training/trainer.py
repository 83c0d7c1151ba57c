"""The loop: rollout, reward, advantage, update, evaluation, checkpoint.

    resume from the workdir, or cold start: build, calibrate, settle precision
    for each step:
        collect     sample responses with the rollout engine and reward them
        learn       compute advantages and take every optimiser step
        guard       compare the step's metrics with the bounds
        finish      evaluate, write metrics, save a checkpoint (where due)

A run is a function of its config, checkpoint and data. A step reads only the
training state, the sampler's position and random keys with fixed addresses. A
run that is killed and resumed therefore continues to the same bits.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from jetrl_jax.checkpoint.arrays import OtherStateError
from jetrl_jax.core import processes
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.core.interrupt import Interrupt, StopRequested
from jetrl_jax.metrics import alarms
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.apply import UpdateInfo
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import LossFunction, policy_loss
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import (
    calibration,
    fp8_support,
    mixed_flow,
    preflight,
    train_state,
)
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring import evaluation
from jetrl_jax.rl.scoring.dynamic_sampling import NotEnoughGroupsError
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training import (
    guard_actions,
    initialize,
    step_metrics,
)
from jetrl_jax.rl.training.collector import Collector
from jetrl_jax.rl.training.guard import GuardState
from jetrl_jax.rl.training.learner import Learner
from jetrl_jax.rl.training.workdir import EXPORT, RunFolder
from jetrl_jax.rl.types import TrainBatch


class Trainer:
  """One run in one workdir.

  Args:
    spec: the run's specification.
    workdir: the run writes metrics, checkpoints and rollouts here. If it holds
      an interrupted run, that run is resumed.
  """

  def __init__(self, spec: RunSpec, workdir: str | pathlib.Path):
    if problem := fp8_support.of_run(spec):
      raise ValueError(problem)
    workdir = pathlib.Path(workdir)
    source, export = spec.export_source, workdir / EXPORT
    if source is not None and source.resolve() == export.resolve():
      raise ValueError(
          f'model.path is {source}, which the export of this run will replace:'
          ' choose another --workdir, or copy the checkpoint'
      )
    workdir.mkdir(parents=True, exist_ok=True)
    # A run that has already started keeps the precision it settled on.
    policy = run_precision.resolve(workdir, spec.policy, spec.invariant_scale)
    self.spec = spec.with_policy(policy)
    self.loss: LossFunction = functools.partial(policy_loss, spec.loss)
    self.sampler = spec.prompt_sampler()
    self.folder = RunFolder(workdir, spec.run, spec.wandb)
    self.interrupt = Interrupt()
    self.timer = Timer()
    self.skipped_in_row = 0
    self.idle_in_row = 0
    self.alarms = alarms.Watch()
    self.guard = GuardState()
    # The reason why the run must end after this step; '' if it continues.
    self.failure = ''
    # Held-out accuracy of the current state; None until it is evaluated.
    self.accuracy: float | None = None
    # Metrics of a step whose line has not been written yet.
    self.pending: dict[str, Any] | None = None
    # Whether what runs changes no state: a rollout, its rewards, an evaluation.
    self.is_sampling = False

  # --- the algorithm ------------------------------------------------------

  def train(self, started: Callable[[], None] = lambda: None) -> None:
    """Trains up to total_training_steps, starting from the workdir's state.

    Args:
      started: called once, in the first process, after every start-up check
        has passed; not where a finished run keeps a config of other settings.

    Raises:
      StopRequested: SIGTERM arrived; a checkpoint was saved.
      RuntimeError: max_skipped_updates updates in a row were not finite, the
        guard has rolled the run back max_rollbacks times, or
        stop_after_idle_steps steps in a row taught nothing; after the last a
        checkpoint was saved.
      NotEnoughGroupsError: dynamic sampling did not fill a batch; a checkpoint
        was saved.
      Exception: whatever else a rollout, its rewards or an evaluation raised,
        such as RewardFunctionError; a checkpoint was saved, but before the
        first step and of several processes.
    """
    run = self.spec.run
    with (
        self.interrupt,
        contextlib.closing(self),
        contextlib.closing(CompileAhead()) as self.ahead,
        self.spec.make_rewards() as self.pool,
    ):
      with processes.slow('start-up'):
        state, step = self._resume_or_start()
        self._check_exactness(state, self.guard)
      if processes.is_first() and not self.folder.keeps_config:
        started()
      position = self.sampler.state()
      try:
        if self.pending is not None:
          self._finish(step, state, self.pending)
        while step < run.total_training_steps:
          position = self.sampler.state()
          state = self._apply_guard_action(state)
          state, metrics = self._train_step(step, state)
          step, position = step + 1, self.sampler.state()
          self._finish(step, state, metrics)
          processes.watch_for_hangs()
        if not run.synthetic:  # Synthetic rewards train nothing useful.
          self._save(step, state)
          self._export(state)
      except (StopRequested, NotEnoughGroupsError):
        # These are raised only while the state is still the one that the step
        # started with.
        self.sampler.restore(position)
        self._save(step, state)
        raise
      except Exception:
        # Of several processes the others do not know of it, and a checkpoint
        # is the work of all.
        if self.is_sampling and step and processes.count() == 1:
          self._save_after_error(step, state, position)
        raise
    self.state = state

  def _train_step(
      self, step: int, state: TrainState
  ) -> tuple[TrainState, dict[str, Any]]:
    """Takes one training step: one rollout and all updates on it.

    1. Sample G responses to each prompt with the current weights, and reward
       them (`Collector.collect`).
    2. Compute advantages, then update the weights mini-batch by mini-batch
       (`Learner.learn`). The next rollout reads the new weights directly.
    3. Measure mismatch, FP8 health and throughput, and let the guard decide.
    """
    with self._sampling():
      sampled = self.collector.collect(step, state)
    processes.stop_together('the rollout and its rewards', self.interrupt.check)
    self._wait_for_copy()
    self.accuracy = None
    # The rollout is compressed and written while the device learns from it.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
      saved = pool.submit(self._save_rollouts, step + 1, sampled.experience)
      state, result = self.learner.learn(state, sampled.experience)
    saved.result()
    self._count_skipped(result.infos)
    metrics = step_metrics.step_metrics(
        self.spec, sampled, result, state, self.timer
    )
    metrics |= self._ask_guard(step + 1, metrics)
    metrics |= self._raise_alarms(step + 1, metrics, len(sampled.completions))
    return state, metrics

  def _save_rollouts(self, step: int, exp: Experience) -> None:
    if self.spec.run.save_rollouts:
      self.folder.save_rollouts(step, exp)

  def _finish(
      self, step: int, state: TrainState, metrics: dict[str, Any]
  ) -> None:
    """Evaluates (if due), writes the metrics, saves a checkpoint (if due)."""
    run = self.spec.run
    last = step == run.total_training_steps
    due = run.test_freq and (last or step % run.test_freq == 0)
    # If the evaluation is interrupted, a checkpoint keeps these metrics and a
    # resumed run evaluates again.
    self.pending = metrics
    if due and not self.failure:
      metrics = metrics | self._evaluate(step, state)
    self.folder.log(step, metrics | self.timer.take())
    self.pending = None
    if self.failure:
      raise RuntimeError(self.failure)
    idle = 0
    if 0 < run.stop_after_idle_steps <= self.idle_in_row and not last:
      # A resumed run has as many steps again.
      idle, self.idle_in_row = self.idle_in_row, 0
    if step == self.folder.saved_step:
      self.folder.checkpoints.amend(
          step, self._host_state(), metric=self.accuracy
      )
    elif step and run.save_freq and step % run.save_freq == 0:
      self._save(step, state)
    if idle:
      self._save(step, state)  # This does nothing if the step is saved already.
      raise RuntimeError(alarms.stopped(idle, self.folder.path))

  def _evaluate(self, step: int, state: TrainState) -> dict[str, Any]:
    """Returns the held-out metrics, and saves the samples; {} without any."""
    with self._sampling():
      metrics, samples = self.collector.evaluate(state)
    if samples:
      assert self.spec.val_set is not None
      self.accuracy = evaluation.headline(metrics)
      self.folder.save_samples(step, samples)
      shared = self.spec.train_set.shared_with(self.spec.val_set)
      metrics[alarms.SHARED] = len(shared)
    return metrics

  def _raise_alarms(
      self, step: int, metrics: dict[str, Any], answers: int
  ) -> dict[str, Any]:
    """Warns of what is wrong with the step; returns the alarms' own metrics."""
    if self.spec.run.synthetic:  # Its rewards are seeded and mean nothing.
      return {}
    found = self.alarms.step(step, metrics, answers)
    self.idle_in_row = self.idle_in_row + 1 if alarms.is_idle(found) else 0
    return found

  def _count_skipped(self, infos: list[UpdateInfo]) -> None:
    """Ends the run after too many updates in a row that were not finite."""
    for info in infos:
      self.skipped_in_row = 0 if info.applied else self.skipped_in_row + 1
      if self.skipped_in_row >= self.spec.run.max_skipped_updates:
        self.failure = step_metrics.not_finite(self.skipped_in_row, info)

  def _ask_guard(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
    """Lets the guard judge the step; returns the guard's own metrics."""
    if not self.spec.guard.enable:
      return {}
    decision = guard_actions.decide(self.spec, self.guard, step, metrics)
    self._set_guard(decision.state)
    if decision.breaches:
      logging.warning('Step %d: %s', step, decision.sentence())
    if decision.exhausted:
      self.failure = decision.sentence()
    return decision.metrics()

  def _apply_guard_action(self, state: TrainState) -> TrainState:
    """Carries out the action that the guard chose after the last step, if any.

    If the run stops first, the action is saved with the step and carried out
    after a resume.
    """
    action = self.guard.due
    if action is None:
      return state
    done = self.guard.done()
    self._wait_for_copy()
    with self.timer('guard'), processes.slow('guard'):
      engine, reference = self.collector.engine, self.learner.reference
      self.spec, state = guard_actions.act(
          action,
          self.cold_start_spec,
          self.spec,
          engine,
          state,
          self.folder.checkpoints,
          self.interrupt.check,
      )
      self.accuracy = None
      if action.name == 'high_precision':
        engine = self._new_engine()
      self._set_programs(engine, self._new_learner(state), reference)
      if action.name == 'high_precision':
        self._check_exactness(state, done)
    if action.name == 'rollback':
      self.skipped_in_row = 0
    self._set_guard(done)
    return state

  def _set_guard(self, state: GuardState) -> None:
    self.guard = state
    # Retention must keep the checkpoints that a rollback may need; 0 is none.
    needed = {state.good, state.candidate} - {0}
    self.folder.checkpoints.pinned = frozenset(needed)

  # --- start and save -----------------------------------------------------

  def _resume_or_start(self) -> tuple[TrainState, int]:
    """Returns (state, step): resumed from the workdir, or a cold start."""
    folder = self.folder
    # The spec in the precision of the cold start, before any guard action.
    self.cold_start_spec = self.spec
    reference = None
    try:
      resumed = initialize.resume(self.cold_start_spec, folder.checkpoints)
      if resumed is not None:
        reference = self._reference(resumed.state, cold=False)
    except OtherStateError as error:
      changed = folder.changed(self.spec.config_text)
      if not changed:
        raise
      raise ValueError(
          f'the run in {folder.path} cannot be resumed: its checkpoints hold a'
          ' different state than these settings need. These settings changed:'
          f' {"; ".join(changed)}. Restore those of the model, the precision'
          ' and the optimiser, or choose another --workdir'
      ) from error
    if resumed is None:
      folder.begin(self.spec.config_text)
      with self.timer('calibration'):
        state = initialize.create(self.spec)
        first = calibration.ColdStart(self.spec, state)
        engine, learner = self._programs(state, 0, first)
        state = calibration.calibrate_run(
            self.spec, engine, state, self.interrupt.check, first
        )
        chosen, state = initialize.settle_precision(
            self.spec, state, folder.path
        )
      if chosen is not self.spec:
        self.spec = self.cold_start_spec = chosen
        engine, learner = self._programs(state, 0)
      # Step 0 gets its line once its state is evaluated.
      step, self.pending = 0, {}
      reference = self._reference(state, cold=True)
    else:
      self.spec = resumed.spec
      state, step = resumed.state, resumed.step
      self._restore_host_state(resumed.host_state)
      is_over = step >= self.spec.run.total_training_steps
      # This comes last, because a refused start must not change the run's
      # config.
      folder.write_config(
          self.spec.config_text, is_over=is_over and self.pending is None
      )
      folder.saved_step = step
      folder.drop_after(step, is_whole=self.pending is None)
      logging.info('Resuming from step %d in %s', step, folder.path)
      if is_over:
        logging.info(
            'No step is left to train; a larger'
            ' trainer.total_training_steps goes on from here'
        )
      engine, learner = self._programs(state, step)
    self._set_programs(engine, learner, reference)
    # The evaluation that comes before any step.
    if self.pending is not None and self.spec.run.test_freq:
      if self._compiles_ahead(step):
        self.collector.compile_ahead(self.ahead, state)
    return state, step

  def _reference(self, state: TrainState, *, cold: bool) -> PolicyParams | None:
    if not self.spec.needs_reference:
      return None
    return train_state.reference(
        self.folder.path / 'reference', state, cold=cold
    )

  def _new_engine(self) -> Engine:
    spec = self.spec
    return Engine(spec.rollout_policy, spec.engine, spec.mesh)

  def _new_learner(self, state: TrainState) -> Learner:
    return Learner(self.spec, self.loss, state, self.timer)

  def _programs(
      self,
      state: TrainState,
      step: int,
      first: calibration.ColdStart | None = None,
  ) -> tuple[Engine, Learner]:
    """Returns engine and learner; other threads compile their programs.

    Args:
      state: an example.
      step: after which they are needed.
      first: what is called before them; its programs are compiled too.
    """
    engine, learner = self._new_engine(), self._new_learner(state)
    if self._compiles_ahead(step):
      if first:
        batch = TrainBatch.of_shapes(*self.spec.batch_shape)
        first.compile_ahead(self.ahead, state, batch)
      # XLA takes longest for the update. The engine's are lowered meanwhile.
      learner.compile_ahead(self.ahead, state)
      lengths = [len(prompt.tokens) for prompt in self.spec.train_set]
      engine.compile_ahead(
          self.ahead, mixed_flow.rollout_params(state), lengths
      )
    return engine, learner

  def _compiles_ahead(self, step: int) -> bool:
    """Whether other threads compile what is needed after `step`."""
    needed = step < self.spec.run.total_training_steps
    # Without `exact`, a compiler may choose by timing on a busy device.
    return needed and self.spec.policy.exact and self.ahead.is_on

  def _set_programs(
      self, engine: Engine, learner: Learner, reference: PolicyParams | None
  ) -> None:
    """Sets the collector and the learner, in the precision of `self.spec`."""
    self.collector = Collector(
        self.spec,
        engine,
        self.sampler,
        self.pool,
        self.interrupt.check,
        self.timer,
    )
    self.learner, learner.reference = learner, reference

  def _check_exactness(self, state: TrainState, guard: GuardState) -> None:
    """Checks that rollout and training agree, before any step is taken."""
    preflight.check(
        self.spec,
        self.loss,
        self.collector.engine,
        self.learner.logprobs_in_update,
        state,
        self.interrupt.check,
        guard.high_precision,
    )

  def _host_state(self) -> dict[str, Any]:
    """Returns the part of a checkpoint that is not arrays."""
    pending = None
    if self.pending is not None:
      # As a string, because the metrics may hold NaN or infinity.
      pending = json.dumps(self.pending, default=float)
    saved = {
        'sampler': self.sampler.state(),
        'skipped_in_row': self.skipped_in_row,
        'idle_in_row': self.idle_in_row,
        'pending': pending,
    }
    if self.guard != GuardState():
      saved['guard'] = self.guard.to_json()
    return saved

  def _restore_host_state(self, saved: dict[str, Any]) -> None:
    self.sampler.restore(saved['sampler'])
    self.skipped_in_row = saved['skipped_in_row']
    self.idle_in_row = saved['idle_in_row']
    guarded = GuardState.of_checkpoint(saved)
    config = self.spec.guard
    allowed = config.actions if config.enable else ()
    if guarded.due is not None and guarded.due.name not in allowed:
      logging.warning(
          'The guard had decided on %s, which guard.enable and guard.actions no'
          ' longer allow: it is not carried out',
          guarded.due.name,
      )
      guarded = dataclasses.replace(guarded, due=None)
    self._set_guard(guarded)
    if saved['pending'] is not None:
      self.pending = json.loads(saved['pending'])

  def _save(self, step: int, state: TrainState) -> None:
    with self.timer('save_checkpoint'), processes.slow('save_checkpoint'):
      self.folder.save(step, state, self._host_state(), metric=self.accuracy)

  @contextlib.contextmanager
  def _sampling(self) -> Iterator[None]:
    """Marks what changes no state; an error leaves the mark."""
    self.is_sampling = True
    yield
    self.is_sampling = False

  def _save_after_error(
      self, step: int, state: TrainState, position: dict[str, Any]
  ) -> None:
    """Saves the step before a rollout or an evaluation that failed."""
    self.sampler.restore(position)
    try:
      self._save(step, state)
      self.folder.checkpoints.wait()
    except Exception as error:  # The first error is the one to be told.
      logging.warning('Step %d could not be saved: %s', step, error)
      return
    logging.warning(
        'Step %d is saved in %s: once what is wrong is mended, the same command'
        ' goes on from there',
        step,
        self.folder.path,
    )

  def _wait_for_copy(self) -> None:
    """Waits until no checkpoint reads the state, because it changes next."""
    if self.folder.checkpoints.is_copying:
      with self.timer('save_checkpoint'), processes.slow('save_checkpoint'):
        self.folder.checkpoints.wait_for_copy()

  def _export(self, state: TrainState) -> None:
    """Exports the trained policy, if the run started from a checkpoint."""
    if self.spec.export_source is not None:
      with self.timer('export'), processes.slow('export'):
        self.folder.export(self.spec, state, self.spec.export_source)

  def close(self) -> None:
    """Waits for the last checkpoint and closes all files."""
    with processes.slow('the last checkpoint'):
      self.folder.close()
