"""Evaluations of the tiny run: what they measure, and how they say no."""

import json
import shutil
import types

import numpy as np
import pytest

from jetrl_jax.evaluate import __main__ as evaluate
from jetrl_jax.evaluate import report as evaluate_report
from jetrl_jax.evaluate import settings as evaluate_settings
from jetrl_jax.rl.scoring.evaluation import Graded
from tests import whole_run


def _values(**changes):
  """All flags: the run on its held-out problems, and `changes`."""
  values = {name: default for name, _, default, _ in evaluate_settings.FLAGS}
  values['checkpoint'] = str(whole_run.finished())
  values['data'] = str(whole_run.home() / 'tiny/heldout.jsonl')
  assert set(changes) <= set(values)
  return values | changes


def _evaluate(**changes):
  settings = evaluate_settings.resolve(_values(**changes))
  summary = evaluate.evaluate(settings)
  lines = (settings.output / 'problems.jsonl').read_text().splitlines()
  written = json.loads((settings.output / 'summary.json').read_text())
  assert written == summary
  return summary, [json.loads(line) for line in lines]


def test_a_run_is_measured_as_it_measured_itself(tmp_path):
  summary, problems = _evaluate(output=str(tmp_path / 'out'))
  own = whole_run.records(whole_run.finished())[-1]
  (row,) = summary['sources'].values()
  assert row['mean@1']['value'] == own['val-core/heldout/acc/mean@1']
  assert row['problems'] == 6 and summary['recipe'] == 'fp8_delayed'
  assert summary['scales'] == 'of the checkpoint'
  assert summary['checkpoint'] == f'step 6 of {whole_run.finished()}'
  file = whole_run.finished() / 'samples' / '000006.jsonl'
  samples = [json.loads(line) for line in file.read_text().splitlines()]
  assert [p['samples'][0]['response'] for p in problems] == [
      s['response'] for s in samples
  ]


def test_rows_and_summary_of_several_samples_agree(tmp_path):
  summary, problems = _evaluate(
      num_generations=4,
      temperature=1.0,
      output=str(tmp_path / 'out'),
  )
  row = summary['sources']['heldout']
  # The tiny run's reward reads no answer: there is nothing to vote with.
  assert row['without_answer'] is None and 'last_number' not in row
  assert 'maj@4' not in row and problems[0]['maj'] is None
  for kind in ('mean', 'best'):
    entry = row[f'{kind}@4']
    value = np.mean([problem[kind] for problem in problems])
    np.testing.assert_allclose(entry['value'], value, rtol=1e-12)
    assert 0 <= entry['low'] <= entry['value'] <= entry['high'] <= 1
  assert row['mean@4']['value'] <= row['best@4']['value']
  assert [len(problem['samples']) for problem in problems] == [4] * 6
  responses = {s['response'] for s in problems[0]['samples']}
  assert len(responses) > 1  # At temperature 1 samples differ.
  shown = evaluate_report.table(summary, 'cpu')
  assert 'heldout' in shown and 'best@4' in shown and 'Wilson' in shown


def test_a_strict_reward_says_what_it_did_not_find(tmp_path):
  summary, _ = _evaluate(reward='gsm8k', output=str(tmp_path / 'out'))
  row = summary['sources']['heldout']
  # What the tiny run writes has no '####'.
  assert row['without_answer'] == 1.0
  assert row['last_number']['problems'] == 6
  head, strict, lenient = evaluate_report.table(summary, 'cpu').split('\n')[3:6]
  assert head.split() == [
      *('problems', 'mean@1', 'length', 'cut', 'off', 'no', 'answer')
  ]
  assert strict.startswith('heldout') and strict.endswith('100.0%')
  assert lenient.startswith('  last_number')


def test_the_last_number_is_read_of_problems_whose_answer_is_one():
  tokenizer = types.SimpleNamespace(
      eos_ids=(), decode=lambda tokens: f'The answer is {tokens[0]}.'
  )
  prompts = [
      types.SimpleNamespace(answer=answer) for answer in ('7', 'x^2', '1,000')
  ]
  completions = [
      types.SimpleNamespace(tokens=np.asarray([n]))
      for n in (7, 7, 5, 5, 7, 1000)
  ]
  graded = Graded(
      prompts=prompts, completions=completions, results=[], num_generations=2
  )
  row = evaluate_report._last_number(graded, [0, 1, 2], tokenizer)
  assert row['problems'] == 2 and row['without_answer'] == 0
  assert row['mean@2']['value'] == 0.75
  assert evaluate_report._last_number(graded, [1], tokenizer) is None


def test_problems_without_a_score_count_nowhere(tmp_path):
  path = tmp_path / 'rewards.py'
  path.write_text(
      'def odd(completions, answer, **kwargs):\n'
      '  return [0.5 if int(answer[0].split()[-1]) % 2 else None]\n'
  )
  summary, problems = _evaluate(
      reward=f'{path}:odd', output=str(tmp_path / 'out')
  )
  row = summary['sources']['heldout']
  odd = [int(problem['answer']) % 2 for problem in problems]
  assert 0 < sum(odd) < 6
  assert [p['mean'] for p in problems] == [0.5 if o else None for o in odd]
  assert row['unscored'] == 6 - sum(odd)
  assert row['mean@1']['value'] == 0.5
  shown = evaluate_report.table(summary, 'cpu')
  assert f'heldout: {row["unscored"]} answers count nowhere' in shown


@pytest.mark.slow
def test_a_checkpoint_without_scales_is_calibrated_for_fp8(tmp_path):
  export = str(whole_run.finished() / 'export')
  common = dict(
      checkpoint=export,
      template='{prompt}',
      # As tests/test_export.py, so the same programs; no prompt is longer.
      max_prompt_length=13,
      max_response_length=64,
      num_slots=16,
      reward=f'{whole_run.home()}/tiny/rewards.py:digits',
  )
  summary, _ = _evaluate(
      recipe='fp8_delayed', output=str(tmp_path / 'fp8'), **common
  )
  assert summary['recipe'] == 'fp8_delayed'
  assert summary['scales'] == 'calibrated on the first prompts'
  assert summary['over_long_left_out'] == 0


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'data': 'gsm9k'}, 'no set of that name; allowed: gsm8k, math500'),
        ({'data': 'a.jsonl,b.jsonl'}, '; several files are a call each'),
        ({'data_file': 'x.jsonl'}, '--data_file is for a named set'),
        (
            {'data': 'gsm8k', 'data_file': 'nowhere.jsonl'},
            'nowhere.jsonl: there is no such file',
        ),
        ({'num_generations': 4}, 'would sample the same answer each time'),
        ({'num_generations': 0}, '--num_generations is 0; it must be >= 1'),
        ({'temperature': -1.0}, '--temperature is -1.0; allowed: 0.001 to'),
        # In float32 this is 0, and all samples would be the greedy one.
        (
            {'temperature': 1e-46, 'num_generations': 4},
            '--temperature is 1e-46; allowed: 0.001 to 1000.0, or 0',
        ),
        ({'recipe': 'fp4'}, "recipe is 'fp4'; allowed"),
        ({'checkpoint': 'nowhere'}, 'no such folder'),
        ({'step': 5}, 'has no step 5; found'),
        ({'prompt_key': 'problem'}, 'problem'),
        ({'max_response_length': 10**6}, 'the model has'),
        ({'reward': 'maths'}, "reward 'maths' is neither built in"),
    ],
)
def test_a_flag_that_cannot_be_is_one_sentence(changes, message):
  with pytest.raises(ValueError) as error:
    evaluate_settings.resolve(_values(**changes))
  assert message in str(error.value)


def test_an_accuracy_outside_of_0_and_1_has_a_normal_interval():
  interval = evaluate_report._with_interval(np.array([0.0, 2.0, 4.0]), 1)
  # Mean 2, standard deviation 2 (of 3 values): 1.96 x 2 / sqrt(3) = 2.263.
  assert interval['value'] == 2
  assert interval['low'] == pytest.approx(2 - 2.263, abs=1e-3)
  assert interval['high'] == pytest.approx(2 + 2.263, abs=1e-3)
  alone = evaluate_report._with_interval(np.array([-1.0]), 1)
  assert alone == {'value': -1.0, 'low': None, 'high': None}
  # It is no share, so it is shown as a number.
  assert evaluate_report._cell(interval) == '2 [-0.2632, 4.263]'
  assert evaluate_report._cell(alone) == '-1'
  wide = {'value': -1234.5, 'low': -1250.25, 'high': -1218.75}
  row = {'problems': 8, 'mean@1': wide, 'without_answer': None}
  shown = evaluate_report._row('mine', row, ['mean@1'])
  assert shown.split() == ['mine', '8', '-1234', '[-1250,', '-1219]', '-']


def test_a_path_with_a_tilde_is_read_and_written_in_the_home_folder(
    tmp_path, monkeypatch
):
  monkeypatch.setenv('HOME', str(whole_run.home()))
  monkeypatch.chdir(tmp_path)
  home = dict(
      checkpoint=f'~/{whole_run.finished().name}',
      data='~/tiny/heldout.jsonl',
      reward='~/tiny/rewards.py:digits',
  )
  settings = evaluate_settings.resolve(_values(**home))
  assert settings.output == whole_run.finished() / 'evaluate' / 'heldout'
  assert len(settings.prompts) == 6
  settings = evaluate_settings.resolve(_values(**home, output='~/out'))
  assert settings.output == whole_run.home() / 'out'


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
  folder = tmp_path / 'x'
  shutil.copytree(whole_run.finished() / 'export', folder)
  whole_run.shift_ids(folder, '=')
  with pytest.raises(ValueError, match='gives the data the id 117; allowed'):
    evaluate_settings.resolve(
        _values(checkpoint=str(folder), template='{prompt}')
    )


def test_a_place_for_the_results_is_sought_before_anything_is_sampled(
    tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('')
  monkeypatch.delattr(evaluate.evaluation, 'grade')
  with pytest.raises(ValueError, match='--output=.* cannot be written: Not a'):
    _evaluate(output=str(tmp_path / 'file' / 'out'))


def test_a_second_data_set_is_refused():
  arguments = ('--checkpoint=nowhere', '--data=gsm8k', '--data=math500')
  process = whole_run.start(*arguments, module='jetrl_jax.evaluate')
  _, errors = process.communicate(timeout=250)
  assert process.returncode == 1
  assert errors == (
      "error: --data is given twice, as 'gsm8k' and 'math500'; give it once:"
      ' several values are a call each\n'
  )


def test_the_command_says_no_in_one_line():
  arguments = ('--checkpoint=nowhere', '--data=gsm8k')
  process = whole_run.start(*arguments, module='jetrl_jax.evaluate')
  output, errors = process.communicate(timeout=250)
  assert process.returncode == 1 and output == ''
  assert errors.startswith('error: ') and errors.count('\n') == 1
  assert 'no such folder' in errors and 'Traceback' not in errors
