"""One run of benchmarks/scaling.py, in each of its processes.

    step         steps of the trainer; the first and the third have short
                 answers: one compiles, the other is profiled, and the second is
                 timed. Without --short all are whole and none is profiled
    prepare      compiles what a run compiles, for its cache; memory by the dry
                 run's estimate
    collectives  times what devices send each other in an update
    restore      reads a run's newest checkpoint and hashes what it holds

Facts go to <workdir>/facts_<rank>.json.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from benchmarks import common, launch
from jetrl_jax.config import build as configs
from jetrl_jax.config import flags as config_flags
from jetrl_jax.config.model import SHAPES
from jetrl_jax.core import collectives, compilation, processes, sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.dry_run import memory
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.rl import synthetic
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import calibration, mixed_flow, train_state
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.training.learner import Learner
from jetrl_jax.rl.training.trainer import Trainer
from jetrl_jax.rl.types import TrainBatch

config_flags.define()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Of the run.', required=True)
_WHAT = flags.DEFINE_enum(
    'what', 'step', ['step', 'prepare', 'collectives', 'restore'], 'See above.'
)
_SHORT = flags.DEFINE_integer('short', 0, 'Tokens of short answers.')
_LAYERS = flags.DEFINE_integer('layers', 0, "Of model.shape's; 0 for all.")
_ROWS = flags.DEFINE_integer('rows', 37888, 'Of the weight that is sent.')
_COLUMNS = flags.DEFINE_integer('columns', 3584, 'The same.')

_PROFILED = 'gen', 'old_log_prob', 'update_actor', 'update_weights'
_COMPILING = 6  # threads, on a machine of few cores too
# Of JAX: one for each program that is compiled or found in the cache.
_COMPILED = '/jax/core/compile/backend_compile_duration'
_CACHE = '/jax/compilation_cache/cache_'


class _Timer(Timer):
  """Notes compilations by step, and profiles the phases of one step.

  Args:
    folder: for the profiles.
    profiled: the step; 0 for none.
  """

  def __init__(self, folder: pathlib.Path, profiled: int):
    super().__init__()
    self._folder, self._profiled = folder, profiled
    # The line of step 0 is a step of its own.
    self.step = 0
    self.compiled: dict[int, float] = {}
    self.cache = collections.Counter[str]()
    jax.monitoring.register_event_duration_secs_listener(self._took)
    jax.monitoring.register_event_listener(self._happened)

  def _took(self, event: str, duration_secs: float, **kwargs: Any) -> None:
    if event == _COMPILED:
      before = self.compiled.get(self.step, 0.0)
      self.compiled[self.step] = before + duration_secs

  def _happened(self, event: str, **kwargs: Any) -> None:
    if event.startswith(_CACHE):
      self.cache[event.removeprefix(_CACHE)] += 1

  @contextlib.contextmanager
  def __call__(self, phase: str):
    if self._profiled != self.step or phase not in _PROFILED:
      with super().__call__(phase):
        yield
      return
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    folder = str(self._folder / phase)
    # What a profile takes to be written is not the phase's.
    with (
        processes.slow(phase),
        jax.profiler.trace(folder, profiler_options=options),
    ):
      with super().__call__(phase):
        yield

  def take(self) -> dict[str, float]:
    self.step += 1
    return super().take()


def _make_short(tokens: int) -> None:
  """Makes the answers of every step but the second one short."""
  limits = synthetic.response_limits

  def shortened(seed, step, prompts, samples, maximum, lengths):
    longest = maximum if step == 1 else min(tokens, maximum)
    found = limits(seed, step, prompts, samples, maximum, lengths)
    # In proportion, so that as many slots as ever run at the end.
    return np.maximum(1, found * longest // maximum)

  synthetic.response_limits = shortened


def _step(spec: RunSpec, workdir: pathlib.Path) -> dict[str, Any]:
  if _SHORT.value:
    _make_short(_SHORT.value)
  # Its own for each process: a profile is named by host and second.
  profiles = workdir / f'profile_{processes.rank()}'
  timer = _Timer(profiles, 3 if _SHORT.value else 0)
  trainer = Trainer(spec, workdir)
  trainer.timer = timer
  trainer.train()
  stats = [device.memory_stats() or {} for device in jax.local_devices()]
  peaks = [found.get('peak_bytes_in_use', 0) / 2**30 for found in stats]
  return {
      'peaks_gib': [peak for peak in peaks if peak],
      'compiled_s': timer.compiled,
      'cache': dict(timer.cache),
      'kernels': {
          phase: common.gpu_seconds(profiles / phase) for phase in _PROFILED
      },
  }


def _prepare(spec: RunSpec) -> dict[str, Any]:
  found = memory.shapes(spec)
  sizes = memory.ledger(spec, found)
  phases = memory.estimated_phases(spec, found, sizes)
  # What a run lowers: the keys of the cache depend on it.
  state, batch = found.state, TrainBatch.of_shapes(*spec.batch_shape)
  with (
      processes.slow('compiling'),
      contextlib.closing(CompileAhead(_COMPILING)) as ahead,
  ):
    loss = functools.partial(policy_loss, spec.loss)
    engine = Engine(spec.rollout_policy, spec.engine, spec.mesh)
    learner = Learner(spec, loss, state, Timer())
    calibration.ColdStart(spec, state).compile_ahead(ahead, state, batch)
    lengths = [len(prompt.tokens) for prompt in spec.train_set]
    engine.compile_ahead(ahead, mixed_flow.rollout_params(state), lengths)
    learner.compile_ahead(ahead, state)
    ahead.wait()
  return {
      'ledger': {name: count / 2**30 for name, count in sizes.items() if count},
      'phases': {phase.name: phase.total / 2**30 for phase in phases},
  }


def _collectives(spec: RunSpec) -> dict[str, Any]:
  mesh, axes = spec.mesh, collectives.axes_of(spec.mesh)
  rows, columns, stored = _ROWS.value, _COLUMNS.value, sharding.FSDP
  others = (axes.size - 1) / axes.size

  def numbers():
    row_R = jnp.arange(rows, dtype=jnp.float32)[:, None]
    return 1e-3 * row_R * jnp.ones((1, columns), jnp.float32)

  def on(dtype, where):
    there = jax.NamedSharding(mesh, where)
    return jax.jit(lambda: numbers().astype(dtype), out_shardings=there)()

  def scaled(x):  # Each device has numbers of its own.
    return x * (1.0 + 0.1 * axes.index())

  def scattered(x):
    return axes.reduce_scatter(scaled(x), rows // axes.fsdp, rows)

  whole, split = jax.P(), jax.P(stored)
  cases = {
      'sum, float32': (
          lambda x: axes.psum(scaled(x)),
          jnp.float32,
          whole,
          whole,
          8 * others,
      ),
  }
  if axes.fsdp > 1:
    cases |= {
        'gather, 8 bits': (
            lambda x: axes.gather(x, rows),
            jnp.uint8,
            split,
            whole,
            others,
        ),
        'sum and scatter, float32': (
            scattered,
            jnp.float32,
            whole,
            split,
            4 * others,
        ),
    }
  times = {}
  for name, (function, dtype, before, after, sent) in cases.items():
    each = sharding.per_device(function, mesh, (before,), after)
    run, x = compilation.exact_jit(each), on(dtype, before)
    seconds = common.median_seconds(lambda run=run, x=x: run(x), 10)
    times[name] = {
        'mib': rows * columns * jnp.dtype(dtype).itemsize / 2**20,
        'ms': seconds * 1e3,
        'gb_s': rows * columns * sent / seconds / 1e9,
        'hash': launch.sha(sharding.to_host(run(x)))[:12],
    }
  return {'collectives': times}


def _restore(spec: RunSpec, workdir: pathlib.Path) -> dict[str, Any]:
  found = initialize.read(spec, workdir)
  assert found is not None
  state = train_state.without_weights(found.state)
  hosted = jax.tree.map(sharding.to_host, state)
  return {'step': found.step, 'state': launch.hashes(hosted)}


def main() -> None:
  """Does what --what says and writes the facts."""
  config: configs.Config = config_flags.load()
  workdir = pathlib.Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  compilation.keep_compiled(config.compile_cache_dir)
  if _LAYERS.value:
    for name, shape in SHAPES.items():
      SHAPES[name] = dataclasses.replace(shape, num_layers=_LAYERS.value)
  spec = configs.build(config)
  match _WHAT.value:
    case 'step':
      facts = _step(spec, workdir)
    case 'prepare':
      facts = _prepare(spec)
    case 'collectives':
      facts = _collectives(spec)
    case _:
      facts = _restore(spec, workdir)
  facts['device'] = jax.devices()[0].device_kind
  file = workdir / f'facts_{processes.rank()}.json'
  file.write_text(json.dumps(facts))


if __name__ == '__main__':
  config_flags.run(main, several=True)
