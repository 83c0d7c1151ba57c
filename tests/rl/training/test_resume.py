"""Killed at any moment and resumed, a run continues to the same bits."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.core.interrupt import Interrupt, StopRequested
from jetrl_jax.dry_run import checks as dry_run_checks
from jetrl_jax.rewards import RewardFunctionError
from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.training.collector import Collector
from tests import whole_run

# A wait that is longer than any compilation here.
_PATIENCE_S = 200


@pytest.fixture(scope='module')
def uninterrupted() -> dict:
  return whole_run.outcome(whole_run.finished())


class _AtCheck(Interrupt):
  """Gets a real SIGTERM just before its n-th check."""

  def __init__(self, number: int):
    super().__init__()
    self._left = number

  def check(self) -> None:
    self._left -= 1
    if self._left == 0:
      os.kill(os.getpid(), signal.SIGTERM)
    super().check()


def _train_until_check(
    workdir: pathlib.Path, number: int, changes: dict | None = None
) -> bool:
  """Returns whether the run was through before the n-th check."""
  trainer = whole_run.trainer(workdir, changes)
  trainer.interrupt = _AtCheck(number)
  try:
    trainer.train()
  except StopRequested:
    return False
  return True


def test_a_start_that_is_refused_leaves_the_run_as_it_was(tmp_path):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  kept = ('config.json', 'metrics.jsonl', 'precision.json')
  before = [(workdir / name).read_bytes() for name in kept]
  trainer = whole_run.trainer(workdir, {'optim.moments': 'fp8'})
  # By the setting, not by the arrays that follow from it.
  with pytest.raises(ValueError, match="optim.moments: 'float32' -> 'fp8'"):
    trainer.train()
  assert [(workdir / name).read_bytes() for name in kept] == before


def test_a_finished_run_that_is_started_again_says_so(tmp_path, caplog):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  before = (workdir / 'metrics.jsonl').read_bytes()
  with caplog.at_level('INFO', logger='absl'):
    whole_run.trainer(workdir).train()
  assert 'No step is left to train; a larger' in caplog.text
  assert (workdir / 'metrics.jsonl').read_bytes() == before


def test_a_finished_run_keeps_the_settings_that_it_was_trained_with(
    tmp_path, caplog
):
  workdir = tmp_path / 'run'
  shutil.copytree(whole_run.finished(), workdir)
  before = (workdir / 'config.json').read_bytes()
  started = []
  trainer = whole_run.trainer(workdir, {'optim.lr': 0.5})
  trainer.train(started=lambda: started.append(1))
  # The folder of the newest start is where the config's paths begin.
  assert not started
  assert (workdir / 'config.json').read_bytes() == before
  assert 'these settings change nothing' in caplog.text
  assert '-> 0.5' in caplog.text


def test_a_dry_run_refuses_a_workdir_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').touch()
  spec = configs.build(whole_run.config())
  spec = dataclasses.replace(spec, make_rewards=contextlib.nullcontext)
  (problem,) = dry_run_checks._inputs(spec, tmp_path / 'file' / 'run')
  assert problem.startswith(f'--workdir={tmp_path}/file/run cannot be written')


def test_a_dry_run_refuses_what_a_resume_would():
  workdir = whole_run.finished()
  for changes, message in (
      ({}, None),
      ({'optim.moments': 'fp8'}, 'opt_state/.* is not saved'),
      ({'seed': 1}, 'the saved data position has seed=0, this run has 1'),
      ({'algorithm.kl_loss_coef': 0.1}, 'holds no reference policy'),
  ):
    spec = configs.build(whole_run.config(**changes))
    spec = dataclasses.replace(spec, make_rewards=contextlib.nullcontext)
    problems = dry_run_checks._inputs(spec, workdir)
    assert len(problems) == (message is not None)
    assert all(re.search(message, problem) for problem in problems)


def test_a_run_is_stopped_everywhere_and_ends_in_the_same_bits(
    tmp_path, uninterrupted
):
  # 1: the calibration's rollout; 6: the first evaluation; then rollouts of
  # steps 1, 1 again, 2 to 3 (after a checkpoint of its own) and later.
  for number in (1, 6, 9, 2, 8, 11):
    assert not _train_until_check(tmp_path, number), number
  assert _train_until_check(tmp_path, 10**6)
  assert whole_run.outcome(tmp_path) == uninterrupted


@pytest.mark.slow
def test_masters_rounded_at_random_continue_to_the_same_bits(tmp_path):
  changes = {
      'model.master_dtype': 'bfloat16',
      'optim.master_rounding': 'stochastic',
  }
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert _train_until_check(whole, 10**6, changes)
  for number in (9, 8):
    assert not _train_until_check(parts, number, changes), number
  assert _train_until_check(parts, 10**6, changes)
  found, expected = (whole_run.outcome(w, changes) for w in (parts, whole))
  assert found == expected


def test_no_prompt_is_lost_or_repeated_at_an_epochs_edge():
  # 10 prompts in batches of 4: the edges lie inside batches 3 and 5. The
  # interrupted runs drew the same ones: `outcome` holds the rollouts.
  drawn = []
  for file in sorted((whole_run.finished() / 'rollouts').iterdir()):
    completions, _ = store.load_rollouts(file)
    ids = [c.prompt_id for c in completions[::4]]
    assert len(set(ids)) == 4
    drawn += ids
  # Two epochs and 4 prompts of the third.
  counts = [drawn.count(i) for i in range(10)]
  assert sorted(counts) == [2] * 6 + [3] * 4


@pytest.fixture
def finished(tmp_path) -> pathlib.Path:
  """A finished run of one's own, to be damaged."""
  return shutil.copytree(whole_run.finished(), tmp_path / 'run')


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    finished, uninterrupted
):
  newest = finished / 'checkpoints' / '6'
  largest = max(
      (p for p in newest.rglob('*') if p.is_file()),
      key=lambda p: p.stat().st_size,
  )
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  shutil.rmtree(finished / 'export')
  whole_run.trainer(finished).train()
  assert whole_run.outcome(finished) == uninterrupted


def test_a_finished_run_that_is_started_again_changes_nothing(
    finished, uninterrupted
):
  whole_run.trainer(finished).train()
  assert whole_run.outcome(finished) == uninterrupted


def test_a_run_made_longer_goes_on_and_exports_its_new_weights(
    finished, uninterrupted
):
  whole_run.trainer(finished, {'trainer.total_training_steps': 7}).train()
  longer = whole_run.outcome(finished)
  assert longer['step'] == 7
  assert longer['records'][:7] == uninterrupted['records']
  weights = 'model.safetensors'
  assert longer['export'][weights] != uninterrupted['export'][weights]


def test_a_stop_during_an_evaluation_is_at_once_and_changes_no_bit(
    finished, uninterrupted
):
  shutil.rmtree(finished / 'checkpoints' / '6')
  shutil.rmtree(finished / 'export')
  for _ in range(2):  # In step 6 itself, and where a resumed run takes it up.
    trainer = whole_run.trainer(finished)
    evaluate = trainer._evaluate

    def stop(step, state, evaluate=evaluate):
      os.kill(os.getpid(), signal.SIGTERM)
      return evaluate(step, state)

    trainer._evaluate = stop
    with pytest.raises(StopRequested):
      trainer.train()
    # All of step 6 but its evaluation is saved, and it has no line yet.
    assert [r['step'] for r in whole_run.records(finished)] == list(range(6))
    assert whole_run.restored(finished).step == 6
  whole_run.trainer(finished).train()
  assert whole_run.outcome(finished) == uninterrupted


@pytest.mark.parametrize(
    ('call', 'number', 'error'),
    [
        ('score', 4, RewardFunctionError('of a test')),
        ('evaluate', 2, RuntimeError('of a test')),
    ],
)
def test_an_error_of_a_rollout_or_a_test_loses_no_step_that_was_taken(
    tmp_path, uninterrupted, monkeypatch, caplog, call, number, error
):
  trainer = whole_run.trainer(tmp_path)
  original, calls = getattr(Collector, call), itertools.count(1)

  def broken(collector, *arguments):
    if next(calls) == number:
      raise error
    return original(collector, *arguments)

  with monkeypatch.context() as patched:
    patched.setattr(Collector, call, broken)
    with pytest.raises(type(error), match='of a test'):
      trainer.train()
  assert f'Step 3 is saved in {tmp_path}' in caplog.text
  assert whole_run.restored(tmp_path).step == 3
  whole_run.trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path) == uninterrupted


def test_an_error_after_a_checkpoint_that_fails_is_the_one_that_is_told(
    tmp_path, monkeypatch, caplog
):
  trainer = whole_run.trainer(tmp_path)

  def broken(collector, step, *_):
    raise RuntimeError('the first')

  def full(*_, **__):
    raise OSError('no space is left')

  score = Collector.score
  monkeypatch.setattr(
      Collector,
      'score',
      lambda *a: (broken if a[1] == 1 else score)(*a),
  )
  monkeypatch.setattr(trainer.folder, 'save', full)
  with pytest.raises(RuntimeError, match='the first'):
    trainer.train()
  assert 'Step 1 could not be saved: no space is left' in caplog.text


def _lines(workdir: pathlib.Path) -> int:
  path = workdir / 'metrics.jsonl'
  return path.read_bytes().count(b'\n') if path.exists() else 0


def _kill(workdir: pathlib.Path, generator: random.Random) -> bool:
  """Starts the run and kills it somewhere; returns whether it was through.

  The place is drawn in lines of metrics.jsonl and a delay, so that kills
  spread over all phases on a slow machine too.
  """
  process = whole_run.start_run(workdir)
  before = _lines(workdir)
  wanted = before + generator.choice((0, 0, 1, 1, 2, 3))
  delay = generator.uniform(0, 6 if wanted == before else 0.8)
  end = time.monotonic() + _PATIENCE_S
  while process.poll() is None and _lines(workdir) < wanted:
    assert time.monotonic() < end
    time.sleep(0.01)
  try:
    process.wait(delay)
  except subprocess.TimeoutExpired:
    process.kill()
  output = process.communicate()
  assert process.returncode in (0, -signal.SIGKILL), output
  return process.returncode == 0


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_in_the_same_bits(
    tmp_path, uninterrupted
):
  generator = random.Random(0)
  for _ in range(2):
    _kill(tmp_path, generator)
  whole_run.trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path) == uninterrupted


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize('seed', range(1, 9))
def test_twenty_five_kills_change_no_bit(tmp_path, uninterrupted, seed):
  generator, kills, runs = random.Random(seed), 0, 0
  while kills < 25:
    workdir, runs = tmp_path / str(runs), runs + 1
    while not _kill(workdir, generator):
      kills += 1
    assert whole_run.outcome(workdir) == uninterrupted
    shutil.rmtree(workdir)


def _wait_for_lines(process: subprocess.Popen, workdir, number: int) -> None:
  end = time.monotonic() + _PATIENCE_S
  while _lines(workdir) < number:
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_ends_the_process_well_and_says_what_to_do(
    tmp_path, uninterrupted
):
  process = whole_run.start_run(tmp_path)
  _wait_for_lines(process, tmp_path, 2)
  process.terminate()
  output, errors = process.communicate(timeout=_PATIENCE_S)
  assert process.returncode == 0, errors
  assert 'Stopped by SIGTERM; everything up to here is saved in' in output
  assert 'The same command resumes.' in output
  assert _lines(tmp_path) < 7
  whole_run.trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path) == uninterrupted


def test_ctrl_c_reaches_the_run_and_not_the_workers_that_score(tmp_path):
  scoring = tmp_path / 'scoring'
  rewards = tmp_path / 'rewards.py'
  rewards.write_text(
      'import pathlib, time\n'
      'def slow(data_source, solution_str, ground_truth):\n'
      f'  pathlib.Path({str(scoring)!r}).touch()\n'
      '  time.sleep(0.2)\n'
      '  return len(solution_str) / 12\n'
  )
  # A terminal sends the signal to the whole group of the command.
  process = whole_run.start_run(
      tmp_path / 'run',
      f"--config.reward.functions=('{rewards}:slow',)",
      # What is scored first is then step 1.
      '--config.trainer.test_freq=0',
      start_new_session=True,
  )
  # Its 16 answers are being scored for 3 seconds.
  end = time.monotonic() + _PATIENCE_S
  while not scoring.exists():
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.01)
  os.killpg(process.pid, signal.SIGINT)
  output, errors = process.communicate(timeout=_PATIENCE_S)
  assert process.returncode == 0, errors
  assert 'Stopped by SIGINT; everything up to here is saved in' in output
  assert 'Traceback' not in errors
  assert _lines(tmp_path / 'run') == 1


def test_a_stop_before_the_first_checkpoint_says_that_nothing_is_saved(
    tmp_path,
):
  process = whole_run.start_run(tmp_path)
  end = time.monotonic() + _PATIENCE_S
  # Written after the handlers' installation and before the calibration.
  while not (tmp_path / 'config.json').exists():
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.01)
  process.terminate()
  output, errors = process.communicate(timeout=_PATIENCE_S)
  assert process.returncode == 0, errors
  assert 'Stopped by SIGTERM during start-up; there was nothing to' in output
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))
