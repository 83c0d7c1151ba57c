"""The gather between GPUs, on devices that are Python: its PTX, run as text.

What a device writes to another travels in pieces of 8 bytes, each of which
arrives at any time, before or after the others. Threads take turns at random,
and a device may be as far ahead of the others as it can get.
"""

import operator
import random
import re
from typing import Any

import numpy as np
import pytest

from jetrl_jax.kernels import mosaic_tools
from jetrl_jax.kernels.gather_columns import mosaic_sm90

_ARRAY, _DEVICE = 1 << 24, 1 << 28  # Distances of addresses.
_X, _Y, _WORK = range(3)
_steps_of: Any = mosaic_sm90.Form.__dict__['steps'].fget
_BINARY = {'add': operator.add, 'sub': operator.sub, 'and': operator.and_}
_BINARY |= {'or': operator.or_, 'xor': operator.xor, 'div': operator.floordiv}
_BINARY |= {'mul': operator.mul}
_COMPARE = {n: getattr(operator, n) for n in ('lt', 'ge', 'gt', 'eq', 'ne')}


def _parsed(text: str):
  """Returns (instructions, labels): (guard, operation, operands) each."""
  text = text.strip().removeprefix('{').removesuffix('}')
  text = re.sub(r'\{([^}]*)\}', lambda found: found[1].replace(',', ' '), text)
  lines, labels = [], {}
  for part in text.split(';'):
    part = part.strip()
    while label := re.match(r'(\w+):\s*', part):
      labels[label[1]] = len(lines)
      part = part[label.end() :]
    if part and not part.startswith('.reg'):
      guard = re.match(r'@(!?\w+)\s+', part)
      rest = part[guard.end() :] if guard else part
      operation, _, operands = rest.partition(' ')
      operands = [x.strip() for x in operands.split(',')] if operands else []
      lines.append((guard and guard[1], operation.split('.'), operands))
  return lines, labels


class _Stuck(Exception):
  """A program waits for what does not come."""


class _Devices:
  """Devices, each with a result and a workspace, and what travels."""

  def __init__(self, plan: mosaic_sm90.Form, seed: int):
    self.plan, self.random = plan, random.Random(seed)
    self.steps = [_parsed(step) for step in plan.steps]
    words = mosaic_sm90.workspace_words(plan.form, plan.devices, plan.capacity)
    part = plan.rows * plan.row_bytes // 4
    self.memory = {}
    for device in range(plan.devices):
      for array, size in (
          (_X, part),
          (_Y, part * plan.devices),
          (_WORK, words),
      ):
        self.memory[device, array] = np.zeros(size, np.uint32)
    self.travelling = []

  def _place(self, address: int):
    assert address % 4 == 0
    device, rest = divmod(address, _DEVICE)
    array, offset = divmod(rest, _ARRAY)
    return self.memory[device, array], offset // 4

  def _arrive(self, count: int) -> None:
    for _ in range(min(count, len(self.travelling))):
      some = self.random.randrange(len(self.travelling))
      self.travelling[some], last = self.travelling[-1], self.travelling[some]
      self.travelling.pop()
      _, address, words = last
      memory, first = self._place(address)
      memory[first : first + len(words)] = words

  def _store(self, sender, address: int, words) -> None:
    assert address % (4 * len(words)) == 0
    if address // _DEVICE == sender[0]:
      memory, first = self._place(address)
      memory[first : first + len(words)] = words
      return
    for i in range(0, len(words), 2):
      piece = sender, address + 4 * i, words[i : i + 2]
      self.travelling.append(piece)

  def _thread(self, device: int, program: int, tid: int, step):
    """Runs a step of a thread; yields where others may go on."""
    lines, labels = step
    devices = self.plan.devices
    at = [device * _DEVICE + array * _ARRAY for array in (_X, _Y, _WORK)]
    others = [(device + k) % devices for k in range(1, devices)]
    operands = [*at, device, *(d * _DEVICE + _WORK * _ARRAY for d in others)]
    values = {f'${i}': value for i, value in enumerate(operands)}
    values |= {'%tid.x': tid, '%ctaid.x': program}

    def value(name: str) -> int:
      return int(name) if name.isdigit() else values[name]

    place = 0
    while place < len(lines):
      guard, (kind, *more), names = lines[place]
      place += 1
      if guard and values[guard.lstrip('!')] == guard.startswith('!'):
        continue
      if kind == 'bra':
        place = labels[names[0]]
      elif kind == 'trap':
        raise _Stuck
      elif kind == 'fence':
        mine = device, program
        while any(sender == mine for sender, _, _ in self.travelling):
          yield
      elif kind in ('ld', 'st'):
        yield
        address = value(names[kind == 'ld'].strip('[]'))
        chosen = names[kind == 'st'].split()
        if kind == 'st':
          words = [value(name) for name in chosen]
          self._store((device, program), address, words)
        else:
          memory, first = self._place(address)
          assert address % (4 * len(chosen)) == 0
          found = memory[first : first + len(chosen)]
          values |= zip(chosen, map(int, found), strict=True)
      else:
        result, *rest = names
        rest = [value(name) for name in rest]
        if kind == 'setp':
          values[result] = _COMPARE[more[0]](*rest)
          continue
        bits = 64 if 'wide' in more or '64' in more[-1] else 32
        if kind == 'mov':
          found = rest[0]
        elif kind == 'mad':
          found = rest[0] * rest[1] + rest[2]
        else:
          found = _BINARY[kind](*rest)
        values[result] = found % (1 << bits)

  def _program(self, device: int, program: int):
    """Runs a program: its threads meet between two steps."""
    for step in self.steps:
      threads = [
          self._thread(device, program, tid, step)
          for tid in range(mosaic_tools.THREADS)
      ]
      self.random.shuffle(threads)
      while threads:
        # The first ones stand still, often.
        some = self.random.randrange(len(threads))
        going = [t for t in threads[some:] if next(t, self) is not self]
        threads = threads[:some] + going
        yield

  def _launches(self, device: int, parts, results):
    """Runs gathers one after the other; each has a result of its own."""
    for part in parts[:, device]:
      self.memory[device, _X][:] = part
      self.memory[device, _Y][:] = 0xDEADBEEF
      programs = [self._program(device, p) for p in range(self.plan.grid)]
      while programs:
        some = self.random.choice(programs)
        if next(some, self) is self:
          programs.remove(some)
        yield
      results[device].append(self.memory[device, _Y].copy())

  def gathers(self, parts) -> np.ndarray:
    """Returns what every device got, of what every device had in each turn."""
    results = [[] for _ in range(self.plan.devices)]
    running = [
        self._launches(device, parts, results)
        for device in range(self.plan.devices)
    ]
    looks = 0
    while running:
      some = self.random.choice(running)
      # It goes on alone for a while, and little of what travels arrives.
      for _ in range(self.random.choice((1, 30))):
        looks += 1
        if next(some, self) is self:
          running.remove(some)
          break
        if self.random.random() < 0.2:
          self._arrive(self.random.choice((1, 1, 2, 20)))
      if looks > 10_000:
        raise _Stuck
    assert not self.travelling
    return np.stack([np.stack(result) for result in results], axis=1)


def _plan(form: str, **changes) -> mosaic_sm90.Form:
  # Of the last units some threads have none.
  sizes = {'devices': 2, 'rows': 3, 'row_bytes': 48, 'capacity': 160}
  options = {'programs': 2, 'batch': 2}
  return mosaic_sm90.Form(form=form, **(sizes | options | changes))


def _parts(plan, turns: int) -> np.ndarray:
  size = plan.rows * plan.row_bytes // 4
  shape = turns, plan.devices, size
  return np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32)


def _whole(plan, parts) -> np.ndarray:
  """Returns the parts' rows next to each other, for each device."""
  turns = parts.shape[0]
  rows = parts.reshape(turns, plan.devices, plan.rows, -1).swapaxes(1, 2)
  return np.repeat(rows.reshape(turns, 1, -1), plan.devices, axis=1)


@pytest.fixture(autouse=True)
def _few_threads(monkeypatch):
  monkeypatch.setattr(mosaic_tools, 'THREADS', 4)


@pytest.mark.parametrize('form', mosaic_sm90.FORMS)
@pytest.mark.parametrize('devices', [2, 3])
def test_every_gather_gets_the_parts_of_its_turn(form, devices):
  plan = _plan(form, devices=devices)
  assert plan.grid == 2
  parts = _parts(plan, turns=6)
  for seed in range(4):
    found = _Devices(plan, seed).gathers(parts)
    np.testing.assert_array_equal(found, _whole(plan, parts))


@pytest.mark.parametrize('form', mosaic_sm90.FORMS)
def test_a_workspace_serves_gathers_of_other_shapes(form):
  plan = _plan(form)
  machine = _Devices(plan, seed=0)
  for rows in (3, 1, 2, 3):
    other = plan._replace(rows=rows)
    parts = _parts(other, turns=3)
    part = other.rows * other.row_bytes // 4
    for device in range(plan.devices):
      machine.memory[device, _X] = np.zeros(part, np.uint32)
      machine.memory[device, _Y] = np.zeros(plan.devices * part, np.uint32)
    machine.plan = other
    machine.steps = [_parsed(step) for step in other.steps]
    found = machine.gathers(parts)
    np.testing.assert_array_equal(found, _whole(other, parts))


def _replace(monkeypatch, old: str, new: str) -> None:
  """Changes the program."""

  def steps(plan):
    changed = [step.replace(old, new) for step in _steps_of(plan)]
    assert changed != _steps_of(plan)
    return changed

  monkeypatch.setattr(mosaic_sm90.Form, 'steps', property(steps))


def _goes_wrong(plan, seed: int) -> bool:
  parts = _parts(plan, turns=6)
  try:
    found = _Devices(plan, seed).gathers(parts)
  except _Stuck:
    return True
  return not np.array_equal(found, _whole(plan, parts))


@pytest.mark.parametrize('form', mosaic_sm90.FORMS)
def test_one_slot_would_not_do(form, monkeypatch):
  """So what the others find is not for want of looking."""
  _replace(monkeypatch, 'and.b32 parity, epoch, 1;', 'mov.u32 parity, 0;')
  assert any(_goes_wrong(_plan(form), seed) for seed in range(20))


def test_the_flag_must_not_overtake_the_values(monkeypatch):
  _replace(monkeypatch, 'fence.acq_rel.sys;', '')
  assert any(_goes_wrong(_plan('flags'), seed) for seed in range(20))


def test_threads_must_meet_before_the_flag(monkeypatch):
  def joined(plan):
    push, signal, *rest = _steps_of(plan)
    return [push.replace('END', 'NEVER').removesuffix('}') + signal[1:], *rest]

  monkeypatch.setattr(mosaic_sm90.Form, 'steps', property(joined))
  assert any(_goes_wrong(_plan('flags'), seed) for seed in range(20))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'form': 'letters'}, "form 'letters'; allowed are"),
        ({'row_bytes': 40, 'form': 'flags'}, '40 bytes; flags take multiples'),
        ({'rows': 4}, '4 rows of 48 bytes; the workspace has room for 160'),
        ({'programs': 300}, '300 programs; allowed are 1 to 256'),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    _plan(**({'form': 'packets'} | changes)).check()
