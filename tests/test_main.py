"""The command line: what a run prints, and how it says no."""

import json
import re
import shutil

import pytest
from absl import app, flags
from ml_collections import config_flags

from jetrl_jax import models
from jetrl_jax.config import flags as config_flag
from tests import commands, launched, whole_run
from tests.report import pages

_PATIENCE_S = 250


def _run(*arguments: str, **options) -> tuple[int, str, str]:
  process = whole_run.start(*arguments, **options)
  output, errors = process.communicate(timeout=_PATIENCE_S)
  return process.returncode, output, errors


def _refused(*arguments: str, run=commands.run, **options) -> str:
  """The one line on stderr of a command that does not work."""
  code, output, errors = run(*arguments, **options)
  assert code == 1 and output == ''
  assert 'Traceback' not in errors
  assert errors.count('\n') == 1 and errors.startswith('error: ')
  return errors.removeprefix('error: ').strip()


def _file(tmp_path, *lines: str) -> str:
  """A config file: the tiny one with these lines."""
  path = tmp_path / 'mine.py'
  path.write_text(
      '\n'.join(
          [
              'from tests import tiny_config',
              'def get_config():',
              '  config = tiny_config.get_config()',
              *(f'  {line}' for line in lines),
              '  return config',
          ]
      )
  )
  return f'--config={path}'


_TINY = f'--config={whole_run.ROOT}/tests/tiny_config.py'


@pytest.mark.parametrize(
    'module, own',
    [
        ('jetrl_jax.sft', ['config', 'workdir']),
        ('jetrl_jax.evaluate', ['checkpoint', 'data', 'recipe']),
    ],
)
def test_help_lists_the_flags_of_a_command(module, own):
  _, output, _ = _run('--help', module=module)
  listed = re.findall(r'^  --(?:\[no\])?(\w+):', output, re.MULTILINE)
  assert set(own) <= set(listed)


def test_a_run_shows_before_and_after_and_two_completions(tmp_path):
  workdir = tmp_path / 'run'
  code, output, errors = _run(_TINY, f'--workdir={workdir}')
  assert code == 0, errors
  assert (
      # The tests have eight virtual devices; by default a run takes one.
      'fp8_delayed on 1 of 8 x cpu (--config.mesh.data and .fsdp take more):'
      ' 10 prompts (0 over-long left out)' in output
  )
  assert '\nkernels: reference for all operations\n' in output
  assert [f'step {i}/6' in output for i in range(7)] == [True] * 7
  assert re.search(
      r'val-core/heldout/acc/mean@1: [0-9.]+% before, [0-9.]+% after', output
  )
  assert (
      'Tokens whose rollout and training log-probs differ in any bit: 0.0000%'
      in output
  )
  heldout = (whole_run.home() / 'tiny/heldout.jsonl').read_text().splitlines()
  questions = [json.loads(line)['question'] for line in heldout[:2]]
  assert re.findall('^> (.*)$', output, re.MULTILINE) == questions
  assert output.count('(expected ') == 2
  exported = models.load_config(workdir / 'export')
  assert exported == models.load_config(whole_run.home() / 'tiny/model')
  assert f'Report: {workdir}/report.html' in output
  report = (workdir / 'report.html').read_text()
  heldout = pages.answers(report, 0)[6]
  assert [problem['prompt'] for problem in heldout[:2]] == questions
  ends = {answer['end'] for p in heldout for answer in p['answers']}
  assert ends and ends <= {'stop', 'length'}
  assert list(pages.answers(report, 1)) == [1, 2, 3, 4, 5, 6]
  start = json.loads((workdir / 'starts.jsonl').read_text())
  assert start['train_prompts'] == 10 and start['train_left_out'] == 0
  assert start['num_devices'] == 1
  assert set(start['kernels'].values()) == {'reference'}
  config = json.loads((workdir / 'config.json').read_text())
  assert config['trainer']['total_training_steps'] == 6


def test_what_is_told_at_the_end_takes_any_answer_and_a_lost_file(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  file = workdir / 'samples' / '000006.jsonl'
  sample, *others = file.read_text().split('\n')
  # Unicode's own ends of a line, which JSON lets stand as they are.
  answer = 'one\u2028two\x85three'
  changed = json.loads(sample) | {'response': answer}
  lines = [json.dumps(changed, ensure_ascii=False), *others]
  file.write_text('\n'.join(lines), encoding='utf-8')
  code, output, errors = _run(_TINY, f'--workdir={workdir}')
  assert code == 0 and 'Traceback' not in errors
  assert answer in output and output.count('(expected ') == 2
  file.unlink()
  code, output, errors = _run(_TINY, f'--workdir={workdir}')
  assert code == 0 and 'Traceback' not in errors
  assert 'not all is told of it' in errors and '000006.jsonl' in errors
  assert f'Report: {workdir}/report.html' in output


def test_a_mismatch_that_no_step_measured_is_not_told_as_0(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  file = workdir / 'metrics.jsonl'
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  for record in lines:
    record.pop('training/mismatch_token_frac', None)
  file.write_text(''.join(json.dumps(record) + '\n' for record in lines))
  code, output, errors = commands.run(_TINY, f'--workdir={workdir}')
  assert code == 0, errors
  assert 'acc/mean@1: ' in output
  assert 'log-probs differ' not in output


def test_an_unknown_name_on_the_command_line_gets_the_nearest_one():
  said = _refused(_TINY, '--config.algorithm.ppo_epoch=2', run=_run)
  assert said.startswith(
      "--config.algorithm.ppo_epoch=2: unknown config name 'algorithm.ppo_epoch"
      "'; did you mean 'algorithm.ppo_epochs'?"
  )


def test_an_unknown_name_in_a_config_file_gets_its_line(tmp_path):
  said = _refused(_file(tmp_path, 'config.optim.lrr = 1e-5'), run=_run)
  assert said.startswith(
      f"{tmp_path}/mine.py:4: unknown config name 'optim.lrr'; did you mean"
      " 'optim.lr'?"
  )


@pytest.mark.parametrize(
    'line, message',
    [
        ('config.optim.lr = "fast"', ':4: TypeError: Could not override'),
        ('nonsense', ":4: NameError: name 'nonsense' is not defined"),
        ('config.trainer.mini_batch_size = 3', 'is not a multiple of'),
        (
            'config.mesh.tensor = 4',
            'mesh.tensor is 4; the model has 2 query heads on 1 KV heads',
        ),
        (
            'config.unlock(); config.optim.momentum = 0.9',
            "unknown config name 'optim.momentum'",
        ),
    ],
)
def test_a_mistake_in_a_config_file_is_one_line(tmp_path, line, message):
  said = _refused(_file(tmp_path, line), f'--workdir={tmp_path}/run')
  assert message in said
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'text, message',
    [
        ('\ndef get_config(:', ':2: SyntaxError: invalid syntax'),
        ('def config():\n  pass', ' has no function get_config()'),
        ('def get_config():\n  pass', ' has no function get_config()'),
    ],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path, text, message):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  flag = f'--config={path}'
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', flag_values=values)
  with pytest.raises(Exception) as caught:
    values(['main', flag, '--config.seed=1'])
  said = config_flag._sentence([flag], path, caught.value)
  assert said.startswith(f'{path}{message}')


def _overridden(tmp_path, monkeypatch, *overrides: str):
  """The config that a command line with these overrides gives."""
  argv = ['main', _file(tmp_path), *(f'--config.{o}' for o in overrides)]
  monkeypatch.setattr('sys.argv', argv)
  values = flags.FlagValues()
  config_flag.define(values)
  values(argv)
  return config_flag.load(values)


# Of how ml_collections loads a config file.
_LOADS = pytest.mark.filterwarnings('ignore:the load_module:DeprecationWarning')


@_LOADS
@pytest.mark.parametrize(
    'name, first, last, held',
    [
        ('data.train_files', "('a.jsonl',)", "('b.jsonl',)", ('b.jsonl',)),
        ('data.val_files', "('a.jsonl', 'b.jsonl')", '()', ()),
        ('reward.functions', 'math', 'format', ('format',)),
        ('optim.betas', '(0.8, 0.9)', '(0.9, 0.99)', (0.9, 0.99)),
        ('seed', '1', '2', 2),
    ],
)
def test_of_a_flag_given_twice_the_last_one_holds(
    tmp_path, monkeypatch, name, first, last, held
):
  config = _overridden(
      tmp_path, monkeypatch, f'{name}={first}', f'{name}={last}'
  )
  section, _, key = name.rpartition('.')
  assert (config[section] if section else config)[key] == held


@_LOADS
def test_a_flag_at_its_default_that_contradicts_its_flow_is_refused(
    tmp_path, monkeypatch
):
  flow, recipe = 'flow=flashrl', 'precision.recipe=fp8_delayed'
  with pytest.raises(ValueError, match="a run with precision.recipe='bf16'"):
    _overridden(tmp_path, monkeypatch, flow, recipe)


@_LOADS
def test_a_flag_that_its_flow_has_too_may_be_given(tmp_path, monkeypatch):
  config = _overridden(
      tmp_path, monkeypatch, 'flow=flashrl', 'precision.recipe=bf16'
  )
  assert config.precision.rollout_recipe == 'int8'


@pytest.mark.parametrize(
    'argument, meant',
    [
        ('optim.lr=2', '; did you mean --config.optim.lr=2?'),
        ('+actor.optim.lr=2', '; did you mean --config.optim.lr=2?'),
        ('trainer.lr=2', '; did you mean --config.optim.lr=2?'),
        ('--learning_rate=2', '; did you mean --config.optim.lr=2?'),
        ('--learning_rat=2', ''),
        (
            'actor_rollout_ref.rollout.n=8',
            '; did you mean --config.rollout.num_generations=8?',
        ),
        ('lr', ''),
        ('--output_dir=runs', '; the flag --workdir takes its place'),
    ],
)
def test_a_name_of_another_library_is_led_to_ours(argument, meant):
  known = ['sft.rate', 'optim.lr', 'rollout.num_generations']
  assert config_flag._as_override(argument, known) == meant


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--config=nowhere.py'], '--config=nowhere.py: there is no such file'),
        (
            ['--config=elsewhere/configs/quickstart.py'],
            'there is no such file; --config=quickstart works in any folder',
        ),
        (
            ['--config=quikstart'],
            '--config=quikstart: there is no such file, and no example of that'
            " name; did you mean 'quickstart'? Examples: calculator, ",
        ),
        (
            [f'--config={whole_run.ROOT}/configs'],
            f'--config={whole_run.ROOT}/configs is a folder; name a config',
        ),
        (
            [_TINY, '--config.optim.learning_rate=2'],
            "'optim.learning_rate'; did you mean 'optim.lr'?",
        ),
        (
            ['--config', 'nowhere.py'],
            '--config=nowhere.py: there is no such file',
        ),
        (
            [],
            '--config is missing (Path of a config file, e.g. configs/',
        ),
        (
            ['--config.seed=3'],
            '--config.seed=3 overrides a config, and none is named; name one',
        ),
        (
            ['--config.seed=3', _TINY],
            '--config.seed=3 stands before --config; give --config first',
        ),
        ([_TINY, '--wordkir=x'], "Unknown command line flag 'wordkir'"),
        (
            [_TINY, '--lr=2'],
            "Unknown command line flag 'lr'; did you mean --config.optim.lr=2?",
        ),
        (
            [_TINY, '--config.trainer.synthetic=yes'],
            "synthetic=yes: (allowed: True, False; not 'yes')",
        ),
        (
            [_TINY, 'optim.lr=2e-5'],
            "unknown arguments ['optim.lr=2e-5']; did you mean"
            ' --config.optim.lr=2e-5?',
        ),
        (
            [_TINY, '--dry_run_device=NVIDIA H200'],
            '--dry_run_device trains nothing: give --dry_run with it',
        ),
        (
            [_TINY, '--config.sft.output=x'],
            'is the config of a warm start, python -m jetrl_jax.sft',
        ),
        (
            [_TINY, '--config.optim.lr=fast'],
            'could not convert string to float',
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, message):
  assert message in _refused(*arguments)


def test_a_reward_that_raises_stops_the_run_with_its_traceback(tmp_path):
  rewards = tmp_path / 'rewards.py'
  rewards.write_text(
      'def broken(data_source, solution_str, ground_truth):\n'
      '  return 1 / 0\n'
  )
  code, _, errors = _run(
      _file(tmp_path, f'config.reward.functions = ("{rewards}:broken",)'),
      f'--workdir={tmp_path}/run',
  )
  assert code == 1
  assert 'error: ' in errors and 'ZeroDivisionError' in errors
  assert 'main.py' not in errors  # The user's traceback, not ours.


@pytest.mark.slow
def test_a_run_that_diverges_ends_with_the_reason_and_exit_code_1(tmp_path):
  code, _, errors = _run(
      _TINY,
      f'--workdir={tmp_path}/run',
      '--config.optim.lr=1.0',
      '--config.optim.weight_decay=1e38',
      '--config.trainer.max_skipped_updates=2',
  )
  assert code == 1
  last = errors.splitlines()[-1]
  assert last.startswith('error: 2 updates in a row were not finite (gradient')
  assert 'Traceback' not in errors


def test_a_config_that_is_a_dict_is_one_line(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text("def get_config():\n  return {'seed': 1}\n")
  for more in [], ['--config.optim.lr=1']:
    said = _refused(f'--config={path}', *more)
    assert said.startswith(f'{path}: get_config() returns a dict; allowed is')


def test_the_warm_start_answers_in_the_same_words():
  said = _refused(_TINY, '--config.sft.outputt=x', module='jetrl_jax.sft')
  assert "did you mean 'sft.output'?" in said
  said = _refused(_TINY, module='jetrl_jax.sft', run=_run)
  assert said == 'sft.output is empty; name the folder to export to'


@pytest.mark.parametrize(
    'module, arguments',
    [
        ('jetrl_jax.report', ['runs']),
        ('jetrl_jax.serve', ['--checkpoint=runs']),
        ('jetrl_jax.mismatch', [_TINY]),
    ],
)
def test_a_command_of_one_process_refuses_a_launcher(
    monkeypatch, module, arguments
):
  for name, value in launched.by_hand(1, 2, 1234).items():
    monkeypatch.setenv(name, value)
  code, _, errors = commands.run(*arguments, module=module)
  assert code in (1, 2)
  assert errors.startswith(
      'error: this command is one process, but the launcher started 2; start it'
  )


def test_ctrl_c_before_there_is_anything_to_save_is_a_sentence(
    monkeypatch, capsys
):

  def interrupted():
    raise KeyboardInterrupt

  # As absl calls it.
  monkeypatch.setattr(app, 'run', lambda main, **_: main([]))
  monkeypatch.setattr(flags, 'mark_flag_as_required', lambda name: None)
  with pytest.raises(SystemExit) as stopped:
    config_flag.run(interrupted)
  assert stopped.value.code == 130
  assert capsys.readouterr().err == (
      'Stopped by SIGINT; what was not saved is lost.\n'
  )
