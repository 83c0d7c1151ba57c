"""What a checkpoint costs: time of a run, memory of the host, room on the disk.

python -m benchmarks.save --output=benchmarks/results/save_qwen7b_h200_DATE

Saves a random state as a run does, beside a rollout, once with each set of
Orbax's options, reads it back and compares the bits. Moments are random too, as
those of zeros, before the first update, would compress to nothing. The disk
needs room for one state, the device for two.
"""

import concurrent.futures
import contextlib
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
from absl import flags

from benchmarks import common
from jetrl_jax import checkpoint, checkpoint_arrays, checkpoint_manager, rng
from jetrl_jax.checkpoint_manager import CheckpointManager
from jetrl_jax.rl import state as states
from jetrl_jax.rl.engine import Engine, EngineConfig
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import rollout

_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 0, 'Of the model; 0 for all.')
_MASTERS = flags.DEFINE_enum(
    'masters', 'float32', ['float32', 'bfloat16'], 'Their dtype.'
)
_PINNED = {'enable_pinned_host_transfer': None}
_COMPRESSED = {'use_compression': True}
# Orbax's options, and how many arrays are copied to the host at a time; None
# leaves that to Orbax.
_VARIANTS = {
    'as it is': ({}, checkpoint_arrays.AT_A_TIME),
    'one at a time': ({}, 1),
    'two at a time': ({}, 2),
    'eight at a time': ({}, 8),
    'compressed': (_COMPRESSED, checkpoint_arrays.AT_A_TIME),
    'all at once': ({}, None),
    'pinned': (_PINNED, None),
    'pinned, compressed': (_PINNED | _COMPRESSED, None),
}
_TOKENS = flags.DEFINE_integer(
    'tokens', 1024, 'Of each of 64 answers that are sampled meanwhile.'
)
_CHOSEN = flags.DEFINE_list('variants', list(_VARIANTS), 'Which to save.')
_COLUMNS = (
    ('variant', 'variant', ''),
    ('state_gib', 'state GiB', '.2f'),
    ('copied_s', 'copied after s', '.2f'),
    ('alone_s', 'rollout alone s', '.2f'),
    ('beside_s', 'beside the save s', '.2f'),
    ('saved_s', 'saved after s', '.2f'),
    ('processor_s', 'processor s', '.1f'),
    ('host_gib', 'host memory, more by GiB', '.2f'),
    ('disk_gib', 'disk GiB', '.2f'),
    ('restored_s', 'restored in s', '.2f'),
    ('unequal', 'unequal leaves', 'd'),
)


class HostMemory:
  """Watches how much memory this process has come to hold."""

  def __enter__(self):
    self._before = self.peak = _resident()
    self._done = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def _watch(self) -> None:
    while not self._done.wait(0.02):
      self.peak = max(self.peak, _resident())

  def __exit__(self, *_):
    self._done.set()
    self._thread.join()

  @property
  def grown_gib(self) -> float:
    """What the peak was above the beginning."""
    return (self.peak - self._before) / 2**30


def _resident() -> int:
  """Returns the bytes of this process in memory."""
  pages = pathlib.Path('/proc/self/statm').read_text(encoding='ascii').split()
  return int(pages[1]) * 4096


@jax.jit
def _differ(a, b):
  """Whether any bit of two arrays differs."""
  if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
    a, b = jax.random.key_data(a), jax.random.key_data(b)
  if a.dtype != jnp.bool:
    word = f'uint{8 * a.dtype.itemsize}'
    a, b = (jax.lax.bitcast_convert_type(x, word) for x in (a, b))
  return jnp.any(a != b)


def with_moments(state: dict) -> dict:
  """Returns the state with 8-bit noise in the place of moments of zeros."""

  def filled(leaf):
    if leaf.dtype.itemsize != 1 or leaf.dtype == jnp.bool:
      return leaf
    key = jax.random.key(leaf.size)
    return jax.random.normal(key, leaf.shape, jnp.bfloat16).astype(leaf.dtype)

  moments = jax.jit(lambda tree: jax.tree.map(filled, tree))
  return state | {'opt_state': moments(state['opt_state'])}


def anew(leaf: jax.Array) -> jax.Array:
  """Returns a copy in the place of an array.

  An array keeps what of it has once been on the host, and the next save would
  find it there.
  """
  copy = jax.block_until_ready(jnp.copy(leaf))
  leaf.delete()
  return copy


def sampler(policy, mesh, params: PolicyParams) -> Callable[[], int]:
  """Returns a function that samples answers and returns how many tokens."""
  new, slots = _TOKENS.value, 64
  config = EngineConfig(
      num_slots=slots,
      max_prompt_length=128,
      max_response_length=new,
      stop_ids=(),
  )
  engine = Engine(policy, config, mesh)
  prompts = common.random_prompts(slots, 128, policy.model.vocab_size)

  def sample() -> int:
    found = rollout(
        engine,
        params,
        prompts,
        num_generations=1,
        temperature=1.0,
        base_key=rng.key(0, rng.ROLLOUT, 0),
        weight_version=0,
    )
    return sum(len(c.tokens) for c in found)

  return sample


def measured(
    variant: str, state, folder: pathlib.Path, sample: Callable[[], int]
) -> dict:
  """Returns the row of one set of options.

  Args:
    variant: one of `_VARIANTS`.
    state: what a checkpoint holds.
    folder: where to save; empty again behind it.
    sample: what the run does meanwhile.
  """
  like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
  )
  options, at_a_time = _VARIANTS[variant]
  with mock.patch.dict(checkpoint_manager.ORBAX_OPTIONS, options):
    manager = CheckpointManager(folder, keep_latest=1, keep_best=0)
  with contextlib.ExitStack() as stack:
    memory = stack.enter_context(HostMemory())
    name = 'on_host' if at_a_time is None else 'AT_A_TIME'
    new = (lambda named: named) if at_a_time is None else at_a_time
    stack.enter_context(mock.patch.object(checkpoint_arrays, name, new))
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
    times: list[float] = []
    start, busy = time.perf_counter(), time.process_time()
    manager.save(0, state, {}, metric=None)
    waited = pool.submit(manager.wait_for_copy)
    waited.add_done_callback(lambda _: times.append(time.perf_counter()))
    beside = common.seconds(sample)
    waited.result()
    manager.wait()
    saved = time.perf_counter() - start
    busy = time.process_time() - busy
  manager.close()
  files = [path for path in folder.rglob('*') if path.is_file()]
  row = {
      'variant': variant,
      'state_gib': sum(x.nbytes for x in jax.tree.leaves(state)) / 2**30,
      'copied_s': times[0] - start,
      'beside_s': beside,
      'saved_s': saved,
      'processor_s': busy,
      'host_gib': memory.grown_gib,
      'disk_gib': sum(path.stat().st_size for path in files) / 2**30,
  }
  start = time.perf_counter()
  restored = checkpoint.restore(folder, like)
  assert restored is not None
  jax.block_until_ready(restored.state)
  row['restored_s'] = time.perf_counter() - start
  pairs = zip(
      jax.tree.leaves(state), jax.tree.leaves(restored.state), strict=True
  )
  row['unequal'] = sum(bool(_differ(a, b)) for a, b in pairs if a.size)
  shutil.rmtree(folder)
  return row


def main(_) -> None:
  """Measures every variant."""
  if unknown := set(_CHOSEN.value) - set(_VARIANTS):
    raise ValueError(f'--variants has {unknown}; allowed: {list(_VARIANTS)}')
  policy, mesh, make = common.random_policy(
      _SHAPE.value,
      {'model.master_dtype': _MASTERS.value},
      _LAYERS.value,
  )
  state = common.random_state(policy, mesh, make())
  params = PolicyParams(state.weights, jax.tree.map(jnp.copy, state.fp8_state))
  sample = sampler(policy, mesh, params)
  sample()  # Compiles.
  state = with_moments(states.without_weights(state))
  jax.block_until_ready(state)
  rows = []
  with tempfile.TemporaryDirectory() as folder:
    for name in _CHOSEN.value:
      alone = common.seconds(sample)
      saved = pathlib.Path(folder, 'saved')
      rows.append({'alone_s': alone} | measured(name, state, saved, sample))
      state = jax.tree.map(anew, state)
  common.write(rows, {}, common.table(rows, _COLUMNS))


if __name__ == '__main__':
  common.run(main)
