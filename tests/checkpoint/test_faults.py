"""Kills, flipped bits and lost files: a restore is exact, or an older one."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.checkpoint import restore
from jetrl_jax.checkpoint.manager import CheckpointManager
from tests.checkpoint.saver import host_state_of, state_of


def _like(state):
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      state,
  )


def _assert_exact(restored, state, host_state):
  assert restored.host_state == host_state
  for name, expected in state.items():
    found = np.asarray(restored.state[name])
    assert found.tobytes() == np.asarray(expected).tobytes(), name


@pytest.mark.parametrize(
    'kills', [6, pytest.param(200, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(3600)
def test_sigkill_at_any_instant_loses_nothing_that_was_durable(tmp_path, kills):
  generator = np.random.default_rng(20)
  like = _like(state_of(0))
  saver = subprocess.Popen(
      [sys.executable, '-m', 'tests.checkpoint.saver', str(tmp_path)],
      cwd=pathlib.Path(__file__).parents[2],
      env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
  )
  leftovers, newest = 0, -1
  with saver:
    for _ in range(kills):
      saver.stdin.write(f'{generator.uniform(0, 4):.6f}\n')
      saver.stdin.flush()
      durable = int(saver.stdout.readline())
      leftovers += any(tmp_path.glob('.[sd]*'))
      restored = restore.restore(tmp_path, like)
      found = -1 if restored is None else restored.step
      assert found >= max(durable, newest)
      newest = found
      if restored is not None:
        # Nothing that exists is ever half there.
        assert restored.skipped == ()
        _assert_exact(restored, state_of(found), host_state_of(found))
    saver.stdin.close()
  assert newest > 0
  # Kills between two saves would prove nothing.
  assert leftovers > kills // 4


def _mutations(folder, other, generator, count):
  """Changes `folder` in one way, yields what, undoes it; `count` times."""
  files = sorted(p for p in folder.rglob('*') if p.is_file())
  others = sorted(p for p in other.rglob('*') if p.is_file())
  for _ in range(count):
    path = files[generator.integers(len(files))]
    content = path.read_bytes()
    kind = ('flip', 'flip', 'truncate', 'swap', 'lose', 'zero')[
        generator.integers(6)
    ]
    partner = None
    at = int(generator.integers(len(content)))
    match kind:
      case 'flip':
        changed = bytearray(content)
        changed[at] ^= 1 << generator.integers(8)
      case 'truncate':
        changed = content[:at]
      case 'zero':
        changed = content[:at] + bytes(len(content[at : at + 512]))
        changed += content[at + 512 :]
      case 'swap':
        pool = files if generator.integers(2) else others
        partner = pool[generator.integers(len(pool))]
        changed = partner.read_bytes()
      case 'lose':
        changed = None
    if changed == content:
      continue
    if changed is None:
      path.unlink()
    else:
      path.write_bytes(changed)
    if partner:
      partner.write_bytes(content)
    yield f'{kind} {path} at {at} with {partner}', path
    path.write_bytes(content)
    if partner:
      partner.write_bytes(changed)


@pytest.mark.parametrize(
    'count', [100, pytest.param(10_000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(3600)
def test_no_damaged_file_is_restored_silently(tmp_path, count):
  states = [
      {
          'values': jnp.asarray(np.full(40, s), jnp.float8_e4m3fn),
          'kernel': jnp.arange(50.0) * s,
          'step': jnp.int32(s),
      }
      for s in range(3)
  ]
  manager = CheckpointManager(tmp_path, keep_latest=3, keep_best=0)
  for step, state in enumerate(states):
    manager.save(step, state, {'position': step}, metric=None)
  manager.close()
  like = _like(states[0])
  victim, other = tmp_path / '2', tmp_path / '0'
  applied = harmless = 0
  mutations = _mutations(victim, other, np.random.default_rng(21), count)
  for what, path in mutations:
    restored = restore.restore(tmp_path, like)
    _assert_exact(restored, states[restored.step], {'position': restored.step})
    applied += 1
    if restored.step == 2:
      # White space in the manifest: the content is the same.
      assert path.name == 'manifest.json', what
      harmless += 1
    else:
      assert restored.step == 1, what
      assert restored.skipped == (2,), what
  assert applied > 0.9 * count
  assert harmless < 0.02 * count
