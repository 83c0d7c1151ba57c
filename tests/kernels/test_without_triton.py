"""A jax that has lost Pallas' Triton backend: all runs, by the references."""

import importlib.abc
import pathlib
import pkgutil
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_BACKEND = 'jax.experimental.pallas.triton'


class _Gone(importlib.abc.MetaPathFinder):
  """Finds nothing under the backend's name, and says so at once."""

  def find_spec(self, fullname, path=None, target=None):
    del path, target
    if fullname.startswith((_BACKEND, 'jax._src.pallas.triton')):
      raise ModuleNotFoundError(f'No module named {fullname!r}', name=fullname)
    return None


def _import_everything() -> None:
  """Imports the package, its largest command and every operation."""
  import jetrl_jax.kernels
  import jetrl_jax.main

  package = jetrl_jax.kernels
  for module in pkgutil.walk_packages(package.__path__, 'jetrl_jax.kernels.'):
    if not module.name.rpartition('.')[2].startswith('triton'):
      importlib.import_module(module.name)
  assert 'jetrl_jax.kernels.adamw' in sys.modules and jetrl_jax.main.main
  assert _BACKEND not in sys.modules


def _check_choice() -> None:
  from jetrl_jax.kernels import dispatch

  assert not dispatch.has_triton()
  for has_mosaic in (False, True):
    hopper = dispatch.Hardware('gpu', (9, 0), False, has_mosaic)
    chosen = dict(dispatch.select('auto', hopper).chosen)
    allowed = {'reference', *(['mosaic_sm90'] if has_mosaic else [])}
    assert set(chosen.values()) == allowed and chosen.keys()
    lacks = "Pallas' Triton backend" in dispatch.why_none(hopper)
    assert lacks is not has_mosaic


def _check_bits() -> None:
  """A rollout's log-probs and training's, of a tiny policy."""
  import jax.numpy as jnp
  import numpy as np

  from jetrl_jax.fp8 import Recipe
  from tests.models import build

  recipe, tokens = Recipe(), build.tokens(16, 32)
  trees, temperature = build.trees('qwen2', recipe), jnp.float32(0.9)
  decoded = build.compiled_decode('qwen2', recipe)(
      trees.weights, trees.state, tokens, temperature
  )
  scored = build.compiled_forward('qwen2', recipe)(
      trees.weights, trees.state, tokens, build.unpacked(tokens), temperature
  )
  assert np.all(np.isfinite(decoded)) and np.any(decoded)
  np.testing.assert_array_equal(decoded[:, :-1], scored[:, :-1])


def _main() -> None:
  sys.meta_path.insert(0, _Gone())
  try:
    importlib.import_module(_BACKEND)
    raise AssertionError('the backend is still there')
  except ImportError:
    pass
  _import_everything()
  _check_choice()
  _check_bits()


def _run(code: str) -> None:
  done = subprocess.run(
      [sys.executable, '-W', 'error', '-c', code],
      cwd=_ROOT,
      capture_output=True,
      text=True,
  )
  assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_the_backend_all_runs_and_rollout_and_training_agree():
  _run('from tests.kernels import test_without_triton as t; t._main()')


def test_with_it_nothing_imports_it_where_no_kernel_runs():
  _run(
      'from tests.kernels import test_without_triton as t;'
      ' t._import_everything(); t._check_bits();'
      f' import sys; assert {_BACKEND!r} not in sys.modules'
  )
