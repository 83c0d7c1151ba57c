"""The compile cache: a second start compiles nothing and has the same bits."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from jetrl_jax.core import compilation
from tests import whole_run

# Runs the command and tells how often JAX compiled, and how. Of many cores some
# compile programs before they are called.
_COUNTED = """
import collections, json, os, runpy, sys
cores = int(sys.argv.pop(1))
os.cpu_count = lambda: cores
import jax
counts = collections.Counter()
def count(event, *_, **__):
  counts[event] += 1
jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(count)
try:
  runpy.run_module('jetrl_jax.main', run_name='__main__', alter_sys=True)
finally:
  print('\\n' + json.dumps(counts))
"""
_CACHE = '/jax/compilation_cache/'


def _run(cores: int, *arguments: str) -> dict[str, int]:
  environment = os.environ | {'PYTHONPATH': str(whole_run.ROOT)}
  done = subprocess.run(
      [sys.executable, '-c', _COUNTED, str(cores), *arguments],
      cwd=whole_run.home(),
      env=environment,
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def _start(workdir: pathlib.Path, cores: int = 2) -> dict[str, int]:
  return _run(
      cores,
      f'--config={whole_run.ROOT}/tests/tiny_config.py',
      f'--config.compile_cache_dir={os.environ["JAX_COMPILATION_CACHE_DIR"]}',
      f'--workdir={workdir}',
  )


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_has_the_same_bits(tmp_path):
  # Compiled in this process, or if another test came first, by that one.
  compiled = whole_run.finished()
  # Adds what only a process of the command compiles.
  first = _start(tmp_path / 'first')
  # Other threads compile what this one would have compiled, and no more.
  counts = _start(tmp_path / 'second', cores=8)
  # Every program of the process was asked for in the cache and found there.
  programs = counts['/jax/core/compile/backend_compile_duration']
  assert programs > 30
  assert programs == first['/jax/core/compile/backend_compile_duration']
  assert counts[_CACHE + 'compile_requests_use_cache'] == programs
  assert counts[_CACHE + 'cache_hits'] == programs
  assert _CACHE + 'cache_misses' not in counts
  assert whole_run.outcome(tmp_path / 'second') == whole_run.outcome(compiled)


def test_no_folder_changes_nothing():
  before = jax.config.jax_compilation_cache_dir
  compilation.keep_compiled('')
  assert jax.config.jax_compilation_cache_dir == before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match=r"compile_cache_dir: .* or '' for none"):
    compilation.keep_compiled(tmp_path / 'file' / 'cache')
  with pytest.raises(ValueError, match='^~runs/x: there is no such home'):
    compilation.keep_compiled('~runs/x')
