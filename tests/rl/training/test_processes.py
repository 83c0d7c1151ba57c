"""A run of several processes leaves what one process leaves, through faults."""

import collections
import json
import pathlib
import random
import signal
import time

import pytest

from tests import launched, whole_run

_FILE = whole_run.ROOT / 'tests' / 'tiny_config.py'
# Longer than any compilation here, and than the watch takes to find a loss.
_PATIENCE_S = 250
_LOSS_S = 60
# A process that stops before it has joined is missed by JAX, after 300 s.
_NEVER_CAME_S = 360
# When after its start a run is killed, in times of what a whole run takes.
_MOMENTS = 0.1, 1.2
# Of a whole run, where others use the machine as well.
_SOAK_PATIENCE_S = 1800


def _start(
    workdir: pathlib.Path,
    count: int,
    changes: dict,
    devices: int = 1,
    launcher=launched.by_hand,
):
  settings = [f'--config.{name}={value}' for name, value in changes.items()]
  return launched.processes(
      [
          'jetrl_jax.main',
          f'--config={_FILE}',
          f'--workdir={workdir}',
          *settings,
      ],
      count=count,
      devices=devices,
      launcher=launcher,
      cwd=whole_run.home(),
  )


def _wait_for_lines(workdir: pathlib.Path, count: int) -> None:
  end, file = time.monotonic() + _PATIENCE_S, workdir / 'metrics.jsonl'
  while time.monotonic() < end:
    if file.exists() and len(file.read_text().splitlines()) >= count:
      return
    time.sleep(0.02)
  raise AssertionError(f'{file} has not {count} lines')


def _finish(
    workdir: pathlib.Path,
    count: int,
    changes: dict,
    patience: float = _PATIENCE_S,
    **how,
) -> None:
  with _start(workdir, count, changes, **how) as started:
    said = launched.ended(started, patience)
    codes = [one.returncode for one in started]
  assert codes == [0] * count, said


def _kinds(workdir: pathlib.Path) -> list[int]:
  lines = (workdir / 'starts.jsonl').read_text().splitlines()
  return [json.loads(line).get('processes', 1) for line in lines]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_processes_stopped_and_killed_end_in_the_bits_of_one(tmp_path):
  changes = {
      'mesh.fsdp': 2,
      'trainer.total_training_steps': 40,
      'trainer.test_freq': 20,
  }
  one, two = tmp_path / 'one', tmp_path / 'two'
  _finish(one, 1, changes, devices=2)
  # A signal to one of them.
  with _start(two, 2, changes, launcher=launched.srun) as started:
    _wait_for_lines(two, 2)
    started[1].send_signal(signal.SIGTERM)
    said = launched.ended(started, _PATIENCE_S)
    codes = [each.returncode for each in started]
  assert codes == [0, 0], said
  assert 'Stopped by SIGTERM; everything up to here is saved' in said[0]
  assert not said[1].replace('[Gloo]', '').count('step')
  # A process that is gone.
  lines = len(whole_run.records(two))
  with _start(two, 2, changes) as started:
    _wait_for_lines(two, lines + 2)
    started[1].kill()
    killed = time.monotonic()
    said, _ = launched.ended(started, _LOSS_S)
    assert started[0].returncode != 0
    assert time.monotonic() - killed < _LOSS_S
  assert 'process 1' in said or 'collective' in said.lower()
  # One process continues what two have begun.
  _finish(two, 1, changes, devices=2)
  assert _kinds(two) == [2, 2, 1]
  found, expected = (whole_run.outcome(w, {'mesh.fsdp': 2}) for w in (two, one))
  assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    'mesh, count, devices',
    [
        # Each process has half of every weight.
        pytest.param(
            {'mesh.fsdp': 2, 'mesh.tensor': 2}, 2, 2, marks=pytest.mark.soak
        ),
        # Each has one device of a sequence's two.
        ({'mesh.tensor': 2}, 2, 1),
        pytest.param(
            {'mesh.data': 2, 'mesh.tensor': 2}, 2, 2, marks=pytest.mark.soak
        ),
        pytest.param(
            {'mesh.data': 2, 'mesh.tensor': 2}, 4, 1, marks=pytest.mark.soak
        ),
        pytest.param(
            {'mesh.fsdp': 2, 'mesh.tensor': 2}, 4, 1, marks=pytest.mark.soak
        ),
    ],
)
def test_devices_that_share_sequences_in_several_processes(
    tmp_path, mesh, count, devices
):
  changes = mesh | {'trainer.total_training_steps': 3}
  found = []
  for layout in ((1, count * devices), (count, devices)):
    workdir = tmp_path / str(layout[0])
    _finish(workdir, layout[0], changes, 2 * _PATIENCE_S, devices=layout[1])
    assert _kinds(workdir) == [layout[0]]
    found.append(whole_run.outcome(workdir, mesh))
  one, two = found
  assert two == one
  # All were sampled, and trained on, with the same bits.
  name = 'training/mismatch_token_frac'
  assert not any(line.get(name, 0.0) for line in two['records'])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_processes_that_share_sequences_ask_an_environment_once(tmp_path):
  changes = {
      'mesh.tensor': 2,
      'trainer.total_training_steps': 30,
      'trainer.test_freq': 15,
      'environment.name': 'tests.rl.training.games:Counting',
  }
  one, two = tmp_path / 'one', tmp_path / 'two'
  _finish(one, 1, changes, 2 * _PATIENCE_S, devices=2)
  # A signal to the one that is told what the other one decides.
  with _start(two, 2, changes) as started:
    _wait_for_lines(two, 2)
    started[1].send_signal(signal.SIGTERM)
    said = launched.ended(started, _PATIENCE_S)
    codes = [each.returncode for each in started]
  assert codes == [0, 0], said
  lines = len(whole_run.records(two))
  # It hangs in the middle of a step.
  with _start(two, 2, changes) as started:
    _wait_for_lines(two, lines + 2)
    started[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    said, _ = started[0].communicate(timeout=_PATIENCE_S)
    assert time.monotonic() - stopped < _LOSS_S
    assert started[0].returncode == 1
  assert 'process 1 of this run has not been heard of for' in said
  assert 'it was at: ' in said
  _finish(two, 2, changes, 2 * _PATIENCE_S)
  assert _kinds(two) == [2, 2, 2]
  found, expected = (whole_run.outcome(w, changes) for w in (two, one))
  assert found == expected
  assert found['records'][-1]['environment/observation_frac'] > 0


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize('axis, kills', [('data', 200), ('tensor', 60)])
def test_random_ranks_killed_at_random_moments_change_no_bit(
    tmp_path, pytestconfig, record_property, axis, kills
):
  draw, counts, waits = random.Random(0), collections.Counter[str](), [0.0]
  minutes = pytestconfig.getoption('--soak-minutes')
  end = time.monotonic() + 60 * minutes
  changes = {
      f'mesh.{axis}': 2,
      'trainer.total_training_steps': 60,
      'trainer.test_freq': 20,
  }
  one, begin = tmp_path / 'one', time.monotonic()
  _finish(one, 1, changes, _SOAK_PATIENCE_S, devices=2)
  took = time.monotonic() - begin
  expected = whole_run.outcome(one, changes)

  def compare(workdir):
    counts['runs compared'] += 1
    assert whole_run.outcome(workdir, changes) == expected

  number, done, two = 0, 0, tmp_path / '0'
  try:
    while done < kills and time.monotonic() < end:
      begin = time.monotonic()
      what = _killed(two, changes, draw, took, waits)
      if what is None:  # It was done before: sooner next time.
        took = min(took, time.monotonic() - begin)
        compare(two)
        number += 1
        two = tmp_path / str(number)
        continue
      counts[what] += 1
      done += 1
    count = draw.choice([1, 2])
    _finish(two, count, changes, _SOAK_PATIENCE_S, devices=2 // count)
    compare(two)
  finally:
    for name, value in sorted(counts.items()):
      record_property(name, value)
    record_property('longest wait for the others, s', round(max(waits)))
  # However few minutes there were: a soak without a kill shows nothing.
  assert any(name.startswith('SIG') for name in counts)


def _killed(
    workdir: pathlib.Path,
    changes: dict,
    draw: random.Random,
    took: float,
    waits: list[float],
) -> str | None:
  """Kills, stops or asks a random rank; returns how, None if the run is done.

  What it returns names the signal, and who ends the other rank. `took` is what
  a whole run takes; `waits` gets the seconds until the others had ended.
  """
  with _start(workdir, 2, changes) as started:
    delay = time.monotonic() + took * draw.uniform(*_MOMENTS)
    while time.monotonic() < delay:
      codes = [one.poll() for one in started]
      if codes == [0, 0]:
        return None
      if any(codes):
        # On a slow machine gloo gives up a peer that still compiles.
        said = launched.ended(started, _NEVER_CAME_S)
        if not any('Gloo context initialization' in text for text in said):
          # An assertion would cut this off.
          pytest.fail('\n\n'.join(['ended by itself:', *said]))
        return 'none: gloo waited no longer for the other'
      time.sleep(0.01)
    rank = draw.randrange(2)
    number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
    started[rank].send_signal(number)
    if draw.random() < 0.8:
      # As a launcher does: it kills the others when one has died.
      time.sleep(draw.uniform(0, 1))
      return f'{number.name}, then SIGKILL to both'
    begin, left = time.monotonic(), list(started)
    while left and time.monotonic() < begin + _NEVER_CAME_S:
      left = [one for one in started if one.poll() is None]
      if number == signal.SIGSTOP and left == [started[rank]]:
        break  # It cannot end itself.
      time.sleep(0.05)
    waits.append(time.monotonic() - begin)
    # Nobody waits any more for a process that is gone.
    codes = [one.poll() for one in started]
    assert codes[1 - rank] is not None, (rank, number, codes)
  return f'{number.name}, the others end themselves'
