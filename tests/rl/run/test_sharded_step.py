"""The same update on eight devices: equal bits, or equal sums."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.extend import core as jax_core

from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.mismatch import forced_decode
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout import buckets
from jetrl_jax.rl.rollout.engine import Engine
from tests.rl import tiny_run, tiny_updates

# (data, fsdp) and whether devices keep whole gradients. Those that are slow run
# the same code with another pair of collectives.
MESHES = [
    pytest.param((2, 4), id='data2-fsdp4'),
    pytest.param((2, 4, True), id='data2-fsdp4-whole'),
    pytest.param((1, 8, True), id='fsdp8-whole', marks=pytest.mark.slow),
    pytest.param((8, 1), id='data8', marks=pytest.mark.slow),
    pytest.param((1, 8), id='fsdp8', marks=pytest.mark.slow),
]
on_meshes = pytest.mark.parametrize('mesh', MESHES)


@functools.cache
def _run(mesh):
  """Starts from the numbers of the run on one device."""
  whole, mesh = mesh[2:] == (True,), sharding.make_mesh(
      data=mesh[0], fsdp=mesh[1]
  )
  axes = collectives.axes_of(mesh, whole_gradients=whole)
  return tiny_run.build(
      dataclasses.replace(tiny_run.policy(mesh=mesh), axes=axes),
      mesh,
      loss=LossConfig(kl_loss_coef=0.01),
      config=OptimizerConfig(lr=1e-3),
      start=tiny_run.fp8_run().start,
  )


@functools.cache
def _update(mesh):
  """(gradients, log-probs, state, info) of the first update."""
  run, batches = _run(mesh), tiny_updates.updates('fp8')[0].batches
  gradients, logprobs = run.accumulate(run.start, batches)
  state, info = run.apply(run.start, gradients)
  return gradients, logprobs, state, info


def _expected():
  return tiny_updates.updates('fp8')[0]


def _pairs(found, expected):
  return [
      (jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))
      for (path, a), b in zip(
          jax.tree_util.tree_leaves_with_path(found),
          jax.tree.leaves(expected),
          strict=True,
      )
  ]


@on_meshes
def test_weights_lie_in_parts_on_the_devices(mesh):
  fsdp = mesh[1]
  for tree in (_run(mesh).start, _update(mesh)[2]):
    kernel = tree.weights['layers_0']['mlp']['down']['kernel'].values
    assert len(kernel.devices()) == 8
    assert kernel.sharding.shard_shape(kernel.shape) == (32 // fsdp, 64)
    moment = tree.opt_state[0].mu['layers_0']['mlp']['down']['kernel'].values
    assert moment.sharding.shard_shape(moment.shape) == (32 // fsdp, 64)


@pytest.mark.parametrize('of', ['rollout', 'forced_logprobs'])
def test_weights_are_gathered_once_and_no_step_asks_another_device(
    monkeypatch, of
):
  run = _run((2, 4))
  engine, start = run.engine, run.start
  split = PolicyParams(start.weights, start.fp8_state)
  used = []
  for name in ('_prefilled_caches', '_decode'):
    called = getattr(engine, name)

    def recorded(*args, called=called, **settings):
      used.extend(arg for arg in args if isinstance(arg, PolicyParams))
      return called(*args, **settings)

    monkeypatch.setattr(engine, name, recorded)
  if of == 'rollout':
    run.rollout()
  else:
    forced_decode.forced_logprobs(
        engine, split, tiny_run.completions(), temperature=1.0
    )
  assert len(used) > 2
  for leaf in jax.tree.leaves(used):
    assert leaf.sharding.is_fully_replicated
  generate = next(
      step for (name, _), step in engine._programs.items() if name == 'generate'
  )
  state, key = engine.init_decode_state(), rng.key(0, rng.ROLLOUT, 0)

  def collectives(params):
    lowered = generate.lower(params, state, key, np.int32(8))
    text = lowered.compile().as_text()
    assert ' while(' in text
    return set(re.findall(r'all-gather|all-reduce|permute|to-all', text))

  assert not collectives(used[0])
  if of == 'rollout':  # They would be seen.
    assert collectives(split) == {'all-gather'}


@on_meshes
def test_a_rollout_on_eight_devices_has_the_bits_of_one(mesh):
  run = _run(mesh)
  assert run.engine.num_slots == 8 * 16
  for a, b in zip(run.rollout(), tiny_run.completions(), strict=True):
    assert (a.prompt_id, a.sample) == (b.prompt_id, b.sample)
    assert a.tokens.tolist() == b.tokens.tolist()
    for name in ('logprobs', 'log_mu'):
      np.testing.assert_array_equal(
          tiny_run.bits(getattr(a, name)), tiny_run.bits(getattr(b, name))
      )


@pytest.mark.slow
def test_what_is_computed_again_on_eight_devices_has_the_bits_of_one():
  run = _run((2, 4))
  # The 24 sequences lie on two devices, which have room for two each.
  config = tiny_run.engine_config(kv_cache_tokens=8 * 64)
  engine = Engine(run.policy, config, run.mesh)
  found = run.rollout(engine=engine)
  assert engine.pages.times_preempted > 0
  for a, b in zip(found, tiny_run.completions(), strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_array_equal(
        tiny_run.bits(a.logprobs), tiny_run.bits(b.logprobs)
    )


@pytest.mark.slow
@on_meshes
def test_the_tail_of_a_rollout_has_the_bits_of_one_device(mesh, monkeypatch):
  monkeypatch.setattr(buckets, 'TAILS', ((4, 1),))
  run = _run(mesh)
  config = tiny_run.engine_config(num_slots=8 * 32, decode_block=2)
  engine = Engine(run.policy, config, run.mesh)
  limits = np.full((6, tiny_run.SAMPLES), 2)
  limits[::2, 1] = 12
  found = run.rollout(engine=engine, limits=limits)
  for a, b in zip(found, tiny_run.completions(), strict=True):
    length = len(a.tokens)
    assert a.tokens.tolist() == b.tokens[:length].tolist()
    np.testing.assert_array_equal(a.logprobs, b.logprobs[:length])
  assert 'generate_compacted' in {name for name, _ in engine._programs}


@on_meshes
def test_log_probs_on_eight_devices_have_the_bits_of_one(mesh):
  logprobs = _update(mesh)[1]
  for found, expected in zip(logprobs, _expected().logprobs, strict=True):
    np.testing.assert_array_equal(tiny_run.bits(found), tiny_run.bits(expected))


@on_meshes
def test_amaxes_have_the_bits_of_one_device(mesh):
  pairs = _pairs(_update(mesh)[0].fp8, _expected().gradients.fp8)
  for name, a, b in pairs:
    np.testing.assert_array_equal(a[..., 0], b[..., 0], err_msg=name)
    np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=name)
  # And so have the scales after the update, but for the kernels': their
  # masters moved by other sums.
  pairs = _pairs(_update(mesh)[2].fp8_state, _expected().applied.fp8_state)
  for name, a, b in pairs:
    if "'kernel'" not in name and 'health' not in name:
      np.testing.assert_array_equal(a, b, err_msg=name)
    elif "'scale'" in name:
      assert a == b, name
    elif 'amax_history' in name:
      np.testing.assert_allclose(a, b, rtol=1e-3, err_msg=name)
    elif "'kernel'" in name:
      # Of the whole kernel; devices that hold the same rows all count them, in
      # the number of elements as in the signal.
      times = a[0] / b[0]
      assert times in (mesh[0], 8), name
      np.testing.assert_allclose(a[3], times * b[3], rtol=1e-3, err_msg=name)


@on_meshes
def test_gradients_are_those_of_one_device(mesh):
  gradients, _, _, info = _update(mesh)
  expected = _expected()
  for name, a, b in _pairs(gradients.trainable, expected.gradients.trainable):
    if a.ndim > b.ndim:  # Each device has kept its own, or each of `data`.
      assert len(a) == (8 if len(mesh) > 2 else mesh[0])
      assert not np.array_equal(a[0], a[1])
      a = a.sum(0)
    # Float32 sums of at most 512 rows in another order.
    np.testing.assert_allclose(
        a, b, rtol=0, atol=5e-6 * np.abs(b).max(), err_msg=name
    )
  np.testing.assert_allclose(
      float(info.grad_norm), float(expected.info.grad_norm), rtol=1e-6
  )
  for name, metric in info.metrics.items():
    other = expected.info.metrics[name]
    assert float(metric.weight) == float(other.weight), name
    np.testing.assert_allclose(metric.sum, other.sum, rtol=1e-5, atol=1e-7)


@on_meshes
def test_weights_after_the_update_are_those_of_one_device(mesh):
  _, _, state, info = _update(mesh)
  expected = _expected()
  assert bool(info.applied) and int(state.opt_step) == 1
  gradients = jax.tree.leaves(expected.gradients.trainable)
  pairs = _pairs(state.trainable, expected.applied.trainable)
  for (name, a, b), gradient in zip(pairs, gradients, strict=True):
    gradient = np.abs(np.asarray(gradient))
    # Adam's first step is lr g / (|g| + 1e-8): a sum that is noise itself may
    # step anywhere within lr, any other goes where its sign points.
    assert np.abs(a - b).max() <= 2 * 1e-3 * (1 + 1e-5), name
    clear = gradient > 1e-3 * gradient.max()
    assert clear.mean() > 0.5, name
    np.testing.assert_allclose(
        a[clear], b[clear], rtol=0, atol=1e-5, err_msg=name
    )
  reported = jax.tree.leaves(info.changed_bytes)
  for a, b in zip(
      reported, jax.tree.leaves(expected.info.changed_bytes), strict=True
  ):
    # A few elements of noise may step the other way.
    np.testing.assert_allclose(a, b, atol=0.01)


@on_meshes
def test_rollout_and_training_agree_on_eight_devices_after_an_update(mesh):
  run, state = _run(mesh), _update(mesh)[2]
  rolled = run.step.roll_inputs(state.fp8_state)
  state = dataclasses.replace(state, fp8_state=rolled)
  batches = tiny_updates.batches(run.rollout(state, 1))
  _, logprobs = run.accumulate(state, batches)
  differ, tokens = tiny_updates.mismatched(batches, logprobs)
  assert (differ, tokens > 100) == (0, True)
  # The results of one update are the arguments of the next, where they lie.
  for compiled in (run.step.accumulate, *run.step.apply.programs()):
    assert compiled._cache_size() == 1


@on_meshes
def test_a_gradient_that_is_not_finite_on_one_device_stops_all(mesh):
  run = _run(mesh)
  batch = _expected().batches[0]
  row, place = np.argwhere(batch.loss_mask > 0)[-1]
  advantages = batch.advantages.copy()
  advantages[row, place] = np.nan
  gradients, _ = run.accumulate(
      run.start, [dataclasses.replace(batch, advantages=advantages)]
  )
  state, info = run.apply(run.start, gradients)
  assert not bool(info.applied)
  tiny_run.assert_same_bits(state, run.start)


def _collectives_in_loops(jaxpr, in_loop=False) -> list[str]:
  found = []
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    if in_loop and re.match('all_gather|reduce_scatter|psum', name):
      found.append(name)
    for inner in jax_core.jaxprs_in_params(eqn.params):
      found += _collectives_in_loops(inner, in_loop or name == 'scan')
  return found


# The head is tied to the embedding in the first.
@pytest.mark.parametrize(
    'family', ['qwen2', pytest.param('llama', marks=pytest.mark.slow)]
)
def test_devices_gather_the_head_once_and_not_once_a_chunk_of_rows(family):
  mesh = sharding.make_mesh(data=2, fsdp=2)
  policy = tiny_run.policy(mesh=mesh, family=family)
  run = tiny_run.build(
      policy, mesh, loss=LossConfig(), config=OptimizerConfig(lr=1e-3)
  )
  batch = tiny_updates.updates('fp8')[0].batches[0]
  assert batch.tokens.size // mesh.size > policy.logit_chunk_rows
  traced = run.step.accumulate.trace(
      run.start, run.step.gradient_shapes(run.start), batch, np.float32(1)
  )
  assert 'scan' in str(traced.jaxpr)
  assert not _collectives_in_loops(traced.jaxpr.jaxpr)
