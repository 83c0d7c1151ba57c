"""Several processes: where they meet, how they end."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jetrl_jax.core import collectives, process_watch, processes, sharding
from jetrl_jax.core.interrupt import StopRequested
from tests import launched

_MEETING = 'tests.core.meeting'


class _Alone(processes._Group):
  """A process of two, the other of which does not exist."""

  def __init__(self):
    self.rank, self.count = 0, 2
    self.watch = process_watch.Watch(self)


def test_a_process_says_what_it_was_at_before_it_closed_its_files(monkeypatch):
  group = _Alone()
  monkeypatch.setattr(processes, '_group', group)
  processes.touch('a rollout')
  with processes.slow('the last checkpoint'):
    assert group.watch.where == 'the last checkpoint, after a rollout'
  assert group.watch.where == 'a rollout'


class _SlowStore(_Alone):
  """A store that takes its time, as one on a loaded machine."""

  def __init__(self):
    super().__init__()
    self.asked = threading.Event()

  def set(self, key, value, *, again=False):
    pass

  def folder(self, key):
    self.asked.set()
    time.sleep(0.3)
    return {}


def test_a_watch_that_has_stopped_asks_the_store_no_more():
  group, before = _SlowStore(), set(threading.enumerate())
  group.watch.start()
  assert group.asked.wait(10)
  group.watch.stop()
  assert set(threading.enumerate()) <= before


def test_alone_a_process_does_all_and_waits_for_nobody():
  assert (processes.count(), processes.rank()) == (1, 0)
  group = processes.TensorGroup()
  assert group.leads and group.share(3) == [0, 1, 2]
  assert group.from_leader('work', lambda: 7) == 7
  assert processes.together('work', lambda: 7) == [7]

  def stop():
    raise StopRequested('SIGTERM')

  with pytest.raises(StopRequested):
    processes.stop_together('work', stop)
  with pytest.raises(RuntimeError, match='no disk'):
    processes.fail('no disk')


class _Device:
  platform = 'cpu'

  def __init__(self, process_index: int):
    self.process_index = process_index


def test_each_process_gives_a_mesh_as_many_devices(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  found = [_Device(p) for p in (0, 0, 1, 1)]
  shares = sharding._equal_shares(2, found, 'mesh')
  assert [device.process_index for device in shares] == [0, 1]
  for need in (1, 3, 6):
    with pytest.raises(ValueError, match='there are 2 processes'):
      sharding._equal_shares(need, found, f'mesh data={need}')


def test_devices_that_share_a_sequence_are_neighbours(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 4)
  found = [_Device(p) for p in (0, 0, 1, 1, 2, 2, 3, 3)]
  monkeypatch.setattr(jax, 'devices', lambda: found)

  def of_sequences(**axes):
    mesh = sharding.make_mesh(**axes)
    shared = sharding.processes_of_sequence(mesh)
    monkeypatch.setattr(jax, 'process_index', lambda: 3)
    local = sharding.local_mesh(mesh)
    sequences = [
        [device.process_index for device in sequence]
        for sequence in mesh.devices.reshape(-1, mesh.shape['tensor'])
    ]
    last = [d.process_index for d in local.devices.flat]
    return shared, sequences, dict(local.shape), last

  one = {'data': 1, 'fsdp': 1, 'tensor': 2}
  assert of_sequences(data=2, fsdp=2, tensor=2) == (
      1,
      [[0, 0], [1, 1], [2, 2], [3, 3]],
      one,
      [3, 3],
  )
  assert of_sequences(data=2, tensor=2) == (2, [[0, 1], [2, 3]], one, [2, 3])
  assert of_sequences(fsdp=2, tensor=4) == (
      2,
      [[0, 0, 1, 1], [2, 2, 3, 3]],
      one | {'tensor': 4},
      [2, 2, 3, 3],
  )
  # Three devices of two processes: no sequence on the middle one's alone.
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  found = [_Device(p) for p in (0, 0, 0, 1, 1, 1)]
  with pytest.raises(
      ValueError, match='mesh.tensor is 2, but each of 2 processes has 3 of the'
  ):
    sharding.make_mesh(data=3, tensor=2)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_devices_that_share_a_sequence_add_in_their_order(dtype):
  mesh = sharding.make_mesh(data=2, tensor=4)
  axes = collectives.axes_of(mesh)
  random = np.random.default_rng(0)
  x = random.normal(size=(2, 4, 50, 32)).astype(np.float32)
  x = jnp.asarray(x).astype(dtype)

  def each(x):
    mine = x[0, lax.axis_index(sharding.TENSOR)]
    _, add = jax.vjp(axes.enter, mine)
    _, scatter = jax.vjp(axes.gather_inputs, mine[:, :8])
    parts = [axes.psum_shared(mine), *scatter(mine), *add(mine)]
    return [part[None] for part in parts]

  by_columns = jax.P(sharding.DATA, None, sharding.TENSOR)
  rows = jax.P(sharding.DATA)
  found = jax.jit(
      sharding.per_device(each, mesh, (rows,), [rows, by_columns, rows])
  )(x)
  expected = x[:, 0].astype(jnp.float32)
  for device in (1, 2, 3):
    expected = expected + x[:, device].astype(jnp.float32)
  for one in found:
    np.testing.assert_array_equal(one, expected.astype(dtype))


@pytest.mark.parametrize('data, fsdp', [(8, 1), (2, 4), (4, 2), (1, 2)])
def test_devices_add_in_their_order_whatever_a_collective_would_do(data, fsdp):
  size = data * fsdp
  mesh = sharding.make_mesh(data=data, fsdp=fsdp)
  axes = collectives.axes_of(mesh)
  random = np.random.default_rng(0)
  # Large: the order of a sum shows in the last bits.
  x = random.normal(size=(size, 1000, 8)).astype(np.float32)

  def each(x):
    return (
        axes.psum(x[0]),
        axes.psum(x[0, :1]),
        axes.reduce_scatter(x[0], 1000 // fsdp),
    )

  whole, small, scattered = jax.jit(
      sharding.per_device(
          each,
          mesh,
          (sharding.ROWS,),
          (jax.P(), jax.P(), jax.P(sharding.FSDP)),
      )
  )(jnp.asarray(x))
  expected = x[0]
  for part in x[1:]:
    expected = expected + part
  np.testing.assert_array_equal(whole, expected)
  np.testing.assert_array_equal(small, expected[:1])
  # First over fsdp, then over data.
  parts = x.reshape(data, fsdp, 1000, 8)
  rows = parts[:, 0]
  for f in range(1, fsdp):
    rows = rows + parts[:, f]
  expected = rows[0]
  for row in rows[1:]:
    expected = expected + row
  np.testing.assert_array_equal(scattered, expected)


def test_two_processes_meet_and_stop_together():
  with launched.processes([_MEETING, 'facts'], count=2) as started:
    said = launched.ended(started, 100)
    codes = [one.returncode for one in started]
  assert codes == [0, 0], said
  assert all('well' in text for text in said)
  # On the console of process 0, which did not warn of it.
  assert '[process 1] the disk of this host is full' in said[0]


@pytest.mark.slow
def test_a_process_may_wait_for_one_that_works_however_long():
  with launched.processes([_MEETING, 'waits'], count=2) as started:
    said = launched.ended(started, 100)
    codes = [one.returncode for one in started]
  assert codes == [0, 0], said


@pytest.mark.slow
@pytest.mark.parametrize('what', ['busy', 'hangs'])
def test_a_process_in_a_collective_waits_for_one_that_is_busy(what):
  with launched.processes([_MEETING, what], count=2) as started:
    said = launched.ended(started, 100)
    codes = [one.returncode for one in started]
  if what == 'busy':
    assert codes == [0, 0], said
    return
  assert codes == [1, 1], said
  # Whichever of the two says so first.
  assert all('at: an update' in s and 'at: a file' in s for s in said), said


@pytest.mark.slow
@pytest.mark.parametrize(
    'rank, missing, in_time',
    [
        (0, '1 of 2 processes have come', ' in 5 s'),
        (1, 'process 0 does not answer at 127.0.0.1:', ''),
    ],
)
def test_a_process_whose_others_do_not_come_says_so(rank, missing, in_time):
  def only(_, count, port):
    return launched.by_hand(rank, count, port)

  with launched.processes(
      [_MEETING, 'alone'], count=2, launcher=only, kept=1
  ) as started:
    (said,) = launched.ended(started, 100)
    assert started[0].returncode == 1
  first, *_, last = [s for s in said.splitlines() if missing in s]
  assert first.startswith(f'[process {rank}] {missing}')
  assert first.endswith(' s more')
  assert last.startswith(f'[process {rank}] error: {missing}{in_time}')


@pytest.mark.slow
def test_processes_at_different_places_say_so():
  with launched.processes([_MEETING, 'differ'], count=2) as started:
    said = launched.ended(started, 100)
  assert any("is at 'work 1' while process 0 is at 'work 0'" in s for s in said)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others_with_its_reason():
  with launched.processes(
      [_MEETING, 'fails'], count=2, launcher=launched.srun
  ) as started:
    first, second = launched.ended(started, 100)
    codes = [one.returncode for one in started]
  assert codes == [1, 1], (first, second)
  assert 'process 1 of this run has ended: a file is missing' in first
  assert 'error: a file is missing' in second
