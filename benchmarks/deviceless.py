"""Compiles decode step, update or optimiser for a GPU that is not there.

    pip install jax-cuda13-plugin jax-cuda13-pjrt   # of jax's own version
    export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1  # Without CUDA's own libraries.
    python -m benchmarks.deviceless --program=decode --variant=fp8_delayed

Prints the kernels of the compiled program, each with the time that its bytes
alone would take, and XLA's memory analysis: enough to see stray transposes,
what was fused and how many kernels are launched, before time on a device is
spent. Nothing runs, so it says nothing about speed or bits. --dump=FOLDER
keeps the PTX, which ptxas and nvdisasm turn into machine code. An update may be
one of several devices, --data=2, and a decode step too, --tensor=2: then what a
device receives of the others is printed. --gpu names other GPUs than an H200:
whether our kernels compile there, and find room in their shared memory.
"""

import dataclasses
import functools
import os
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import common
from benchmarks.absent_gpus import (
    GPUS,
    kernels,
    mesh_of,
    received,
    state_of,
    update_arguments,
)
from jetrl_jax.core import collectives, compilation, rng, sharding
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels import dispatch
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.apply import Apply, Gradients
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.buckets import STEPS_PER_SYNC
from jetrl_jax.rl.rollout.engine import EngineConfig
from jetrl_jax.rl.rollout.kv_pages import PagesConfig
from jetrl_jax.rl.run.calibration import Calibration
from jetrl_jax.rl.run.gradients import UpdatePrograms

_PROGRAM = flags.DEFINE_enum(
    'program', 'decode', ['decode', 'update', 'apply'], 'Which.'
)
_ROUNDING = flags.DEFINE_enum(
    'rounding', 'nearest', ['nearest', 'stochastic'], 'Of bfloat16 masters.'
)
_VARIANT = flags.DEFINE_string('variant', 'fp8_delayed', 'As in rollout.py.')
_SHAPE = flags.DEFINE_string('shape', 'qwen2.5-7b', 'See model.shape.')
_LAYERS = flags.DEFINE_integer('layers', 2, 'Of the model.')
_ROWS = flags.DEFINE_integer('rows', 128, 'Slots, or rows of the micro-batch.')
_TOKENS = flags.DEFINE_integer('tokens', 2048, 'Of a response, or of a row.')
_REMAT = flags.DEFINE_string('remat', 'full', 'See model.remat.')
_MASTERS = flags.DEFINE_enum(
    'masters', 'bfloat16', ['bfloat16', 'float32'], 'Their dtype.'
)
_DATA = flags.DEFINE_integer('data', 1, 'See mesh.data; of an update.')
_FSDP = flags.DEFINE_integer('fsdp', 1, 'See mesh.fsdp; of an update.')
_TENSOR = flags.DEFINE_integer(
    'tensor', 1, 'See mesh.tensor; of an update or a decode step.'
)
_CALIBRATES = flags.DEFINE_bool(
    'calibrates', False, "A cold start's backward pass as the update."
)
_XLA_ORDER = flags.DEFINE_bool(
    'xla_order', False, 'Of several devices: as XLA hides waits by itself.'
)
_OVERLAP = flags.DEFINE_bool('overlap', False, 'See mesh.overlap.')
_WHOLE_GRADIENTS = flags.DEFINE_bool(
    'whole_gradients', False, 'See mesh.whole_gradients.'
)
_MOMENTS = flags.DEFINE_enum(
    'moments', 'fp8', ['fp8', 'float32'], 'See optim.moments.'
)
_DUMP = flags.DEFINE_string('dump', '', 'Folder for PTX and HLO.')
_PAGE = 128


_GPU = flags.DEFINE_enum('gpu', 'H200', list(GPUS), 'Which.')


def _decode(policy, state):
  """Returns the traced block of decode steps."""
  params: Any = PolicyParams(state.weights, state.fp8_state)
  batch, new = _ROWS.value, _TOKENS.value
  config = EngineConfig(
      num_slots=batch,
      max_prompt_length=_PAGE,
      max_response_length=new,
      stop_ids=(),
  )
  per_slot = new // _PAGE + 1
  pages = PagesConfig(
      num_slots=batch,
      num_devices=1,
      pages_per_device=batch * per_slot,
      page_size=_PAGE,
      pages_per_slot=per_slot,
  )
  state = jax.eval_shape(lambda: decode_states.idle(policy, config, pages))
  key = jax.eval_shape(lambda: rng.key(0, rng.ROLLOUT, 0))
  steps = jax.ShapeDtypeStruct((), jnp.int32)
  mesh = mesh_of(_GPU.value, tensor=_TENSOR.value)
  params_spec: Any = P()
  state_spec, _ = decode_states.specs(policy.axes.kv_spec)
  if policy.axes.tensor > 1:
    params_spec = policy.placed_specs(params)
    params = policy.replicated_shapes(params, mesh)
  specs = params_spec, state_spec, P(), P()
  placed = policy.placed()
  made = policy.jit_per_device(
      functools.partial(decode_step.generate, placed, config, STEPS_PER_SYNC),
      mesh,
      specs,
      state_spec,
      donate_argnums=(1,),
  )
  arguments = params, state, key, steps
  return made.trace(
      *(_at(x, spec, mesh) for x, spec in zip(arguments, specs, strict=True))
  )


def _at(tree, specs, mesh):
  """Returns shapes with shardings; `specs` may end before the tree does."""

  def part(spec, leaves):
    where = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), leaves
    )

  is_spec = {'is_leaf': lambda node: isinstance(node, P)}
  return jax.tree.map(part, specs, tree, **is_spec)


def _update(policy, state):
  """Returns the traced pass over one micro-batch."""
  mesh = mesh_of(_GPU.value, _DATA.value, _FSDP.value, _TENSOR.value)
  axes = collectives.axes_of(
      mesh, overlap=_OVERLAP.value, whole_gradients=_WHOLE_GRADIENTS.value
  )
  policy = dataclasses.replace(policy, axes=axes)
  state, batch, temperature = update_arguments(
      state, mesh, _ROWS.value, _TOKENS.value
  )
  if _CALIBRATES.value:
    observe = Calibration(policy, mesh, state).observe
    return observe.trace(state, batch, temperature)
  loss = functools.partial(policy_loss, LossConfig())
  step = UpdatePrograms(
      policy, loss, optax.identity(), OptimizerConfig(), mesh, state
  )
  gradients = step.gradient_shapes(state)
  return step.accumulate.trace(state, gradients, batch, temperature)


def _apply(policy) -> None:
  """Prints what the programs of an optimiser step launch, move and keep."""
  config = OptimizerConfig(
      master_rounding=_ROUNDING.value, moments=_MOMENTS.value
  )
  optimizer = config.build()
  mesh, state = mesh_of(_GPU.value), state_of(policy, _MASTERS.value, optimizer)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  gradients = Gradients(
      trainable=state.trainable,
      fp8=jax.eval_shape(scaling_state.stack_observations, state.fp8_state),
      metrics={'actor/pg_loss': Mean(sum=scalar, weight=scalar)},
  )
  state, gradients = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=NamedSharding(mesh, P())
      ),
      (state, gradients),
  )
  step = Apply(policy, optimizer, config, mesh, state)
  rows = []
  for name, calls, lowered in step.lowered(state, gradients):
    program = lowered.compile()
    found = kernels(program.as_text(), 'ENTRY')
    rows.append(
        {
            'program': name,
            'calls': calls,
            'kernels': len(found),
            'us': sum(row['us'] for row in found),
            'mb': program.memory_analysis().temp_size_in_bytes / 1e6,
        }
    )
  columns = (('program', 'program', ''), ('calls', 'calls', ''))
  columns += (('kernels', 'kernels', ''), ('us', 'us of bytes', '.1f'))
  columns += (('mb', 'temporary MB', '.1f'),)
  print(common.table(rows, columns))


def compiled(trace):
  """Returns the executable of what is traced; prints how long it took."""
  start = time.monotonic()
  traced = trace()
  middle = time.monotonic()
  lowered = traced.lower()
  end = time.monotonic()
  program = lowered.compile()
  print(
      f'traced in {middle - start:.1f} s, lowered in {end - middle:.1f} s,'
      f' compiled in {time.monotonic() - end:.1f} s'
  )
  return program


def main(argv: list[str]) -> None:
  """Compiles and prints."""
  del argv
  if _DUMP.value:
    os.environ['XLA_FLAGS'] = (
        f'--xla_dump_to={_DUMP.value} --xla_dump_emitter_re=.*'
    )
  settings = common.overrides(_VARIANT.value) | {'model.remat': _REMAT.value}
  # The CPU at hand would refuse them.
  asked = settings.pop('kernels', 'auto')
  policy, _, _ = common.random_policy(_SHAPE.value, settings, _LAYERS.value)
  sharding.make_mesh()  # The devices at hand are asked before the pretence.
  capability = GPUS[_GPU.value].capability
  hardware = dispatch.Hardware('gpu', capability, dispatch.has_mosaic())
  policy = dataclasses.replace(
      policy,
      kernels=dispatch.select(asked, hardware=hardware),
      axes=collectives.Axes(tensor=_TENSOR.value),
  )
  order = {'gpu': {}} if _XLA_ORDER.value else {}
  with (
      mock.patch.dict(compilation._IN_ORDER, order),
      mock.patch.object(jax, 'default_backend', lambda: 'gpu'),
  ):
    if _PROGRAM.value == 'apply':
      _apply(policy)
      return
    state = state_of(policy, _MASTERS.value, optax.identity())
    if _PROGRAM.value == 'decode':
      program = compiled(lambda: _decode(policy, state))
    else:
      program = compiled(lambda: _update(policy, state))
  text = program.as_text()
  rows = kernels(text)
  columns = (('us', 'us of bytes', '.1f'), ('kernel', 'kernel', ''))
  columns += (('shape', 'writes', ''), ('from', 'from', ''))
  print(common.table(rows, columns))
  print(
      f'{len(rows)} kernels, {sum(row["us"] for row in rows):.0f} us of bytes'
  )
  print(program.memory_analysis())
  devices = _DATA.value * _FSDP.value * _TENSOR.value
  if devices > 1:
    rows = received(text, devices)
    columns = ('op', 'collective', ''), ('mb', 'MB received', '.3f')
    columns += ('shape', 'result', ''), ('from', 'from', '')
    print(common.table(rows, columns))
    total = sum(row['mb'] for row in rows)
    print(f'{len(rows)} collectives, {total:.3f} MB received')


if __name__ == '__main__':
  app.run(main)
