"""What every test runs under: CPU, eight virtual devices, checked shapes."""

import os
import pathlib
import re
import shutil
import sys
import tempfile

import hypothesis
import pytest

_ROOT = pathlib.Path(__file__).parent.parent
# Marks of what takes long, each with a switch: seconds, and minutes.
_LONG = ('slow', 'soak')
# Seconds for a slow test, which on a loaded machine may take many minutes.
_SLOW_TIMEOUT_S = 1200
# An array's shape in a signature: Float[Array, 'B T'].
_SHAPE = re.compile(r'\b(Bool|Float|Int|Shaped|UInt8)\[')

# The same examples in every run, and no limit per example: the first one
# compiles. Whole tests have pytest-timeout's limit.
hypothesis.settings.register_profile(
    'tests', deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile('tests')


def pytest_addoption(parser):
  """Adds the switches for tests that are skipped by default."""
  for mark in _LONG:
    parser.addoption(
        f'--run-{mark}', action='store_true', help=f'run tests marked {mark}'
    )
  parser.addoption(
      '--soak-minutes',
      type=float,
      default=float('inf'),
      help='after so many no further kill of a run is begun',
  )
  parser.addoption(
      '--run-gpu',
      action='store_true',
      help='leave the platform to JAX and run the tests marked gpu',
  )


def pytest_configure(config):
  """Sets the platform, then hooks the type checker; JAX reads them once."""
  if not config.getoption('--run-gpu'):
    os.environ['JAX_PLATFORMS'] = 'cpu'
    # For the sharded tests. One-device tests use the first of the eight.
    os.environ['XLA_FLAGS'] = ' '.join(
        [
            os.environ.get('XLA_FLAGS', ''),
            '--xla_force_host_platform_device_count=8',
        ]
    ).strip()
  _share_compiled(config)
  _hook_type_checker()

  import jax

  # A vector that silently broadcasts against a matrix is a wrong loss.
  jax.config.update('jax_numpy_rank_promotion', 'raise')


def _share_compiled(config):
  """Lets every process of one test run take what another has compiled.

  Compiling is what the tests cost. The workers of pytest-xdist meet the same
  programs, and so do the commands that tests start; the settings are those of
  `compilation.keep_compiled`, and reach all of them through the environment.
  An executable is taken only by a program, options and devices equal to those
  that it was compiled for, so this changes no bit. The folder is empty when a
  run starts, and gone when it ends, unless JAX_COMPILATION_CACHE_DIR names one:
  that is kept, and the next run takes from it.
  """
  # A process that is killed while it writes leaves a part of an executable,
  # and so does one that still writes: JAX says so and compiles.
  config.addinivalue_line(
      'filterwarnings',
      'ignore:Error reading persistent compilation cache entry',
  )
  if hasattr(config, 'workerinput'):  # Has the environment of the first one.
    return
  folder = os.environ.get('JAX_COMPILATION_CACHE_DIR')
  if folder:
    folder = os.path.abspath(folder)
  else:
    folder = tempfile.mkdtemp(prefix='jetrl_jax_compiled_')
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
  os.environ |= {
      'JAX_COMPILATION_CACHE_DIR': folder,
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
      'JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES': 'none',
  }
  _keep_bytecode(os.path.join(folder, 'python'))


def _keep_bytecode(folder):
  """Writes the bytecode of modules there, where it would be written nowhere.

  Containers often set PYTHONDONTWRITEBYTECODE. Every process then compiles all
  that it imports, JAX and plotly among it: 8 s of CPU instead of 3 for a run.
  """
  if sys.dont_write_bytecode and not sys.pycache_prefix:
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
    os.environ['PYTHONPYCACHEPREFIX'] = folder
    sys.dont_write_bytecode, sys.pycache_prefix = False, folder


def _hook_type_checker():
  """Checks the array shapes of jetrl_jax's public functions at every call.

  The pytree dataclasses in the types.py files stay outside: `jax.tree.map`
  puts other things than arrays into their fields. So do modules without a
  shape: being checked costs every call 50 us, and walking the operations of a
  step makes a million.
  """
  import jaxtyping

  import tests.typecheck  # noqa: F401  The hook finds it by this name.

  modules = [
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
      for path in sorted((_ROOT / 'jetrl_jax').rglob('*.py'))
      if path.name != 'types.py' and _SHAPE.search(path.read_text())
  ]
  # An operation's signature is its package's: with all that is in it.
  modules = [module.removesuffix('.__init__') for module in modules]
  jaxtyping.install_import_hook(modules, 'tests.typecheck.check_arrays')


def pytest_collection_modifyitems(config, items):
  """Skips long and gpu tests with the switch that would run them.

  Slow tests get a longer limit than the others, unless they have their own.
  Those that have one take longest, so they come first: at the end one worker
  would wait for the other.
  """
  import jax

  from jetrl_jax.kernels import dispatch

  gpu = config.getoption('--run-gpu') and jax.default_backend() == 'gpu'
  if config.getoption('--run-slow'):
    items.sort(key=lambda item: not item.get_closest_marker('timeout'))
  for item in items:
    for mark in _LONG:
      if mark in item.keywords and not config.getoption(f'--run-{mark}'):
        item.add_marker(pytest.mark.skip(reason=f'needs --run-{mark}'))
    if 'slow' in item.keywords and not item.get_closest_marker('timeout'):
      item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))
    if 'mosaic' in item.keywords and not dispatch.has_mosaic():
      item.add_marker(pytest.mark.skip(reason='this jax has no such backend'))
    if 'gpu' in item.keywords and not gpu:
      item.add_marker(pytest.mark.skip(reason='needs --run-gpu and a GPU'))
