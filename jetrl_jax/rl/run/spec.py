"""The specification of a run: settings and objects that the config builds."""

import dataclasses
import pathlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager

from jax.sharding import Mesh

from jetrl_jax.core.typing import PyTree
from jetrl_jax.data import PromptDataset, PromptSampler, Tokenizer
from jetrl_jax.metrics.wandb import WandbConfig
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rewards import RewardPool
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.rollout.environment import EnvironmentConfig
from jetrl_jax.rl.settings import AlgorithmConfig, GuardConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpec:
  """Everything that a run consists of; `config/build.py` builds it.

  Attributes:
    policy: decoder and training recipe.
    rollout_policy: the same decoder with the rollout's recipe; equal to
      `policy` in a unified flow.
    mesh: devices.
    initial_params: makes the masters of a cold start, on their devices.
    initial_checkpoint: the folder that `initial_params` reads; None for random
      masters.
    param_shapes: shapes and dtypes of the masters.
    freeze: patterns of masters that do not train.
    invariant_scale: the factor by which kernels after norms were divided.
    engine: sizes and sampler of the rollout.
    loss: the objective.
    algorithm: how rewards become advantages and loss weights.
    optimizer: AdamW and its schedule.
    run: sizes, frequencies, limits.
    guard: bounds and the actions if they are exceeded.
    tokenizer: the checkpoint's tokenizer, or another one that the config names.
    train_set: prompts to learn from.
    val_set: held-out prompts; None for no evaluation.
    environment: answers the policy's turns and rewards them; None for responses
      of one turn, which the reward workers reward.
    make_rewards: starts the reward workers; with an environment it gives None.
    config_text: the resolved config, which the workdir keeps.
    export_source: the checkpoint whose config is copied into the export; None
      for no export.
    wandb: also log the scalars to Weights & Biases; None for no.
  """

  policy: Policy
  rollout_policy: Policy
  mesh: Mesh
  initial_params: Callable[[], PyTree]
  initial_checkpoint: pathlib.Path | None
  param_shapes: PyTree
  freeze: tuple[str, ...]
  invariant_scale: float
  engine: EngineConfig
  loss: LossConfig
  algorithm: AlgorithmConfig
  optimizer: OptimizerConfig
  run: RunConfig
  guard: GuardConfig
  tokenizer: Tokenizer
  train_set: PromptDataset
  val_set: PromptDataset | None
  environment: EnvironmentConfig | None
  make_rewards: Callable[[], AbstractContextManager[RewardPool | None]]
  config_text: str
  export_source: pathlib.Path | None
  wandb: WandbConfig | None

  def __post_init__(self):
    if self.is_mixed and self.algorithm.old_logprobs == 'rollout':
      raise ValueError(
          f'training runs {self.policy.recipe.name!r} and the rollout'
          f' {self.rollout_policy.recipe.name!r}: in a mixed flow the'
          " rollout's log-probs belong to another policy, and with"
          " algorithm.old_logprobs='rollout' no correction could act. Set"
          " algorithm.old_logprobs='recompute' and, to correct,"
          " algorithm.rollout_is='token', or leave precision.rollout_recipe"
          ' empty'
      )

  def with_policy(self, policy: Policy) -> 'RunSpec':
    """Returns the spec with another policy on both sides of the flow."""
    recipe = dataclasses.replace(
        policy.recipe, name=self.rollout_policy.recipe.name
    )
    return dataclasses.replace(
        self,
        policy=policy,
        rollout_policy=dataclasses.replace(policy, recipe=recipe),
    )

  def with_high_precision(self, dots: tuple[str, ...]) -> 'RunSpec':
    """Returns the spec with these dots in high precision as well.

    Args:
      dots: paths of dots; () returns the spec unchanged.
    """
    if not dots:
      return self
    recipe = self.policy.recipe.with_high_precision(dots)
    return self.with_policy(dataclasses.replace(self.policy, recipe=recipe))

  @property
  def is_mixed(self) -> bool:
    """Whether the rollout's recipe differs from training's."""
    return self.rollout_policy.recipe != self.policy.recipe

  @property
  def needs_reference(self) -> bool:
    """Whether a KL term needs the run's first policy as its reference."""
    return bool(self.loss.kl_loss_coef or self.algorithm.kl_reward_coef)

  @property
  def batch_shape(self) -> tuple[int, int]:
    """(rows, tokens per row) of a micro-batch, see `packing.batch_shape`."""
    return packing.batch_shape(
        self.engine.max_prompt_length + self.engine.max_response_length,
        micro_batch_size=self.run.micro_batch_size,
        packed_rows=self.run.packed_rows,
        tile=self.policy.tile,
        devices=self.policy.axes.size,
    )

  def prompt_sampler(self) -> PromptSampler:
    """Returns a new prompt sampler, at its first prompt."""
    return PromptSampler(
        num_prompts=len(self.train_set),
        seed=self.run.seed,
        shuffle=True,
        fingerprint=self.train_set.fingerprint,
    )

  @property
  def smaller_batch_shapes(self) -> list[tuple[int, int]]:
    """Smaller shapes that the last micro-batch of an update may have."""
    return packing.halved_shapes(
        self.batch_shape,
        self.engine.max_prompt_length + self.engine.max_response_length,
        tile=self.policy.tile,
        devices=self.policy.axes.size,
        count=self.run.smaller_micro_batches,
    )

  def pack(
      self,
      sequences: list[packing.Sequence],
      last: SequenceOf[tuple[int, int]] = (),
  ) -> packing.Packed:
    """Packs sequences into micro-batches of `batch_shape`.

    Args:
      sequences: sequences to pack.
      last: shapes that the last micro-batch may have, too.
    """
    rows, row_length = self.batch_shape
    return packing.pack(
        sequences,
        row_length=row_length,
        rows_per_micro_batch=rows,
        tile=self.policy.tile,
        last=last,
    )
