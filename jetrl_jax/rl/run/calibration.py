"""Measures the activation scales of a cold start, and what 8 bits cost.

Only delayed scales have to be measured first. What inputs of dots, keys and
values in 8 bits cost is measured for every run that has them, because a format
that does not fit a model's activations ruins a run without a word.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import rng, sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.core.typing import Array, PyTree
from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import packing
from jetrl_jax.rl.mismatch import k3_divergence
from jetrl_jax.rl.objective import supervised_loss
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import StopCheck, rollout
from jetrl_jax.rl.run import mixed_flow
from jetrl_jax.rl.run.gradients import compile_logprobs, differentiable_loss
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.types import Completion, TrainBatch

# For a checkpoint without a run, which does not have these settings.
CHECKPOINT_PROMPTS = 16
CHECKPOINT_TOKENS = 64
_CHECKPOINT_SAMPLES = 4
_CHECKPOINT_ROWS = 4
# k3 in nats a token that 8 bits cost, from which a start warns; what real
# models have: docs/tuning.md.
MUCH = 0.05


class Calibration:
  """Fills the scaling state of a cold start from a backward pass.

  The pass uses the weights that training will use, but computes in the compute
  dtype, keys and values too. A layer without a scale therefore cannot distort
  what the next layers measure. No gradient of a weight is computed; only the
  scaling state changes.

  Attributes:
    observe: (state, batch, temperature) to (observations, see
      `scaling_state.stack_observations`; log-probs [B, T] in nats).

  Args:
    policy: training's policy.
    mesh: devices.
    state: an example, for its shapes.
  """

  def __init__(self, policy: Policy, mesh: Mesh, state: TrainState):
    self._recipe, self._whole = policy.recipe, NamedSharding(mesh, P())
    # It runs only once, so memory matters more than time.
    calibrating = dataclasses.replace(
        policy.with_wide_keys(),
        recipe=dataclasses.replace(policy.recipe, calibrating=True),
        remat='full',
    )
    specs, rows = sharding.tree_specs(state, mesh), sharding.ROWS
    self.observe = policy.jit_per_device(
        functools.partial(_observe, calibrating),
        mesh,
        (specs, rows, P()),
        (P(), rows),
        in_order=policy.axes.devices > 1,
    )
    where = sharding.named(specs.fp8_state, mesh)
    self._take_effect = policy.jit(self._observe_and_roll, out_shardings=where)
    self._observe_health = policy.jit(
        scaling_state.observe_health, out_shardings=where
    )

  def compile_ahead(
      self, ahead: CompileAhead, state: TrainState, batch: TrainBatch
  ) -> None:
    """Compiles what `fill` and `measure` call, on other threads.

    Args:
      ahead: the threads.
      state: arrays, or shapes with their shardings.
      batch: shapes of a micro-batch.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    observed, _ = ahead(self.observe, state, batch, scalar)
    observed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=self._whole
        ),
        observed,
    )
    ahead(self._take_effect, state.fp8_state, observed)
    ahead(self._observe_health, state.fp8_state, observed)

  def fill(
      self, state: TrainState, batches: list[TrainBatch], temperature: float
  ) -> TrainState:
    """Returns the state with scales for inputs and output gradients.

    Args:
      state: it has kernel scales already.
      batches: micro-batches of real tokens; their loss weights set the size of
        the gradients.
      temperature: the temperature of pi.
    """
    observed, _ = self._pass(state, batches, temperature)
    fp8_state = self._take_effect(state.fp8_state, observed)
    return dataclasses.replace(state, fp8_state=fp8_state)

  def measure(
      self, state: TrainState, batches: list[TrainBatch], temperature: float
  ) -> tuple[TrainState, float | None]:
    """Returns the state with the health that its scales give, and a distance.

    `fill` sees the scales that it replaces. So what the new ones lose takes a
    pass of its own.

    Args:
      state: its scales are filled.
      batches: the sequences that filled them, with the rollout's log-probs.
      temperature: the temperature of pi.

    Returns:
      (state, k3). The k3, in nats a token, is from the rollout's policy to one
      that reads inputs of dots, keys and values in the compute dtype: what they
      cost in 8 bits. None if nothing was sampled.
    """
    observed, logprobs = self._pass(state, batches, temperature)
    fp8_state = self._observe_health(state.fp8_state, observed)
    state = dataclasses.replace(state, fp8_state=fp8_state)
    return state, _distance(batches, logprobs)

  def _pass(self, state, batches, temperature) -> tuple[PyTree, list]:
    observed, logprobs = None, []
    for batch in batches:
      new, logprobs_BT = self.observe(state, batch, jnp.float32(temperature))
      observed = (
          new if observed is None else scaling_state.combine(observed, new)
      )
      logprobs.append(logprobs_BT)
    return observed, logprobs

  def _observe_and_roll(self, fp8_state, observed):
    recorded = scaling_state.observe(fp8_state, observed)
    rolled = scaling_state.roll(
        recorded, self._recipe, operands=('input', 'output_grad')
    )
    # The RL objective's gradients differ in size from this loss's. This scale
    # is only a start, and the first real observation must be able to lower it.
    return scaling_state.forget(rolled, operand='output_grad')


class InputCost:
  """Measures what inputs, keys and values in 8 bits cost a rollout.

  `Calibration.measure` does so too, in the backward pass that it makes anyway.
  This class needs only a forward pass. It is for a run without a `Calibration`,
  and for the rollout of a mixed flow, where training's policy sampled nothing.

  Args:
    policy: the rollout's policy; its recipe quantises, or its keys are FP8.
    mesh: devices.
    state: an example, for its shapes.
  """

  def __init__(self, policy: Policy, mesh: Mesh, state: TrainState):
    params = mixed_flow.rollout_params(state)
    side = dataclasses.replace(
        state, weights=params.weights, fp8_state=params.fp8_state
    )
    recipe = dataclasses.replace(policy.recipe, calibrating=True)
    policy = dataclasses.replace(policy.with_wide_keys(), recipe=recipe)
    self._logprobs = compile_logprobs(policy, mesh, side)

  def compile_ahead(
      self, ahead: CompileAhead, state: TrainState, batch: TrainBatch
  ) -> None:
    """Compiles the pass on another thread; see `Calibration`."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    ahead(self._logprobs, mixed_flow.rollout_params(state), batch, scalar)

  def __call__(
      self, state: TrainState, batches: list[TrainBatch], temperature: float
  ) -> float | None:
    """Returns the distance of `Calibration.measure`.

    Args:
      state: its rollout's weights and scales sampled.
      batches: what they sampled, with the rollout's log-probs.
      temperature: the temperature of pi.
    """
    params, value = mixed_flow.rollout_params(state), jnp.float32(temperature)
    read = [self._logprobs(params, batch, value)[0] for batch in batches]
    return _distance(batches, read)


def _distance(batches: list[TrainBatch], logprobs: list) -> float | None:
  """Returns k3 from the rollout's log-probs to these; None of no tokens."""
  sampled_T, read_T = (
      np.concatenate([sharding.to_host(x).ravel() for x in of])
      for of in ([batch.rollout_logprobs for batch in batches], logprobs)
  )
  # A log-prob is 0 if its token was not sampled.
  chosen_T = sampled_T < 0
  return k3_divergence(sampled_T[chosen_T], read_T[chosen_T])


def _observe(
    policy: Policy, state: TrainState, batch: TrainBatch, temperature: Array
) -> tuple[PyTree, Array]:
  """Returns what a backward pass shows of all dots, and the log-probs."""
  loss_of = differentiable_loss(
      policy, supervised_loss, state, batch, temperature
  )
  seen, (_, logprobs_BT, _) = jax.grad(loss_of, argnums=1, has_aux=True)(
      state.trainable, state.fp8_state
  )
  observed = scaling_state.reduce_over_devices(
      scaling_state.stack_observations(seen), policy.axes
  )
  return observed, logprobs_BT


def likelihood_sequences(
    token_lists: list[np.ndarray],
    first_target: list[int],
    logprobs: list[np.ndarray] | None = None,
) -> list[packing.Sequence]:
  """Returns sequences for `supervised_loss`, averaged over all targets.

  Args:
    token_lists: int32 tokens per sequence.
    first_target: index of each sequence's first token in the loss; token 0 is
      never in it.
    logprobs: float32 per sequence, the rollout's, 0 where a token was not
      sampled; by default 0 everywhere.
  """
  starts = [max(1, start) for start in first_target]
  targets = sum(
      max(0, len(tokens) - start)
      for tokens, start in zip(token_lists, starts, strict=True)
  )
  sequences = []
  for i, (tokens, start) in enumerate(zip(token_lists, starts, strict=True)):
    zeros = np.zeros(len(tokens), np.float32)
    mask = (np.arange(len(tokens)) >= start).astype(np.float32)
    sequences.append(
        packing.Sequence(
            tokens=np.asarray(tokens, np.int32),
            loss_mask=mask,
            loss_weight=mask / np.float32(max(targets, 1)),
            advantages=zeros,
            log_mu=zeros,
            rollout_logprobs=zeros if logprobs is None else logprobs[i],
            old_logprobs=zeros,
            ref_logprobs=zeros,
            weight_version=np.zeros(len(tokens), np.int32),
            origin=i,
        )
    )
  return sequences


def calibrate_checkpoint(
    engine: Engine,
    state: TrainState,
    prompts: list[Prompt],
    *,
    origin: str,
    seed: int = 0,
) -> TrainState:
  """Fills the scaling state of a policy without a run, as a cold start would.

  Args:
    engine: samples; it was made with the state's policy and mesh.
    state: it has kernel scales already, see `train_state.create`.
    prompts: the first `CHECKPOINT_PROMPTS` are used.
    origin: where the policy comes from, for the log.
    seed: seed of the short rollout.
  """
  first = prompts[:CHECKPOINT_PROMPTS]
  logging.info(
      '%s holds no activation scales: calibrating on %d prompts',
      origin,
      len(first),
  )
  policy, config = engine.run_policy, engine.config
  rows, row_length = packing.batch_shape(
      config.max_prompt_length + config.max_response_length,
      micro_batch_size=_CHECKPOINT_ROWS,
      packed_rows=0,
      tile=policy.tile,
      devices=policy.axes.size,
  )
  calibration = Calibration(policy, engine.run_mesh, state)

  def batches(sequences):
    return packing.pack(
        sequences,
        row_length=row_length,
        rows_per_micro_batch=rows,
        tile=policy.tile,
    ).batches

  def fill(state, sequences):
    return calibration.fill(state, batches(sequences), temperature=1.0)

  def measure(state, sequences):
    return calibration.measure(state, batches(sequences), temperature=1.0)

  def sample(state):
    most = min(CHECKPOINT_TOKENS, config.max_response_length)
    return rollout(
        engine,
        PolicyParams(state.weights, state.fp8_state),
        first,
        num_generations=_CHECKPOINT_SAMPLES,
        temperature=1.0,
        base_key=rng.key(seed, rng.CALIBRATION),
        weight_version=0,
        limits=np.full((len(first), _CHECKPOINT_SAMPLES), most),
    )

  state, distance = _filled(state, first, fill, sample, measure)
  report(distance, policy)
  return state


class ColdStart:
  """What a cold start of a run measures before its first rollout.

  Attributes:
    training: fills training's scaling state; None if nothing has to.
    cost: measures what 8 bits cost the rollout; None if `training` does, or if
      the rollout has none.

  Args:
    spec: the run's specification.
    state: an example, or its shapes.
  """

  def __init__(self, spec: RunSpec, state: TrainState):
    self.training = self.cost = None
    if spec.policy.recipe.needs_calibration:
      self.training = Calibration(spec.policy, spec.mesh, state)
    # In a mixed flow training's policy sampled nothing.
    is_unknown = spec.is_mixed or self.training is None
    sampling = spec.rollout_policy
    has_8_bits = sampling.recipe.name != 'bf16' or sampling.has_fp8_keys
    if is_unknown and has_8_bits:
      self.cost = InputCost(spec.rollout_policy, spec.mesh, state)

  def compile_ahead(
      self, ahead: CompileAhead, state: TrainState, batch: TrainBatch
  ) -> None:
    """Compiles what `calibrate_run` calls; see `Calibration`."""
    for part in (self.training, self.cost):
      if part is not None:
        part.compile_ahead(ahead, state, batch)


def calibrate_run(
    spec: RunSpec,
    engine: Engine,
    state: TrainState,
    should_stop: StopCheck,
    first: ColdStart | None = None,
) -> TrainState:
  """Fills the scaling state of a run's training and rollout, if they have one.

  It also reports what 8-bit inputs cost the rollout, if it quantises: of
  recipes that need no scales only at a start, where `first` is given.

  Args:
    spec: the run's specification.
    engine: samples the short rollout; its policy is that of `spec`.
    state: it has kernel scales already.
    should_stop: called at each host visit of the rollout; raises to stop.
    first: its programs may be being compiled; by default it is made here.
  """
  recipes = (spec.policy.recipe, spec.rollout_policy.recipe)
  needs_scales = any(recipe.needs_calibration for recipe in recipes)
  if first is None and not needs_scales:
    return state
  first = first or ColdStart(spec, state)
  training, cost, rollout_side = first.training, first.cost, None
  temperature = spec.run.temperature

  def sample(state):
    return short_rollout(spec, engine, state, should_stop)

  if not needs_scales:
    if cost is not None:
      batches = spec.pack(_sampled_sequences(sample(state))).batches
      report(
          cost(state, batches, temperature), spec.rollout_policy, spec.is_mixed
      )
    return state
  if spec.is_mixed:
    rollout_side = mixed_flow.Requantizer(spec.rollout_policy, spec.mesh, state)

  def fill(state, sequences):
    batches = spec.pack(sequences).batches
    if training:
      state = training.fill(state, batches, temperature)
    return rollout_side.calibrate(state, batches) if rollout_side else state

  def measure(state, sequences):
    batches, distance = spec.pack(sequences).batches, None
    if training:
      state, distance = training.measure(state, batches, temperature)
    if rollout_side is None:
      return state, distance
    # Another policy sampled these tokens, so the distance above is that between
    # the two sides of the flow.
    distance = cost(state, batches, temperature) if cost else None
    return rollout_side.measure(state, batches), distance

  prompts = _calibration_prompts(spec)
  state, distance = _filled(state, prompts, fill, sample, measure)
  report(distance, spec.rollout_policy, spec.is_mixed)
  return state


def short_rollout(
    spec: RunSpec, engine: Engine, state: TrainState, should_stop: StopCheck
) -> list[Completion]:
  """Samples at most calibration_tokens for each calibration prompt."""
  run, prompts = spec.run, _calibration_prompts(spec)
  shape = (len(prompts), run.num_generations)
  return rollout(
      engine,
      mixed_flow.rollout_params(state),
      prompts,
      num_generations=run.num_generations,
      temperature=run.temperature,
      base_key=rng.key(run.seed, rng.CALIBRATION),
      weight_version=0,
      limits=np.full(shape, run.calibration_tokens),
      should_stop=should_stop,
      environment=spec.environment,
  )


def _calibration_prompts(spec: RunSpec) -> list[Prompt]:
  count = min(spec.run.calibration_prompts, len(spec.train_set))
  return [spec.train_set[i] for i in range(count)]


def _filled(
    state: TrainState,
    prompts: list[Prompt],
    fill: Callable[[TrainState, list[packing.Sequence]], TrainState],
    sample: Callable[[TrainState], list[Completion]],
    measure: Callable[
        [TrainState, list[packing.Sequence]], tuple[TrainState, float | None]
    ],
) -> tuple[TrainState, float | None]:
  """Fills the scaling state from prompts, then from sampled responses.

  Args:
    state: it has kernel scales already.
    prompts: prompts like those of the run.
    fill: measures the scales on sequences.
    sample: samples responses with the scales that the prompts gave.
    measure: see `Calibration.measure`.

  Returns:
    What `measure` returns.
  """
  sequences = likelihood_sequences(
      [p.tokens for p in prompts], [1] * len(prompts)
  )
  state = fill(state, sequences)
  sequences = _sampled_sequences(sample(state))
  return measure(fill(state, sequences), sequences)


def _sampled_sequences(completions: list[Completion]) -> list[packing.Sequence]:
  return likelihood_sequences(
      [np.concatenate([c.prompt_tokens, c.tokens]) for c in completions],
      [len(c.prompt_tokens) for c in completions],
      [
          np.concatenate(
              [
                  np.zeros(len(c.prompt_tokens), np.float32),
                  np.where(c.sampled, c.logprobs, np.float32(0)),
              ]
          )
          for c in completions
      ],
  )


def report(
    distance: float | None, policy: Policy, is_mixed: bool = False
) -> None:
  """Logs how far 8 bits move the policy; warns if it is far.

  Args:
    distance: k3 in nats a token; None, of no tokens, is not reported.
    policy: the one that samples.
    is_mixed: whether it is that of a mixed flow's rollout alone.
  """
  if distance is None:
    return
  recipe, read = policy.recipe.name, []
  if recipe != 'bf16':
    read.append(f'the inputs of dots in {recipe}')
  if policy.has_fp8_keys:
    read.append('keys and values in FP8')
  logging.info(
      'Reading %s moves the policy%s by k3 = %.2g nats a token',
      ', and '.join(read),
      ' of the rollout' if is_mixed else '',
      distance,
  )
  if distance <= MUCH:
    return
  remedies = []
  if policy.has_fp8_keys:
    if policy.model.qkv_bias and not policy.smooth_k:
      remedies.append('precision.smooth_k=True')
    remedies.append("precision.kv_cache_dtype='compute'")
  if recipe != 'bf16':
    setting = 'precision.rollout_recipe' if is_mixed else 'precision.recipe'
    others = [name for name in ('fp8_block', 'bf16') if name != recipe]
    remedies.append("precision.high_precision_layers='.*/mlp/down'")
    remedies.append(f'{setting}={", then ".join(map(repr, others))}')
  logging.warning(
      'That is more than %.2g: activations probably have outliers. Try %s'
      ' (docs/tuning.md)',
      MUCH,
      ', then '.join(remedies),
  )
