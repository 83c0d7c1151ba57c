"""The numbers and sentences: what came out, and what is to be looked at."""

import json

import pytest

from jetrl_jax.report import facts
from jetrl_jax.report.run import read_run
from tests.report import workdirs


@pytest.fixture
def workdir(tmp_path):
  return workdirs.write(tmp_path / 'run')


def _append(folder, **metrics):
  path = folder / 'metrics.jsonl'
  step = json.loads(path.read_text().splitlines()[-1])['step'] + 1
  with open(path, 'a') as file:
    file.write(json.dumps({'step': step} | metrics) + '\n')


def _fact(folder, label) -> facts.Fact:
  found = facts.headline(read_run(folder, 'run'))
  return {fact.label: fact for fact in found}[label]


def _guarded(folder) -> dict[str, str]:
  return {row[0]: row[1] for row in facts.guarded(read_run(folder, 'run'))}


def _alarms(folder, unanswered=None) -> dict[str, facts.Fact]:
  found = facts.alarms(read_run(folder, 'run'), unanswered)
  return {fact.label: fact for fact in found}


def test_the_headline_says_before_and_after(workdir):
  heldout = _fact(workdir, 'Held-out accuracy')
  assert heldout.value == '25% → 85%' and heldout.tone == 'good'
  assert heldout.detail == 'heldout, mean@1, ±\xa05%; best 85% at step 6'
  reward = _fact(workdir, 'Reward')
  assert reward.value == '0.1 → 0.6'
  assert reward.detail == 'the first and the last step'
  steps = _fact(workdir, 'Steps')
  assert steps.value == '6 of 6' and steps.tone == 'bad'
  assert steps.detail == 'finished in 1 start; 1 of 13 updates skipped'
  # 12 + 6 * 2 seconds.
  assert _fact(workdir, 'Time').value == '24 s'
  assert _fact(workdir, 'Time').detail == '2 s per step (median)'
  assert _fact(workdir, 'Speed').value == '100 tokens/s'


def test_a_reward_in_the_place_of_an_accuracy_is_a_number(workdir):
  _append(workdir, **{'val-core/heldout/acc/mean@1': 16.5})
  heldout = _fact(workdir, 'Held-out accuracy')
  assert heldout.value == '0.25 → 16.5'
  assert '; best 16.5 at step 7' in heldout.detail


def test_a_run_whose_lines_are_lost_claims_no_before(workdir):
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[3:]))
  detail = _fact(workdir, 'Held-out accuracy').detail
  assert '; from step 3; best 85% at step 6' in detail
  path.write_text(''.join(lines[6:]))
  heldout = _fact(workdir, 'Held-out accuracy')
  assert heldout.value == '85%' and heldout.tone == ''
  assert heldout.detail.endswith('; at step 6')
  assert _fact(workdir, 'Reward').value == '0.6'


def test_a_run_that_goes_on_is_not_finished_and_not_bad(tmp_path):
  folder = workdirs.write(tmp_path / 'run', steps=3)
  steps = _fact(folder, 'Steps')
  assert steps.value == '3 of 6'
  assert steps.detail.startswith('not finished; 1 start; ')
  assert _fact(workdirs.write(tmp_path / 'two'), 'Steps').tone == 'bad'
  assert steps.tone == ''


def test_the_headline_claims_what_was_compared(tmp_path):
  sizes = {'train_batch_size': 6, 'mini_batch_size': 3}
  config = {'trainer': sizes | {'measure_mismatch': 'first'}}
  workdirs.write(tmp_path / 'run', config=config)
  detail = _fact(tmp_path / 'run', 'Mismatch').detail
  assert 'no token of the first mini-batch of 6 steps differed' in detail


def test_a_run_that_differs_says_so(workdir):
  assert _fact(workdir, 'Mismatch').tone == 'good'
  _append(workdir, **{'training/mismatch_token_frac': 0.25})
  mismatch = _fact(workdir, 'Mismatch')
  assert mismatch.value == '25%' and mismatch.tone == 'bad'
  assert '1 of 7 steps have some' in mismatch.detail
  assert 'Rollout and training differ in a unified flow' in _alarms(workdir)


def test_a_mismatch_that_the_flow_is_made_of_is_no_alarm(tmp_path):
  config = {'precision': {'recipe': 'bf16', 'rollout_recipe': 'int8'}}
  folder = workdirs.write(tmp_path / 'run', config=config)
  _append(folder, **{'training/mismatch_token_frac': 0.25})
  mismatch = _fact(folder, 'Mismatch')
  assert mismatch.tone == '' and 'meant to be mixed' in mismatch.detail
  assert 'Rollout and training differ in a unified flow' not in _alarms(folder)


def test_what_was_skipped_or_guarded_is_counted(workdir):
  rows = _guarded(workdir)
  assert rows['Updates skipped'] == '1 (steps 4)'
  assert rows['Answers that got 0 by an error'] == '18 timeout'
  assert rows['Training prompts left out'] == '10 of 100'
  cut = rows['Answers cut at the length limit']
  assert cut == '12.5% (last step 12.5%)'
  assert rows['Metrics that were not finite'] == '0'
  _append(
      workdir, **{'actor/grad_norm': None, 'nonfinite': ['actor/grad_norm']}
  )
  assert (
      _guarded(workdir)['Metrics that were not finite'] == 'actor/grad_norm (1)'
  )


def test_the_dots_that_a_cold_start_chose_are_named(tmp_path):
  folder = workdirs.write(
      tmp_path / 'run', config={'precision': {'min_sqnr_db': 30.0}}
  )
  name = 'Dots kept in high precision'
  assert _guarded(folder)[name] == '0'
  settled = {'high_precision': {'layers_0/mlp/down': 12.34}}
  (folder / 'precision.json').write_text(json.dumps(settled))
  assert _guarded(folder)[name] == 'layers_0/mlp/down (12.3 dB)'
  for chosen in ('""', '3', '{"lm_head": ""}'):
    damaged = f'{{"high_precision": {chosen}}}'
    (folder / 'precision.json').write_text(damaged)
    notes = read_run(folder, 'run').notes
    assert 'precision.json is damaged and left out.' in notes


def test_what_the_guard_saw_and_did_is_told_where_there_was_one(workdir):
  assert 'Actions of the guard' not in _guarded(workdir)
  _append(workdir, **{'guard/over': 1, 'guard/high_precision': 3})
  _append(workdir, **{'guard/over': 0})
  rows = _guarded(workdir)
  assert rows['Steps over a bound of the guard'] == '1 (steps 7)'
  assert rows['Actions of the guard'] == 'high_precision 3 (steps 7)'


def test_a_run_that_goes_well_has_no_alarm(workdir):
  assert _alarms(workdir) == {}


@pytest.mark.parametrize(
    ('metric', 'well', 'ill', 'label'),
    [
        ('critic/mixed_group_frac', 0.1, 0.0, 'No group had a learning signal'),
        ('response_length/clip_ratio', 0.1, 1.0, 'Nearly all answers are cut'),
        ('actor/grad_norm', 1e-9, 0.0, 'The gradient is exactly 0'),
        ('training/updates', 1, 0, 'No update was applied'),
        (
            'fp8/changed_weight_bytes/mean',
            1e-6,
            0.0,
            'The update changes no FP8',
        ),
        ('critic/acc/mean', 1.0, 7.0, 'The accuracy is not between 0 and 1'),
    ],
)
def test_what_is_ill_in_the_last_steps_is_an_alarm(
    workdir, metric, well, ill, label
):
  for _ in range(5):
    _append(workdir, **{metric: ill})
  (alarm,) = _alarms(workdir).values()
  assert alarm.label.startswith(label)
  assert alarm.value == 'the last 5 steps' and alarm.detail
  if metric != 'critic/acc/mean':  # One such step is enough.
    _append(workdir, **{metric: well})
    assert _alarms(workdir) == {}


def test_rewards_that_fail_are_an_alarm(tmp_path):
  sizes = {
      'trainer': {'train_batch_size': 2},
      'rollout': {'num_generations': 4},
  }
  folder = workdirs.write(tmp_path / 'run', config=sizes)
  # 3 timeouts of 8 answers at each step.
  (alarm,) = _alarms(folder).values()
  assert alarm.label.startswith('Rewards fail')
  assert alarm.value == '37.5% of the answers of the last 5 steps'
  assert alarm.detail.endswith(' In the run: 18 timeout.')
  sizes['rollout']['num_generations'] = 16  # 3 of 32.
  (folder / 'config.json').write_text(json.dumps(sizes))
  assert _alarms(folder) == {}


def test_answers_without_a_final_answer_are_an_alarm(workdir):
  label = 'Nearly no answer holds a final answer'
  assert _alarms(workdir, 0.95)[label].value == '95% of the newest'
  assert _alarms(workdir, 0.5) == {}
  # What the run itself has counted goes before what the page has read.
  _append(workdir, **{'alarm/no_answer': 0})
  assert _alarms(workdir, 0.95) == {}


def test_heldout_prompts_that_are_trained_on_are_an_alarm(workdir):
  _append(workdir, **{'alarm/heldout_in_training': 7})
  (alarm,) = _alarms(workdir).values()
  assert alarm.value == '7 of them' and 'data.val_files' in alarm.detail


def test_an_alarm_that_another_explains_is_not_said(workdir):
  for _ in range(5):
    _append(workdir, **{'critic/mixed_group_frac': 0.0, 'actor/grad_norm': 0.0})
  (alarm,) = _alarms(workdir).values()
  assert alarm.label == 'No group had a learning signal'


def test_a_fall_beyond_both_intervals_is_an_alarm(workdir):
  name = 'val-core/heldout/acc/mean@1'
  _append(workdir, **{name: 0.76, f'{name}/ci95': 0.05})
  assert _alarms(workdir) == {}  # From 85% by 9 points, of 10.
  _append(workdir, **{name: 0.74, f'{name}/ci95': 0.05})
  assert _alarms(workdir)['Held-out accuracy fell'].value == '85% → 74%'


@pytest.mark.parametrize(
    ('value', 'unit', 'text'),
    [
        (0.0, '%', '0%'),
        (0.8633, '%', '86.3%'),
        (1234.5, '', '1234'),
        (5e-5, '', '5e-5'),
        (1.25e7, 'tokens', '1.25e7 tokens'),
        (-0.0123, 'nats', '-0.0123 nats'),
        (float('nan'), '', '–'),
        (None, '%', '–'),
    ],
)
def test_a_number_has_three_digits_and_its_unit(value, unit, text):
  assert facts.number(value, unit) == text


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0.25, '0.2 s'),
        (59.4, '59.4 s'),
        (417, '6 min 57 s'),
        (3599.9, '1 h 00 min'),
        (11100, '3 h 05 min'),
        (187200, '2 d 04 h'),
    ],
)
def test_a_duration_has_two_parts(seconds, text):
  assert facts.duration(seconds) == text


def test_one_step_is_not_all_1_steps():
  assert facts.at_all({1}) == 'at the only step'
  assert facts.at_all({6}) == 'at all 6 steps'
  assert facts.at_all({6, 3}) == 'at all steps'
