"""A run of the smallest size: one policy, its engine and its train step.

Compiling is what these tests cost, so a run is built once per process and
shared. `UpdatePrograms.apply` and the engine take their state over (they donate
it): tests hand them copies, see `copy`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jetrl_jax import kernels
from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.models.types import FAMILY_TRAITS, ModelConfig
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.calibration import Calibration, likelihood_sequences
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.types import Completion, TrainBatch

VOCAB, TILE, ROWS, LENGTH = 64, 16, 16, 32
TEMPERATURE = 0.8
SAMPLES = 4
FP8, BF16 = Recipe(), Recipe(name='bf16')


def model(family: str = 'qwen2', layers: int = 1) -> ModelConfig:
  """D 32, 2 heads on 1 key head of 16, F 64, V 64."""
  return ModelConfig(
      family=family,
      vocab_size=VOCAB,
      num_layers=layers,
      model_dim=32,
      num_heads=2,
      num_kv_heads=1,
      head_dim=16,
      ffn_dim=64,
      norm_eps=1e-6,
      rope_theta=1e4,
      rope_scaling=None,
      max_position=64,
      **FAMILY_TRAITS[family]._asdict(),
      tied_embeddings=family == 'qwen2',
  )


def policy(recipe: Recipe = FP8, mesh: Mesh | None = None, **kwargs) -> Policy:
  """The policy; several chunks of logit rows per micro-batch."""
  return Policy(
      model=model(**kwargs),
      recipe=recipe,
      axes=collectives.axes_of(mesh or sharding.make_mesh()),
      tile=TILE,
      logit_chunk_rows=64,
  )


def engine_config(**changes) -> EngineConfig:
  """16 slots for 24 sequences: some wait, and slots are used again."""
  fields: dict[str, Any] = dict(
      num_slots=16,
      max_prompt_length=20,
      max_response_length=12,
      stop_ids=(1, 2, 3),
      decode_block=8,
  )
  return EngineConfig(**(fields | changes))


def masters(of: Policy) -> Any:
  """Random masters, large enough for logits to matter."""
  tree = jax.jit(dataclasses.replace(of, axes=collectives.Axes()).init)(
      rng.key(0, rng.INIT)
  )
  return jax.tree.map(lambda x: x * 5 if x.ndim == 2 else x, tree)


def prompts() -> list[Prompt]:
  """Six prompts of 1 to 20 tokens, in both prefill buckets."""
  generator = np.random.default_rng(0)
  return [
      Prompt(
          id=10 * i + 3,
          tokens=generator.integers(4, VOCAB, length).astype(np.int32),
          text='',
          answer='',
          source='',
          extra={},
      )
      for i, length in enumerate((1, 2, 9, 16, 17, 20))
  ]


def bits(x) -> np.ndarray:
  """The array's bytes: NaN equals NaN, and 0.0 is not -0.0."""
  x = np.ascontiguousarray(jax.device_get(x))
  return x.reshape(-1).view(np.uint8)


def leaves(tree: Any) -> list[np.ndarray]:
  """The tree's arrays."""
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_same_bits(found: Any, expected: Any) -> None:
  """Two trees of equal structure, shapes, dtypes and bits."""
  found_leaves = jax.tree_util.tree_leaves_with_path(found)
  expected_leaves = jax.tree_util.tree_leaves_with_path(expected)
  assert [p for p, _ in found_leaves] == [p for p, _ in expected_leaves]
  for (path, a), (_, b) in zip(found_leaves, expected_leaves, strict=True):
    name = jax.tree_util.keystr(path)
    assert a.shape == b.shape and a.dtype == b.dtype, name
    np.testing.assert_array_equal(bits(a), bits(b), err_msg=name)


def assert_same_on_all_devices(tree: Any) -> None:
  """Arrays that are whole on every device have the same bits on each."""
  for leaf in jax.tree.leaves(tree):
    if leaf.sharding.is_fully_replicated:
      first, *others = (bits(shard.data) for shard in leaf.addressable_shards)
      for other in others:
        np.testing.assert_array_equal(other, first)


def copy(tree: Any) -> Any:
  """Buffers of one's own, to be donated."""
  return jax.tree.map(jnp.copy, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """All that is compiled for one policy.

  Attributes:
    policy: the functions.
    mesh: devices.
    loss: what the step differentiates.
    config: the optimiser's.
    optimizer: the optimiser.
    engine: the rollout's.
    step: the update.
    start: the first state, calibrated if the recipe is FP8.
  """

  policy: Policy
  mesh: Mesh
  loss: Any
  config: OptimizerConfig
  optimizer: optax.GradientTransformation
  engine: Engine
  step: UpdatePrograms
  start: TrainState

  def rollout(
      self,
      params: TrainState | None = None,
      key_step: int = 0,
      engine: Engine | None = None,
      **changes,
  ) -> list[Completion]:
    """Samples with a state's weights, by default those of the start."""
    params = params or self.start
    arguments: dict[str, Any] = dict(
        prompts=prompts(),
        num_generations=SAMPLES,
        temperature=TEMPERATURE,
        base_key=rng.key(0, rng.ROLLOUT, key_step),
        weight_version=0,
    )
    return rollout(
        engine or self.engine,
        PolicyParams(params.weights, params.fp8_state),
        **(arguments | changes),
    )

  def accumulate(self, params: TrainState, batches: list[TrainBatch]):
    """Returns the gradients of all micro-batches and their log-probs."""
    gradients, logprobs = self.step.zero_gradients(params), []
    for batch in batches:
      gradients, logprobs_BT, _ = self.step.accumulate(
          params, gradients, batch, jnp.float32(TEMPERATURE)
      )
      logprobs.append(np.asarray(logprobs_BT))
    return gradients, logprobs

  def score(
      self,
      params: TrainState,
      batch: TrainBatch,
      temperature: float = TEMPERATURE,
  ) -> np.ndarray:
    """Log-probs [B, T] by `UpdatePrograms.logprobs`."""
    logprobs_BT, _ = self.step.logprobs(
        PolicyParams(params.weights, params.fp8_state),
        batch,
        jnp.float32(temperature),
    )
    return np.asarray(logprobs_BT)

  def apply(self, params: TrainState, gradients):
    """`UpdatePrograms.apply` that leaves its arguments alive."""
    return self.step.apply(copy(params), copy(gradients))


def cold_state(
    of: Policy,
    mesh: Mesh | None = None,
    optimizer: optax.GradientTransformation | None = None,
    frozen: tuple[str, ...] = (),
) -> TrainState:
  """The state of a cold start, before calibration."""
  mesh = mesh or sharding.make_mesh()
  params = masters(of)
  params = jax.device_put(params, sharding.tree_shardings(params, mesh))
  return train_state.create(
      of, params, optimizer or optax.identity(), mesh, frozen
  )


def build(
    of: Policy,
    mesh: Mesh,
    *,
    loss: LossConfig,
    config: OptimizerConfig,
    frozen: tuple[str, ...] = (),
    start: TrainState | None = None,
) -> Run:
  """Builds a run; compiles as little as it can.

  Args:
    of: the policy.
    mesh: devices.
    loss: the objective.
    config: the optimiser's.
    frozen: see `state.partition`.
    start: a state of another run, to start from the same numbers.
  """
  objective = functools.partial(policy_loss, loss)
  optimizer = config.build()
  if start is None:
    start = cold_state(of, mesh, optimizer, frozen)
  else:
    start = jax.device_put(start, sharding.tree_shardings(start, mesh))
  return Run(
      policy=of,
      mesh=mesh,
      loss=objective,
      config=config,
      optimizer=optimizer,
      engine=Engine(of, engine_config(), mesh),
      step=UpdatePrograms(of, objective, optimizer, config, mesh, start),
      start=start,
  )


def calibration_batches(samples: list[Completion]) -> list[TrainBatch]:
  """Micro-batches for `Calibration`, as the trainer makes them."""
  return packing.pack(
      likelihood_sequences(
          [np.concatenate([c.prompt_tokens, c.tokens]) for c in samples],
          [len(c.prompt_tokens) for c in samples],
      ),
      row_length=LENGTH,
      rows_per_micro_batch=ROWS,
      tile=TILE,
  ).batches


@functools.cache
def cold_fp8_run() -> tuple[Run, Calibration, list[Completion]]:
  """The run before calibration, and what it is calibrated with."""
  mesh = sharding.make_mesh()
  run = build(
      policy(FP8, mesh),
      mesh,
      loss=LossConfig(kl_loss_coef=0.01),
      config=OptimizerConfig(lr=1e-3),
  )
  return run, Calibration(run.policy, mesh, run.start), run.rollout()


@functools.cache
def fp8_run() -> Run:
  """FP8 moments and a KL term; everything trains."""
  run, calibration, samples = cold_fp8_run()
  start = calibration.fill(run.start, calibration_batches(samples), TEMPERATURE)
  return dataclasses.replace(run, start=start)


@functools.cache
def bf16_run() -> Run:
  """Float32 moments, a tight gradient clip and a frozen embedding."""
  mesh = sharding.make_mesh()
  return build(
      policy(BF16, mesh),
      mesh,
      loss=LossConfig(entropy_coeff=0.01, rollout_is='token'),
      config=OptimizerConfig(lr=1e-3, grad_clip=0.25, moments='float32'),
      frozen=('embed/.*',),
  )


@functools.cache
def two_layer_run(family: str, recipe: str) -> Run:
  """Two layers, where one layer's rounding reaches the next."""
  mesh = sharding.make_mesh()
  of = policy({'fp8': FP8, 'bf16': BF16}[recipe], mesh, family=family, layers=2)
  run = build(of, mesh, loss=LossConfig(), config=OptimizerConfig(lr=1e-3))
  if recipe == 'bf16':
    return run
  start = Calibration(of, mesh, run.start).fill(
      run.start, calibration_batches(run.rollout()), TEMPERATURE
  )
  return dataclasses.replace(run, start=start)


@functools.cache
def wide_engine() -> Engine:
  """Twice the slots of `fp8_run`, and a host visit after every step."""
  run = fp8_run()
  config = engine_config(num_slots=32, decode_block=1)
  return Engine(run.policy, config, run.mesh)


@functools.cache
def small_engine(tokens: int) -> Engine:
  """The engine of `fp8_run` with keys and values of fewer tokens."""
  run = fp8_run()
  return Engine(run.policy, engine_config(kv_cache_tokens=tokens), run.mesh)


@functools.cache
def completions() -> list[Completion]:
  """What `fp8_run` samples from its start."""
  return fp8_run().rollout()


def state_shapes(of: Policy) -> TrainState:
  """A state of shapes: nothing is computed."""
  params = jax.eval_shape(
      dataclasses.replace(of, remat='none').init, jax.random.key(0)
  )
  fp8_state = jax.eval_shape(
      lambda p: scaling_state.init_state(p, of.recipe), params
  )
  return TrainState(
      trainable=params,
      frozen={},
      fp8_state=fp8_state,
      opt_state=(),
      weights=jax.eval_shape(
          lambda p, s: kernels.prepare_weights(p, s, of.recipe),
          params,
          fp8_state,
      ),
      opt_step=jax.ShapeDtypeStruct((), jnp.int32),
  )
