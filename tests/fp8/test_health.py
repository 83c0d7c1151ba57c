"""Sums of what quantising lost, and their summary in the log."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import formats, health, scaling_state
from jetrl_jax.fp8.quantization import QTensor, quantize, quantize_groups


def _operand(sums, history=(0.0, 3.0), scale=0.5) -> dict:
  return {
      'amax_history': np.asarray(history, np.float32),
      'scale': np.float32(scale),
      'health': np.asarray(sums, np.float32),
  }


_NOTHING = (0.0, 0.0, 0.0, 0.0, 0.0)


def _dot_state(**operands) -> dict:
  empty = {name: _operand(_NOTHING) for name in scaling_state.OPERANDS}
  return empty | operands


def test_sums_count_what_saturates_and_what_becomes_zero_on_valid_rows():
  # Scale 1, largest E4M3 448: 500 saturates (lost 52), 2^-11 is below half of
  # the smallest subnormal 2^-9 and becomes 0, 1 and the two 0 are kept. The
  # second row is padding.
  x = jnp.asarray([[500.0, 2.0**-11, 1.0, 0.0, 0.0], [900.0, *[7.0] * 4]])
  scale = jnp.float32(1.0)
  amax, sums = health.measure(
      x,
      QTensor(values=quantize(x, scale, formats.E4M3), scale=scale),
      jnp.asarray([1.0, 0.0]),
  )
  assert float(amax) == 500.0
  found = dict(zip(health.SUMS, np.asarray(sums).tolist(), strict=True))
  assert found['elements'] == 5
  assert found['saturated'] == 1 and found['flushed'] == 1
  assert found['signal'] == pytest.approx(500.0**2 + 1 + 2.0**-22)
  assert found['noise'] == pytest.approx(52.0**2 + 2.0**-22)


def test_what_a_scale_was_made_of_is_not_saturated():
  # 127 times a scale that is no power of two is rounded below half the amaxes.
  x = jnp.asarray(np.random.default_rng(0).normal(size=(512, 16)), jnp.float32)
  q = quantize_groups(x, formats.INT8, (1, 16), margin=0, power_of_two=False)
  _, sums = health.measure(x, q, jnp.ones(512))
  assert sums[health.SUMS.index('saturated')] == 0


def test_a_summary_has_shares_and_decibels_by_operand():
  state = {
      'layers_0': {
          'mlp': {
              # 2 of 8 saturate, 1 of 8 is flushed, signal to noise is 1000.
              'down': _dot_state(input=_operand((8, 2, 1, 500.0, 0.5)))
          }
      }
  }
  summary = health.summarize(state, ['layers_0/mlp/down'])
  assert summary['layers_0/mlp/down']['input'] == {
      'amax': 3.0,
      'scale': 0.5,
      'saturated_frac': 0.25,
      'flushed_frac': 0.125,
      'sqnr_db': pytest.approx(30.0),
  }


def test_the_amax_is_the_newest_recorded_one():
  # Being filled: entry 0. Right after a roll entry 0 is empty.
  state = {'a': _dot_state(input=_operand(_NOTHING, history=(2.0, 5.0)))}
  assert health.summarize(state, ['a'])['a']['input']['amax'] == 2.0
  assert health.summarize(state, ['a'])['a']['kernel']['amax'] == 3.0


def test_what_lost_nothing_or_saw_nothing_has_no_ratio():
  state = {'a': _dot_state(input=_operand((8, 0, 0, 1.0, 0.0)))}
  summary = health.summarize(state, ['a'])['a']
  assert 'sqnr_db' not in summary['input']  # Nothing was lost.
  assert 'sqnr_db' not in summary['kernel']  # Nothing was measured.
  assert 'saturated_frac' not in summary['kernel']


def test_the_headline_is_the_worst_dot_state_of_each_operand():
  state = {
      'a': _dot_state(input=_operand((10, 1, 0, 100.0, 1.0))),
      'b': _dot_state(input=_operand((10, 0, 4, 1000.0, 1.0))),
  }
  headline = health.headline(health.summarize(state, ['a', 'b']))
  assert headline['fp8/input/saturated_frac/max'] == pytest.approx(0.1)
  assert headline['fp8/input/flushed_frac/max'] == pytest.approx(0.4)
  assert headline['fp8/input/sqnr_db/min'] == pytest.approx(20.0)
  # No kernel was measured: nothing is said of them, not 0. So it is with the
  # output gradients of recipes that do not quantise them, such as INT8.
  assert not any(name.startswith('fp8/kernel/') for name in headline)


def test_what_the_logits_gradient_flushes_is_no_headline():
  # A softmax: most of it is next to nothing.
  tail = _dot_state(output_grad=_operand((10, 1, 9, 100.0, 1.0)))
  block = _dot_state(output_grad=_operand((10, 0, 2, 100.0, 1.0)))
  state = {'lm_head': tail, 'layers_0': {'attn': {'o': block}}}
  summary = health.summarize(state, ['lm_head', 'layers_0/attn/o'])
  assert summary['lm_head']['output_grad']['flushed_frac'] == 0.9
  headline = health.headline(summary)
  assert headline['fp8/output_grad/flushed_frac/max'] == 0.2
  assert headline['fp8/output_grad/saturated_frac/max'] == 0.1
  alone = health.headline({'lm_head': summary['lm_head']})
  assert 'fp8/output_grad/flushed_frac/max' not in alone


def test_without_dot_states_there_is_no_headline():
  assert health.headline(health.summarize({}, [])) == {}
