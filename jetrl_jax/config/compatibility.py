"""Settings that are fine alone, but together make no sense or do nothing.

A dataclass refuses what it can see by itself (`LossConfig`, `AlgorithmConfig`).
This file compares the settings of several. It refuses a combination that would
compute something else than its name says, and warns of a setting that is not
read.
"""

import dataclasses
from collections.abc import Sequence

from absl import logging

from jetrl_jax.data.settings import DataConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.settings import AlgorithmConfig, GuardConfig, RunConfig

# Above it an update is larger than the weights that it moves.
_LARGEST_RATE = 0.02
# Above it one update replaces all there is, gains of about 1 included.
_MOST_RATE = 1.0
_USUAL_RATES = (
    'Usual are 1e-7 to 1e-5, and up to 1e-3 for models of a few million'
    ' parameters'
)


def check(
    loss: LossConfig,
    algorithm: AlgorithmConfig,
    engine: EngineConfig,
    run: RunConfig,
) -> None:
  """Refuses combinations that make no sense; warns of settings nobody reads.

  Args:
    loss: the objective.
    algorithm: from scores to weights.
    engine: the rollout's sampler.
    run: sizes and whether rewards are made up.

  Raises:
    ValueError: saying what contradicts what, and the way out.
  """
  _check_sequence_loss(loss, algorithm)
  _check_correction(loss, engine)
  # 'dr_grpo' has left the division out already.
  if algorithm.adv_estimator not in ('grpo', 'dr_grpo'):
    if not algorithm.norm_adv_by_std:
      raise ValueError(
          f'adv_estimator is {algorithm.adv_estimator!r} and norm_adv_by_std is'
          ' False: only grpo has a division to leave out; leave'
          ' norm_adv_by_std at True'
      )
  if run.synthetic and algorithm.filter_groups.enable:
    raise ValueError(
        'trainer.synthetic and algorithm.filter_groups.enable are both on:'
        ' seeded scores judge nothing, so no group would ever have mixed'
        ' outcomes; switch one of them off'
    )
  for sentence in unread(loss, algorithm):
    logging.warning('%s', sentence)


def check_rate(lr: float) -> None:
  """Refuses or warns of a learning rate that leaves nothing of the weights.

  Args:
    lr: the learning rate; AdamW moves a weight by about as much at each update.

  Raises:
    ValueError: it is above 1.
  """
  if lr > _MOST_RATE:
    raise ValueError(
        f'optim.lr is {lr:g}; allowed: above 0, up to {_MOST_RATE:g}. AdamW'
        ' moves every weight by about that much at each update.'
        f' {_USUAL_RATES}'
    )
  if lr > _LARGEST_RATE:
    logging.warning(
        'optim.lr is %g: AdamW moves every weight by about that much at each'
        ' update, and weights are about 0.02. %s',
        lr,
        _USUAL_RATES,
    )


def warn_of_ties(paths: Sequence[str]) -> None:
  """Warns of masters left on ties of an 8-bit grid (docs/numerics.md).

  Args:
    paths: of the masters that `model.spread_masters` would have spread.
  """
  if not paths:
    return
  logging.warning(
      'model.spread_masters is False, and %d trained kernels of 8-bit dots (the'
      ' first is %s) come from a 16-bit checkpoint: many of their weights, in'
      ' E4M3 a sixteenth, lie on rounding ties of the 8-bit grid. The first'
      ' update, however small, moves half of these by a whole step of the grid,'
      ' all along the update, so the policy moves about fifteen times too far'
      ' (docs/numerics.md, "The first update"). Set model.spread_masters=True,'
      ' the default',
      len(paths),
      paths[0],
  )


def warn_of_updates(recipe: str, updates: int) -> None:
  """Warns of several updates a rollout in 8 bits (docs/numerics.md).

  Args:
    recipe: of training.
    updates: that follow a rollout.
  """
  if recipe == 'bf16' or updates == 1:
    return
  logging.warning(
      '%d updates follow each rollout, and precision.recipe is %r: with four, a'
      ' small model ended 3 to 5 points below BF16 in FP8 and INT8, and a 0.5B'
      ' ended 2.2 below on MATH in FP8; with one, the small one ended 0.4 below'
      ' in FP8, and the 0.5B 0.9, in one seed (docs/tuning.md).'
      ' One update: trainer.mini_batch_size=trainer.train_batch_size,'
      ' algorithm.ppo_epochs=1',
      updates,
      recipe,
  )


def warn_of_mixed_flow(
    recipe: str, rollout_recipe: str, loss: LossConfig
) -> None:
  """Warns of two precisions without a correction (docs/study.md).

  Args:
    recipe: of training.
    rollout_recipe: of the rollout; the same in a unified flow.
    loss: whose correction reads the rollout's log-probs, if it has one.
  """
  if recipe == rollout_recipe or loss.reads_mu:
    return
  logging.warning(
      'training is in %r, the rollout in %r, and nothing corrects it: a real'
      " 0.5B trained in 'bf16' from 'fp8_token' samples stopped learning after"
      ' some 80 updates, in each of five seeds; one FP8 flow went on, and so'
      ' did this one with a correction (docs/study.md). Leave'
      ' precision.rollout_recipe empty for one flow, or correct: flow=flashrl'
      ' with this precision.rollout_recipe, or without a flow'
      ' algorithm.rollout_is=token',
      recipe,
      rollout_recipe,
  )


def warn_of_inexact_flow(recipe: str, exact: bool, loss: LossConfig) -> None:
  """Warns of one 8-bit flow without equal bits (docs/study_gsm8k.md).

  Args:
    recipe: of rollout and training.
    exact: whether the two compute the same bits, see `Policy`.
    loss: whose correction reads the rollout's log-probs, if it has one.
  """
  if exact or recipe == 'bf16' or loss.reads_mu:
    return
  logging.warning(
      'precision.exact is False with precision.recipe %r, and nothing corrects'
      " it: with 'fp8_delayed' on H200 rollout and training of a real 0.5B"
      ' drifted further apart than in a mixed flow, in each of three seeds, and'
      ' accuracy was 2.6 to 4.0 points lower (docs/study_gsm8k.md). Set'
      ' precision.exact=True (flow=jetrl), the default, or correct:'
      ' algorithm.rollout_is=token',
      recipe,
  )


def warn_of_template(data: DataConfig) -> None:
  """Warns of words that a prompt without a chat template does not get.

  Args:
    data: how rows become prompts.
  """
  for name in ('system', 'instruction') if data.template != 'chat' else ():
    if words := getattr(data, name):
      logging.warning(
          "data.%s is %r, which only data.template='chat' puts into prompts;"
          ' the template is %r: write it there, or leave it out',
          name,
          words,
          data.template,
      )


def check_guard(
    guard: GuardConfig,
    loss: LossConfig,
    algorithm: AlgorithmConfig,
    run: RunConfig,
) -> None:
  """Refuses actions of the guard that could not be carried out.

  Raises:
    ValueError: saying which, why, and the way out.
  """
  if not guard.enable:
    return
  if 'rollback' in guard.actions and not run.save_freq:
    raise ValueError(
        f'guard.actions is {list(guard.actions)} and trainer.save_freq is 0:'
        ' there would be no checkpoint to go back to; set trainer.save_freq, or'
        ' leave rollback out'
    )
  updates = algorithm.ppo_epochs * (run.train_batch_size // run.mini_batch_size)
  if 'rollback' in guard.actions and (
      guard.patience * updates >= run.max_skipped_updates
  ):
    raise ValueError(
        f'trainer.max_skipped_updates is {run.max_skipped_updates}: weights'
        f' that are not finite would end the run before guard.patience'
        f'={guard.patience} steps of {updates} updates are over and the guard'
        f' rolls back; set it above {guard.patience * updates}, or leave'
        ' rollback out'
    )
  if 'high_precision' in guard.actions and (
      loss.kl_loss_coef or algorithm.kl_reward_coef
  ):
    raise ValueError(
        f'guard.actions is {list(guard.actions)}, kl_loss_coef is'
        f' {loss.kl_loss_coef} and kl_reward_coef is'
        f' {algorithm.kl_reward_coef}: the reference policy would stay in the'
        ' precision of the start while the policy leaves it; leave'
        ' high_precision out, or set both to 0'
    )


def _check_sequence_loss(loss: LossConfig, algorithm: AlgorithmConfig) -> None:
  if loss.policy_loss != 'gspo':
    return
  if algorithm.loss_agg_mode != 'seq-mean-token-mean':
    raise ValueError(
        "policy_loss is 'gspo' and loss_agg_mode is"
        f' {algorithm.loss_agg_mode!r}: GSPO averages over answers, with one'
        ' ratio for all tokens of an answer; any other mode weighs answers by'
        " their length. Set loss_agg_mode='seq-mean-token-mean'"
    )


def _check_correction(loss: LossConfig, engine: EngineConfig) -> None:
  """A truncated mu and an untruncated pi_old give a biased rho."""
  if not loss.reads_mu:
    return
  truncated = [
      f'{name}={value}'
      for name, value, off in (
          ('top_p', engine.top_p, engine.top_p == 1.0),
          ('top_k', engine.top_k, engine.top_k <= 0),
          ('min_p', engine.min_p, engine.min_p == 0.0),
      )
      if not off
  ]
  if truncated:
    raise ValueError(
        f'rollout_is is {loss.rollout_is!r}, rollout_rs {loss.rollout_rs!r} and'
        f' the sampler is cut ({", ".join(truncated)}): mu is then normalised'
        ' over fewer tokens than pi_old, and rho = pi_old / mu too small at'
        ' every token. Sample with top_p=1, top_k=0, min_p=0, or set'
        " rollout_is='none' and rollout_rs='none'"
    )


def readers(loss: LossConfig) -> dict[str, bool]:
  """Returns for each setting of one method whether the objective reads it."""
  return {
      'clip_ratio_low': loss.policy_loss in ('ppo', 'gspo'),
      'clip_ratio_high': loss.policy_loss in ('ppo', 'gspo'),
      'clip_ratio_c': loss.policy_loss == 'ppo',
      'cispo_cap': loss.policy_loss == 'cispo',
      'rollout_is_threshold': loss.rollout_is != 'none',
      'rollout_is_threshold_low': loss.rollout_is == 'icepop',
      # The other methods have one weight per answer, which is its own mean.
      'rollout_is_per_answer': loss.rollout_is in ('token', 'icepop'),
      'rollout_rs_threshold_low': loss.rollout_rs == 'geometric',
      'rollout_rs_threshold_high': loss.rollout_rs == 'geometric',
  }


def unread(loss: LossConfig, algorithm: AlgorithmConfig) -> list[str]:
  """Returns a sentence per setting that was changed and that nobody reads.

  Args:
    loss: the objective.
    algorithm: from scores to weights.
  """
  defaults = {field.name: field.default for field in dataclasses.fields(loss)}
  sentences = [
      f'{name} is {getattr(loss, name)}, which is not read with policy_loss='
      f'{loss.policy_loss}, rollout_is={loss.rollout_is}, rollout_rs='
      f'{loss.rollout_rs}'
      for name, read in readers(loss).items()
      if not read and getattr(loss, name) != defaults[name]
  ]
  _, clip_ratio_high = loss.clip_range
  if loss.policy_loss == 'gspo' and clip_ratio_high > 0.05:
    sentences.append(
        f'clip_ratio_high is {clip_ratio_high} with policy_loss=gspo: the'
        ' ratio is a geometric mean over an answer, hardly ever that far from'
        ' 1, so nothing will be clipped (usual: 3e-4 and 4e-4)'
    )
  if loss.reads_mu and algorithm.old_logprobs == 'rollout':
    sentences.append(
        f'rollout_is={loss.rollout_is}, rollout_rs={loss.rollout_rs} correct'
        " nothing with old_logprobs='rollout': pi_old is then mu, and every"
        ' weight is 1'
    )
  return sentences
