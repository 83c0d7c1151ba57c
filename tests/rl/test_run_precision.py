import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax import checkpoint, sharding
from jetrl_jax import config as configs
from jetrl_jax.fp8 import QTensor, Recipe, slots
from jetrl_jax.rl import mixed_flow, run_precision, startup
from jetrl_jax.rl import state as states
from jetrl_jax.rl.run_precision import RunPrecision
from tests import whole_run
from tests.rl import tiny_run

TOKEN = Recipe(name='fp8_token', min_sqnr_db=30.0)
DOWN = 'layers_0/mlp/down'
SETTLED = RunPrecision(
    invariant_scale=1.5, min_sqnr_db=30.0, high_precision={DOWN: 12.5}
)


def _begun(workdir):
  """A workdir with a first checkpoint."""
  manager = checkpoint.CheckpointManager(
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
  assert 'not known yet' in run_precision.told(tmp_path / 'new', TOKEN)
  assert run_precision.told(tmp_path, TOKEN).strip() == (
      f'precision.min_sqnr_db=30 chose at the cold start: {DOWN} (12.5 dB)'
  )
  assert run_precision.told(tmp_path, Recipe(name='bf16')) == ''
  # Another factor would be undone on export that was never put in.
  with pytest.raises(ValueError, match='invariant_scale is 1.0, but .* 1.5'):
    run_precision.resolve(tmp_path, of, 1.0)
  other = tiny_run.policy(dataclasses.replace(TOKEN, min_sqnr_db=20.0))
  with pytest.raises(ValueError, match='min_sqnr_db is 20.0, but .* 30.0'):
    run_precision.resolve(tmp_path, other, 1.5)
  (tmp_path / 'precision.json').write_text('{"x": 1}')
  with pytest.raises(ValueError, match='precision.json does not say'):
    run_precision.resolve(tmp_path, of, 1.5)


def _with_health(state, path, operand, sums):
  """The state with the health of one operand set by hand."""

  def walk(node, rest):
    if not rest:
      entry = node[operand] | {'health': jnp.asarray(sums, jnp.float32)}
      return node | {operand: entry}
    return node | {rest[0]: walk(node[rest[0]], rest[1:])}

  fp8_state = walk(state.fp8_state, path.split('/'))
  return dataclasses.replace(state, fp8_state=fp8_state)


def test_the_choice_is_made_from_inputs_and_kernels_and_takes_effect():
  of = tiny_run.policy(TOKEN)
  state = tiny_run.cold_state(of)
  for path in slots.slot_paths(state.fp8_state):
    # 35 dB everywhere, but for the input of one dot: 10 log10(1 / 0.1).
    noise = 0.1 if path == DOWN else 10**-3.5
    state = _with_health(state, path, 'input', [9, 0, 0, 1, noise])
  settled = run_precision.settle([(of, state)], 1.0)
  assert settled.high_precision == {DOWN: pytest.approx(10.0, abs=1e-5)}
  assert json.loads(json.dumps(dataclasses.asdict(settled)))
  of = run_precision.keeping(of, settled)
  kept = states.restricted(of, state, sharding.make_mesh())
  down = kept.weights['layers_0']['mlp']['down']['kernel']
  assert down.dtype == jnp.bfloat16
  assert DOWN not in slots.slot_paths(kept.fp8_state)
  qkv = kept.weights['layers_0']['attn']['qkv']['kernel']
  assert isinstance(qkv, QTensor)
  jax.tree.map(
      np.testing.assert_array_equal,
      qkv,
      state.weights['layers_0']['attn']['qkv']['kernel'],
  )


def test_what_the_rollout_loses_is_in_high_precision_on_both_sides(tmp_path):
  changes = {'flow': 'flashrl', 'precision.min_sqnr_db': 30.0}
  parts = configs.build(whole_run.config(**changes))
  state = mixed_flow.create(
      parts.rollout_policy,
      states.create(
          parts.policy, parts.initial_params(), optax.identity(), parts.mesh
      ),
      parts.mesh,
  )
  side = mixed_flow.as_rollout(state)
  for path in slots.slot_paths(side.fp8_state):
    noise = 0.1 if path == DOWN else 10**-3.5
    side = _with_health(side, path, 'input', [9, 0, 0, 1, noise])
  state = dataclasses.replace(state, rollout_fp8_state=side.fp8_state)
  chosen, state = startup.settle_precision(parts, state, tmp_path)
  _begun(tmp_path)
  # BF16 training has no dot to lose: the choice is the INT8 rollout's.
  settled = run_precision.read(tmp_path)
  assert settled is not None
  assert settled.high_precision == {DOWN: pytest.approx(10.0, abs=1e-5)}
  assert chosen.rollout_policy.recipe.quantizes('layers_0/attn/qkv')
  for policy in (chosen.policy, chosen.rollout_policy):
    assert not policy.recipe.quantizes(DOWN)
  assert DOWN not in slots.slot_paths(state.rollout_fp8_state)
  kernels = [
      weights['layers_0']['mlp']['down']['kernel']
      for weights in (state.weights, state.rollout_weights)
  ]
  assert kernels[1].dtype == jnp.bfloat16
  np.testing.assert_array_equal(*kernels)
  # A resumed run has the same two sides.
  policy = run_precision.resolve(tmp_path, parts.policy, 1.0)
  resumed = parts.with_policy(policy)
  assert resumed.policy == chosen.policy
  assert resumed.rollout_policy == chosen.rollout_policy


def test_without_a_threshold_nothing_is_chosen_or_measured():
  of = tiny_run.policy(Recipe(name='bf16'))
  settled = run_precision.settle([(of, tiny_run.state_shapes(of))], 2.0)
  assert settled == RunPrecision(
      invariant_scale=2.0, min_sqnr_db=0.0, high_precision={}
  )
  assert run_precision.keeping(of, settled) is of
