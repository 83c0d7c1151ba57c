"""Tests of the averages and of the metric log."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.metrics import writer as metrics
from jetrl_jax.metrics.writer import Mean, MetricWriter


def _lines(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  assert text == '' or text.endswith('\n')
  return [
      json.loads(line, parse_constant=_refuse) for line in text.split('\n')[:-1]
  ]


def _refuse(constant):
  raise AssertionError(f'{constant} is not JSON')


def test_an_average_of_parts_is_the_average_of_the_whole():
  # Micro-batches of 3 and 1 tokens: (1 + 2 + 3 + 6) / 4 = 3, whereas the mean
  # of the two means would be (2 + 6) / 2 = 4.
  first = metrics.mean(jnp.array([1.0, 2.0, 3.0]), jnp.ones(3))
  second = metrics.mean(jnp.array([6.0, 9.0]), jnp.array([1.0, 0.0]))
  assert (first + second).value() == 3.0


def test_an_average_is_a_pytree_that_a_jitted_step_can_return():
  step = jax.jit(lambda x: metrics.mean(x, jnp.array([1.0, 3.0])))
  total = jax.tree.map(jnp.add, step(jnp.array([2.0, 6.0])), step(jnp.zeros(2)))
  # (1 * 2 + 3 * 6 + 0) / 8 = 2.5
  assert total.value() == 2.5


def test_what_has_no_weight_cannot_poison_an_average():
  masked = metrics.mean(jnp.array([jnp.nan, 4.0]), jnp.array([0.0, 2.0]))
  assert masked.value() == 4.0
  assert Mean(sum=0.0, weight=0.0).value() is None


def test_a_line_has_the_step_first_and_the_names_in_order(tmp_path):
  writer = MetricWriter(tmp_path, tensorboard=False)
  writer.write(0, {'critic/score/mean': 0.5, 'n': np.int32(7), 'lr': 1e-6})
  assert (tmp_path / 'metrics.jsonl').read_text() == (
      '{"step": 0, "critic/score/mean": 0.5, "n": 7, "lr": 1e-06}\n'
  )
  writer.close()
  assert not (tmp_path / 'tensorboard').exists()


def test_every_kind_of_number_is_written_as_a_python_number(tmp_path):
  writer = MetricWriter(tmp_path, tensorboard=False)
  writer.write(
      3,
      {
          'python': 2,
          'float32': np.float32(0.1),
          'int64': np.int64(2**40),
          'jax': jnp.float32(0.25),
          'bfloat16': jnp.bfloat16(1.5),
          'fp8': np.asarray(448, ml_dtypes.float8_e4m3fn),
          'mean': Mean(sum=jnp.float32(3), weight=jnp.int32(2)),
          'nothing': Mean(sum=0.0, weight=0.0),
          'fp8/amax': {'layers_0': [jnp.float32(2), 3.5]},
          'vector': np.arange(2.0),
      },
  )
  writer.close()
  # float32(0.1) is 0.100000001490116...: the number that was computed.
  assert _lines(tmp_path) == [
      {
          'step': 3,
          'python': 2,
          'float32': 0.10000000149011612,
          'int64': 2**40,
          'jax': 0.25,
          'bfloat16': 1.5,
          'fp8': 448.0,
          'mean': 1.5,
          'fp8/amax': {'layers_0': [2.0, 3.5]},
          'vector': [0.0, 1.0],
      }
  ]


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
  writer = MetricWriter(tmp_path, tensorboard=True)
  writer.write(
      0,
      {
          'a': math.nan,
          'b': jnp.float32(jnp.inf),
          'c': {'d': [1.0, -math.inf]},
          'e': Mean(sum=math.nan, weight=1.0),
          'f': 1.0,
      },
  )
  writer.close()
  assert _lines(tmp_path) == [
      {
          'step': 0,
          'a': None,
          'b': None,
          'c': {'d': [1.0, None]},
          'e': None,
          'f': 1.0,
          'nonfinite': ['a', 'b', 'c/d/1', 'e'],
      }
  ]


def test_what_cannot_be_logged_is_refused_and_leaves_no_line(tmp_path):
  writer = MetricWriter(tmp_path, tensorboard=False)
  writer.write(5, {'a': 1})
  for name in ('step', 'nonfinite'):
    with pytest.raises(ValueError, match=f"cannot be named '{name}'"):
      writer.write(6, {name: 1})
  with pytest.raises(ValueError, match="metric a/b is 'text'; allowed: numb"):
    writer.write(6, {'a': {'b': 'text'}})
  for step in (5, 4):
    with pytest.raises(ValueError, match=f'step {step} does not follow step 5'):
      writer.write(step, {'a': 1})
  writer.close()
  assert _lines(tmp_path) == [{'step': 5, 'a': 1}]


def test_a_torn_last_line_is_dropped_wherever_it_tore(tmp_path):
  writer = MetricWriter(tmp_path, tensorboard=False)
  for step in range(3):
    writer.write(step, {'a': step / 7})
  writer.close()
  path = tmp_path / 'metrics.jsonl'
  whole = path.read_bytes()
  start = whole.rindex(b'{')
  for end in range(start, len(whole)):
    path.write_bytes(whole[:end])
    writer = MetricWriter(tmp_path, tensorboard=False)
    assert path.read_bytes() == whole[:start]
    writer.write(2, {'a': 2 / 7})
    writer.close()
    assert path.read_bytes() == whole


def test_damage_elsewhere_is_not_repaired_by_guessing(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
  with pytest.raises(
      ValueError, match='metrics.jsonl line 2 is not a line of metr'
  ):
    MetricWriter(tmp_path, tensorboard=False)


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path):
  def run(folder, steps, resume_from):
    writer = MetricWriter(tmp_path / folder, tensorboard=False)
    writer.truncate_after(resume_from)
    for step in steps:
      writer.write(step, {'loss': math.sin(step), 'nested': {'a': [step]}})
    writer.close()
    return (tmp_path / folder / 'metrics.jsonl').read_bytes()

  whole = run('whole', range(8), -1)
  run('parts', range(6), -1)
  assert run('parts', range(4, 8), 3) == whole
  assert run('parts', [], 9) == whole
  assert run('parts', range(8), -1) == whole


def test_a_resume_parses_the_last_line_alone(tmp_path, monkeypatch):
  writer = MetricWriter(tmp_path, tensorboard=False)
  for step in range(20):
    writer.write(step, {'nested': {'a': [step]}})
  writer.close()
  parsed = []
  parse = json.loads
  monkeypatch.setattr(json, 'loads', lambda x: parsed.append(x) or parse(x))
  # The lines of ten thousand steps took 20 seconds.
  writer = MetricWriter(tmp_path, tensorboard=False)
  writer.truncate_after(9)
  assert len(parsed) == 1
  monkeypatch.undo()
  writer.write(10, {'nested': {}})
  writer.close()
  assert [line['step'] for line in _lines(tmp_path)] == list(range(11))


def test_a_step_that_was_kept_is_not_written_again(tmp_path):
  # A kill tore the first line of all: there is none, and step 0 comes next.
  (tmp_path / 'metrics.jsonl').write_text('{"step"')
  writer = MetricWriter(tmp_path, tensorboard=False)
  for step in range(3):
    writer.write(step, {})
  writer.truncate_after(1)
  with pytest.raises(ValueError, match='step 1 does not follow step 1'):
    writer.write(1, {})
  writer.write(2, {})
  writer.close()
  assert [line['step'] for line in _lines(tmp_path)] == [0, 1, 2]


def test_what_was_written_is_on_the_disk(tmp_path, monkeypatch):
  fsync, synced = os.fsync, []

  def watched(descriptor):
    fsync(descriptor)
    synced.append(os.fstat(descriptor).st_size)

  monkeypatch.setattr(os, 'fsync', watched)
  path = tmp_path / 'metrics.jsonl'
  writer = MetricWriter(tmp_path, tensorboard=False)
  for step in range(2):
    writer.write(step, {'a': 1})
    assert synced[-1] == path.stat().st_size and len(synced) == step + 1
  writer.truncate_after(0)
  assert synced[2:] == [path.stat().st_size]
  writer.close()


def test_a_killed_process_leaves_whole_lines(tmp_path):
  code = (
      'import itertools, sys\n'
      'from jetrl_jax.metrics.writer import MetricWriter\n'
      'writer = MetricWriter(sys.argv[1], tensorboard=True)\n'
      'for step in itertools.count():\n'
      '  writer.write(step, {"a": step / 3, "b": [0.1] * 500})\n'
      '  print(step, flush=True)\n'
  )
  process = subprocess.Popen(
      [sys.executable, '-c', code, str(tmp_path)],
      env=os.environ | {'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.PIPE,
      text=True,
  )
  with process:
    while int(process.stdout.readline()) < 20:
      pass
    process.send_signal(signal.SIGKILL)
    told = process.stdout.read().split()
  writer = MetricWriter(tmp_path, tensorboard=False)
  writer.close()
  steps = [line['step'] for line in _lines(tmp_path)]
  assert steps == list(range(len(steps)))
  assert steps[-1] >= (int(told[-1]) if told else 20)


@pytest.mark.parametrize('clock_s', [0, -3600])
def test_tensorboard_shows_the_scalars_of_a_resumed_run_once(
    tmp_path, monkeypatch, clock_s
):
  from tensorboard.backend.event_processing import event_accumulator

  writer = MetricWriter(tmp_path, tensorboard=True)
  for step in range(5):
    writer.write(step, {'loss': -1.0, 'n': 3, 'fp8': {'layers_0': 1.0}})
  writer.close()
  now_ns = time.time_ns() + clock_s * 10**9
  monkeypatch.setattr(time, 'time_ns', lambda: now_ns)
  writer = MetricWriter(tmp_path, tensorboard=True)
  writer.truncate_after(2)
  writer.write(3, {'loss': 1e300, 'big': 2**70})
  writer.close()
  events = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  events.Reload()
  assert sorted(events.Tags()['scalars']) == ['big', 'loss', 'n']
  found = [(event.step, event.value) for event in events.Scalars('loss')]
  assert found == [(0, -1.0), (1, -1.0), (2, -1.0), (3, math.inf)]
