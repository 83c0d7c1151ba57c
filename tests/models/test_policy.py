"""Tests of the policy's functions, through what compiles them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import rng
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.models import rope
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl import packing
from jetrl_jax.rl.rollout.engine import Engine
from tests.rl import tiny_run, tiny_updates


@pytest.mark.parametrize('name', ['tile', 'logit_chunk_rows'])
@pytest.mark.parametrize('value', [0, 8, 40])
def test_sizes_that_no_dot_can_take_are_refused(name, value):
  with pytest.raises(ValueError, match=f'{name} is {value}; it must be a mult'):
    dataclasses.replace(tiny_run.policy(), **{name: value})


def test_smooth_keys_are_refused_where_they_would_do_nothing():
  of = tiny_run.policy()
  with pytest.raises(ValueError, match="kv_cache_dtype is 'compute'; set it"):
    dataclasses.replace(of, smooth_k=True)
  changes = dict(kv_cache_dtype='float8_e4m3fn', smooth_k=True)
  dataclasses.replace(of, **changes)
  with pytest.raises(ValueError, match='keys of this model have no bias; set'):
    dataclasses.replace(tiny_run.policy(family='llama'), **changes)


def test_random_masters_have_the_paths_and_shapes_of_the_tree():
  shapes = jax.eval_shape(
      tiny_run.policy(family='qwen3').init, jax.random.key(0)
  )
  paths = {
      '/'.join(k.key for k in path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
  }
  assert {p: leaf.shape for p, leaf in paths.items()} == {
      'embed/embedding': (64, 32),
      'final_norm/scale': (32,),
      'lm_head/kernel': (64, 32),
      'layers_0/attn_norm/scale': (32,),
      'layers_0/attn/qkv/kernel': ((2 + 2 * 1) * 16, 32),
      'layers_0/attn/q_norm/scale': (16,),
      'layers_0/attn/k_norm/scale': (16,),
      'layers_0/attn/o/kernel': (32, 2 * 16),
      'layers_0/mlp_norm/scale': (32,),
      'layers_0/mlp/gate_up/kernel': (2 * 64, 32),
      'layers_0/mlp/down/kernel': (32, 64),
  }
  assert {leaf.dtype for leaf in paths.values()} == {jnp.dtype('float32')}


def test_random_masters_are_a_function_of_the_key():
  of = tiny_run.policy()
  init = jax.jit(of.init)
  one, same, other = (init(rng.key(seed, rng.INIT)) for seed in (0, 0, 1))
  tiny_run.assert_same_bits(one, same)
  kernel = one['layers_0']['mlp']['down']['kernel']
  assert np.any(kernel != other['layers_0']['mlp']['down']['kernel'])
  # 2048 draws of deviation 0.02: its estimate is within 5 / sqrt(4096).
  assert abs(float(kernel.std()) / 0.02 - 1) < 5 / 64
  assert np.all(np.asarray(one['final_norm']['scale']) == 1)


def test_packed_sequences_get_the_bits_of_rows_of_their_own():
  run, samples = tiny_run.fp8_run(), tiny_run.completions()
  packed, alone = tiny_updates.batches(samples), tiny_updates.one_per_row(
      samples
  )
  # Neighbours there, none here.
  assert max(b.segment_ids.max() for b in packed) > 1
  assert max(b.segment_ids.max() for b in alone) == 1
  for batches in (packed, alone):
    scores = [run.score(run.start, b) for b in batches]
    differ, tokens = tiny_updates.mismatched(batches, scores)
    assert (differ, tokens > 100) == (0, True)


def _one_row(tokens):
  zeros = np.zeros(len(tokens), np.float32)
  sequence = packing.Sequence(
      tokens=np.asarray(tokens, np.int32),
      **{
          name: zeros
          for name in (
              'loss_mask',
              'loss_weight',
              'advantages',
              'log_mu',
              'rollout_logprobs',
              'old_logprobs',
              'ref_logprobs',
          )
      },
      weight_version=np.zeros(len(tokens), np.int32),
      origin=0,
  )
  return packing.pack(
      [sequence, sequence],
      row_length=tiny_run.LENGTH,
      rows_per_micro_batch=tiny_run.ROWS,
      tile=tiny_run.TILE,
  ).batches[0]


def test_a_token_reaches_its_own_log_prob_and_those_after_it_only():
  run = tiny_run.fp8_run()
  tokens = np.arange(10, 23)
  changed = tokens.copy()
  changed[5] = 40
  batch, other = _one_row(tokens), _one_row(changed)
  # Only the first of two segments in the row changes.
  other = dataclasses.replace(
      other,
      tokens=np.concatenate(
          [other.tokens[:, :16], batch.tokens[:, 16:]], axis=1
      ),
  )
  before = run.score(run.start, batch)[0]
  after = run.score(run.start, other)[0]
  differs = before != after
  # Token 0 of a segment is predicted by nothing.
  assert not differs[1:5].any()
  assert differs[5:13].all()
  assert not differs[17:29].any()


def test_log_probs_of_the_vocabulary_add_up_to_one():
  run = tiny_run.bf16_run()
  context = np.asarray([5, 6, 7], np.int32)
  for temperature in (0.5, 1.0, 2.0):
    logprobs_V = tiny_updates.next_logprobs(
        run, run.start, context, temperature
    )
    total = np.exp(logprobs_V.astype(np.float64)).sum()
    assert abs(total - 1) < 1e-5


def test_temperature_divides_the_logits():
  run = tiny_run.bf16_run()
  context = np.asarray([5, 6, 7], np.int32)
  cold, warm = (
      tiny_updates.next_logprobs(run, run.start, context, t).astype(np.float64)
      for t in (0.5, 1.0)
  )
  # Differences of log-probs are differences of logits.
  np.testing.assert_allclose(cold - cold[0], 2 * (warm - warm[0]), atol=1e-5)


def test_chunks_of_logit_rows_change_no_bit():
  run = tiny_run.fp8_run()
  batch = tiny_updates.batches(tiny_run.completions())[0]
  # All 512 rows at once, and 192 at a time, which leaves a rest of 128.
  for rows in (1024, 192):
    of = dataclasses.replace(run.policy, logit_chunk_rows=rows)
    logprobs_BT, _ = exact_jit(of.logprobs)(
        PolicyParams(run.start.weights, run.start.fp8_state),
        batch,
        jnp.float32(tiny_run.TEMPERATURE),
    )
    assert tiny_updates.mismatched([batch], [logprobs_BT])[0] == 0


def _with_large_key_bias(of, weights):
  """Biases of 200 and -200, as Qwen2.5 has them in channels that hardly turn.

  Returns:
    the policy, of which half the channels hardly turn; and the weights.
  """
  of = dataclasses.replace(
      of, model=dataclasses.replace(of.model, rope_theta=2.0**30)
  )
  heads, size = of.model.num_heads, of.model.head_dim
  is_slow = rope.is_slow(of.model)
  assert is_slow.sum() == size // 2
  signs = np.where(np.arange(size) % 2, 200.0, -200.0)
  qkv = weights['layers_0']['attn']['qkv']
  bias_OH = np.asarray(qkv['bias'], np.float32).reshape(-1, size)
  bias_OH[heads] = np.where(is_slow, signs, bias_OH[heads])
  planted = qkv | {'bias': jnp.asarray(bias_OH.ravel(), qkv['bias'].dtype)}
  attn = weights['layers_0']['attn'] | {'qkv': planted}
  return of, weights | {'layers_0': weights['layers_0'] | {'attn': attn}}


@pytest.mark.parametrize('recipe', ['bf16', 'fp8_delayed'])
def test_smooth_keys_keep_what_a_large_bias_hides_from_fp8(recipe):
  run = tiny_run.bf16_run() if recipe == 'bf16' else tiny_run.fp8_run()
  of, weights = _with_large_key_bias(run.policy, run.start.weights)
  batch = tiny_updates.batches(tiny_run.completions())[0]
  keys = {'kv_cache_dtype': 'float8_e4m3fn'}
  wide, fp8, smooth = (
      np.asarray(
          exact_jit(dataclasses.replace(of, **changes).logprobs)(
              PolicyParams(weights, run.start.fp8_state),
              batch,
              jnp.float32(1.0),
          )[0]
      )[batch.loss_mask > 0]
      for changes in ({}, keys, keys | {'smooth_k': True})
  )
  lost, kept = (np.abs(x - wide).mean() for x in (fp8, smooth))
  assert 0 < kept < lost / 4


def test_smooth_keys_agree_in_rollout_and_training():
  run = tiny_run.fp8_run()
  of, weights = _with_large_key_bias(run.policy, run.start.weights)
  of = dataclasses.replace(of, kv_cache_dtype='float8_e4m3fn', smooth_k=True)
  # Few pages: sequences are parked, and their keys prefilled again.
  config = tiny_run.engine_config(kv_cache_tokens=96)
  samples = run.rollout(
      dataclasses.replace(run.start, weights=weights),
      engine=Engine(of, config, run.mesh),
  )
  packed = tiny_updates.batches(samples)
  score = exact_jit(of.logprobs)
  params = PolicyParams(weights, run.start.fp8_state)
  temperature = jnp.float32(tiny_run.TEMPERATURE)
  logprobs = [score(params, batch, temperature)[0] for batch in packed]
  differ, tokens = tiny_updates.mismatched(packed, logprobs)
  assert (differ, tokens >= 100) == (0, True)


def test_pages_hold_keys_or_values_of_one_layer():
  keys, values = tiny_run.policy().page_shapes(48, 32)
  assert (keys.shape, keys.dtype) == ((48, 1, 32, 16), jnp.bfloat16)
  assert values == keys
