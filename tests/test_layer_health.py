"""What `benchmarks.layer_health` measures, on values known by hand."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import layer_measures, layer_plant, layer_updates
from jetrl_jax.fp8 import Recipe
from tests import whole_run

_DEFAULT = {'default': Recipe()}


def test_a_value_halfway_between_two_of_the_grid_is_a_tie():
  # The amax of 448 gives the scale 1. Above 1 E4M3 has steps of 1/8, so 1.0625
  # lies halfway, 1.03 does not; 2^-8 is below the smallest normal, 2^-6.
  kernel = jnp.asarray([[448.0, 1.0625, 1.03, 0.0, -1.0625, 2.0**-8, 1.0, 5.0]])
  (row,) = layer_measures.kernel_rows('dot', kernel, _DEFAULT)
  assert row['ties'] == 2 / 8
  assert row['zeros'] == 1 / 8
  assert row['subnormal'] == 1 / 8
  assert row['flushed'] == row['saturated'] == 0


def test_one_bfloat16_in_sixteen_is_a_tie_under_powers_of_two_alone():
  kernel = jax.random.normal(jax.random.key(0), (256, 256))
  rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
  recipes = _DEFAULT | {
      'amax448': Recipe(power_of_two_scales=False),
      'fp8_token': Recipe(name='fp8_token'),
  }
  ties = {
      row['arm']: row['ties']
      for row in layer_measures.kernel_rows('dot', rounded, recipes)
  }
  # 65536 values: the deviation of the share is 0.001.
  assert abs(ties['default'] - 1 / 16) < 0.005
  assert abs(ties['fp8_token'] - 1 / 16) < 0.005
  assert ties['amax448'] < 0.001
  (whole,) = layer_measures.kernel_rows('dot', kernel, _DEFAULT)
  assert whole['ties'] < 0.001


def test_a_massive_value_hides_from_the_sqnr_what_the_median_token_lost():
  x = jax.random.normal(jax.random.key(0), (32, 128)).at[0, 7].set(2.0**16)
  rows = layer_measures.input_rows(
      'dot',
      x.astype(jnp.bfloat16),
      _DEFAULT | {'fp8_token': Recipe(name='fp8_token')},
      mask_M=np.ones(32, np.float32),
      positions_M=np.arange(32),
      tokens_M=np.arange(32),
  )
  found = {row['arm']: row for row in rows}
  assert found['bf16']['position'] == 0
  assert found['bf16']['channels'][0] == 7
  # On a scale of 256 the least value is 0.5: half of a quarter is flushed.
  assert found['default']['sqnr_db'] > 40
  assert found['default']['median_token_db'] < 20
  assert found['fp8_token']['median_token_db'] > 29


def test_what_is_planted_fires_at_first_tokens_alone():
  random = np.random.default_rng(0)
  dim, ffn, size = 16, 24, 400.0
  rows = random.normal(size=(200, dim))
  first = np.arange(200) % 50 == 0
  rows[first] = 5 * random.normal(size=dim)
  hidden = random.normal(size=(200, ffn))
  params = {
      'layers_1': {
          'mlp': {
              'gate_up': {
                  'kernel': jnp.asarray(random.normal(size=(2 * ffn, dim)))
              },
              'down': {'kernel': jnp.asarray(random.normal(size=(dim, ffn)))},
          }
      },
      'final_norm': {'scale': jnp.ones(dim)},
  }
  plant = layer_plant.find(params, 1, rows, hidden, first)
  mlp = layer_plant.planted(params, plant, size)['layers_1']['mlp']
  gate, up = np.split(rows @ np.asarray(mlp['gate_up']['kernel']).T, 2, axis=1)
  made = gate / (1 + np.exp(-gate)) * up
  (neuron, _), (channel, _) = plant.neurons, plant.channels
  np.testing.assert_allclose(made[first, neuron], size, rtol=1e-2)
  assert np.abs(made[~first, neuron]).max() < size / 10
  written = np.asarray(mlp['down']['kernel'])[:, neuron]
  np.testing.assert_array_equal(written, np.eye(dim)[channel])


def test_updates_are_held_against_what_was_before_them():
  # The log-probs are the masters, the 8-bit weights their signs.
  def score(params):
    return layer_updates.Scored(
        logprobs_N=np.asarray(params['w']),
        weights=[jnp.sign(params['w']).astype(jnp.int8)],
        next_NV=np.log(np.full((1, 2), 0.5)),
    )

  def without_weights(params):
    return dataclasses.replace(score(params), weights=[])

  params = {'w': jnp.asarray([0.5, -0.5, 0.0, 0.1])}
  signs = {'w': jnp.asarray([1, -1, 0, 1], jnp.int8)}
  scores = {'one': score, 'none': without_weights}
  large, none, small, _ = layer_updates.rows(scores, params, signs, [0.25, 0.0])
  assert (large['arm'], none['arm']) == ('one', 'none')
  np.testing.assert_allclose(large['half_mean_square'], 0.75 * 0.25**2 / 2)
  np.testing.assert_allclose(large['mean_absolute'], 0.75 * 0.25)
  # exp(-0.25) is 0.78, exp(0.25) 1.28; 0.1 - 0.25 has another sign.
  assert large['clipped'] == 0.75
  assert large['weights_changed'] == 0.25
  assert 'weights_changed' not in none
  assert small['half_mean_square'] == small['weights_changed'] == 0


def test_the_clip_drops_what_an_update_made_likelier_or_less_likely():
  old = np.log([[0.5, 0.4, 0.095, 0.005]])
  new = np.log([[0.5, 0.3, 0.18, 0.02]])
  # Ratios 1, 0.75, 1.9 and 4; a token's part is p (1 - p).
  parts = np.array([0.25, 0.21, 0.1476, 0.0196])
  found = layer_updates.clipped_gradient(old, new)
  np.testing.assert_allclose(
      [found['clipped_positive_all'], found['clipped_negative_all']],
      [parts[2:].sum() / parts.sum(), (parts[1] + parts[3]) / parts.sum()],
  )
  assert found['clipped_positive_rare'] == found['clipped_negative_rare'] == 1
  same = layer_updates.clipped_gradient(old, old)
  assert set(same.values()) == {0}


def test_a_clip_of_symmetric_noise_drops_more_where_the_advantage_is_positive():
  random = np.random.default_rng(0)
  old = random.normal(scale=2, size=(200, 50))
  new = old + random.normal(scale=0.3, size=old.shape)
  old, new = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (old, new))
  found = layer_updates.clipped_gradient(old, new)
  assert 0.25 < found['clipped_positive_all'] < 0.35
  assert 0.12 < found['clipped_negative_all'] < 0.22


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_command_measures_every_part_of_a_checkpoint(tmp_path):
  rows = _measured(
      tmp_path / 'health',
      '--compared=1',
      '--massive=1000',
      '--arms=default,own_amax,kernels_only,planted',
  )
  assert (tmp_path / 'health.md').exists()
  whole = {
      row['arm']: row
      for row in rows
      if row['part'] == 'gradient' and row['dot'] == 'all'
  }
  assert whole['kernels_only']['cosine'] > whole['default']['cosine'] > 0.9
  assert whole['own_amax']['output_grad_saturated_worst'] < 0.01
  planted = [r for r in rows if r['part'] == 'planted']
  assert {r['model'] for r in planted} == {
      'as it is',
      'layers_2/mlp/down 1000',
  }
  (massive,) = [
      r
      for r in rows
      if r['part'] == 'input'
      and (r['model'], r['dot'], r['arm'])
      == ('layers_2/mlp/down 1000', 'layers_2/mlp/down', 'bf16')
  ]
  assert massive['amax_first_token'] > 500 > massive['amax_other_tokens']


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_command_measures_updates_of_all_sizes(tmp_path):
  rows = _measured(
      tmp_path / 'updates', '--arms=updates', '--updates=1e-2,1e-8'
  )
  assert len(rows) == 6
  for arm in {row['arm'] for row in rows}:
    large, small = (row for row in rows if row['arm'] == arm)
    assert large['half_mean_square'] > small['half_mean_square'] >= 0
    if arm != 'BF16':
      assert large['weights_changed'] > 0.1 > 1e-3 > small['weights_changed']


def _measured(output: pathlib.Path, *more: str) -> list[dict]:
  """Runs the command on the quickstart's checkpoint; returns its records."""
  example = whole_run.ROOT / 'examples/quickstart'
  return whole_run.benchmark(
      'layer_health',
      output,
      f'--checkpoint={example / "checkpoint"}',
      f'--data={example / "train.jsonl"}',
      *('--prompts=9', '--answers=written', '--step_prompts=2'),
      *('--tokens=16', '--mini_batch=16'),
      *more,
  )
