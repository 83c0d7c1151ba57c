"""The whole chain on a CPU: task, warm start, arms, results, figures."""

import json
import pathlib
import subprocess
import sys
from unittest import mock

import pytest

from study import arms, figures, prepare, results, run

_ROOT = pathlib.Path(__file__).parents[2]


def _command(*arguments, check=True):
  return subprocess.run(
      [sys.executable, '-m', *map(str, arguments)],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=check,
  ).stdout


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_arms_are_run_stopped_resumed_and_drawn(tmp_path):
  _command('study.prepare', f'--folder={tmp_path}', '--tiny')
  run = ['study.run', f'--folder={tmp_path}', '--tiny', '--seeds=1']
  run += ['--parallel=2', '--arms=2x2,mixed_int4,unified_int4,jetrl_long']
  # Stopped in the middle of the first ones; then to the end.
  assert 'runs are not finished' in _command(*run, '--limit_s=40', check=False)
  assert '0 of 7 runs are not finished' in _command(*run)
  assert '0 of 7 runs to do' in _command(*run)
  out = tmp_path / 'out'
  _command('study.results', f'--folder={tmp_path}', f'--output={out}')
  for one in results.read(out):
    assert [row['step'] for row in one.rows] == [0, 1, 2, 3, 4]
    shares = {v for _, v in one.series('training/mismatch_token_frac')}
    # A unified flow of any bits agrees to the bit; a mixed one nowhere near.
    assert (min(shares) > 0.9) if one.arm.is_mixed else (shares == {0.0})
  for figure in ('curves', 'pairs', 'control'):
    _command(
        'study.figures',
        figure,
        f'--results={out}',
        f'--output={tmp_path / figure}.png',
    )


def test_what_cannot_be_run_is_refused_before_anything_is(tmp_path):
  done = subprocess.run(
      [
          *(sys.executable, '-m', 'study.run', f'--folder={tmp_path}'),
          '--arms=jetrl_long',
          '--config=configs/quickstart.py',
      ],
      cwd=_ROOT,
      capture_output=True,
      text=True,
  )
  assert done.returncode == 1 and 'error: arm ' in done.stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'module, arguments, message',
    [
        (run, ['--seeds=x'], '--seeds=x must be whole numbers by comma'),
        (run, ['--parallel=0'], '--parallel=0; it must be >= 1'),
        (run, ['--memory=90'], '--memory=90; it is a share of a device'),
        (run, ['--set=optim.lr'], '--set=optim.lr must be NAME=VALUE'),
        (prepare, ['--set=foo'], '--set=foo must be NAME=VALUE, such as --set'),
        (
            run,
            ['--seeds=1', '--arms=2x2'],
            'holds no task; run python -m study.prepare',
        ),
        (run, ['--seeds=1'], "arm 'gsm8k_jetrl' starts from a real checkp"),
        (
            run,
            ['--seeds=6', '--arms=gsm8k'],
            'Name an arm by itself to run any seed, such as --arms=gsm8k_jetrl',
        ),
        (
            run,
            ['--seeds=1', '--set=seed=7'],
            '--set=seed=7: a run has the seed of --seeds',
        ),
        (run, ['--config=nowhere.py'], '--config=nowhere.py: there is no such'),
        (results, ['--output=out'], 'holds no runs/*/seed*/metrics.jsonl'),
        (
            figures,
            ['curves', '--results=nowhere', '--output=a.png'],
            'nowhere holds no *.jsonl.gz of study.results; run python -m',
        ),
    ],
)
def test_what_is_missing_is_one_sentence(
    tmp_path, monkeypatch, module, arguments, message
):
  folder = [] if module is figures else [f'--folder={tmp_path}']
  monkeypatch.setattr(sys, 'argv', ['x', *arguments, *folder])
  with pytest.raises(SystemExit) as refused:
    module.main()
  # A text as exit code: printed on stderr, and 1.
  said = str(refused.value.code)
  assert said.startswith('error: ') and message in said and '\n' not in said
  assert not list(tmp_path.iterdir())


def test_a_warm_start_that_is_missing_is_refused_unless_it_is_elsewhere(
    tmp_path,
):
  (tmp_path / 'task').mkdir()
  toys = arms.named(['2x2'])
  with pytest.raises(ValueError, match='no checkpoint; .*--tiny first'):
    run.Plan(folder=tmp_path, is_tiny=True).check(toys)
  run.Plan(folder=tmp_path, more={'model.path': 'elsewhere'}).check(toys)
  run.Plan(folder=tmp_path, config='configs/quickstart.py').check(toys)


def test_a_setting_that_an_arm_is_made_of_is_refused(tmp_path):
  plan = run.Plan(
      folder=tmp_path,
      more={'model.path': 'X', 'precision.recipe': 'int8'},
  )
  with pytest.raises(ValueError, match="=int8 would do nothing: arm 'sums_j"):
    plan.check(arms.named(['sums_jetrl']))


def test_a_failed_run_is_named_with_what_it_said_last(tmp_path, capsys):
  runner = run.Runner(run.Plan(folder=tmp_path), [], parallel=1, deadline=0.0)
  folder = tmp_path / 'runs' / 'jetrl' / 'seed2'
  folder.mkdir(parents=True)
  log = folder / 'log.txt'
  for text, said in (
      ('Traceback\nModuleNotFoundError: x\n\n', 'ModuleNotFoundError: x'),
      ('', 'nothing'),
  ):
    log.write_text(text)
    runner.running[folder] = mock.Mock(returncode=1)
    runner._collect()
    assert capsys.readouterr().out == (
        f'FAILED   jetrl/seed2 before step 0: {said} (see {log})\n'
    )


def test_a_run_keeps_what_was_set(tmp_path):
  more = {'model.path': 'X', 'algorithm.policy_loss': 'cispo'}
  plan = run.Plan(folder=tmp_path, more=more)
  runner = run.Runner(plan, [], parallel=1, deadline=0.0)
  (arm,) = arms.named(['sums_jetrl'])
  with mock.patch('subprocess.Popen') as started:
    runner._start(arm, 3)
  assert '--config.algorithm.policy_loss=cispo' in started.call_args.args[0]
  kept = plan.run_folder(arm, 3) / run.SET
  assert json.loads(kept.read_text()) == more


def test_a_run_goes_to_the_device_with_the_fewest_runs():
  plan = run.Plan(folder=pathlib.Path('nowhere'))
  runner = run.Runner(plan, [], parallel=2, deadline=0.0, gpus=('0', '1'))
  folders = [pathlib.Path(name) for name in 'abc']
  chosen = []
  for folder in folders:
    chosen.append(runner.free_gpu())
    runner.gpu_of[folder] = chosen[-1]
    runner.running[folder] = mock.Mock()
  assert chosen == ['0', '1', '0']
  del runner.running[folders[0]], runner.running[folders[2]]
  assert runner.free_gpu() == '0'
