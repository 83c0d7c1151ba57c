"""Where activation scales come from: a discarded backward pass."""

import contextlib
import dataclasses
import logging

import numpy as np

from jetrl_jax.core import sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.rl.run import calibration as calibration_module
from jetrl_jax.rl.run.calibration import Calibration, likelihood_sequences
from jetrl_jax.rl.types import TrainBatch
from tests import compilations
from tests.rl import tiny_run, tiny_updates


def _slot_list(state):
  made = []
  scaling_state.map_records(lambda slot: made.append(slot), state.fp8_state)
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


def test_measured_health_is_that_of_the_scales_in_use():
  run, calibration, samples = tiny_run.cold_fp8_run()
  packed = tiny_run.calibration_batches(samples)
  filled = calibration.fill(run.start, packed, tiny_run.TEMPERATURE)
  # A hundred times too small: nearly all that dots read saturates.
  small = dataclasses.replace(
      filled,
      fp8_state=scaling_state.map_records(
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


def test_a_start_warns_where_8_bit_inputs_move_the_policy(caplog):
  for distance, level in ((0.004, 'INFO'), (0.2, 'WARNING')):
    caplog.clear()
    with caplog.at_level(logging.INFO):
      calibration_module.report(distance)
    assert caplog.records[-1].levelname == level
  assert "high_precision_layers='.*/mlp/down'" in caplog.text
