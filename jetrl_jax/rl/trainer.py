"""The loop: rollout, reward, advantage, update, evaluation, checkpoint.

A run is a function of its config, checkpoint and data. Everything that a step
reads is in the training state, in the sampler's position or in an address of
randomness, so a run that is killed and resumed continues to the same bits.
"""

import contextlib
import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jetrl_jax import checkpoint, models, rng
from jetrl_jax.data import Prompt, PromptDataset, PromptSampler, Tokenizer
from jetrl_jax.fp8 import health, slots
from jetrl_jax.metrics import MetricWriter
from jetrl_jax.models import norm
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl import (
    evaluation,
    experience,
    flops,
    flow_check,
    mismatch,
    packing,
    rollout_store,
    step_metrics,
    synthetic,
)
from jetrl_jax.rl import state as states
from jetrl_jax.rl.console import Console
from jetrl_jax.rl.engine import Engine, EngineConfig
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.interrupt import Interrupt, StopRequested
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import never_stop, rollout
from jetrl_jax.rl.settings import AlgorithmConfig, RunConfig
from jetrl_jax.rl.step_metrics import Timer
from jetrl_jax.rl.train_step import (
    LossConfig,
    TrainStep,
    UpdateInfo,
    merge,
    policy_loss,
)
from jetrl_jax.rl.types import Completion, TrainState
from jetrl_jax.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
  """What a run is made of; `config.py` builds it.

  Attributes:
    policy: decoder and recipe.
    mesh: devices.
    initial_params: makes the masters of a cold start, on their devices.
    param_shapes: their shapes and dtypes.
    freeze: patterns of masters that do not train.
    engine: sizes and sampler of the rollout.
    loss: the objective.
    algorithm: from scores to weights.
    optimizer: AdamW and its schedule.
    run: sizes, frequencies, limits.
    tokenizer: of the checkpoint.
    train_set: prompts to learn from.
    val_set: held-out prompts; None for no evaluation.
    make_rewards: starts the reward workers.
    config_text: the resolved config, kept in the workdir.
    export_source: the checkpoint whose config and tokenizer files the exported
      one carries on; None for no export.
  """

  policy: Policy
  mesh: Mesh
  initial_params: Callable[[], PyTree]
  param_shapes: PyTree
  freeze: tuple[str, ...]
  engine: EngineConfig
  loss: LossConfig
  algorithm: AlgorithmConfig
  optimizer: OptimizerConfig
  run: RunConfig
  tokenizer: Tokenizer
  train_set: PromptDataset
  val_set: PromptDataset | None
  make_rewards: Callable[[], RewardPool]
  config_text: str
  export_source: pathlib.Path | None


class Trainer:
  """One run in one workdir.

  Args:
    parts: what the run is made of.
    workdir: metrics, checkpoints and rollouts go here; a run that was
      interrupted there is resumed.
  """

  def __init__(self, parts: Parts, workdir: str | pathlib.Path):
    self.parts, self.workdir = parts, pathlib.Path(workdir)
    self.workdir.mkdir(parents=True, exist_ok=True)
    run = parts.run
    self.loss = functools.partial(policy_loss, parts.loss)
    self.engine = Engine(parts.policy, parts.engine, parts.mesh)
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
    self.writer = MetricWriter(self.workdir, tensorboard=True)
    self.interrupt = Interrupt()
    self.timer = Timer()
    self.console = Console(run.total_training_steps)
    self.row_length = _round_up(
        parts.engine.max_prompt_length + parts.engine.max_response_length,
        parts.policy.tile,
    )
    rows = run.micro_batch_size
    self.rows = _round_up(rows, parts.policy.axes.size)
    self.skipped_in_row = 0
    self.reference: PolicyParams | None = None
    self.last_accuracy: float | None = None
    self.saved_step: int | None = None

  # --- the story ----------------------------------------------------------

  def train(self) -> None:
    """Runs to total_training_steps, from where the workdir stands.

    Raises:
      StopRequested: SIGTERM came; a checkpoint was saved.
      RuntimeError: max_skipped_updates non-finite updates in a row.
    """
    run = self.parts.run
    with (
        self.interrupt,
        contextlib.closing(self),
        self.parts.make_rewards() as self.pool,
    ):
      state, step = self._start()
      # Rollout and training must be one precision flow before a token is spent.
      flow_check.check_flow(
          self.parts.policy, self.loss, self.parts.engine, state
      )
      if norm.on_gpu():
        self._say_whether_exact(self.bit_test(state))
      position = self.sampler.state()
      try:
        if step == 0:
          self._log(0, self._evaluate(0, state) | self._timings())
        while step < run.total_training_steps:
          position = self.sampler.state()
          state, metrics = self._train_step(step, state)
          step += 1
          due = run.test_freq and step % run.test_freq == 0
          if due or (run.test_freq and step == run.total_training_steps):
            metrics |= self._evaluate(step, state)
          self._log(step, metrics | self._timings())
          if run.save_freq and step % run.save_freq == 0:
            self._save(step, state)
        if not run.synthetic:  # Made-up rewards leave nothing worth keeping.
          self._save(step, state)
          self._export(state)
      except StopRequested:
        # Raised only where the state still is that of the step's start.
        self.sampler.restore(position)
        self._save(step, state)
        raise
    self.state = state

  def _train_step(
      self, step: int, state: TrainState
  ) -> tuple[TrainState, dict]:
    """One rollout and its updates; the paper's algorithm box."""
    params = PolicyParams(state.weights, state.fp8_state)
    prompts = self._next_prompts()
    with self.timer('gen'):
      completions = self._rollout(step, prompts, params, state)
    exp = self._score(step, prompts, completions)
    self.interrupt.check()  # From here on the state is being changed.
    state, infos, scored = self.learn(state, exp)
    self._count_skipped(infos)
    metrics = self._metrics(exp, scored, infos, state)
    if self.parts.run.save_rollouts:
      self._save_rollouts(step, exp)
    return state, metrics

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
    return state, infos, scored

  # --- the parts of a step ------------------------------------------------

  def _next_prompts(self) -> list[Prompt]:
    indices = self.sampler.next_batch(self.parts.run.train_batch_size)
    return [self.parts.train_set[i] for i in indices]

  def _rollout(self, step, prompts, params, state):
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
        params,
        prompts,
        num_generations=run.num_generations,
        temperature=run.temperature,
        base_key=rng.key(run.seed, rng.ROLLOUT, step),
        weight_version=int(state.opt_step),
        limits=limits,
        should_stop=self.interrupt.check,
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

  def _pack(self, batch: list[packing.Sequence]) -> packing.Packed:
    return packing.pack(
        batch,
        row_length=self.row_length,
        rows_per_micro_batch=self.rows,
        tile=self.parts.policy.tile,
    )

  def _score_batch(self, batch, params: PolicyParams) -> list[np.ndarray]:
    packed = self._pack(batch)
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
        packed = self._pack(batch)
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

  def _count_skipped(self, infos: list[UpdateInfo]) -> None:
    for info in infos:
      self.skipped_in_row = 0 if info.applied else self.skipped_in_row + 1
      if self.skipped_in_row >= self.parts.run.max_skipped_updates:
        raise RuntimeError(
            f'{self.skipped_in_row} updates in a row were not finite (gradient'
            f' norm {float(info.grad_norm)}); the weights are as they were'
            ' before them. Look at actor/grad_norm and fp8/ in metrics.jsonl,'
            ' lower lr, or set precision.recipe=bf16 to rule out FP8.'
        )

  def _metrics(self, exp, scored, infos, state) -> dict:
    """Joins all metrics of a step."""
    train = np.concatenate(
        [
            scored[i][len(c.prompt_tokens) :]
            for i, c in enumerate(exp.completions)
        ]
    )

    def join(name):
      return np.concatenate([getattr(c, name) for c in exp.completions])

    per_token = np.concatenate(
        [
            np.full(len(c.tokens), advantage, np.float32)
            for c, advantage in zip(
                exp.completions, exp.advantages_PG.reshape(-1), strict=True
            )
        ]
    )
    metrics: dict[str, Any] = experience.experience_metrics(exp)
    metrics |= mismatch.mismatch_metrics(
        rollout_logprobs=join('logprobs'),
        train_logprobs=train,
        log_mu=join('log_mu'),
        log_pi_old=train,
        advantages=per_token,
        rollout_is_threshold=self.parts.loss.rollout_is_threshold,
    )
    metrics |= step_metrics.update_metrics(infos)
    metrics['perf/packing_efficiency'] = self.packing_efficiency
    fp8_state = jax.device_get(state.fp8_state)
    summary = health.summarize(fp8_state, slots.slot_paths(fp8_state))
    metrics |= health.headline(summary)
    if summary:
      metrics['fp8_health'] = summary
    metrics |= step_metrics.throughput(
        exp.completions, exp.prompts, self.timer, self.parts.policy.axes.size
    )
    metrics |= flops.mfu_metrics(
        self.parts.policy,
        exp.prompts,
        exp.completions,
        self.timer,
        ppo_epochs=self.parts.algorithm.ppo_epochs,
    )
    return metrics

  def _evaluate(self, step: int, state: TrainState) -> dict:
    if self.parts.val_set is None:
      return {}
    run = self.parts.run
    with self.timer('testing'):
      metrics, samples = evaluation.evaluate(
          self.engine,
          PolicyParams(state.weights, state.fp8_state),
          list(self.parts.val_set),
          self.pool,
          self.parts.tokenizer,
          num_generations=run.val_num_generations,
          temperature=run.val_temperature,
          # The same noise at every step: curves then differ by the policy.
          base_key=rng.key(run.seed, rng.EVALUATION, 0),
          # Later, the step behind it is not in any checkpoint yet.
          should_stop=never_stop if step else self.interrupt.check,
      )
    self.last_accuracy = evaluation.headline(metrics)
    step_metrics.write_samples(self.workdir / 'samples', step, samples)
    return metrics

  # --- start, save, log ---------------------------------------------------

  def _start(self) -> tuple[TrainState, int]:
    """Resumes from the workdir, or calibrates a cold start."""
    parts = self.parts
    (self.workdir / 'config.json').write_text(parts.config_text)
    optimizer = parts.optimizer.build()
    like = states.abstract(
        parts.policy, parts.param_shapes, optimizer, parts.mesh, parts.freeze
    )
    restored = self.checkpoints.restore(states.without_weights(like))
    if restored is None:
      state, step = self._cold_start(optimizer), 0
    else:
      state = states.with_weights(
          parts.policy,
          dataclasses.replace(like, **restored.state),
          parts.mesh,
          record=False,
      )
      step = self.saved_step = restored.step
      self.sampler.restore(restored.host_state['sampler'])
      self.skipped_in_row = restored.host_state['skipped_in_row']
      self.last_accuracy = restored.host_state['accuracy']
      logging.info('Resuming from step %d in %s', step, self.workdir)
    # Step 0 has a line only once its evaluation is through.
    self.writer.truncate_after(step or -1)
    self.train_step = TrainStep(
        parts.policy, self.loss, optimizer, parts.optimizer, parts.mesh, state
    )
    self.gradients = self.train_step.zero_gradients(state)
    if parts.loss.kl_loss_coef:
      self.reference = states.reference(
          self.workdir / 'reference', state, cold=restored is None
      )
    return state, step

  def _cold_start(self, optimizer) -> TrainState:
    """Builds the state and fills its FP8 slots from prompts and a rollout."""
    parts, run = self.parts, self.parts.run
    state = states.create(
        parts.policy,
        parts.initial_params(),
        optimizer,
        parts.mesh,
        parts.freeze,
    )
    if not slots.slot_paths(state.fp8_state):
      return state
    with self.timer('calibration'):
      prompts = self._calibration_prompts()
      calibration = states.Calibration(parts.policy, parts.mesh, state)
      texts = [prompt.tokens for prompt in prompts]
      sequences = states.likelihood_sequences(texts, [1] * len(texts))
      state = calibration.fill(
          state, self._pack(sequences).batches, run.temperature
      )
      completions = self._short_rollout(state)
      sequences = states.likelihood_sequences(
          [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
          [len(c.prompt_tokens) for c in completions],
      )
      state = calibration.fill(
          state, self._pack(sequences).batches, run.temperature
      )
    return state

  def _calibration_prompts(self) -> list[Prompt]:
    train_set = self.parts.train_set
    count = min(self.parts.run.calibration_prompts, len(train_set))
    return [train_set[i] for i in range(count)]

  def _short_rollout(self, state: TrainState) -> list[Completion]:
    """Samples the calibration's prompts, calibration_tokens at most."""
    run, prompts = self.parts.run, self._calibration_prompts()
    shape = (len(prompts), run.num_generations)
    return rollout(
        self.engine,
        PolicyParams(state.weights, state.fp8_state),
        prompts,
        num_generations=run.num_generations,
        temperature=run.temperature,
        base_key=rng.key(run.seed, rng.CALIBRATION),
        weight_version=0,
        limits=np.full(shape, run.calibration_tokens),
        should_stop=self.interrupt.check,
    )

  def bit_test(self, state: TrainState) -> float:
    """Returns the share of a short rollout's tokens that training differs on.

    The run's own executables at the run's own shapes: what they give on this
    device and with these library versions is an observation, and this is it.
    """
    completions = self._short_rollout(state)
    batch = [
        packing.sequence_from_completion(
            completion,
            advantage=0.0,
            loss_weight=0.0,
            mask_truncated=False,
            origin=i,
        )
        for i, completion in enumerate(completions)
    ]
    params = PolicyParams(state.weights, state.fp8_state)
    scored = self._score_batch(batch, params)
    return mismatch.mismatch_token_frac(
        np.concatenate([c.logprobs for c in completions]),
        np.concatenate(
            [
                values[len(c.prompt_tokens) :]
                for c, values in zip(completions, scored, strict=True)
            ]
        ),
    )

  def _say_whether_exact(self, share: float) -> None:
    if share == 0:
      logging.info(
          'Start-up bit test: rollout and training agree on all tokens'
      )
      return
    logging.warning(
        'Start-up bit test: %.3f%% of tokens differ between rollout and'
        ' training on this device; exactness may not be claimed for this run.'
        ' training/mismatch_token_frac shows it at every step.',
        100 * share,
    )

  def _save(self, step: int, state: TrainState) -> None:
    if step == self.saved_step:
      return
    self.saved_step = step
    with self.timer('save_checkpoint'):
      self.checkpoints.save(
          step,
          states.without_weights(state),
          {
              'sampler': self.sampler.state(),
              'skipped_in_row': self.skipped_in_row,
              'accuracy': self.last_accuracy,
          },
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
          merge(state.trainable, state.frozen),
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

  def _timings(self) -> dict[str, float]:
    return self.timer.take()

  def _log(self, step: int, metrics: dict) -> None:
    self.checkpoints.check()
    self.writer.write(step, {'training/global_step': step} | metrics)
    self.console.step(step, metrics)

  def close(self) -> None:
    """Waits for the checkpoint, and lets go of the files."""
    self.console.close()
    self.checkpoints.close()
    self.writer.close()


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple
