"""Devices that share each dot have the bits of one device."""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import Recipe
from jetrl_jax.fp8.quantization import QTensor
from jetrl_jax.kernels.quantized_dot import linear
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models import logprobs, tensor_parallel
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.types import TrainBatch
from jetrl_jax.serve.logprobs import SequenceLogprobs
from tests.rl import tiny_run, tiny_updates

F32 = Recipe(name='bf16', compute_dtype='float32')


def _mesh(data, fsdp, tensor):
  return sharding.make_mesh(data=data, fsdp=fsdp, tensor=tensor)


def _model(family='llama', **changes):
  """8 query heads on 2 KV heads of 16, D 128, F 128, V 128."""
  sizes = dict(
      vocab_size=128,
      model_dim=128,
      num_heads=8,
      num_kv_heads=2,
      ffn_dim=128,
  )
  return dataclasses.replace(tiny_run.model(family), **(sizes | changes))


# --- which rows a device reads ----------------------------------------------


def _rows(model, tensor, path, device):
  """The rows of a kernel that a device reads, as slices say it."""
  found, before = [], 0
  for rows, parts in tensor_parallel.pieces(model, Axes(tensor=tensor), path):
    size, part = rows // parts, device * parts // tensor
    found += range(before + part * size, before + (part + 1) * size)
    before += rows
  return found


def test_devices_have_neighbouring_heads_with_their_key_heads():
  model = _model()  # Queries are rows 0 to 127, keys to 159, values to 191.

  def heads(*rows):
    return [r for a, b in rows for r in range(16 * a, 16 * b)]

  rows = functools.partial(_rows, model)
  assert rows(2, 'attn/qkv', 1) == heads((4, 8), (9, 10), (11, 12))
  # Of 4 devices, two each have a copy of a key head.
  assert rows(4, 'attn/qkv', 2) == heads((4, 6), (9, 10), (11, 12))
  assert rows(4, 'attn/qkv', 3) == heads((6, 8), (9, 10), (11, 12))
  # Gate's rows, then up's.
  assert rows(2, 'mlp/gate_up', 1) == [*range(64, 128), *range(192, 256)]
  assert rows(2, 'mlp/down', 1) == [*range(64, 128)]
  here = tensor_parallel.on_device(model, 4)
  assert (here.num_heads, here.num_kv_heads, here.ffn_dim) == (2, 1, 32)
  assert tensor_parallel.on_device(model, 1) is model
  assert tensor_parallel.pieces(model, Axes(), 'attn/qkv') == ()


@pytest.mark.parametrize(
    'mesh',
    # Two devices exchange gate and up, four gather them.
    [(1, 2, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)],
)
def test_what_is_stored_in_parts_is_placed_as_dots_read_it(mesh):
  mesh = _mesh(*mesh)
  axes, model = collectives.axes_of(mesh), _model('qwen2', num_layers=1)
  random, recipe = np.random.default_rng(0), Recipe(name='fp8_token')
  shapes = jax.eval_shape(
      Policy(model=model, recipe=recipe).init, jax.random.key(0)
  )
  params = jax.tree.map(
      lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes
  )
  whole = prepare_weights(params, {}, recipe)
  specs = tensor_parallel.placed_specs(model, axes, whole)
  stored = sharding.tree_specs(whole, mesh)
  kernel = whole['layers_0']['mlp']['gate_up']['kernel']
  assert stored['layers_0']['mlp']['gate_up']['kernel'].scale == (
      jax.sharding.PartitionSpec(('tensor', 'fsdp'))
  )
  placed = exact_jit(
      sharding.per_device(
          functools.partial(tensor_parallel.place, axes, model),
          mesh,
          (stored,),
          specs,
      )
  )(whole)
  tensor = axes.tensor
  for path in ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down'):
    room, name = path.split('/')
    order = [
        row
        for device in range(tensor)
        for row in _rows(model, tensor, path, device)
    ]
    # A rollout has o whole on each device.
    assert path != 'attn/o' or order == list(range(model.model_dim))
    expected, found = (t['layers_0'][room][name] for t in (whole, placed))
    for leaf in ('values', 'scale'):
      a, b = (np.asarray(getattr(t['kernel'], leaf)) for t in (found, expected))
      np.testing.assert_array_equal(a.view(np.uint8), b[order].view(np.uint8))
    if 'bias' in expected:
      np.testing.assert_array_equal(found['bias'], expected['bias'][order])
  assert kernel.values.shape == (256, 128)


# --- bits --------------------------------------------------------------------


@functools.cache
def _run():
  """The tiny run, on two devices that share a key head."""
  mesh = _mesh(1, 1, 2)
  return tiny_run.build(
      tiny_run.policy(mesh=mesh),
      mesh,
      loss=LossConfig(kl_loss_coef=0.01),
      config=OptimizerConfig(lr=1e-3),
      start=tiny_run.fp8_run().start,
  )


def test_rollout_and_training_on_two_devices_have_the_bits_of_one():
  run = _run()
  for a, b in zip(run.rollout(), tiny_run.completions(), strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    for name in ('logprobs', 'log_mu'):
      np.testing.assert_array_equal(
          tiny_run.bits(getattr(a, name)), tiny_run.bits(getattr(b, name))
      )
  batches = tiny_updates.batches(tiny_run.completions())
  gradients, logprobs = run.accumulate(run.start, batches)
  for a, b in zip(logprobs, tiny_updates.whole()[1], strict=True):
    np.testing.assert_array_equal(tiny_run.bits(a), tiny_run.bits(b))
  again, _ = run.accumulate(run.start, batches)
  tiny_run.assert_same_bits(again, gradients)
  tiny_run.assert_same_on_all_devices(gradients.trainable)


def test_a_server_on_two_devices_has_the_bits_of_one():
  found = []
  for run in (tiny_run.fp8_run(), _run()):
    engine = Engine(run.policy, tiny_run.engine_config(stop_ids=()), run.mesh)
    params = PolicyParams(run.start.weights, run.start.fp8_state)
    engine.set_params(params)
    params, state = engine.load_params(), engine.init_decode_state()
    prompt = tiny_run.prompts()[0].tokens
    prefix = engine.prefill_batch(params, [prompt])
    # Two slots, of which one has a top_p of its own.
    for slot in (0, 1):
      state = engine.bulk_insert(prefix, state, [slot], temperature=1.0)
    top_p_B = np.ones(engine.num_slots, np.float32)
    top_p_B[1] = 0.3
    key = rng.key(0, rng.ROLLOUT, 0)
    state = engine.generate_block(params, state, key, 4, top_p_B)
    policy, specs = engine.reader
    scores = SequenceLogprobs(policy, run.mesh, 32, specs)(params, prompt, 1.0)
    found.append(
        (
            np.asarray(state.tokens[:2]),
            tiny_run.bits(np.asarray(state.logprobs[:2])),
            tiny_run.bits(scores.logprobs[1:]),
            tiny_run.bits(scores.top_logprobs[1:]),
        )
    )
  for one, two in zip(*found, strict=True):
    np.testing.assert_array_equal(one, two)


def test_on_gpus_a_shared_product_leaves_the_rounding_to_the_sum(monkeypatch):
  high = jnp.zeros((2, 2), jnp.bfloat16)
  low = QTensor(values=high.astype(jnp.float8_e4m3fn), scale=jnp.float32(1.0))
  delayed, token = Recipe(name='fp8_delayed'), Recipe(name='fp8_token')
  any_scale = dataclasses.replace(delayed, power_of_two_scales=False)
  assert linear.added_dtype(delayed, high, 2) is None  # A CPU rounds both.
  monkeypatch.setattr(linear, 'on_gpu', lambda: True)
  assert linear.added_dtype(delayed, high, 1) is None
  assert linear.added_dtype(delayed, high, 2) == jnp.float32
  assert linear.added_dtype(delayed, low, 2) == jnp.float32
  # These scale in float32 and round before anything is added.
  assert linear.added_dtype(any_scale, low, 2) is None
  assert linear.added_dtype(token, low, 2) is None


def test_a_float32_product_is_added_by_columns_and_rounded_once():
  mesh = sharding.make_mesh(tensor=2)
  axes = collectives.axes_of(mesh)
  random = np.random.default_rng(0)
  x_MD = jnp.asarray(random.normal(size=(8, 32)), jnp.bfloat16)
  y_MD = jnp.asarray(random.normal(size=(8, 32)), jnp.float32)
  columns = P(None, sharding.TENSOR)

  def add(x_MD, y_MO):
    total, pull = jax.vjp(axes.add, x_MD, y_MO)
    return total, *pull(total)

  specs = (P(), columns)
  add = sharding.per_device(add, mesh, specs, (P(), *specs))
  total, dx_MD, dy_MD = jax.jit(add)(x_MD, y_MD)
  once = (x_MD.astype(jnp.float32) + y_MD).astype(jnp.bfloat16)
  np.testing.assert_array_equal(total, once)
  assert not np.array_equal(once, x_MD + y_MD.astype(jnp.bfloat16))
  assert (dx_MD.dtype, dy_MD.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_array_equal(dy_MD, total.astype(jnp.float32))


def _on(tensor: int, function, specs, out_specs):
  """Compiles a function of axes and arrays for devices that share rows."""
  mesh = _mesh(1, 1, tensor)
  function = functools.partial(function, collectives.axes_of(mesh))
  return exact_jit(sharding.per_device(function, mesh, specs, out_specs))


def _sent(lowered) -> list[tuple[str, str]]:
  """What devices gather and exchange in a program: (how, shape of a part)."""
  form = r'"stablehlo.(all_gather|all_to_all)"\([^)]*\).*?: \((.*?)\)'
  return re.findall(form, lowered.as_text(), re.S)


# 48 rows are too few for four devices: each of them has all.
@pytest.mark.parametrize('rows', [128, 48])
def test_log_probs_of_shared_logits_have_the_bits_of_whole_ones(rows):
  random = np.random.default_rng(0)
  hidden_MD = random.normal(size=(rows, 32)).astype(np.float32)
  kernel_VD = random.normal(size=(256, 32)).astype(np.float32)
  targets_M = jnp.asarray(random.integers(0, 256, rows), jnp.int32)

  def run(axes, hidden_MD, kernel_VD):
    def of(hidden_MD, kernel_VD):
      return logprobs.target_logprobs(
          lambda x_MD, *_: axes.enter(x_MD) @ kernel_VD.T,
          hidden_MD,
          targets_M,
          jnp.float32(0.7),
          chunk_rows=128,
          row_mask_M=jnp.ones(rows),
          fp8_state={},
          axes=axes,
      )

    found, pull = jax.vjp(of, hidden_MD, kernel_VD)
    weights = tuple(jnp.cos(jnp.arange(rows, dtype=jnp.float32)) for _ in found)
    return found, pull(weights)

  kernel = P(sharding.TENSOR)
  expected, gradients = _on(1, run, (P(), P()), P())(hidden_MD, kernel_VD)
  for tensor in (2, 4):
    shared = _on(tensor, run, (P(), kernel), (P(), (P(), kernel)))
    found, others = shared(hidden_MD, kernel_VD)
    # The backward pass exchanges nothing.
    logits = f'tensor<{tensor}x{rows // tensor}x{256 // tensor}xf32>'
    sent = _sent(shared.lower(hidden_MD, kernel_VD))
    assert sent.count(('all_to_all', logits)) == (rows == 128)
    tiny_run.assert_same_bits(found, expected)
    # Sums over tokens have another order, and those over rows have not.
    np.testing.assert_allclose(others[0], gradients[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(others[1], gradients[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize('limits', [{}, {'top_k': 5, 'min_p': 0.01}, 'top_p'])
def test_devices_that_share_sequences_draw_the_tokens_of_one(limits):
  slots, random = 128, np.random.default_rng(0)
  logits_BV = 3 * random.normal(size=(slots, 256)).astype(np.float32)
  address_B2 = np.stack([np.arange(slots), np.ones(slots)], 1)
  state = types.SimpleNamespace(
      address=jnp.asarray(address_B2, jnp.uint32),
      emitted=jnp.ones(slots, jnp.int32),
      # A few tokens are given.
      given=2 * (jnp.arange(slots) % 7 == 0).astype(jnp.int32),
      tokens=jnp.asarray(random.integers(0, 256, (slots, 4)), jnp.int32),
      temperature=jnp.linspace(0.0, 2.0, slots),
  )
  top_p_B = np.linspace(0.1, 1.0, slots, dtype=np.float32)
  own = limits == 'top_p'
  config = tiny_run.engine_config(**({} if own else limits))
  key = rng.key(0, rng.ROLLOUT, 0)

  def run(axes, logits_BV):
    of = Policy(model=_model(), recipe=F32, axes=axes)
    top_p = jnp.asarray(top_p_B) if own else None
    return decode_step.sample(of, config, state, logits_BV, key, top_p)

  expected = _on(1, run, (P(),), P())(logits_BV)
  columns = P(None, sharding.TENSOR)
  for tensor in (2, 8):
    found = _on(tensor, run, (columns,), P())(logits_BV)
    tiny_run.assert_same_bits(found, expected)


def test_devices_exchange_logits_for_rows_and_gather_only_numbers():
  rows, columns = 64, 128

  def run(axes, logits_BV):
    whole = axes.whole_rows(logits_BV)
    return axes.all_rows([whole.sum(1), whole.max(1)], rows)

  run = _on(2, run, (P(None, sharding.TENSOR),), P())
  sent = _sent(run.lower(jnp.zeros((rows, 2 * columns))))
  assert sorted(sent) == [
      ('all_gather', 'tensor<2x32xui32>'),
      ('all_to_all', 'tensor<2x32x128xf32>'),
  ]


@pytest.mark.slow
def test_rollout_and_training_agree_after_an_update_on_two_devices():
  run, expected = _run(), tiny_updates.updates('fp8')[0]
  gradients, _ = run.accumulate(run.start, expected.batches)
  state, info = run.apply(run.start, gradients)
  assert bool(info.applied)
  norm = float(expected.info.grad_norm)
  assert abs(float(info.grad_norm) - norm) < 0.02 * norm
  tiny_run.assert_same_on_all_devices(state)
  rolled = run.step.roll_inputs(state.fp8_state)
  state = dataclasses.replace(state, fp8_state=rolled)
  batches = tiny_updates.batches(run.rollout(state, 1))
  _, logprobs = run.accumulate(state, batches)
  differ, tokens = tiny_updates.mismatched(batches, logprobs)
  assert (differ, tokens > 100) == (0, True)
  for compiled in (run.step.accumulate, *run.step.apply.programs()):
    assert compiled._cache_size() == 1


def _batch(vocab: int) -> TrainBatch:
  """Two random sequences of 16 tokens in each of 16 rows."""
  random, shape = np.random.default_rng(0), (16, 32)
  fields = {
      field.name: np.zeros(shape, leaf.dtype)
      for field in dataclasses.fields(TrainBatch)
      for leaf in [getattr(TrainBatch.of_shapes(*shape), field.name)]
  }
  place = np.broadcast_to(np.arange(32, dtype=np.int32), shape)
  fields['tokens'] = random.integers(4, vocab, shape).astype(np.int32)
  fields['positions'] = place % 16
  fields['segment_ids'] = place // 16 + 1
  fields['loss_mask'] = fields['loss_weight'] = (place % 16 > 0) * np.float32(1)
  fields['advantages'] = random.normal(size=shape).astype(np.float32)
  for name in ('log_mu', 'rollout_logprobs', 'old_logprobs'):
    fields[name] = np.full(shape, -4.8, np.float32)
  return TrainBatch(**fields)


@pytest.mark.parametrize('name', ['fp8_delayed', 'bf16'])
@pytest.mark.parametrize('fsdp, tensor, dots', [(2, 1, 4), (1, 2, 2)])
def test_a_layer_s_weights_are_exchanged_one_layer_ahead(
    fsdp, tensor, dots, name
):
  mesh = _mesh(1, fsdp, tensor)
  of = Policy(
      model=_model(num_layers=3),
      recipe=Recipe(name=name),
      axes=collectives.axes_of(mesh),
      tile=16,
      remat='none',
  )
  state = tiny_run.state_shapes(dataclasses.replace(of, axes=Axes()))
  params = PolicyParams(state.weights, state.fp8_state)
  specs = sharding.tree_specs(params, mesh), sharding.ROWS, P()
  function = sharding.per_device(of.logprobs, mesh, specs, sharding.ROWS)
  traced = jax.make_jaxpr(function)(params, _batch(128), jnp.float32(1))
  waits = 0
  for body in [eqn.params['jaxpr'] for eqn in traced.eqns]:
    made = {out for eqn in body.eqns for out in eqn.outvars}
    for eqn in body.eqns:
      if eqn.primitive.name in ('all_gather', 'all_to_all'):
        # What does not wait is the weight as it came.
        waits += eqn.invars[0].aval.shape[1:] == (128,) and (
            eqn.invars[0] in made
        )
  # Of the first layer all are there at once, as of embedding and head.
  assert waits == 2 * dots


def _on_mesh(model, recipe, mesh, overlap=False, **changes):
  """A run whose numbers at the start are those of one device."""
  mesh_of = _mesh(*mesh)
  of = Policy(
      model=model,
      recipe=recipe,
      axes=collectives.axes_of(mesh_of, overlap=overlap),
      tile=16,
      logit_chunk_rows=64,
      **changes,
  )
  start = None
  if mesh != (1, 1, 1):
    start = tiny_run.cold_state(
        dataclasses.replace(of, axes=Axes()),
        optimizer=OptimizerConfig(lr=1e-3).build(),
    )
  return tiny_run.build(
      of,
      mesh_of,
      loss=LossConfig(),
      config=OptimizerConfig(lr=1e-3),
      start=start,
  )


@functools.cache
def _updated(model, recipe, mesh, overlap=False):
  """(gradients, log-probs) of one micro-batch."""
  run = _on_mesh(model, recipe, mesh, overlap)
  return run.accumulate(run.start, [_batch(model.vocab_size)])


def _scored(model, recipe, mesh):
  """Log-probs of one micro-batch, by the forward pass alone.

  The update is traced, and not compiled: that takes four times as long.
  """
  run, batch = _on_mesh(model, recipe, mesh), _batch(model.vocab_size)
  gradients = run.step.gradient_shapes(run.start)
  run.step.accumulate.trace(run.start, gradients, batch, jnp.float32(1))
  return run.score(run.start, batch)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 2, 1), (1, 1, 2)])
def test_an_update_that_overlaps_has_the_same_bits(mesh):
  apart = _updated(_model(), Recipe(), mesh)
  found = _updated(_model(), Recipe(), mesh, overlap=True)
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(apart), strict=True)
  for a, b in pairs:
    np.testing.assert_array_equal(tiny_run.bits(a), tiny_run.bits(b))


def _needs(out, eqns) -> list:
  """Returns the equations without which a result is not there."""
  made = {var: eqn for eqn in eqns for var in eqn.outvars}
  found, todo = {}, [out]
  while todo:
    var = todo.pop()
    if isinstance(var, jax.extend.core.Var) and var in made:
      eqn = made[var]
      todo += [] if id(eqn) in found else eqn.invars
      found[id(eqn)] = eqn
  return list(found.values())


@pytest.mark.parametrize('overlap', [False, True])
@pytest.mark.parametrize('fsdp, tensor', [(2, 1), (4, 1), (2, 2)])
def test_a_backward_pass_waits_for_the_gradients_of_the_layer_after(
    fsdp, tensor, overlap
):
  # XLA keeps what gradients are made of, of all layers, while nobody waits.
  mesh = _mesh(1, fsdp, tensor)
  of = Policy(
      model=_model(num_layers=3),
      recipe=Recipe(),
      axes=collectives.axes_of(mesh, overlap=overlap),
      tile=16,
      remat='none',
  )
  state = tiny_run.state_shapes(dataclasses.replace(of, axes=Axes()))
  loss, config = functools.partial(policy_loss, LossConfig()), OptimizerConfig()
  step = UpdatePrograms(of, loss, config.build(), config, mesh, state)
  gradients = step.gradient_shapes(state)
  traced = step.accumulate.trace(state, gradients, _batch(128), jnp.float32(1))
  (inner,) = [
      eqn.params['jaxpr']
      for eqn in traced.jaxpr.eqns
      if eqn.primitive.name == 'shard_map'
  ]
  names = [
      jax.tree_util.keystr(path)
      for path, _ in jax.tree.leaves_with_path(traced.out_info)
  ]
  (embedding,) = [
      out
      for name, out in zip(names, inner.outvars, strict=True)
      if 'embedding' in name and 'trainable' in name
  ]
  sent = [eqn for eqn in _needs(embedding, inner.eqns) if _sends_kernel(eqn)]
  # Its own, and the four dots' of all layers but the first.
  assert len(sent) == 1 + 2 * 4


def _sends_kernel(eqn) -> bool:
  """Whether devices send each other [parts, rows, D] of a gradient."""
  shape = eqn.outvars[0].aval.shape
  return eqn.primitive.name == 'all_to_all' and shape[2:] == (128,)


def _wide():
  """A model whose parts have whole blocks of 128 on two devices."""
  return _model(model_dim=256, ffn_dim=256, num_heads=16, num_kv_heads=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('recipe', 'model', 'meshes'),
    [
        (Recipe(), _model('qwen3'), [(1, 1, 2), (1, 2, 4), (1, 1, 8)]),
        (Recipe(quantize_lm_head=True), _model(), [(1, 1, 4)]),
        (Recipe(name='fp8_token'), _model('qwen2'), [(2, 2, 2)]),
        (Recipe(name='fp8_block'), _wide(), [(1, 1, 2)]),
        (Recipe(name='int8'), _model(), [(1, 1, 4)]),
        (Recipe(name='fake_int4'), _model(), [(1, 1, 8)]),
        # A part of qkv is 96 wide, of o 16: see `layers.widened`.
        (Recipe(name='bf16'), _model(), [(1, 1, 2), (1, 1, 8)]),
        (F32, _model('qwen2'), [(1, 1, 8)]),
    ],
)
def test_log_probs_of_every_recipe_have_the_bits_of_one_device(
    recipe, model, meshes
):
  expected = _scored(model, recipe, (1, 1, 1))
  for mesh in meshes:
    found = _scored(model, recipe, mesh)
    np.testing.assert_array_equal(
        tiny_run.bits(found), tiny_run.bits(expected), err_msg=str(mesh)
    )


@pytest.mark.slow
def test_smooth_keys_have_the_bits_of_one_device():
  # Half the channels hardly turn.
  model = dataclasses.replace(_model('qwen2'), rope_theta=2.0**30)
  batch = _batch(model.vocab_size)

  def scored(mesh, smooth_k=True):
    keys = {'kv_cache_dtype': 'float8_e4m3fn', 'smooth_k': smooth_k}
    run = _on_mesh(model, Recipe(), mesh, **keys)
    weights = jax.tree_util.tree_map_with_path(
        lambda path, x: x + jnp.arange(x.size, dtype=x.dtype) / 4
        if jax.tree_util.keystr(path).endswith("['bias']")
        else x,
        run.start.weights,
    )
    start = dataclasses.replace(run.start, weights=weights)
    return tiny_run.bits(run.score(start, batch))

  expected = scored((1, 1, 1))
  assert np.any(scored((1, 1, 1), smooth_k=False) != expected)
  # On eight devices some share a key head.
  for mesh in [(1, 1, 2), (1, 2, 4), (1, 1, 8)]:
    np.testing.assert_array_equal(scored(mesh), expected, err_msg=str(mesh))


@pytest.mark.slow
# On eight devices some share a key head.
@pytest.mark.parametrize(
    ('family', 'mesh'),
    [
        ('qwen2', (1, 1, 2)),
        ('qwen2', (1, 1, 8)),
        ('qwen3', (2, 2, 2)),
        ('qwen3', (1, 1, 8)),
    ],
)
def test_gradients_are_those_of_one_device(family, mesh):
  # In float32, where nothing is rounded that depends on the order of a sum.
  expected, _ = _updated(_model(family), F32, (1, 1, 1))
  found, _ = _updated(_model(family), F32, mesh)
  pairs = zip(
      jax.tree_util.tree_leaves_with_path(found.trainable),
      jax.tree.leaves(expected.trainable),
      strict=True,
  )
  for (path, a), b in pairs:
    whole, b = np.asarray(a), np.asarray(b)
    if whole.ndim > b.ndim:  # Each device of `data` has kept its own.
      whole = whole.sum(0)
    np.testing.assert_allclose(
        whole,
        b,
        rtol=0,
        atol=5e-6 * float(np.abs(b).max()),
        err_msg=jax.tree_util.keystr(path),
    )


# --- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
    ('tensor', 'model', 'recipe', 'message'),
    [
        (
            3,
            _model(),
            Recipe(),
            'mesh.tensor is 3; the model has 8 query heads on 2 KV heads, which'
            ' can be shared by 1, 2, 4, 8 devices',
        ),
        (
            4,
            _model(num_heads=12, num_kv_heads=6),
            Recipe(),
            'on 6 KV heads, which can be shared by 1, 2, 3, 6, 12 devices',
        ),
        (
            8,
            _model(vocab_size=192),
            Recipe(),
            'vocab_size is 192, and must be a multiple of 128: 16 columns',
        ),
        (
            2,
            _model(),
            Recipe(name='fp8_block'),
            'each device has 64 of the 128 rows of queries or keys in attn/qkv',
        ),
    ],
)
def test_what_devices_cannot_share_is_refused(tensor, model, recipe, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    Policy(model=model, recipe=recipe, axes=Axes(tensor=tensor))


def test_parameters_are_placed_once():
  run = _run()
  params = PolicyParams(run.start.weights, run.start.fp8_state)
  placed = run.engine.replicate(params)
  assert run.engine.replicate(placed) is placed
  kernel = placed.weights['layers_0']['mlp']['gate_up']['kernel'].values
  assert kernel.sharding.shard_shape(kernel.shape) == (64, 32)
  caches = run.engine.init_decode_state().caches[0][0]
  # Each device has a copy of the one key head.
  assert caches.shape[1] == 2
  assert caches.sharding.shard_shape(caches.shape)[1] == 1
