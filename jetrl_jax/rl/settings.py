"""The settings of a run, except model, precision, objective and optimiser.

`config/build.py` builds these once from the ConfigDict; nothing below it sees
the ConfigDict. Defaults and meanings are written here and nowhere else, see
`config/sections.py`.
"""

import dataclasses

from jetrl_jax.fp8.recipes import UNCALIBRATED
from jetrl_jax.rl import advantages, aggregation, synthetic

# Below the first, logits of 1000 over the temperature leave float32's range.
# Above the second, all tokens are equally likely.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3


def check_temperature(name: str, value: float, *, greedy: bool) -> None:
  """Checks a temperature of sampling.

  Args:
    name: for the message.
    value: the temperature.
    greedy: whether 0 is allowed.

  Raises:
    ValueError: logits divided by it say nothing.
  """
  if greedy and value == 0:
    return
  if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
    raise ValueError(
        f'{name} is {value}; allowed: {MIN_TEMPERATURE} to {MAX_TEMPERATURE}'
        + (', or 0 for greedy' if greedy else '')
    )


def _at_least(record, minimum: int, *names: str) -> None:
  for name in names:
    value = getattr(record, name)
    if value < minimum:
      raise ValueError(f'{name} is {value}; it must be >= {minimum}')


def check_packed_rows(packed_rows: int, micro_batch_size: int) -> None:
  """Checks `RunConfig.packed_rows`.

  Raises:
    ValueError: the sequences of a micro-batch do not share its rows evenly.
  """
  if packed_rows and (packed_rows < 0 or micro_batch_size % packed_rows):
    raise ValueError(
        f'packed_rows is {packed_rows}; allowed: 0 for micro_batch_size, or a'
        f' divisor of micro_batch_size ({micro_batch_size}), such as 1'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterGroups:
  """Dynamic sampling (DAPO).

  Prompts are drawn until trainer.train_batch_size groups have answers of
  different accuracy; the other groups teach nothing.

  Attributes:
    enable: whether prompts are drawn until the batch is full of such groups.
    max_num_gen_batches: generation batches (of train_batch_size prompts) after
      which a step that is not full ends the run; 0 goes on until every prompt
      was met.
  """

  enable: bool = False
  max_num_gen_batches: int = 10

  def __post_init__(self):
    _at_least(self, 0, 'max_num_gen_batches')


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlongBuffer:
  """Overlong shaping (DAPO), added to the score of long answers.

  It is 0 up to max_response_length - len tokens, then falls to -penalty_factor
  at max_response_length.

  Attributes:
    enable: whether long answers are punished.
    len: tokens before the limit over which the penalty grows.
    penalty_factor: the largest penalty.
    max_response_length: the rollout's limit in tokens.
  """

  enable: bool = False
  len: int = 4096
  penalty_factor: float = 1.0
  max_response_length: int = 0

  def __post_init__(self):
    if not self.enable:
      return
    if not 1 <= self.len <= self.max_response_length:
      raise ValueError(
          f'overlong_buffer.len is {self.len}; the penalty grows over the last'
          f' tokens before max_response_length={self.max_response_length}, so'
          ' it must be in [1, max_response_length] (DAPO: 4096 of 20480), or'
          ' set overlong_buffer.enable=False'
      )
    if not self.penalty_factor > 0:
      raise ValueError(
          f'overlong_buffer.penalty_factor is {self.penalty_factor}; it must be'
          ' > 0 (DAPO: 1), or set overlong_buffer.enable=False'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
  """From scores to the objective (docs/algorithms.md explains every name).

  Attributes:
    adv_estimator: 'grpo', 'dr_grpo', 'rloo' or 'reinforce_plus_plus_baseline'.
    norm_adv_by_std: for 'grpo': divide by the group's sample standard
      deviation.
    loss_agg_mode: 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum' or
      'seq-mean-token-sum-norm'; denominators span the mini-batch.
    loss_scale_factor: divisor of 'seq-mean-token-sum-norm'; None is
      max_response_length.
    mask_truncated_completions: take responses that met the length limit out of
      the loss.
    kl_reward_coef: an answer's reward is reduced by this times its KL to the
      reference (k1, in nats, summed over its tokens), before advantages are
      computed; 0 is off.
    ppo_epochs: passes over each rollout.
    old_logprobs: 'rollout': those of the rollout, which in a unified flow are
      the training forward's own bits. 'recompute': computed by the training
      forward.
    filter_groups: dynamic sampling.
    overlong_buffer: overlong shaping.
  """

  adv_estimator: str = 'grpo'
  norm_adv_by_std: bool = True
  loss_agg_mode: str = 'token-mean'
  loss_scale_factor: float | None = None
  mask_truncated_completions: bool = False
  kl_reward_coef: float = 0.0
  ppo_epochs: int = 1
  old_logprobs: str = 'rollout'
  filter_groups: FilterGroups = FilterGroups()
  overlong_buffer: OverlongBuffer = OverlongBuffer()

  def __post_init__(self):
    _at_least(self, 1, 'ppo_epochs')
    _at_least(self, 0, 'kl_reward_coef')
    if self.adv_estimator not in advantages.ESTIMATORS:
      raise ValueError(
          f'adv_estimator is {self.adv_estimator!r}; allowed:'
          f' {", ".join(advantages.ESTIMATORS)}'
      )
    if self.loss_agg_mode not in aggregation.MODES:
      raise ValueError(
          f'loss_agg_mode is {self.loss_agg_mode!r}; allowed:'
          f' {list(aggregation.MODES)}'
      )
    if self.loss_scale_factor is not None and not self.loss_scale_factor > 0:
      raise ValueError(
          f'loss_scale_factor is {self.loss_scale_factor}; allowed: above 0, or'
          ' None for max_response_length'
      )
    if self.old_logprobs not in ('rollout', 'recompute'):
      raise ValueError(
          f'old_logprobs is {self.old_logprobs!r}; allowed: rollout, recompute'
      )


# In the order of their cost, the cheapest first.
GUARD_ACTIONS = ('recalibrate', 'high_precision', 'rollback')
# The guard's bound on k3 where nothing corrects it, in nats (docs/guard.md).
GUARD_MAX_K3 = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
  """What to do when numbers leave their bounds (docs/guard.md).

  Attributes:
    enable: whether there is a guard.
    max_mismatch_token_frac: largest share of tokens whose log-prob differs in
      any bit between rollout and training (`training/mismatch_token_frac`): 0
      holds a unified flow to its promise, 1 is no bound.
    max_logprob_diff: largest difference of two such log-probs, in nats
      (`training/rollout_logprob_diff_max`); None is no bound.
    max_k3: largest estimate (k3) of the KL divergence between the sampled
      policy and the trained one, in nats (`rollout_corr/k3_kl`); exactly 0 in a
      unified flow without top-p or top-k. None is 0.01 where nothing corrects
      the mismatch, and no bound where a correction does: a real run with one
      grew beyond and learned (docs/guard.md).
    max_saturated_frac: largest share of the elements of any operand of any
      8-bit dot that saturate; 1 is no bound.
    max_flushed_frac: largest share of them that are flushed to zero; 1 is no
      bound.
    patience: steps in a row over a bound before an action (those before only
      warn), and steps in a row within all bounds before scales may be measured
      again.
    actions: what may be done, tried in this order where it can help; () only
      warns.
    max_rollbacks: rollbacks of one run; where another would be due, the run
      ends.
  """

  enable: bool = False
  max_mismatch_token_frac: float = 1.0
  max_logprob_diff: float | None = None
  max_k3: float | None = None
  max_saturated_frac: float = 0.01
  max_flushed_frac: float = 0.9
  patience: int = 2
  actions: tuple[str, ...] = GUARD_ACTIONS
  max_rollbacks: int = 3

  def __post_init__(self):
    for name in (
        'max_mismatch_token_frac',
        'max_saturated_frac',
        'max_flushed_frac',
    ):
      value = getattr(self, name)
      if not 0 <= value <= 1:
        raise ValueError(
            f'guard.{name} is {value}; it bounds a share and must be in [0, 1],'
            ' where 1 is no bound'
        )
    for name in ('max_logprob_diff', 'max_k3'):
      value = getattr(self, name)
      if value is not None and not value >= 0:
        raise ValueError(f'guard.{name} is {value} nats; it must be >= 0')
    known = [name for name in GUARD_ACTIONS if name in self.actions]
    if sorted(known) != sorted(self.actions):
      raise ValueError(
          f'guard.actions is {self.actions}; allowed: each at most once of'
          f' {list(GUARD_ACTIONS)}, or () to warn only'
      )
    for name in ('patience', 'max_rollbacks'):
      if getattr(self, name) < 1:
        raise ValueError(
            f'guard.{name} is {getattr(self, name)}; it must be >= 1'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Sizes, frequencies and limits of a run.

  Attributes:
    seed: the seed of everything random.
    train_batch_size: prompts per step.
    mini_batch_size: prompts per optimiser step. In FP8 take as many as
      train_batch_size: one update a rollout (docs/tuning.md).
    micro_batch_size: rows per forward and backward; a row holds one sequence of
      full length, or several shorter ones packed.
    packed_rows: rows of a micro-batch; 0 is micro_batch_size. The tokens of
      micro_batch_size sequences of full length in fewer, longer rows pack
      closer. On a CPU attention costs more in longer rows. Rows are made up to
      a multiple of the devices, each as long: fewer rows than devices give more
      tokens.
    smaller_micro_batches: sizes of smaller micro-batches that are compiled as
      well, of a half, a quarter and so on. The last micro-batch of an update
      takes the smallest that holds what is left, because it takes the same time
      whether it is full or not. Each size makes a start longer. A device
      whose micro-batch is one sequence of full length has no smaller one.
    total_training_steps: rollouts, each with its updates.
    num_generations: samples per prompt.
    temperature: temperature of the rollout, and of the policy that is trained.
    test_freq: steps between evaluations, which step 0 and the last have too; 0
      is never.
    val_num_generations: samples per held-out prompt.
    val_temperature: temperature of held-out samples; 0 is greedy.
    val_recipes: recipes in which held-out accuracy is measured besides the
      rollout's own, such as ('bf16',); each takes a copy of the compute weights
      while it is measured, and keeps the format of the KV cache.
    save_freq: steps between checkpoints; 0 is only at the end.
    keep_latest: newest checkpoints kept.
    keep_best: best checkpoints kept besides, by held-out accuracy, of the steps
      that were evaluated.
    save_rollouts: write each step's rollouts to workdir/rollouts.
    max_skipped_updates: non-finite updates in a row after which the run stops.
    stop_after_idle_steps: steps in a row without a learning signal (all answers
      to a prompt earned the same, or no answer counts) after which the run
      saves and stops with an error; 0 is never. It is 0 by default because such
      a step harms nothing and a rare success may still come; an alarm says it
      in any case.
    calibration_prompts: prompts of the cold start's calibration.
    calibration_tokens: response tokens of the calibration's short rollout.
    measure_mismatch: tokens whose rollout log-probs are compared with the
      training forward's: 'first' is the step's first mini-batch, whose update
      computes them anyway; 'all' takes one more forward pass over the later
      mini-batches. algorithm.old_logprobs='recompute' takes that pass in any
      case, and all tokens are compared.
    synthetic: seeded scores and response lengths instead of rewards and stop
      tokens: for speed and exactness runs with random weights, which solve
      nothing and never stop.
    synthetic_lengths: how those lengths are spread: 'uniform' between half of
      the longest and the longest, or 'long_tail', an eighth of the longest on
      average and a few of all lengths.
  """

  seed: int = 0
  train_batch_size: int = 32
  mini_batch_size: int = 32
  micro_batch_size: int = 8
  packed_rows: int = 0
  smaller_micro_batches: int = 0
  total_training_steps: int = 100
  num_generations: int = 8
  temperature: float = 1.0
  test_freq: int = 10
  val_num_generations: int = 1
  val_temperature: float = 0.0
  val_recipes: tuple[str, ...] = ()
  save_freq: int = 20
  keep_latest: int = 2
  keep_best: int = 1
  save_rollouts: bool = True
  max_skipped_updates: int = 5
  stop_after_idle_steps: int = 0
  calibration_prompts: int = 16
  calibration_tokens: int = 64
  measure_mismatch: str = 'first'
  synthetic: bool = False
  synthetic_lengths: str = 'uniform'

  def __post_init__(self):
    _at_least(
        self,
        1,
        'total_training_steps',
        'train_batch_size',
        'mini_batch_size',
        'micro_batch_size',
        'val_num_generations',
        'keep_latest',
        'max_skipped_updates',
        'calibration_prompts',
        'calibration_tokens',
    )
    _at_least(
        self,
        0,
        'seed',
        'test_freq',
        'save_freq',
        'keep_best',
        'stop_after_idle_steps',
        'smaller_micro_batches',
    )
    check_packed_rows(self.packed_rows, self.micro_batch_size)
    if self.measure_mismatch not in ('all', 'first'):
      raise ValueError(
          f"measure_mismatch is {self.measure_mismatch!r}; allowed: 'all', or"
          " 'first' for the first mini-batch of a step"
      )
    if self.synthetic_lengths not in synthetic.LENGTHS:
      raise ValueError(
          f'synthetic_lengths is {self.synthetic_lengths!r}; allowed:'
          f' {", ".join(synthetic.LENGTHS)}'
      )
    if self.num_generations < 2:
      raise ValueError(
          f'num_generations is {self.num_generations}; a group advantage needs'
          ' at least 2 samples per prompt'
      )
    if not self.temperature > 0:
      raise ValueError(
          f'temperature is {self.temperature}; the rollout samples, so it must'
          ' be > 0 (val_temperature may be 0)'
      )
    check_temperature('temperature', self.temperature, greedy=False)
    check_temperature('val_temperature', self.val_temperature, greedy=True)
    for name in self.val_recipes:
      if name not in UNCALIBRATED:
        raise ValueError(
            f'val_recipes has {name!r}; allowed: {", ".join(UNCALIBRATED)}.'
            ' Delayed scales belong to the run that observed them'
        )
    if self.train_batch_size % self.mini_batch_size:
      raise ValueError(
          f'train_batch_size ({self.train_batch_size} prompts) is not a'
          f' multiple of mini_batch_size ({self.mini_batch_size} prompts)'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftConfig:
  """Supervised warm start (python -m jetrl_jax.sft); unread by main.

  Attributes:
    total_training_steps: optimiser steps; the learning rate decays over them.
    batch_size: sequences per optimiser step.
    output: folder of the exported checkpoint.
  """

  total_training_steps: int = 1000
  batch_size: int = 64
  output: str = ''

  def __post_init__(self):
    for name in ('total_training_steps', 'batch_size'):
      if getattr(self, name) < 1:
        raise ValueError(
            f'sft.{name} is {getattr(self, name)}; it must be >= 1'
        )
