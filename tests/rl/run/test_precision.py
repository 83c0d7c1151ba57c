import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.checkpoint.manager import CheckpointManager
from jetrl_jax.config import build as configs
from jetrl_jax.fp8 import QTensor, Recipe, scaling_state
from jetrl_jax.rl.run import mixed_flow, train_state
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run.precision import RunPrecision
from jetrl_jax.rl.training import initialize
from tests import whole_run
from tests.rl import tiny_run

TOKEN = Recipe(name='fp8_token', min_sqnr_db=30.0)
OUT, DOWN = 'layers_0/attn/o', 'layers_0/mlp/down'
SETTLED = RunPrecision(
    invariant_scale=1.5, min_sqnr_db=30.0, high_precision={DOWN: 12.5}
)


def _begun(workdir):
  """A workdir with a first checkpoint."""
  manager = CheckpointManager(
      workdir / 'checkpoints', keep_latest=1, keep_best=0
  )
  manager.save(1, {'x': jnp.ones(2)}, {}, metric=None)
  manager.close()


def test_a_run_that_has_begun_keeps_the_dots_it_settled_on(tmp_path):
  run_precision.write(tmp_path, SETTLED)
  of = tiny_run.policy(TOKEN)
  # Killed before its first checkpoint: it starts again, and chooses again.
  assert run_precision.read(tmp_path) is None
  assert run_precision.resolve(tmp_path, of, 1.0) is of
  _begun(tmp_path)
  assert run_precision.read(tmp_path) == SETTLED
  resumed = run_precision.resolve(tmp_path, of, 1.5)
  assert not resumed.recipe.quantizes(DOWN)
  assert resumed.recipe.quantizes('layers_0/attn/qkv')
  # What a dry run says, before and after.
  assert 'not known yet' in run_precision.describe(tmp_path / 'new', TOKEN)
  assert run_precision.describe(tmp_path, TOKEN).strip() == (
      f'precision.min_sqnr_db=30 chose at the cold start: {DOWN} (12.5 dB)'
  )
  assert run_precision.describe(tmp_path, Recipe(name='bf16')) == ''
  # Another factor would be undone on export that was never put in.
  with pytest.raises(ValueError, match='invariant_scale is 1.0, but .* 1.5'):
    run_precision.resolve(tmp_path, of, 1.0)
  other = tiny_run.policy(dataclasses.replace(TOKEN, min_sqnr_db=20.0))
  with pytest.raises(ValueError, match='min_sqnr_db is 20.0, but .* 30.0'):
    run_precision.resolve(tmp_path, other, 1.5)
  (tmp_path / 'precision.json').write_text('{"x": 1}')
  with pytest.raises(ValueError, match=r'json cannot be read.*\. Restore it'):
    run_precision.resolve(tmp_path, of, 1.5)


def test_a_run_that_lost_which_dots_it_keeps_is_told_so(tmp_path):
  _begun(tmp_path)
  with pytest.raises(ValueError, match='precision.json is missing.*=30 keeps'):
    run_precision.resolve(tmp_path, tiny_run.policy(TOKEN), 1.0)
  # Nothing was to be chosen, so nothing is unknown.
  of = tiny_run.policy(Recipe(name='fp8_token'))
  assert run_precision.resolve(tmp_path, of, 1.0) is of


def _with_health(fp8_state, decibels):
  """The slots with dB of every dot's input set by hand; 35 if not named."""

  def walk(node, path):
    if set(node) == set(scaling_state.OPERANDS):
      noise = 10 ** (-decibels.get(path, 35.0) / 10)
      sums = jnp.asarray([9, 0, 0, 1, noise], jnp.float32)
      return node | {'input': node['input'] | {'health': sums}}
    return {
        key: walk(child, f'{path}/{key}' if path else key)
        for key, child in node.items()
    }

  return walk(fp8_state, '')


def test_what_either_side_loses_is_in_high_precision_on_both(tmp_path):
  changes = {
      'precision.recipe': 'fp8_token',
      'precision.rollout_recipe': 'int8',
      'precision.min_sqnr_db': 30.0,
      'algorithm.old_logprobs': 'recompute',
  }
  spec = configs.build(whole_run.config(**changes))
  start = mixed_flow.create(
      spec.rollout_policy,
      train_state.create(
          spec.policy, spec.initial_params(), optax.identity(), spec.mesh
      ),
      spec.mesh,
  )
  start = dataclasses.replace(
      start,
      fp8_state=_with_health(start.fp8_state, {OUT: 25.0}),
      rollout_fp8_state=_with_health(start.rollout_fp8_state, {DOWN: 10.0}),
  )
  chosen, state = initialize.settle_precision(spec, start, tmp_path)
  _begun(tmp_path)
  settled = run_precision.read(tmp_path)
  assert settled is not None
  about = {OUT: 25.0, DOWN: 10.0}
  assert settled.high_precision == pytest.approx(about, abs=1e-5)
  for policy, fp8_state in (
      (chosen.policy, state.fp8_state),
      (chosen.rollout_policy, state.rollout_fp8_state),
  ):
    left = ['layers_0/attn/qkv', 'layers_0/mlp/gate_up']
    assert scaling_state.dot_paths(fp8_state) == left
    assert not policy.recipe.quantizes(DOWN)
  layers = [
      weights['layers_0'] for weights in (state.weights, state.rollout_weights)
  ]
  down = [layer['mlp']['down']['kernel'] for layer in layers]
  assert down[1].dtype == jnp.bfloat16
  np.testing.assert_array_equal(*down)
  # What still is quantised has not moved.
  for layer, before in zip(
      layers, (start.weights, start.rollout_weights), strict=True
  ):
    qkv = layer['attn']['qkv']['kernel']
    assert isinstance(qkv, QTensor)
    jax.tree.map(
        np.testing.assert_array_equal,
        qkv,
        before['layers_0']['attn']['qkv']['kernel'],
    )
  # A resumed run has the same two sides.
  policy = run_precision.resolve(tmp_path, spec.policy, 1.0)
  resumed = spec.with_policy(policy)
  assert resumed.policy == chosen.policy
  assert resumed.rollout_policy == chosen.rollout_policy


def test_without_a_threshold_nothing_is_chosen_or_measured():
  of = tiny_run.policy(Recipe(name='bf16'))
  settled = run_precision.settle([(of, tiny_run.state_shapes(of))], 2.0)
  assert settled == RunPrecision(
      invariant_scale=2.0, min_sqnr_db=0.0, high_precision={}
  )
  assert run_precision.with_high_precision(of, settled) is of
