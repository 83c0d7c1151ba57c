import dataclasses
import re

import pytest
from absl import logging

from jetrl_jax.config import compatibility
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.settings import (
    AlgorithmConfig,
    FilterGroups,
    GuardConfig,
    RunConfig,
)

ENGINE = EngineConfig(
    num_slots=16, max_prompt_length=4, max_response_length=8, stop_ids=(1,)
)
RUN = RunConfig(
    seed=0,
    total_training_steps=1,
    train_batch_size=4,
    mini_batch_size=4,
    micro_batch_size=4,
    packed_rows=0,
    smaller_micro_batches=0,
    num_generations=4,
    temperature=1.0,
    test_freq=0,
    val_num_generations=1,
    val_temperature=0.0,
    val_recipes=(),
    save_freq=0,
    keep_latest=1,
    keep_best=0,
    save_rollouts=False,
    max_skipped_updates=1,
    calibration_prompts=1,
    calibration_tokens=1,
    measure_mismatch='all',
    synthetic=False,
    synthetic_lengths='uniform',
)
MU = AlgorithmConfig(old_logprobs='recompute')


def _check(loss=None, algorithm=MU, run=RUN, **engine):
  compatibility.check(
      LossConfig(**(loss or {})),
      algorithm,
      dataclasses.replace(ENGINE, **engine),
      run,
  )


@pytest.mark.parametrize(
    'mode', ['token-mean', 'seq-mean-token-sum', 'seq-mean-token-sum-norm']
)
def test_gspo_wants_the_mean_of_answers(mode):
  algorithm = dataclasses.replace(MU, loss_agg_mode=mode)
  with pytest.raises(ValueError, match="Set loss_agg_mode='seq-mean-token-m"):
    _check({'policy_loss': 'gspo'}, algorithm)


@pytest.mark.parametrize('cut', [{'top_p': 0.9}, {'top_k': 20}, {'min_p': 0.1}])
@pytest.mark.parametrize(
    'loss', [{'rollout_is': 'token'}, {'rollout_rs': 'geometric'}]
)
def test_a_correction_of_a_cut_sampler_is_refused(cut, loss):
  ((name, value),) = cut.items()
  with pytest.raises(ValueError, match=f'the sampler is cut .{name}={value}'):
    _check(loss, **cut)
  _check({}, **cut)


@pytest.mark.parametrize('name', ['rloo', 'reinforce_plus_plus_baseline'])
def test_only_grpo_has_a_division_to_leave_out(name):
  algorithm = dataclasses.replace(MU, adv_estimator=name, norm_adv_by_std=False)
  with pytest.raises(ValueError, match='only grpo has a division to leave out'):
    _check(algorithm=algorithm)
  _check(algorithm=dataclasses.replace(algorithm, adv_estimator='dr_grpo'))


def test_made_up_rewards_cannot_be_filtered_by():
  algorithm = dataclasses.replace(MU, filter_groups=FilterGroups(enable=True))
  run = dataclasses.replace(RUN, synthetic=True)
  with pytest.raises(ValueError, match='seeded scores judge nothing'):
    _check(algorithm=algorithm, run=run)
  _check(algorithm=algorithm)
  _check(run=run)


def test_it_is_known_of_every_setting_of_the_loss_who_reads_it():
  # Those of all methods: the choices themselves, and weights that may be 0.
  of_all = {
      *('policy_loss', 'rollout_is', 'rollout_rs'),
      *('kl_loss_coef', 'kl_loss_type', 'entropy_coeff'),
  }
  settings = {field.name for field in dataclasses.fields(LossConfig)}
  assert set(compatibility.readers(LossConfig())) == settings - of_all


_SEQUENCES = dataclasses.replace(MU, loss_agg_mode='seq-mean-token-mean')


@pytest.mark.parametrize(
    ('loss', 'algorithm', 'words'),
    [
        ({'policy_loss': 'cispo', 'clip_ratio_high': 0.28}, MU, 'not read'),
        ({'policy_loss': 'cispo', 'clip_ratio_c': 5.0}, MU, 'not read'),
        ({'cispo_cap': 3.0}, MU, 'cispo_cap is 3.0, which is not read'),
        ({'rollout_rs_threshold_high': 1.1}, MU, 'not read'),
        (
            {
                'policy_loss': 'gspo',
                'rollout_is': 'mis',
                'rollout_is_per_answer': True,
            },
            _SEQUENCES,
            'rollout_is_per_answer is True, which is not read',
        ),
        (
            {'policy_loss': 'gspo', 'clip_ratio_high': 0.2},
            _SEQUENCES,
            'nothing will be clipped',
        ),
        (
            {'rollout_is': 'token'},
            AlgorithmConfig(),
            'rollout_is=token, rollout_rs=none correct nothing with',
        ),
    ],
)
def test_a_setting_that_nobody_reads_is_named_in_a_warning(
    loss, algorithm, words, monkeypatch
):
  said = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *values: said.append(text % values)
  )
  _check(loss, algorithm)
  assert len(said) == 1 and words in said[0]


def test_a_rate_that_leaves_nothing_of_the_weights_is_warned_of(caplog):
  # The tiny run of the tests, and sft of 0.8 M parameters.
  for lr in (1e-6, 1e-2, 3e-3):
    compatibility.check_rate(lr)
  assert not caplog.text
  compatibility.check_rate(1.0)
  assert 'optim.lr is 1: AdamW moves every weight by about' in caplog.text


@pytest.mark.parametrize('lr', [1.001, 1e10, float('inf')])
def test_a_rate_that_replaces_every_weight_is_refused(lr):
  message = f'optim.lr is {re.escape(f"{lr:g}")}; allowed: .*Usual are 1e-7 to'
  with pytest.raises(ValueError, match=message):
    compatibility.check_rate(lr)


def test_a_mixed_flow_without_a_correction_is_warned_of(caplog):
  plain, token = LossConfig(), LossConfig(rollout_is='token')
  compatibility.warn_of_mixed_flow('bf16', 'bf16', plain)
  compatibility.warn_of_mixed_flow('bf16', 'fp8_token', token)
  assert not caplog.text
  compatibility.warn_of_mixed_flow('bf16', 'fp8_token', plain)
  assert "training is in 'bf16', the rollout in 'fp8_token', and nothing" in (
      caplog.text
  )


def test_8_bits_without_equal_bits_or_a_correction_are_warned_of(caplog):
  plain, token = LossConfig(), LossConfig(rollout_is='token')
  compatibility.warn_of_inexact_flow('fp8_delayed', True, plain)
  compatibility.warn_of_inexact_flow('bf16', False, plain)
  compatibility.warn_of_inexact_flow('fp8_delayed', False, token)
  assert not caplog.text
  compatibility.warn_of_inexact_flow('fp8_delayed', False, plain)
  assert "precision.exact is False with precision.recipe 'fp8_delayed'" in (
      caplog.text
  )


@pytest.mark.parametrize('recipe', ['fp8_delayed', 'int8'])
def test_several_updates_a_rollout_in_8_bits_are_warned_of(caplog, recipe):
  compatibility.warn_of_updates('bf16', 4)
  compatibility.warn_of_updates(recipe, 1)
  assert not caplog.text
  compatibility.warn_of_updates(recipe, 4)
  assert (
      f'4 updates follow each rollout, and precision.recipe is {recipe!r}'
      in (caplog.text)
  )


def test_words_that_a_plain_template_leaves_out_are_warned_of(caplog):
  words = {'system': 'You are kind.', 'instruction': ' Be brief.'}
  compatibility.warn_of_template(DataConfig(**words))
  compatibility.warn_of_template(DataConfig(template='Q: {prompt}'))
  assert not caplog.text
  compatibility.warn_of_template(DataConfig(template='Q: {prompt}', **words))
  for name, text in words.items():
    assert f'data.{name} is {text!r}, which only data.template=' in caplog.text
  assert "the template is 'Q: {prompt}': write it there" in caplog.text


@pytest.mark.parametrize(
    ('loss', 'algorithm'),
    [
        ({}, AlgorithmConfig()),
        (
            {
                'policy_loss': 'gspo',
                'rollout_is': 'token',
                'rollout_rs': 'geometric',
            },
            _SEQUENCES,
        ),
        ({'policy_loss': 'cispo', 'rollout_is': 'mis'}, MU),
        ({'rollout_is': 'acr', 'clip_ratio_high': 0.28}, MU),
    ],
)
def test_what_the_literature_combines_passes_without_a_word(loss, algorithm):
  compatibility.check(LossConfig(**loss), algorithm, ENGINE, RUN)
  assert not compatibility.unread(LossConfig(**loss), algorithm)


def test_a_guard_that_could_not_act_is_refused():
  on, off = GuardConfig(enable=True), GuardConfig()
  saving = dataclasses.replace(RUN, save_freq=1, max_skipped_updates=3)

  def check(guard=on, loss=None, algorithm=MU, run=saving):
    loss = LossConfig(**(loss or {}))
    compatibility.check_guard(guard, loss, algorithm, run)

  check()
  kl = {'kl_loss_coef': 0.1}
  check(off, kl, run=RUN)
  with pytest.raises(ValueError, match='no checkpoint to go back to; set tra'):
    check(run=RUN)
  # Two steps of one update each: the second would end the run.
  with pytest.raises(ValueError, match='max_skipped_updates is 2: .* above 2,'):
    check(run=dataclasses.replace(saving, max_skipped_updates=2))
  with pytest.raises(ValueError, match='2 steps of 2 updates are .* above 4,'):
    check(algorithm=dataclasses.replace(MU, ppo_epochs=2))
  with pytest.raises(ValueError, match='reference policy would stay in the'):
    check(loss=kl)
  check(dataclasses.replace(on, actions=('recalibrate',)), kl, run=RUN)
