"""Killed at any moment and resumed, a run continues to the same bits."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import time

import pytest

from jetrl_jax.rl import rollout_store
from jetrl_jax.rl.interrupt import Interrupt, StopRequested
from tests import whole_run

# A wait that is longer than any compilation here.
_PATIENCE_S = 200


@pytest.fixture(scope='module', autouse=True)
def _cache():
  with whole_run.cached_compilation():
    yield


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


def _train_until_check(workdir: pathlib.Path, number: int) -> bool:
  """Returns whether the run was through before the n-th check."""
  trainer = whole_run.trainer(workdir)
  trainer.interrupt = _AtCheck(number)
  try:
    trainer.train()
  except StopRequested:
    return False
  return True


def test_a_run_is_stopped_everywhere_and_ends_in_the_same_bits(
    tmp_path, uninterrupted
):
  # 1: the calibration's rollout; 6: the first evaluation; then rollouts of
  # steps 1, 1 again, 2 to 3 (behind a checkpoint of its own) and later.
  for number in (1, 6, 9, 2, 8, 11):
    assert not _train_until_check(tmp_path, number), number
  assert _train_until_check(tmp_path, 10**6)
  assert whole_run.outcome(tmp_path) == uninterrupted


def test_no_prompt_is_lost_or_repeated_at_an_epochs_edge():
  # 10 prompts in batches of 4: the edges lie inside batches 3 and 5. The
  # interrupted runs drew the same ones: `outcome` holds the rollouts.
  drawn = []
  for file in sorted((whole_run.finished() / 'rollouts').iterdir()):
    completions, _ = rollout_store.load_rollouts(file)
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


def test_a_run_killed_at_random_moments_ends_in_the_same_bits(
    tmp_path, uninterrupted
):
  generator = random.Random(0)
  for _ in range(2):
    _kill(tmp_path, generator)
  whole_run.trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path) == uninterrupted


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_hundred_kills_change_no_bit(tmp_path, uninterrupted):
  generator, kills, runs = random.Random(1), 0, 0
  while kills < 200:
    workdir, runs = tmp_path / str(runs), runs + 1
    while not _kill(workdir, generator):
      kills += 1
    assert whole_run.outcome(workdir) == uninterrupted
    shutil.rmtree(workdir)


def test_sigterm_ends_the_process_well_and_says_what_to_do(
    tmp_path, uninterrupted
):
  process = whole_run.start_run(tmp_path)
  end = time.monotonic() + _PATIENCE_S
  while _lines(tmp_path) < 2:
    assert process.poll() is None and time.monotonic() < end
    time.sleep(0.01)
  process.terminate()
  output, errors = process.communicate(timeout=_PATIENCE_S)
  assert process.returncode == 0, errors
  assert 'Stopped by SIGTERM; everything up to here is saved in' in output
  assert 'The same command resumes.' in output
  assert _lines(tmp_path) < 7
  whole_run.trainer(tmp_path).train()
  assert whole_run.outcome(tmp_path) == uninterrupted
