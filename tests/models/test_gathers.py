"""A decode step of devices that share sequences gathers by a kernel, if asked.

No CPU runs the kernel (tests/kernels/test_gather_columns.py has its program).
Here a step is traced as a GPU has it, or runs with a stand-in for the kernel.
"""

import dataclasses
import functools
import re
import types
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.dry_run import memory as dry_run_memory
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels import dispatch, gather_columns
from jetrl_jax.kernels.gather_columns import Workspace, mosaic_sm90
from jetrl_jax.models import tensor_parallel
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.engine import Engine
from tests import kernels_in_use, whole_run
from tests.models import gathers, tiny
from tests.rl import tiny_run

_ASKED = 'gather_columns=mosaic_sm90'
_LAYERS = 2


def _on_hopper(monkeypatch) -> dispatch.Kernels:
  kernels_in_use.as_on_hopper(monkeypatch)
  return dispatch.select(_ASKED, kernels_in_use.HOPPER)


def _engine(kernels, recipe=tiny_run.FP8, slots=32) -> Engine:
  """An engine whose devices share sequences in pairs."""
  mesh = sharding.make_mesh(data=2, tensor=2)
  of = gathers.policy(kernels, recipe, collectives.axes_of(mesh))
  return Engine(of, tiny_run.engine_config(num_slots=slots), mesh)


def _inside(jaxpr):
  """Yields all operations of a program."""
  for eqn in jaxpr.eqns:
    yield eqn
    for part in jax.tree.leaves(list(eqn.params.values())):
      part = getattr(part, 'jaxpr', part)
      if hasattr(part, 'eqns'):
        yield from _inside(part)


def _traced(engine: Engine, function, *per_slot):
  """Returns a block of decode steps, traced."""
  of, mesh = engine.policy, engine.mesh
  state = tiny_run.state_shapes(dataclasses.replace(of, axes=Axes()))
  params = PolicyParams(state.weights, state.fp8_state)
  engine._params_spec = of.placed_specs(params)
  program = engine._decode_program(function, 8, len(per_slot))
  return program.trace(
      of.replicated_shapes(params, mesh),
      engine._idle.eval_shape(),
      *per_slot,
      jax.eval_shape(lambda: rng.key(0, rng.ROLLOUT, 0)),
      np.int32(8),
  )


def _gathers(engine: Engine, function, *per_slot) -> Counter:
  """Counts gathers of a traced program: (how, what of a device)."""
  traced = _traced(engine, function, *per_slot)
  found = Counter()
  for eqn in _inside(traced.jaxpr.jaxpr):
    name = eqn.primitive.name
    if name == kernels_in_use.CALL:
      name = str(eqn.params.get('name'))
    if 'gather' in name and name != 'gather':
      found[name, str(eqn.invars[0].aval)] += 1
  return found


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize(
    'recipe, rows, adds',
    [
        (Recipe(), 'float8_e4m3fn', 'float32'),
        (Recipe(name='bf16'), 'bfloat16', 'bfloat16'),
    ],
)
def test_each_layer_of_a_decode_step_gathers_three_times(
    monkeypatch, recipe, rows, adds
):
  engine = _engine(_on_hopper(monkeypatch), recipe)
  expected = {
      ('gather_packets', f'{rows}[16,128]'): _LAYERS,  # What o reads.
      ('gather_packets', f'{rows}[16,512]'): _LAYERS,  # What down reads.
      ('gather_packets', f'{adds}[16,256]'): _LAYERS,  # What down adds.
      # The logits of 16 slots are too few to be exchanged.
      ('all_gather', 'float32[16,64]'): 1,
  }
  assert _gathers(engine, decode_step.generate) == expected
  some = np.arange(32, dtype=np.int32)
  assert _gathers(engine, decode_step.generate_compacted, some) == expected


# Mosaic finds layouts when it lowers. The shapes are those of tests/gpu.
@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('recipe', [tiny_run.FP8, tiny_run.BF16])
def test_a_step_s_kernels_are_lowered_for_a_gpu(monkeypatch, recipe):
  engine = _engine(_on_hopper(monkeypatch), recipe)
  traced = _traced(engine, decode_step.generate)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert text.count('mosaic_gpu') > 7


@kernels_in_use.needs_mosaic
def test_xla_gathers_where_the_kernel_is_not_asked_for(monkeypatch):
  _on_hopper(monkeypatch)
  engine = _engine(dispatch.automatic())
  assert engine._idle.eval_shape().workspace is None
  found = _gathers(engine, decode_step.generate)
  assert {name for name, _ in found} == {'all_gather'}
  assert sum(found.values()) == 3 * _LAYERS + 1


@kernels_in_use.needs_mosaic
@pytest.mark.parametrize('slots, form', [(64, 'packets'), (80, 'flags')])
def test_each_device_has_a_workspace_for_the_largest_gather(
    monkeypatch, slots, form
):
  engine = _engine(_on_hopper(monkeypatch), slots=2 * slots)
  found = engine._idle.eval_shape().workspace
  assert found.form == form
  shape = found.words.sharding.shard_shape(found.words.shape)
  assert shape[:2] == (1, 1) and found.words.shape[:2] == (2, 2)
  size = functools.partial(mosaic_sm90.workspace_words, form, 2)
  # 512 columns of what down reads, in bfloat16 at most.
  assert shape[2] == size(slots * 512 * 2)
  assert mosaic_sm90._capacity(form, 2, shape[2]) == slots * 512 * 2
  assert (
      size(2 * slots)
      == size(slots)
      + 2 * 2 * slots * 16 // (8 if form == 'packets' else 16) // 4
  )


def test_what_down_adds_may_be_the_largest():
  model = tiny.config(model_dim=64, num_heads=4, head_dim=2, ffn_dim=32)
  axes = Axes(tensor=2)
  assert tensor_parallel.most_row_bytes(model, Recipe(), axes) == 4 * 32
  wide = dataclasses.replace(model, ffn_dim=256)
  assert tensor_parallel.most_row_bytes(wide, Recipe(), axes) == 2 * 128


@kernels_in_use.needs_mosaic
def test_a_dry_run_counts_the_workspace(monkeypatch):
  spec = configs.build(whole_run.config(**{'mesh.tensor': 2}))
  without = dry_run_memory.ledger(spec, dry_run_memory.shapes(spec))
  kernels = _on_hopper(monkeypatch)
  policy = dataclasses.replace(spec.rollout_policy, kernels=kernels)
  spec = dataclasses.replace(spec, rollout_policy=policy)
  found = dry_run_memory.shapes(spec)
  name, words = 'KV caches and slots', found.slots.workspace.words
  more = dry_run_memory.ledger(spec, found)[name] - without[name]
  assert more == 4 * words.shape[2] > 0


# --- with a stand-in ----------------------------------------------------------


def _stand_in(x_MC, words, *, axis, form):
  """Gathers as XLA does, and counts as the kernel does."""
  assert (axis, form) == (sharding.TENSOR, 'packets')
  return collectives.gather_columns(x_MC), words + 1


def test_a_workspace_goes_through_all_steps_and_the_bits_are_those_of_xla(
    monkeypatch,
):
  monkeypatch.setattr(gather_columns, 'check', lambda *_: None)
  monkeypatch.setattr(mosaic_sm90, 'gather_columns', _stand_in)
  plain = dispatch.select('reference')
  kernels = plain.replace(gather_columns='mosaic_sm90')
  of = tiny_run.policy(mesh=sharding.make_mesh(tensor=2))
  runs = (
      gathers.ready(dataclasses.replace(of, kernels=k))
      for k in (kernels, plain)
  )
  found, expected = (run(state, 4) for run, state in runs)
  workspace, none = found.workspace, expected.workspace
  assert workspace is not None and none is None
  tiny_run.assert_same_bits(
      dataclasses.replace(found, workspace=None), expected
  )
  assert np.unique(expected.emitted).tolist() == [4]
  # One layer.
  assert np.unique(np.asarray(workspace.words)).tolist() == [3 * 4]


def test_programs_that_do_not_gather_never_see_the_workspace(monkeypatch):
  engine = Engine(
      tiny_run.policy(), tiny_run.engine_config(), sharding.make_mesh()
  )
  workspace = Workspace(words=jnp.zeros((1, 1, 8), jnp.int32), form='packets')
  state = engine._idle.eval_shape()
  state = dataclasses.replace(state, workspace=workspace)
  seen = []

  def program(state, *_):
    seen.append(state.workspace)
    return state

  for name in ('_insert', '_pause', '_resume', '_free'):
    monkeypatch.setattr(engine, name, program)
  one: Any = types.SimpleNamespace(
      caches=[[np.zeros((1, 1, 16, 16))]], length=np.ones(1, np.int32)
  )
  state = engine.bulk_insert(one, state, [0, 1])
  state = engine.pause(state, [0])
  state = engine.resume(state, {0: 0}, {0: np.asarray([5], np.int32)})
  state = engine.free_resource(1, state)
  assert seen == [None] * 4 and state.workspace is workspace


# --- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'processes': (0, 1)},
            'the devices are in 2 processes, and the kernel needs them in one',
        ),
        ({'ids': (1, 0)}, 'the ids of the devices are [1, 0]'),
        ({'ids': (2, 3)}, 'the ids of the devices are [2, 3]'),
        ({'jax': (0, 11, 0)}, 'the kernel needs 0.11.2: upgrade, or leave'),
    ],
)
def test_what_the_kernel_cannot_gather_is_refused(
    monkeypatch, changes, message
):
  options: dict[str, Any] = {'processes': (0, 0), 'ids': (0, 1)}
  options |= {'jax': (0, 11, 2)} | changes
  monkeypatch.setattr(jax, '__version_info__', options['jax'])
  pairs = zip(options['ids'], options['processes'], strict=True)
  devices = [types.SimpleNamespace(id=i, process_index=p) for i, p in pairs]
  mesh: Any = types.SimpleNamespace(devices=np.array([[devices]]))
  kernels = dispatch.select(_ASKED, kernels_in_use.HOPPER)
  with pytest.raises(ValueError, match=re.escape(message)):
    gather_columns.check(kernels, Axes(tensor=2), mesh)
  # Nothing is gathered, or nothing by the kernel.
  gather_columns.check(kernels, Axes(), mesh)
  plain = dispatch.select('reference')
  gather_columns.check(plain, Axes(tensor=2), mesh)
