"""The objective of a micro-batch: policy loss, correction, KL and entropy.

The terms are in `losses`, `corrections` and `kl`, for one row and unreduced.
This file applies the mask and `TrainBatch.loss_weight` and sums.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jetrl_jax.core.typing import Array
from jetrl_jax.metrics.writer import Mean, mean
from jetrl_jax.rl import corrections, kl, losses, segments
from jetrl_jax.rl.losses import PolicyLoss
from jetrl_jax.rl.types import TrainBatch

# Each has a case in `_policy_term`.
POLICY_LOSSES = ('ppo', 'gspo', 'cispo', 'gpg')
# Corrections that may drop tokens; metrics count the dropped ones.
_REJECTING = ('icepop', 'mis')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
  """The objective per token; `TrainBatch.loss_weight` does the averaging.

  Attributes:
    policy_loss: 'ppo' (token ratios, clipped), 'gspo' (sequence ratios,
      clipped; wants loss_agg_mode 'seq-mean-token-mean'), 'cispo' (capped
      weights) or 'gpg' (no ratio).
    clip_ratio_low: distance of the clip range's lower end from 1; None is 0.2
      for 'ppo' and 3e-4 for 'gspo'. The others do not read it.
    clip_ratio_high: distance of its upper end from 1; None is 0.2 for 'ppo'
      (DAPO: 0.28) and 4e-4 for 'gspo'. The others do not read it.
    clip_ratio_c: dual clip of 'ppo': most loss of a token with a negative
      advantage, in units of that advantage.
    cispo_cap: largest weight of 'cispo' (the bound itself, as TRL's
      epsilon_high).
    kl_loss_coef: weight of the KL loss; if this and kl_reward_coef are 0, no
      reference copy is kept.
    kl_loss_type: 'k2' or 'k3' (also 'low_var_kl'); k1 is kl_reward_coef's.
    entropy_coeff: weight of the entropy bonus.
    rollout_is: importance weights rho = pi_old / mu against the sampled
      distribution: 'none', 'token' (TIS), 'sequence' (TIS of whole answers),
      'icepop', 'mis' (whole answers, dropped above the cap) or 'acr' (TIS and
      QuRL's clip range).
    rollout_is_threshold: cap C of rho; None is 2 for 'token', 'sequence' and
      'acr', 3 for 'mis', 5 for 'icepop'.
    rollout_is_threshold_low: lower end of the band that 'icepop' keeps.
    rollout_is_per_answer: for 'gspo' with 'token' or 'icepop': every token has
      the mean weight of its answer, as in TRL; otherwise its own, as in verl.
    rollout_rs: rejection of whole answers, beside any rollout_is: 'none' or
      'geometric' (the geometric mean of rho must lie in the band below).
    rollout_rs_threshold_low: lower end of the band of 'geometric'.
    rollout_rs_threshold_high: upper end of the band of 'geometric'.
  """

  policy_loss: str = 'ppo'
  clip_ratio_low: float | None = None
  clip_ratio_high: float | None = None
  clip_ratio_c: float = 3.0
  cispo_cap: float = 5.0
  kl_loss_coef: float = 0.0
  kl_loss_type: str = 'k3'
  entropy_coeff: float = 0.0
  rollout_is: str = 'none'
  rollout_is_threshold: float | None = None
  rollout_is_threshold_low: float = 0.5
  rollout_is_per_answer: bool = False
  rollout_rs: str = 'none'
  rollout_rs_threshold_low: float = 0.999
  rollout_rs_threshold_high: float = 1.001

  def __post_init__(self):
    if self.policy_loss not in POLICY_LOSSES:
      raise ValueError(
          f'policy_loss is {self.policy_loss!r}; allowed are'
          f' {", ".join(POLICY_LOSSES)}'
      )
    low, high = self.clip_range
    if not 0 <= low < 1:
      raise ValueError(f'clip_ratio_low is {low}; allowed: [0, 1)')
    if high < 0:
      raise ValueError(f'clip_ratio_high is {high}; allowed: >= 0')
    if self.clip_ratio_c <= 1:
      raise ValueError(f'clip_ratio_c is {self.clip_ratio_c}; allowed: > 1')
    if not self.cispo_cap >= 1:
      raise ValueError(
          f'cispo_cap is {self.cispo_cap}; it bounds the ratio itself, which is'
          ' 1 on-policy; allowed: >= 1'
      )
    for name in ('kl_loss_coef', 'entropy_coeff'):
      if getattr(self, name) < 0:
        raise ValueError(f'{name} is {getattr(self, name)}; allowed: >= 0')
    if self.rollout_is == 'acr' and self.policy_loss != 'ppo':
      raise ValueError(
          "rollout_is is 'acr' and policy_loss is"
          f' {self.policy_loss!r}: ACR widens the upper clip bound of each'
          " token, which only policy_loss='ppo' has; use rollout_is='token'"
      )
    if self.rollout_is_per_answer and self.policy_loss != 'gspo':
      raise ValueError(
          'rollout_is_per_answer is True and policy_loss is'
          f' {self.policy_loss!r}: one weight per answer is for policy_loss='
          "'gspo', which has one ratio per answer; set it to False"
      )
    kl.make_kl_loss(self.kl_loss_type)
    self.correction()
    self.rejection()

  @property
  def clip_range(self) -> tuple[float, float]:
    """Distances of the clip range from 1; the method's own where None."""
    low, high = losses.DEFAULT_CLIP
    if self.policy_loss == 'gspo':
      low, high = losses.GSPO_CLIP
    if self.clip_ratio_low is not None:
      low = self.clip_ratio_low
    if self.clip_ratio_high is not None:
      high = self.clip_ratio_high
    return low, high

  @property
  def rho_cap(self) -> float:
    """Cap C of rho; the method's own where rollout_is_threshold is None."""
    if self.rollout_is_threshold is not None:
      return self.rollout_is_threshold
    # `make_correction` refuses an unknown name.
    return corrections.DEFAULT_THRESHOLD.get(self.rollout_is, 0.0)

  def correction(self) -> corrections.Correction:
    """Returns the importance weight."""
    return corrections.make_correction(
        self.rollout_is,
        threshold=self.rho_cap,
        low=self.rollout_is_threshold_low,
    )

  def rejection(self) -> corrections.Correction:
    """Returns the rejection of whole responses."""
    return corrections.make_rejection(
        self.rollout_rs,
        low=self.rollout_rs_threshold_low,
        high=self.rollout_rs_threshold_high,
    )

  @property
  def reads_mu(self) -> bool:
    """Whether anything in the objective depends on log mu."""
    return self.rollout_is != 'none' or self.rollout_rs != 'none'


class LossFunction(Protocol):
  """An objective: `policy_loss` of a config, `supervised_loss`, or your own.

  The loss is a sum over the tokens of one micro-batch, and those of all
  micro-batches add up: an average is in `batch.loss_weight`. Where
  `batch.loss_mask` is 0 the log-probs are arbitrary. The metrics are
  `Mean`s of scalars, by name; {} is allowed. `UpdatePrograms` adds
  'actor/pg_loss', the loss, where a function has none.
  """

  def __call__(
      self, batch: TrainBatch, logprobs_BT: Array, entropy_BT: Array, /
  ) -> tuple[Array, dict[str, Mean]]:
    """Returns (a micro-batch's part of the loss, its metrics)."""
    ...


def with_loss_metric(
    loss_function: LossFunction,
) -> tuple[LossFunction, dict[str, Mean]]:
  """Returns the function with 'actor/pg_loss', and the shapes of its metrics.

  A function that has this metric comes back as it is. Nothing is computed.

  Raises:
    ValueError: it is no function, or one that returns something else than a
      loss and metrics.
  """
  if not callable(loss_function):
    raise ValueError(
        f'the loss function is {_kind(loss_function)}; it must be a function of'
        ' (batch, logprobs_BT, entropy_BT), for a LossConfig'
        ' functools.partial(rl.policy_loss, config)'
    )
  floats = jax.ShapeDtypeStruct((1, 16), jnp.float32)
  arguments = TrainBatch.of_shapes(1, 16), floats, floats
  found = jax.eval_shape(loss_function, *arguments)
  _check_returned(found)
  if 'actor/pg_loss' in found[1]:
    return loss_function, found[1]

  def added(batch, logprobs_BT, entropy_BT):
    loss, metrics = loss_function(batch, logprobs_BT, entropy_BT)
    # As in `policy_loss`.
    own = Mean(sum=jnp.asarray(loss, jnp.float32), weight=jnp.zeros(()))
    return loss, metrics | {'actor/pg_loss': own}

  return added, jax.eval_shape(added, *arguments)[1]


def _check_returned(found: Any) -> None:
  """Checks what a loss function returns, as shapes."""
  if not isinstance(found, tuple) or len(found) != 2:
    raise ValueError(
        f'the loss function returns {_kind(found)}; it must return a pair, the'
        ' loss and a dict of metrics: return loss, {}'
    )
  loss, metrics = found
  if not isinstance(loss, jax.ShapeDtypeStruct) or (
      loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating)
  ):
    raise ValueError(
        f'the loss function returns {_kind(loss)} as its loss; it must be a'
        ' float scalar, the sum over the tokens of the micro-batch, such as'
        ' (batch.loss_weight * loss_BT).sum()'
    )
  if not isinstance(metrics, dict):
    raise ValueError(
        f'the loss function returns {_kind(metrics)} as its metrics; it must'
        ' be a dict from names to rl.Mean, or {}'
    )
  for name, metric in metrics.items():
    if not isinstance(metric, Mean):
      raise ValueError(
          f'metric {name!r} of the loss function is {_kind(metric)}; it must be'
          ' a Mean, which micro-batches add up: rl.Mean(sum=(x_BT *'
          ' batch.loss_mask).sum(), weight=batch.loss_mask.sum())'
      )
    for part in jax.tree.leaves(metric):
      if part.shape:
        raise ValueError(
            f'metric {name!r} of the loss function is a Mean of {_kind(part)};'
            ' its sum and its weight must be scalars'
        )


def _kind(value: Any) -> str:
  if isinstance(value, jax.ShapeDtypeStruct):
    return f'an array {value.dtype}{list(value.shape)}'
  if isinstance(value, tuple):
    return f'a tuple of {len(value)}'
  return f'a {type(value).__name__}'


def policy_loss(
    config: LossConfig,
    batch: TrainBatch,
    logprobs_BT: Array,
    entropy_BT: Array,
) -> tuple[Array, dict[str, Mean]]:
  """Returns this micro-batch's part of the objective, and its metrics.

      loss = sum_t weight_t (is_t pg_t + kl_loss_coef kl_t - entropy_coeff H_t)

  With `rollout_is_per_answer`, is_t is its mean over the response.

  Args:
    config: the objective.
    batch: one micro-batch.
    logprobs_BT: log pi, by the training forward.
    entropy_BT: entropy of pi at each token, in nats.
  """
  mask_BT = batch.loss_mask
  # Masked positions hold arbitrary numbers, and 0 * inf would be NaN.
  log_ratio_BT = jnp.where(mask_BT > 0, logprobs_BT - batch.old_logprobs, 0.0)
  log_rho_BT = jnp.where(mask_BT > 0, batch.old_logprobs - batch.log_mu, 0.0)
  pg = _policy_term(config, batch, logprobs_BT, log_ratio_BT, log_rho_BT)
  where = (log_rho_BT, mask_BT, batch.segment_ids)
  weight_BT = jax.vmap(config.correction())(*where)
  if config.rollout_rs != 'none':
    weight_BT = weight_BT * jax.vmap(config.rejection())(*where)
  applied_BT = weight_BT
  if config.rollout_is_per_answer:
    applied_BT = jax.vmap(segments.segment_mean)(
        weight_BT, mask_BT, batch.segment_ids
    )
  loss_BT = applied_BT * pg.loss_T
  metrics = {
      'actor/entropy': mean(entropy_BT, mask_BT),
      'actor/pg_clipfrac': mean(pg.clipped_T, mask_BT),
      'actor/pg_clipfrac_lower': mean(pg.clipped_lower_T, mask_BT),
      'actor/ppo_kl': mean(-log_ratio_BT, mask_BT),
  } | _correction_metrics(config, batch, weight_BT)
  if config.kl_loss_coef:
    kl_BT = jax.vmap(kl.make_kl_loss(config.kl_loss_type))(
        jnp.where(mask_BT > 0, logprobs_BT, 0.0),
        jnp.where(mask_BT > 0, batch.ref_logprobs, 0.0),
    )
    loss_BT = loss_BT + config.kl_loss_coef * kl_BT
    metrics['actor/kl_loss'] = mean(kl_BT, mask_BT)
  if config.entropy_coeff:
    loss_BT = loss_BT - config.entropy_coeff * entropy_BT
  loss = jnp.sum(jnp.where(mask_BT > 0, batch.loss_weight * loss_BT, 0.0))
  # A sum over the mini-batch and not an average over tokens, so its weight is 0
  # here; `apply` sets it to 1.
  metrics['actor/pg_loss'] = Mean(sum=loss, weight=jnp.zeros(()))
  return loss, metrics


def _policy_term(
    config: LossConfig,
    batch: TrainBatch,
    logprobs_BT: Array,
    log_ratio_BT: Array,
    log_rho_BT: Array,
) -> PolicyLoss:
  """Returns the policy loss per token, [B, T], before any correction."""
  low, high = config.clip_range

  def ppo(log_ratio_T, advantage_T, log_rho_T):
    widening_T = 1.0
    if config.rollout_is == 'acr':
      widening_T = corrections.acr_widening(log_rho_T, threshold=config.rho_cap)
    return losses.clipped_pg_loss(
        log_ratio_T,
        advantage_T,
        clip_low=low,
        clip_high=high,
        clip_c=config.clip_ratio_c,
        widening_T=widening_T,
    )

  log_pi_BT = jnp.where(batch.loss_mask > 0, logprobs_BT, 0.0)
  match config.policy_loss:
    case 'gspo':
      gspo = functools.partial(losses.gspo_loss, clip_low=low, clip_high=high)
      return jax.vmap(gspo)(
          log_ratio_BT, batch.advantages, batch.loss_mask, batch.segment_ids
      )
    case 'cispo':
      cispo = functools.partial(losses.cispo_loss, cap=config.cispo_cap)
      return jax.vmap(cispo)(log_pi_BT, log_ratio_BT, batch.advantages)
    case 'gpg':
      return jax.vmap(losses.gpg_loss)(log_pi_BT, batch.advantages)
    case 'ppo':
      return jax.vmap(ppo)(log_ratio_BT, batch.advantages, log_rho_BT)
    case name:  # Nobody would notice if another loss ran in its place.
      raise NotImplementedError(f'policy_loss {name!r} has no case here')


def _correction_metrics(
    config: LossConfig, batch: TrainBatch, weight_BT: Array
) -> dict[str, Mean]:
  """Returns metrics of the correction; empty without one."""
  if not config.reads_mu:
    return {}
  mask_BT = batch.loss_mask
  metrics = {'rollout_corr/rollout_is_applied_mean': mean(weight_BT, mask_BT)}
  if config.rollout_is in _REJECTING or config.rollout_rs != 'none':
    dropped_BT = (weight_BT == 0).astype(jnp.float32)
    length_BT = jax.vmap(segments.segment_sum)(mask_BT, batch.segment_ids)
    dropped_here_BT = jax.vmap(segments.segment_sum)(
        dropped_BT * mask_BT, batch.segment_ids
    )
    # Each token weighs 1 / length, so a sequence counts once.
    once_BT = mask_BT / jnp.maximum(length_BT, 1.0)
    metrics |= {
        'rollout_corr/rollout_rs_masked_fraction': mean(dropped_BT, mask_BT),
        'rollout_corr/rollout_rs_seq_masked_fraction': mean(
            (dropped_here_BT > 0).astype(jnp.float32), once_BT
        ),
    }
  return metrics


def supervised_loss(
    batch: TrainBatch, logprobs_BT: Array, entropy_BT: Array
) -> tuple[Array, dict[str, Mean]]:
  """Returns the weighted negative log-likelihood (supervised warm start)."""
  mask_BT = batch.loss_mask
  loss = -jnp.sum(jnp.where(mask_BT > 0, batch.loss_weight * logprobs_BT, 0.0))
  metrics = {
      'sft/loss': mean(-logprobs_BT, mask_BT),
      'actor/entropy': mean(entropy_BT, mask_BT),
      'actor/pg_loss': Mean(sum=loss, weight=jnp.zeros(())),
  }
  return loss, metrics
