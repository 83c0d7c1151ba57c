"""Alarms: said once, said again when they change, named at the end."""

import logging

import pytest

from jetrl_jax.config import sections
from jetrl_jax.fp8.recipes import RECIPES
from jetrl_jax.metrics import alarms

# Of 8 answers; nothing is wrong.
WELL = {
    'critic/mixed_group_frac': 0.5,
    'critic/acc/mean': 0.25,
    'response_length/clip_ratio': 0.125,
    'reward/no_answer': 2,
    'reward/refused': 0,
    'training/updates': 1,
    'actor/grad_norm': 0.5,
    'actor/update_k3': 0.02,
    'fp8/changed_weight_bytes/mean': 0.01,
    'alarm/swapped': 0,
}
IDLE = WELL | {'critic/mixed_group_frac': 0.0, 'actor/grad_norm': 0.0}


def _held(metrics, answers=8) -> set[str]:
  found = alarms.judge(metrics, answers)
  return {n.removeprefix('alarm/') for n, value in found.items() if value}


def _line(step: int, metrics) -> dict:
  return {'step': step} | metrics | alarms.judge(metrics, 8)


def test_a_step_that_goes_well_has_no_alarm_and_absence_is_none():
  assert _held(WELL) == set()
  assert _held({}) == set()


@pytest.mark.parametrize(
    ('name', 'metrics'),
    [
        ('rewards_fail', {'reward/timeout': 1}),
        ('unscored', {'reward/unscored': 8}),
        ('accuracy_range', {'critic/acc/mean': 7.0}),
        ('swapped', {'alarm/swapped': 1}),
        ('inexact', {'alarm/inexact': 1}),
        ('large_update', {'actor/update_k3': 2.8}),
        ('large_update', {'rollout_actor/update_k3': 11.0}),
        ('cut', {'response_length/clip_ratio': 1.0}),
        ('no_answer', {'reward/no_answer': 8}),
        ('no_signal', {'critic/mixed_group_frac': 0.0}),
        ('no_update', {'training/updates': 0}),
        ('zero_gradient', {'actor/grad_norm': 0.0}),
        ('no_weight_change', {'fp8/changed_weight_bytes/mean': 0.0}),
    ],
)
def test_each_alarm_holds_where_its_metric_is_ill(name, metrics):
  assert _held(WELL | metrics) == {name}
  assert alarms.NAMED[name].advice.endswith('.')


def test_a_tenth_of_the_rewards_may_not_fail():
  for answers, held in ((10, {'rewards_fail'}), (11, set())):
    assert _held({'reward/timeout': 1}, answers) == held


def test_the_largest_update_of_the_study_in_one_precision_is_no_alarm():
  # INT8 on sums with four updates a rollout; spread masters at the start.
  for k3 in (0.372, 0.17):
    assert _held(WELL | {'actor/update_k3': k3}) == set()
  assert _held(WELL | {'actor/update_k3': 0.51}) == {'large_update'}
  advice = alarms.NAMED['large_update'].advice
  for name in ('optim.lr', 'optim.lr_warmup_steps', 'model.spread_masters'):
    section, _, key = name.partition('.')
    assert name in advice and key in sections.SECTIONS[section]


def test_what_int8_flushes_of_a_healthy_model_is_no_alarm():
  # benchmarks/results/layer_health_qwen0_5b_h100_2026-11-25.md, 'as it is'.
  assert _held(WELL | {'fp8/input/flushed_frac/max': 0.481}) == set()


def test_flushed_inputs_are_an_alarm_where_nothing_is_learnt():
  flushed = WELL | {'fp8/input/flushed_frac/max': 0.658}
  assert _held(flushed) == set()
  nothing = flushed | {'critic/mixed_group_frac': 0.0}
  assert _held(nothing) == {'flushed_inputs', 'no_signal'}


def test_flushed_inputs_are_said_before_what_blames_the_data():
  names = [alarm.name for alarm in alarms.ALARMS]
  for name in ('cut', 'no_answer', 'no_signal'):
    assert names.index('flushed_inputs') < names.index(name)
  advice = alarms.NAMED['flushed_inputs'].advice
  for name in ('precision.recipe', 'precision.high_precision_layers'):
    section, _, key = name.partition('.')
    assert name in advice and key in sections.SECTIONS[section]
  for recipe in ('fp8_delayed', 'fp8_block', 'bf16'):
    assert recipe in advice and recipe in RECIPES


def test_a_step_without_any_score_is_idle():
  unscored = {n: v for n, v in WELL.items() if not n.startswith('critic/')}
  unscored['reward/unscored'] = 8
  assert _held(unscored) == {'unscored', 'no_signal'}
  assert alarms.is_idle(alarms.judge(unscored, 8))
  assert not alarms.is_idle(alarms.judge(WELL, 8))
  # So is one of which no answer counts.
  assert alarms.is_idle(alarms.judge(WELL | {'actor/grad_norm': 0.0}, 8))


def test_shares_need_the_number_of_answers():
  assert _held(WELL | {'reward/no_answer': 8}, answers=0) == set()


def test_an_alarm_is_said_once_and_again_when_it_changes(caplog):
  caplog.set_level(logging.INFO)
  watch = alarms.Watch()
  for step in range(1, 11):
    watch.step(step, IDLE, 8)
  # At the third step in a row; the gradient of 0 follows from it.
  (record,) = caplog.records
  assert record.levelname == 'WARNING'
  said = record.getMessage()
  assert said.startswith('ALARM at step 3: No group had a learning signal. ')
  caplog.clear()
  for step in range(11, 15):
    watch.step(step, WELL, 8)
  assert not caplog.records
  watch.step(15, WELL, 8)
  (record,) = caplog.records
  assert record.levelname == 'INFO'
  assert record.getMessage().startswith('Step 15: over for 5 steps: No group')
  caplog.clear()
  for step in range(16, 19):
    watch.step(step, IDLE, 8)
  assert 'ALARM at step 18' in caplog.text


def test_a_run_that_learns_nothing_says_so_at_its_end():
  tally = alarms.Tally()
  tally.add({'step': 0, 'alarm/heldout_in_training': 3})
  for step in range(1, 3):
    tally.add(_line(step, IDLE))
  nothing, signal, shared = tally.sentences()
  assert nothing == (
      'ALARM: This run has learnt nothing: all 2 steps had no learning signal.'
  )
  assert signal.startswith(
      'ALARM: No group had a learning signal (2 of 2 steps). All answers'
  )
  assert shared.startswith('ALARM: 3 held-out prompts are among the training')


def test_the_end_names_what_holds_then_or_held_at_most_steps():
  tally = alarms.Tally()
  for step in range(10):
    tally.add(_line(step, WELL if step % 2 else IDLE))
  assert tally.sentences() == []
  for step in range(10, 15):
    tally.add(_line(step, WELL | {'reward/no_answer': 8}))
  (said,) = tally.sentences()
  assert said.startswith(
      'ALARM: Nearly no answer holds a final answer (5 of 15 steps). '
  )
  # It did so at more than half of the steps, or at half of them.
  for steps, count in ((11, 1), (12, 0)):
    tally = alarms.Tally()
    for step in range(steps):
      cut = {'response_length/clip_ratio': 1.0} if step < 6 else {}
      tally.add(_line(step, WELL | cut))
    assert len(tally.sentences()) == count
