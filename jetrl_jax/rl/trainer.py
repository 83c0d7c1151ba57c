"""The loop: rollout, reward, advantage, update, evaluation, checkpoint.

A run is a function of its config, checkpoint and data. Everything that a step
reads is in the training state, in the sampler's position or in an address of
randomness, so a run that is killed and resumed continues to the same bits.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jetrl_jax import checkpoint, models, rng
from jetrl_jax.data import Prompt, PromptSampler
from jetrl_jax.metrics import MetricWriter
from jetrl_jax.models import invariant_scaling, norm
from jetrl_jax.rl import (
    dynamic_sampling,
    evaluation,
    experience,
    flops,
    flow_check,
    mixed_flow,
    packing,
    rollout_store,
    run_precision,
    startup,
    step_metrics,
    synthetic,
)
from jetrl_jax.rl import state as states
from jetrl_jax.rl.console import Console
from jetrl_jax.rl.dynamic_sampling import Filled, NotEnoughGroupsError
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.interrupt import Interrupt, StopRequested
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import rollout
from jetrl_jax.rl.step_metrics import Timer
from jetrl_jax.rl.train_step import TrainStep, UpdateInfo, merge
from jetrl_jax.rl.types import Completion, TrainState


class Trainer:
  """One run in one workdir.

  Args:
    parts: what the run is made of.
    workdir: metrics, checkpoints and rollouts go here; a run that was
      interrupted there is resumed.
  """

  def __init__(self, parts: Parts, workdir: str | pathlib.Path):
    self.workdir = pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    # A run that has begun keeps the precision it settled on.
    policy = run_precision.resolve(
        self.workdir, parts.policy, parts.invariant_scale
    )
    self.parts = parts = parts.with_policy(policy)
    run = parts.run
    self.loss = functools.partial(policy_loss, parts.loss)
    self.engine = Engine(parts.rollout_policy, parts.engine, parts.mesh)
    self.sampler = PromptSampler(
        num_prompts=len(parts.train_set),
        seed=run.seed,
        shuffle=True,
        fingerprint=parts.train_set.fingerprint,
    )
    self.checkpoints = checkpoint.CheckpointManager(
        self.workdir / 'checkpoints',
        keep_latest=run.keep_latest,
        keep_best=run.keep_best,
    )
    self.writer = MetricWriter(
        self.workdir, tensorboard=True, wandb=parts.wandb
    )
    self.interrupt = Interrupt()
    self.timer = Timer()
    self.console = Console(run.total_training_steps)
    self.skipped_in_row = 0
    # Why the run ends at this step, once it does.
    self.given_up = ''
    self.reference: PolicyParams | None = None
    self.requantizer: mixed_flow.Requantizer | None = None
    self.last_accuracy: float | None = None
    self.saved_step: int | None = None
    # Metrics of a step that has no line yet.
    self.pending: dict | None = None

  # --- the story ----------------------------------------------------------

  def train(self) -> None:
    """Runs to total_training_steps, from where the workdir stands.

    Raises:
      StopRequested: SIGTERM came; a checkpoint was saved.
      RuntimeError: max_skipped_updates non-finite updates in a row.
      NotEnoughGroupsError: dynamic sampling did not fill a batch; a checkpoint
        was saved.
    """
    run = self.parts.run
    with (
        self.interrupt,
        contextlib.closing(self),
        self.parts.make_rewards() as self.pool,
    ):
      state, step = self._start()
      self._check(state)
      position = self.sampler.state()
      try:
        if self.pending is not None:
          self._finish(step, state, self.pending)
        while step < run.total_training_steps:
          position = self.sampler.state()
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
    sampled = self._sample(step, state)
    exp = sampled.experience
    self.interrupt.check()  # From here on the state is being changed.
    state, infos, scored = self.learn(state, exp)
    self._count_skipped(infos)
    metrics = self._metrics(sampled, scored, infos, state)
    if self.parts.run.save_rollouts:
      self._save_rollouts(step, exp)
    return state, metrics

  def _finish(self, step: int, state: TrainState, metrics: dict) -> None:
    """Evaluates where due, writes the step's line, saves where due."""
    run = self.parts.run
    due = run.test_freq and step % run.test_freq == 0
    due = due or (run.test_freq and step == run.total_training_steps)
    # Saved with the state if the evaluation is given up; then done again.
    self.pending = metrics
    if not self.given_up and (step == 0 or due):
      metrics = metrics | self._evaluate(step, state)
    self._log(step, metrics | self.timer.take())
    self.pending = None
    if self.given_up:
      raise RuntimeError(self.given_up)
    if step == self.saved_step:
      self.checkpoints.amend(
          step, self._host_state(), metric=self.last_accuracy
      )
    elif step and run.save_freq and step % run.save_freq == 0:
      self._save(step, state)

  def learn(
      self, state: TrainState, exp: Experience
  ) -> tuple[TrainState, list[UpdateInfo], dict[int, np.ndarray]]:
    """Updates on one scored rollout; a function of its arguments alone.

    Args:
      state: the state whose weights sampled `exp`; donated.
      exp: a rollout, fresh or read back by `replay.load_experience`.

    Returns:
      (next state, one UpdateInfo per optimiser step,
       completion's index -> training forward's log-probs at state's weights).
    """
    params = PolicyParams(state.weights, state.fp8_state)
    with self.timer('adv'):
      batches = experience.mini_batches(
          exp,
          self.parts.algorithm,
          mini_batch_size=self.parts.run.mini_batch_size,
          max_response_length=self.parts.engine.max_response_length,
      )
    with self.timer('old_log_prob'):
      batches, scored = self._log_probs_at_rollout_weights(batches, params)
    if self.reference is not None:
      with self.timer('ref'):
        batches = [self._with_reference(b, self.reference) for b in batches]
    with self.timer('update_actor'):
      state, infos, first = self._update(state, batches)
    scored |= first
    with self.timer('update_weights'):
      rolled = self.train_step.roll_inputs(state.fp8_state)
      state = dataclasses.replace(state, fp8_state=rolled)
      state = self._requantize_rollout(state, batches, infos)
    return state, infos, scored

  # --- the parts of a step ------------------------------------------------

  def _sample(self, step: int, state: TrainState) -> Filled:
    """Samples and scores the step's prompts, once or until they teach."""
    parts, size = self.parts, self.parts.run.train_batch_size
    met: set[int] = set()

    def generate() -> Experience | None:
      left = len(parts.train_set) - len(met)
      if not left:
        return None
      indices = self.sampler.next_batch(min(size, left), exclude=met)
      met.update(indices)
      prompts = [parts.train_set[i] for i in indices]
      with self.timer('gen'):
        completions = self._rollout(step, prompts, state)
      return self._score(step, prompts, completions)

    return dynamic_sampling.fill(generate, groups=size, config=parts.algorithm)

  def _rollout(self, step, prompts, state):
    run = self.parts.run
    limits = None
    if run.synthetic:
      limits = synthetic.response_limits(
          run.seed,
          step,
          prompts,
          run.num_generations,
          self.parts.engine.max_response_length,
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
        should_stop=self.interrupt.check,
        environment=self.parts.environment,
    )

  def _score(
      self, step: int, prompts: list[Prompt], completions: list[Completion]
  ) -> Experience:
    run, errors = self.parts.run, {}
    with self.timer('reward'):
      if run.synthetic:
        values = synthetic.scores(run.seed, step, prompts, run.num_generations)
        accuracy = np.zeros_like(values)
      else:
        results = experience.score_completions(
            prompts, completions, self.pool, self.parts.tokenizer
        )
        values = np.asarray([r.score for r in results])
        accuracy = np.asarray([r.accuracy for r in results])
        for result in results:
          if result.error:
            errors[result.error] = errors.get(result.error, 0) + 1
    with self.timer('adv'):
      return experience.from_scores(
          prompts, completions, values, accuracy, errors, self.parts.algorithm
      )

  def _log_probs_at_rollout_weights(self, batches, params):
    """Scores what `accumulate` will not meet at the rollout's weights.

    The first mini-batch of the first epoch is compared with what `accumulate`
    itself returns; the later ones with `score`, before any update. With
    old_logprobs='recompute' all are scored, and that becomes pi_old.

    Returns:
      (batches with old log-probs filled in,
       origin -> training forward's log-probs at the rollout's weights).
    """
    recompute = self.parts.algorithm.old_logprobs == 'recompute'
    filled, scored = [], {}
    for i, batch in enumerate(batches):
      if recompute or i > 0:
        values = self._score_batch(batch, params)
        scored |= {s.origin: v for s, v in zip(batch, values, strict=True)}
        if recompute:
          batch = [
              dataclasses.replace(s, old_logprobs=v)
              for s, v in zip(batch, values, strict=True)
          ]
      filled.append(batch)
    return filled, scored

  def _with_reference(self, batch, reference: PolicyParams):
    values = self._score_batch(batch, reference)
    return [
        dataclasses.replace(s, ref_logprobs=v)
        for s, v in zip(batch, values, strict=True)
    ]

  def _score_batch(self, batch, params: PolicyParams) -> list[np.ndarray]:
    packed = self.parts.pack(batch)
    temperature = jnp.float32(self.parts.run.temperature)
    values = [
        self.train_step.score(params, micro, temperature)[0]
        for micro in packed.batches
    ]
    return packing.unpack(values, packed)

  def _update(self, state: TrainState, batches):
    """Returns (state, one UpdateInfo per optimiser step, first log-probs)."""
    infos, first, efficiency = [], {}, []
    temperature = jnp.float32(self.parts.run.temperature)
    for epoch in range(self.parts.algorithm.ppo_epochs):
      for i, batch in enumerate(batches):
        packed = self.parts.pack(batch)
        efficiency.append(packed.efficiency)
        outputs = []
        for micro in packed.batches:
          self.gradients, logprobs, _ = self.train_step.accumulate(
              state, self.gradients, micro, temperature
          )
          outputs.append(logprobs)
        if epoch == i == 0:
          values = packing.unpack(outputs, packed)
          first = {s.origin: v for s, v in zip(batch, values, strict=True)}
        state, self.gradients, info = self.train_step.apply(
            state, self.gradients
        )
        infos.append(jax.device_get(info))
    self.packing_efficiency = float(np.mean(efficiency))
    return state, infos, first

  def _requantize_rollout(self, state: TrainState, batches, infos):
    """Lets the rollout of a mixed flow follow the masters, if they moved."""
    self.rollout_changed = {}
    if self.requantizer is None or not any(info.applied for info in infos):
      return state
    sequences = [sequence for batch in batches for sequence in batch]
    state, self.rollout_changed = self.requantizer(
        state, self.parts.pack(sequences).batches
    )
    return state

  def _count_skipped(self, infos: list[UpdateInfo]) -> None:
    for info in infos:
      self.skipped_in_row = 0 if info.applied else self.skipped_in_row + 1
      if self.skipped_in_row >= self.parts.run.max_skipped_updates:
        self.given_up = (
            f'{self.skipped_in_row} updates in a row were not finite (gradient'
            f' norm {float(info.grad_norm)}); the weights are as they were'
            ' before them. Look at actor/grad_norm and fp8/ in metrics.jsonl,'
            ' lower lr, or set precision.recipe=bf16 to rule out FP8.'
        )

  def _metrics(self, sampled: Filled, scored, infos, state) -> dict:
    """Joins all metrics of a step."""
    policy, exp = self.parts.policy, sampled.experience
    metrics = step_metrics.step_metrics(
        exp,
        scored,
        infos,
        jax.device_get(state.fp8_state),
        loss=self.parts.loss,
        generated=sampled.completions,
        timer=self.timer,
        num_devices=policy.axes.size,
    )
    metrics |= sampled.metrics
    metrics |= flops.mfu_metrics(
        policy,
        self.engine.policy.recipe,
        sampled.prompts,
        sampled.completions,
        self.timer,
        trained=exp.completions,
        ppo_epochs=self.parts.algorithm.ppo_epochs,
    )
    metrics['perf/packing_efficiency'] = self.packing_efficiency
    if self.requantizer is not None:
      metrics |= step_metrics.rollout_health(
          jax.device_get(state.rollout_fp8_state),
          self.rollout_changed,
          operands=self.requantizer.measures,
      )
    return metrics

  def _evaluate(self, step: int, state: TrainState) -> dict:
    if self.parts.val_set is None:
      return {}
    run = self.parts.run
    with self.timer('testing'):
      metrics, samples = evaluation.evaluate(
          self.engine,
          mixed_flow.rollout_params(state),
          list(self.parts.val_set),
          self.pool,
          self.parts.tokenizer,
          num_generations=run.val_num_generations,
          temperature=run.val_temperature,
          # The same noise at every step: curves then differ by the policy.
          base_key=rng.key(run.seed, rng.EVALUATION, 0),
          should_stop=self.interrupt.check,
          environment=self.parts.environment,
      )
    self.last_accuracy = evaluation.headline(metrics)
    step_metrics.write_samples(self.workdir / 'samples', step, samples)
    return metrics

  # --- start, save, log ---------------------------------------------------

  def _start(self) -> tuple[TrainState, int]:
    """Resumes from the workdir, or calibrates a cold start."""
    parts = self.parts
    (self.workdir / 'config.json').write_text(parts.config_text)
    resumed = startup.resume(parts, self.checkpoints)
    if resumed is None:
      with self.timer('calibration'):
        state = startup.cold_start(parts, self.engine, self.interrupt.check)
        state = self._settle_precision(state)
        parts = self.parts
      # Not evaluated yet: step 0 has a line only once that is done.
      step, self.pending = 0, {}
    else:
      state, step = resumed.state, resumed.step
      self._restore_host_state(resumed.host_state)
      self.saved_step = step
      logging.info('Resuming from step %d in %s', step, self.workdir)
    self.writer.truncate_after(step if self.pending is None else step - 1)
    self.train_step = TrainStep(
        parts.policy,
        self.loss,
        parts.optimizer.build(),
        parts.optimizer,
        parts.mesh,
        state,
    )
    self.gradients = self.train_step.zero_gradients(state)
    if parts.is_mixed:
      self.requantizer = mixed_flow.Requantizer(
          parts.rollout_policy, parts.mesh, state
      )
    if parts.loss.kl_loss_coef:
      self.reference = states.reference(
          self.workdir / 'reference', state, cold=resumed is None
      )
    return state, step

  def _settle_precision(self, state: TrainState) -> TrainState:
    """Puts the dots that lose too much into high precision, on both sides."""
    parts = self.parts
    settled = run_precision.settle(parts.policy, state, parts.invariant_scale)
    run_precision.write(self.workdir, settled)
    policy = run_precision.keeping(parts.policy, settled)
    if policy is parts.policy:
      return state
    self.parts = parts.with_policy(policy)
    self.engine = Engine(policy, parts.engine, parts.mesh)
    return states.restricted(policy, state, parts.mesh)

  def _check(self, state: TrainState) -> None:
    """Compares rollout and training before a token is spent."""
    parts = self.parts
    if parts.is_mixed:
      flow_check.report_mixed_flow(
          parts.policy, parts.rollout_policy, self.loss, parts.engine, state
      )
      return
    flow_check.check_flow(parts.policy, self.loss, parts.engine, state)
    if norm.on_gpu():
      startup.say_whether_exact(
          startup.bit_test(
              parts,
              self.engine,
              self._score_batch,
              state,
              self.interrupt.check,
          )
      )

  def _host_state(self) -> dict[str, Any]:
    """Returns what a checkpoint holds beside the arrays."""
    pending = None
    if self.pending is not None:
      # As text: the numbers need not be finite.
      pending = json.dumps(self.pending, default=float)
    return {
        'sampler': self.sampler.state(),
        'skipped_in_row': self.skipped_in_row,
        'accuracy': self.last_accuracy,
        'pending': pending,
    }

  def _restore_host_state(self, saved: dict[str, Any]) -> None:
    self.sampler.restore(saved['sampler'])
    self.skipped_in_row = saved['skipped_in_row']
    self.last_accuracy = saved['accuracy']
    if saved['pending'] is not None:
      self.pending = json.loads(saved['pending'])

  def _save(self, step: int, state: TrainState) -> None:
    if step == self.saved_step:
      return
    self.saved_step = step
    with self.timer('save_checkpoint'):
      self.checkpoints.save(
          step,
          states.without_weights(state),
          self._host_state(),
          metric=self.last_accuracy,
      )

  def _export(self, state: TrainState) -> None:
    """Writes the trained policy as a Hugging Face checkpoint."""
    folder = self.workdir / 'export'
    if self.parts.export_source is None:
      return
    with self.timer('export'):
      # That of a run with fewer steps, which this one has gone on from.
      shutil.rmtree(folder, ignore_errors=True)
      models.save_checkpoint(
          folder,
          invariant_scaling.unfold(
              merge(state.trainable, state.frozen), self.parts.invariant_scale
          ),
          self.parts.policy.model,
          source_folder=self.parts.export_source,
      )
    logging.info('Exported the policy to %s', folder)

  def _save_rollouts(self, step: int, exp: Experience) -> None:
    folder = self.workdir / 'rollouts'
    folder.mkdir(exist_ok=True)
    rollout_store.save_rollouts(
        folder / f'{step + 1:06d}.npz',
        exp.completions,
        {
            'score': exp.scores_PG.reshape(-1),
            'accuracy': exp.accuracy_PG.reshape(-1),
            'advantage': exp.advantages_PG.reshape(-1),
        },
    )

  def _log(self, step: int, metrics: dict) -> None:
    self.checkpoints.check()
    self.writer.write(step, {'training/global_step': step} | metrics)
    self.console.step(step, metrics)

  def close(self) -> None:
    """Waits for the checkpoint, and lets go of the files."""
    self.console.close()
    self.checkpoints.close()
    self.writer.close()
