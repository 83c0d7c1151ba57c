"""Where activation scales come from: a discarded backward pass."""

import contextlib
import dataclasses
import logging
from typing import cast

import jax
import numpy as np
import optax
import pytest

from jetrl_jax.config import build as configs
from jetrl_jax.core import rng, sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout import scheduler
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.environment import EnvironmentConfig
from jetrl_jax.rl.run import calibration as calibration_module
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.calibration import (
    Calibration,
    ColdStart,
    InputCost,
    likelihood_sequences,
)
from jetrl_jax.rl.run.gradients import compile_logprobs
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.types import Completion, TrainBatch
from tests import compilations, whole_run
from tests.rl import tiny_run, tiny_updates


def _slot_list(state):
  made = []
  scaling_state.map_dot_states(lambda slot: made.append(slot), state.fp8_state)
  return made


def test_calibration_fills_every_slot_and_changes_nothing_else():
  run, _, _ = tiny_run.cold_fp8_run()
  cold, start = run.start, tiny_run.fp8_run().start
  for name in ('trainable', 'frozen', 'opt_state', 'weights', 'opt_step'):
    tiny_run.assert_same_bits(getattr(start, name), getattr(cold, name))
  for before, after in zip(_slot_list(cold), _slot_list(start), strict=True):
    tiny_run.assert_same_bits(after['kernel'], before['kernel'])
    amax = float(after['input']['amax_history'].max())
    assert amax > 0
    # The next power of two above amax / 448.
    assert amax <= 448 * float(after['input']['scale']) < 2 * amax
    # Gradients of another loss: a start, and no memory of it.
    assert not after['output_grad']['amax_history'].any()
    assert 0 < float(after['output_grad']['scale']) < 1


def test_calibration_is_a_function_of_its_batches():
  run, calibration, samples = tiny_run.cold_fp8_run()
  packed = tiny_run.calibration_batches(samples)
  again = calibration.fill(run.start, packed, tiny_run.TEMPERATURE)
  tiny_run.assert_same_bits(again, tiny_run.fp8_run().start)
  # Several micro-batches in any order: amaxes combine by max.
  assert len(packed) > 1
  other = calibration.fill(run.start, packed[::-1], tiny_run.TEMPERATURE)
  for a, b in zip(_slot_list(other), _slot_list(again), strict=True):
    for operand in scaling_state.OPERANDS:
      for key in ('amax_history', 'scale'):
        tiny_run.assert_same_bits(a[operand][key], b[operand][key])


def test_calibration_compiles_nothing_that_was_compiled_ahead():
  run, _, samples = tiny_run.cold_fp8_run()
  calibration = Calibration(run.policy, sharding.make_mesh(), run.start)
  packed = tiny_run.calibration_batches(samples)
  shape = TrainBatch.of_shapes(*packed[0].tokens.shape)
  with compilations.noted() as compiled:
    with contextlib.closing(CompileAhead(1)) as ahead:
      calibration.compile_ahead(ahead, run.start, shape)
      ahead.wait()
    before = len(compiled)
    state = calibration.fill(run.start, packed, tiny_run.TEMPERATURE)
    calibration.measure(state, packed, tiny_run.TEMPERATURE)
  names = {'jit(_observe)', 'jit(_observe_and_roll)', 'jit(observe_health)'}
  programs = [one.program for one in compiled]
  assert names <= set(programs[:before])
  assert not names & set(programs[before:])


def test_a_calibrated_step_saturates_nothing_and_flushes_little():
  update, *_ = tiny_updates.updates('fp8')
  for slot in _slot_list(update.applied):
    for operand in ('input', 'kernel'):
      elements, saturated, flushed, signal, noise = np.asarray(
          slot[operand]['health']
      )
      assert elements > 0 and signal > 0
      # The calibration saw other tokens than the first step.
      assert saturated < 1e-2 * elements
      assert flushed < 1e-1 * elements
      # E4M3 rounds by at most 2^-4 of a value.
      assert noise < signal * 2**-8


def test_likelihood_sequences_average_over_all_targets():
  one, two = likelihood_sequences(
      [np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int32)], [2, 0]
  )
  # Targets: tokens 2 and 3 of the first; 1 and 2 of the second, because
  # nothing predicts token 0.
  assert one.loss_mask.tolist() == [0, 0, 1, 1]
  assert two.loss_mask.tolist() == [0, 1, 1]
  assert one.loss_weight.tolist() == [0, 0, 0.25, 0.25]
  assert two.loss_weight.tolist() == [0, 0.25, 0.25]
  assert (one.origin, two.origin) == (0, 1)


def test_likelihood_sequences_without_a_target_weigh_nothing():
  (one,) = likelihood_sequences([np.zeros(1, np.int32)], [1])
  assert not one.loss_mask.any() and not one.loss_weight.any()


def test_what_an_environment_said_is_measured_as_no_sample():
  completion = Completion(
      prompt_id=0,
      sample=0,
      prompt_tokens=np.array([4, 5], np.int32),
      tokens=np.array([6, 7, 8], np.int32),
      log_mu=np.full(3, -0.5, np.float32),
      logprobs=np.full(3, -0.5, np.float32),
      weight_version=np.zeros(3, np.int32),
      finish_reason='length',
      sampled=np.array([True, False, True]),
  )
  (one,) = calibration_module._sampled_sequences([completion])
  assert one.tokens.tolist() == [4, 5, 6, 7, 8]
  assert one.rollout_logprobs.tolist() == [0, 0, -0.5, 0, -0.5]
  # Its tokens are inputs of the dots all the same.
  assert one.loss_mask.tolist() == [0, 0, 1, 1, 1]


def test_a_short_rollout_samples_as_the_run_does(monkeypatch):
  changes = {'seed': 5, 'rollout.temperature': 0.7}
  spec = configs.build(whole_run.config(**changes))
  spec = dataclasses.replace(spec, environment=cast(EnvironmentConfig, 'turns'))
  asked = {}
  monkeypatch.setattr(
      calibration_module, 'rollout', lambda *a, **how: asked.update(how, of=a)
  )
  state, stop = tiny_run.fp8_run().start, scheduler.never_stop
  calibration_module.short_rollout(spec, cast(Engine, None), state, stop)
  assert (asked['temperature'], asked['environment']) == (0.7, 'turns')
  # By the tiny config four prompts, four samples each, of six tokens.
  assert asked['of'][2] == [spec.train_set[i] for i in range(4)]
  assert asked['num_generations'] == 4
  assert asked['limits'].tolist() == [[6] * 4] * 4
  # A run that is stopped meanwhile does not wait for its end.
  assert asked['should_stop'] is stop
  assert asked['base_key'] == rng.key(5, rng.CALIBRATION)


def test_measured_health_is_that_of_the_scales_in_use():
  run, calibration, samples = tiny_run.cold_fp8_run()
  packed = tiny_run.calibration_batches(samples)
  filled = calibration.fill(run.start, packed, tiny_run.TEMPERATURE)
  # A hundred times too small: nearly all that dots read saturates.
  small = dataclasses.replace(
      filled,
      fp8_state=scaling_state.map_dot_states(
          lambda slot: slot
          | {'input': slot['input'] | {'scale': slot['input']['scale'] / 100}},
          filled.fp8_state,
      ),
  )
  shares = {}
  for name, state in (('filled', filled), ('small', small)):
    measured, _ = calibration.measure(state, packed, tiny_run.TEMPERATURE)
    slots = _slot_list(measured)
    for before, after in zip(_slot_list(state), slots, strict=True):
      for key in ('amax_history', 'scale'):
        tiny_run.assert_same_bits(after['input'][key], before['input'][key])
    shares[name] = [
        float(slot['input']['health'][1] / slot['input']['health'][0])
        for slot in slots
    ]
  assert max(shares['filled']) == 0
  assert min(shares['small']) > 0.1


def test_the_distance_is_0_from_the_pass_to_itself_and_grows_with_a_shift():
  run, calibration, samples = tiny_run.cold_fp8_run()
  packed = tiny_run.calibration_batches(samples)
  state = calibration.fill(run.start, packed, tiny_run.TEMPERATURE)
  # Nothing was sampled.
  none = [
      dataclasses.replace(
          batch, rollout_logprobs=np.zeros_like(batch.rollout_logprobs)
      )
      for batch in packed
  ]
  _, nothing = calibration.measure(state, none, tiny_run.TEMPERATURE)
  assert nothing is None
  distances = []
  for shift in (0.0, 0.5):
    moved = []
    for batch in packed:
      _, logprobs = calibration.observe(
          state, batch, np.float32(tiny_run.TEMPERATURE)
      )
      sampled = np.where(batch.loss_mask > 0, np.asarray(logprobs) - shift, 0)
      moved.append(
          dataclasses.replace(
              batch, rollout_logprobs=sampled.astype(np.float32)
          )
      )
    _, distance = calibration.measure(state, moved, tiny_run.TEMPERATURE)
    distances.append(distance)
  # x = log before - log after = -0.5 everywhere.
  np.testing.assert_allclose(distances, [0, np.expm1(0.5) - 0.5], atol=1e-6)


def _planted(masters):
  """Returns masters of the same function, one channel 2^8 times as large."""
  planted = jax.tree.map(lambda x: x, masters)
  layer = planted['layers_0']
  for norm, dots, name in (
      ('attn_norm', 'attn', 'qkv'),
      ('mlp_norm', 'mlp', 'gate_up'),
  ):
    scale, kernel = layer[norm]['scale'], layer[dots][name]['kernel']
    layer[norm]['scale'] = scale.at[3].multiply(2.0**8)
    layer[dots][name]['kernel'] = kernel.at[:, 3].multiply(2.0**-8)
  return planted


def test_an_outlier_channel_costs_int8_far_more_than_fp8():
  run = tiny_run.fp8_run()
  packed = tiny_run.calibration_batches(tiny_run.completions())
  shape = TrainBatch.of_shapes(*packed[0].tokens.shape)
  temperature, found = tiny_run.TEMPERATURE, {}
  for name in ('int8', 'fp8_token'):
    policy = tiny_run.policy(Recipe(name=name), run.mesh)
    states = [
        train_state.create(policy, params, optax.identity(), run.mesh)
        for params in (run.start.trainable, _planted(run.start.trainable))
    ]
    cost = InputCost(policy, run.mesh, states[0])
    with compilations.noted() as compiled:
      with contextlib.closing(CompileAhead(1)) as ahead:
        cost.compile_ahead(ahead, states[0], shape)
        ahead.wait()
    assert 'jit(logprobs)' in {one.program for one in compiled}
    # The policy whose inputs are in 8 bits; what it would have sampled.
    logprobs = compile_logprobs(policy, run.mesh, states[0])
    for state in states:
      params = PolicyParams(state.weights, state.fp8_state)
      batches = []
      for batch in packed:
        read, _ = logprobs(params, batch, np.float32(temperature))
        read = np.where(batch.loss_mask > 0, np.asarray(read), 0)
        batches.append(dataclasses.replace(batch, rollout_logprobs=read))
      with compilations.noted() as compiled:
        found[name, state is states[1]] = cost(state, batches, temperature)
      assert 'jit(logprobs)' not in {one.program for one in compiled}
      # These hold no log-prob of a rollout: nothing was sampled.
      assert cost(state, packed, temperature) is None
  most = calibration_module.MUCH
  assert 0 < found['int8', False] < most < found['int8', True]
  assert 0 < found['fp8_token', True] < most


@pytest.mark.parametrize(
    ('recipe', 'rollout', 'parts'),
    [
        ('fp8_delayed', '', (True, False)),
        ('int8', '', (False, True)),
        ('bf16', '', (False, False)),
        ('bf16', 'int8', (False, True)),
        ('fp8_delayed', 'int8', (True, True)),
        ('fp8_delayed', 'bf16', (True, False)),
    ],
)
@pytest.mark.parametrize('keys', ['compute', 'float8_e4m3fn'])
def test_a_cold_start_measures_every_rollout_that_quantises_once(
    recipe, rollout, parts, keys
):
  spec = configs.build(
      whole_run.config(
          **{
              'precision.recipe': recipe,
              'precision.kv_cache_dtype': keys,
              'precision.rollout_recipe': rollout,
              'algorithm.old_logprobs': 'recompute',
          }
      )
  )
  first = ColdStart(spec, initialize.create(spec))
  if keys != 'compute':
    # Keys in 8 bits are enough.
    parts = parts[0], parts[1] or recipe == 'bf16' or rollout == 'bf16'
  assert (first.training is not None, first.cost is not None) == parts


@pytest.mark.parametrize(
    ('recipe', 'rollout', 'said'),
    [
        ('int8', '', 'in int8 moves the policy by k3'),
        ('bf16', 'int8', 'in int8 moves the policy of the rollout by k3'),
    ],
)
def test_a_start_without_activation_scales_says_the_cost_and_changes_nothing(
    recipe, rollout, said, monkeypatch, caplog
):
  spec = configs.build(
      whole_run.config(
          **{
              'precision.recipe': recipe,
              'precision.rollout_recipe': rollout,
              'algorithm.old_logprobs': 'recompute',
          }
      )
  )
  # Far from any policy of this vocabulary: it must warn, too.
  completion = Completion(
      prompt_id=0,
      sample=0,
      prompt_tokens=np.array([4, 5], np.int32),
      tokens=np.array([6, 7], np.int32),
      log_mu=np.full(2, -0.01, np.float32),
      logprobs=np.full(2, -0.01, np.float32),
      weight_version=np.zeros(2, np.int32),
      finish_reason='length',
      sampled=np.ones(2, bool),
  )
  monkeypatch.setattr(
      calibration_module, 'short_rollout', lambda *_: [completion]
  )
  state, unused = initialize.create(spec), cast(Engine, None)
  with caplog.at_level(logging.INFO):
    found = calibration_module.calibrate_run(
        spec, unused, state, scheduler.never_stop
    )
    # No start, but an action of the guard.
    assert found is state and 'moves the policy' not in caplog.text
    found = calibration_module.calibrate_run(
        spec, unused, state, scheduler.never_stop, ColdStart(spec, state)
    )
  assert found is state
  assert said in caplog.text
  setting = 'precision.rollout_recipe' if rollout else 'precision.recipe'
  assert f"{setting}='fp8_block', then 'bf16'" in caplog.text


def test_a_start_warns_where_8_bit_inputs_move_the_policy(caplog):
  # A policy that 8-bit inputs make NaN is moved as far as can be.
  levels = ((0.004, 'INFO'), (float('nan'), 'WARNING'), (0.2, 'WARNING'))
  for distance, level in levels:
    caplog.clear()
    with caplog.at_level(logging.INFO):
      calibration_module.report(distance, tiny_run.policy())
    assert caplog.records[-1].levelname == level
  assert (
      "Try precision.high_precision_layers='.*/mlp/down', then"
      " precision.recipe='fp8_block', then 'bf16' (" in caplog.text
  )


@pytest.mark.parametrize(
    ('family', 'changes', 'said'),
    [
        (
            'qwen2',
            {},
            "precision.smooth_k=True, then precision.kv_cache_dtype='c",
        ),
        ('qwen2', {'smooth_k': True}, "Try precision.kv_cache_dtype='compute'"),
        ('llama', {}, "Try precision.kv_cache_dtype='compute'"),
    ],
)
def test_a_start_names_fp8_keys_first_where_8_bits_move_the_policy(
    family, changes, said, caplog
):
  keys = {'kv_cache_dtype': 'float8_e4m3fn'} | changes
  for recipe, what in (
      (
          tiny_run.FP8,
          'the inputs of dots in fp8_delayed, and keys and values in',
      ),
      (tiny_run.BF16, 'Reading keys and values in FP8 moves the policy by k3'),
  ):
    of = tiny_run.policy(recipe, family=family)
    caplog.clear()
    with caplog.at_level(logging.INFO):
      calibration_module.report(0.2, dataclasses.replace(of, **keys))
    assert what in caplog.text and said in caplog.text
    assert ('high_precision_layers' in caplog.text) == (recipe.name != 'bf16')


def test_what_fp8_keys_cost_is_part_of_what_a_start_says():
  run, calibration, samples = tiny_run.cold_fp8_run()
  of = dataclasses.replace(run.policy, kv_cache_dtype='float8_e4m3fn')
  with_keys = Calibration(of, run.mesh, run.start)
  batches = tiny_run.calibration_batches(samples)
  # The pass that a rollout is compared with has wide keys.
  wide, narrow = (
      one.observe(run.start, batches[0], np.float32(tiny_run.TEMPERATURE))[1]
      for one in (calibration, with_keys)
  )
  tiny_run.assert_same_bits(wide, narrow)


def test_a_start_does_not_name_the_recipe_that_runs_as_a_way_out(caplog):
  of = tiny_run.policy(dataclasses.replace(tiny_run.FP8, name='fp8_block'))
  calibration_module.report(0.2, of)
  assert "precision.recipe='bf16' (" in caplog.text
  caplog.clear()
  calibration_module.report(None, of)
  assert not caplog.text
