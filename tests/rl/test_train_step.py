"""Tests of the update: micro-batches, exactness, and what it refuses."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.rl import apply
from jetrl_jax.rl.objective import LossConfig, policy_loss, supervised_loss
from jetrl_jax.rl.types import TrainBatch
from tests.rl import tiny_run, tiny_updates


def _leaves(tree):
  return [np.asarray(x) for x in jax.tree.leaves(tree)]


@functools.cache
def _whole():
  """Gradients of all samples in the fewest micro-batches."""
  run = tiny_run.fp8_run()
  return run.accumulate(run.start, tiny_updates.batches(tiny_run.completions()))


def _assert_close(found, expected):
  """Gradients of the same tokens, added up in another order."""
  for a, b in zip(_leaves(found), _leaves(expected), strict=True):
    # Float32 sums over up to 512 rows and 24 micro-batches, relative to the
    # largest: each addition rounds by 2^-24 of a partial sum.
    np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max())


def _assert_same_amaxes(found, expected):
  """Histories and scales to the bit, health within summation order."""
  for (path, a), (_, b) in zip(
      jax.tree_util.tree_leaves_with_path(found),
      jax.tree_util.tree_leaves_with_path(expected),
      strict=True,
  ):
    if path[-1].key == 'health':
      np.testing.assert_allclose(a, b, rtol=1e-5)
    else:
      np.testing.assert_array_equal(tiny_run.bits(a), tiny_run.bits(b))


# --- the objective ---------------------------------------------------------


def _batch(**fields):
  zeros = np.zeros((1, 4), np.float32)
  made = {f.name: zeros for f in dataclasses.fields(TrainBatch)}
  made |= {
      'loss_mask': np.asarray([[0, 1, 1, 1]], np.float32),
      'loss_weight': np.asarray([[9, 0.5, 0.25, 0.25]], np.float32),
      'advantages': np.asarray([[7, 2, 1, -1]], np.float32),
      'old_logprobs': np.asarray([[0, -1, -2, -1.5]], np.float32),
      'log_mu': np.asarray([[0, -1, -2, -1.5]], np.float32),
      'segment_ids': np.ones((1, 4), np.int32),
  }
  return TrainBatch(**(made | fields))


# Ratios 1, 1.5 and 0.5; the first token is not in the loss.
LOGPROBS = jnp.asarray(
    [[jnp.nan, -1.0, -2 + math.log(1.5), -1.5 + math.log(0.5)]]
)
ENTROPY = jnp.asarray([[jnp.nan, 1.0, 1.0, 1.0]])


def test_the_objective_of_three_tokens_by_hand():
  loss, metrics = policy_loss(LossConfig(), _batch(), LOGPROBS, ENTROPY)
  # 0.5 * (-1 * 2) + 0.25 * (-1.2 * 1) + 0.25 * (0.8 * 1): the second token is
  # clipped at 1.2, the third, whose advantage is -1, at 0.8.
  np.testing.assert_allclose(loss, -1.0 - 0.3 + 0.2, rtol=1e-6)
  assert metrics['actor/pg_clipfrac'].value() == pytest.approx(2 / 3)
  assert metrics['actor/pg_clipfrac_lower'].value() == 0.0
  assert metrics['actor/entropy'].value() == 1.0
  assert metrics['actor/ppo_kl'].value() == pytest.approx(
      -(math.log(1.5) + math.log(0.5)) / 3, rel=1e-6
  )
  assert float(metrics['actor/pg_loss'].sum) == pytest.approx(-1.1, rel=1e-6)
  assert 'actor/kl_loss' not in metrics


def test_the_clip_distances_and_the_dual_clip_are_the_config_s():
  config = LossConfig(clip_ratio_low=0.4, clip_ratio_high=0.3, clip_ratio_c=1.5)
  batch = _batch(advantages=np.asarray([[0, 2, 1, -1]], np.float32))
  logprobs = LOGPROBS.at[0, 1].set(-1 + math.log(4.0))
  loss, _ = policy_loss(config, batch, logprobs, ENTROPY)
  # 0.5 * -1.3 * 2 - 0.25 * 1.3 + 0.25 * 0.6
  np.testing.assert_allclose(loss, -1.3 - 0.325 + 0.15, rtol=1e-6)
  batch = _batch(advantages=np.asarray([[0, -2, 0, 0]], np.float32))
  loss, metrics = policy_loss(config, batch, logprobs, ENTROPY)
  # Ratio 4 at advantage -2: 8, but at most 1.5 * 2.
  np.testing.assert_allclose(loss, 0.5 * 3.0, rtol=1e-6)
  assert metrics['actor/pg_clipfrac_lower'].value() == pytest.approx(1 / 3)


def test_the_kl_term_by_hand():
  config = LossConfig(kl_loss_coef=0.1)
  batch = _batch(ref_logprobs=np.asarray(LOGPROBS + math.log(2), np.float32))
  loss, metrics = policy_loss(config, batch, LOGPROBS, ENTROPY)
  # x = -log 2: exp(-x) - 1 + x = 2 - 1 - log 2; weights add up to 1.
  kl = 1 - math.log(2)
  np.testing.assert_allclose(loss, -1.1 + 0.1 * kl, rtol=1e-5)
  assert metrics['actor/kl_loss'].value() == pytest.approx(kl, rel=1e-5)


def test_the_entropy_bonus_lowers_the_loss():
  loss, _ = policy_loss(
      LossConfig(entropy_coeff=0.01), _batch(), LOGPROBS, ENTROPY
  )
  np.testing.assert_allclose(loss, -1.1 - 0.01, rtol=1e-6)


def test_the_correction_multiplies_the_policy_term_alone():
  mu = np.asarray([[0, -1, -2, -1.5]], np.float32) - np.float32(math.log(4))
  batch = _batch(log_mu=mu)
  config = LossConfig(
      rollout_is='token', rollout_is_threshold=2.0, entropy_coeff=0.01
  )
  loss, _ = policy_loss(config, batch, LOGPROBS, ENTROPY)
  # pi_old / mu = 4, capped at 2.
  np.testing.assert_allclose(loss, 2 * -1.1 - 0.01, rtol=1e-5)
  loss, _ = policy_loss(LossConfig(), batch, LOGPROBS, ENTROPY)
  np.testing.assert_allclose(loss, -1.1, rtol=1e-5)


def test_no_gradient_reaches_a_masked_token_even_from_nan():
  config = LossConfig(kl_loss_coef=0.1, entropy_coeff=0.1)

  def of(logprobs, entropy):
    return policy_loss(config, _batch(), logprobs, entropy)[0]

  by_logprobs, by_entropy = jax.grad(of, (0, 1))(
      LOGPROBS.at[0, 0].set(-3.0), ENTROPY.at[0, 0].set(5.0)
  )
  assert by_logprobs[0, 0] == 0 and by_entropy[0, 0] == 0
  # Ratio 1, advantage 2, weight 0.5, and the KL against ref_logprobs 0.
  expected = 0.5 * (-2 + 0.1 * (1 - math.exp(1)))
  np.testing.assert_allclose(by_logprobs[0, 1], expected, rtol=1e-5)


def test_the_supervised_loss_is_the_weighted_likelihood():
  loss, metrics = supervised_loss(_batch(), LOGPROBS, ENTROPY)
  second, third = -2 + math.log(1.5), -1.5 + math.log(0.5)
  np.testing.assert_allclose(
      loss, 0.5 - 0.25 * second - 0.25 * third, rtol=1e-6
  )
  assert metrics['sft/loss'].value() == pytest.approx(
      (1 - second - third) / 3, rel=1e-6
  )


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'clip_ratio_low': 1.0}, r'clip_ratio_low is 1\.0; allowed: \[0, 1\)'),
        ({'clip_ratio_high': -0.1}, r'clip_ratio_high is -0\.1; allowed: >= 0'),
        ({'clip_ratio_c': 1.0}, r'clip_ratio_c is 1\.0; allowed: > 1'),
        ({'kl_loss_coef': -1.0}, r'kl_loss_coef is -1\.0; allowed: >= 0'),
        ({'entropy_coeff': -1.0}, r'entropy_coeff is -1\.0; allowed: >= 0'),
        ({'kl_loss_type': 'k1'}, "use 'k2' or 'k3'"),
        ({'rollout_is': 'word'}, "'word'; allowed are 'none', 'token'"),
        ({'rollout_is': 'token', 'rollout_is_threshold': 0.0}, 'above 0'),
    ],
)
def test_objectives_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    LossConfig(**changes)


def test_merge_joins_what_partition_split():
  trainable = {'a': {'x': 1}, 'b': {'c': {'y': 2}}}
  frozen = {'b': {'c': {'z': 3}, 'd': 4}, 'e': 5}
  assert apply.merge(trainable, frozen) == {
      'a': {'x': 1},
      'b': {'c': {'y': 2, 'z': 3}, 'd': 4},
      'e': 5,
  }
  assert trainable == {'a': {'x': 1}, 'b': {'c': {'y': 2}}}


# --- accumulate --------------------------------------------------------------


def test_accumulate_twice_gives_the_same_bits():
  run = tiny_run.fp8_run()
  again = run.accumulate(
      run.start, tiny_updates.batches(tiny_run.completions())
  )
  tiny_run.assert_same_bits(again, _whole())


@pytest.mark.parametrize('count', [1, 2, 4, 8, 16])
def test_any_number_of_micro_batches_gives_the_same_gradients(count):
  run = tiny_run.fp8_run()
  packed = tiny_updates.in_micro_batches(tiny_run.completions(), count)
  assert len(packed) >= count
  gradients, logprobs = run.accumulate(run.start, packed)
  assert tiny_updates.mismatched(packed, logprobs)[0] == 0
  _assert_close(gradients.trainable, _whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, _whole()[0].fp8)
  for name, metric in gradients.metrics.items():
    expected = _whole()[0].metrics[name]
    np.testing.assert_allclose(metric.sum, expected.sum, rtol=1e-5, atol=1e-7)
    assert float(metric.weight) == float(expected.weight)


def test_packing_changes_no_gradient_and_no_amax():
  run = tiny_run.fp8_run()
  gradients, _ = run.accumulate(
      run.start, tiny_updates.one_per_row(tiny_run.completions())
  )
  _assert_close(gradients.trainable, _whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, _whole()[0].fp8)


def test_a_micro_batch_of_padding_adds_nothing():
  run = tiny_run.fp8_run()
  packed = tiny_updates.batches(tiny_run.completions())
  empty = jax.tree.map(np.zeros_like, packed[0])
  gradients, _ = run.accumulate(run.start, [*packed, empty])
  tiny_run.assert_same_bits(gradients, _whole()[0])


def test_numbers_outside_the_loss_mask_have_no_influence():
  run = tiny_run.fp8_run()
  garbage = []
  for batch in tiny_updates.batches(tiny_run.completions()):
    outside = batch.loss_mask == 0
    fields = {
        name: np.where(outside, np.float32(junk), getattr(batch, name))
        for name, junk in {
            'loss_weight': 1e30,
            'advantages': np.nan,
            'log_mu': np.inf,
            'old_logprobs': np.nan,
            'ref_logprobs': -np.inf,
        }.items()
    }
    # Tokens behind the segments' ends, too.
    fields['tokens'] = np.where(batch.segment_ids == 0, 33, batch.tokens)
    garbage.append(dataclasses.replace(batch, **fields))
  gradients, logprobs = run.accumulate(run.start, garbage)
  assert tiny_updates.mismatched(garbage, logprobs)[0] == 0
  tiny_run.assert_same_bits(gradients, _whole()[0])


@pytest.mark.parametrize('recipe', ['fp8', 'bf16'])
def test_on_policy_the_ratio_is_exactly_one(recipe):
  for update in tiny_updates.updates(recipe):
    metrics = {k: v.value() for k, v in update.info.metrics.items()}
    assert metrics['actor/ppo_kl'] == 0.0
    assert metrics['actor/pg_clipfrac'] == 0.0
    assert metrics['actor/pg_clipfrac_lower'] == 0.0


def test_the_policy_loss_at_ratio_one_is_the_mean_advantage():
  update = tiny_updates.updates('fp8')[0]
  expected = -sum(
      float((b.loss_weight * b.advantages).sum(dtype=np.float64))
      for b in update.batches
  )
  found = update.info.metrics['actor/pg_loss'].value()
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_kl_to_an_equal_reference_is_exactly_zero_and_then_is_not():
  run, (update, *_) = tiny_run.fp8_run(), tiny_updates.updates('fp8')

  def against(state):
    return [
        dataclasses.replace(b, ref_logprobs=run.score(state, b))
        for b in update.batches
    ]

  gradients, _ = run.accumulate(update.before, against(update.before))
  assert gradients.metrics['actor/kl_loss'].value() == 0.0
  # Neither does it pull.
  tiny_run.assert_same_bits(gradients.trainable, update.gradients.trainable)
  gradients, _ = run.accumulate(update.after, against(update.before))
  assert gradients.metrics['actor/kl_loss'].value() > 1e-6


def test_an_update_makes_good_tokens_likelier():
  run, (update, *_) = tiny_run.fp8_run(), tiny_updates.updates('fp8')
  gain = 0.0
  for batch, before in zip(update.batches, update.scores, strict=True):
    after = run.score(update.after, batch)
    weight = batch.loss_weight * batch.advantages * batch.loss_mask
    gain += float((weight * np.where(weight, after - before, 0)).sum())
  # To first order gain = lr * |g|_1 (Adam's first step): far above noise.
  assert gain > 0.05


# --- apply -------------------------------------------------------------------


@functools.cache
def _applied():
  run = tiny_run.fp8_run()
  return run.apply(run.start, _whole()[0])


def test_apply_hands_the_accumulator_back_empty():
  _, emptied, _ = _applied()
  for leaf in _leaves(emptied):
    assert not tiny_run.bits(leaf).any()


def test_apply_counts_its_steps():
  state, _, info = _applied()
  assert int(state.opt_step) == 1
  assert bool(info.applied)
  assert float(info.lr) == np.float32(1e-3)
  assert float(info.metrics['actor/pg_loss'].weight) == 1.0


def test_the_gradient_norm_is_over_all_masters():
  _, _, info = _applied()
  squares = sum(
      np.square(leaf.astype(np.float64)).sum()
      for leaf in _leaves(_whole()[0].trainable)
  )
  np.testing.assert_allclose(
      float(info.grad_norm), math.sqrt(squares), rtol=1e-6
  )


def test_the_optimiser_does_not_see_the_fp8_state():
  run = tiny_run.fp8_run()
  moments = jax.tree.structure(
      run.start.opt_state[0].mu,
      is_leaf=lambda x: not isinstance(x, dict),
  )
  assert moments == jax.tree.structure(run.start.trainable)
  names = {
      str(key)
      for path, _ in jax.tree_util.tree_leaves_with_path(run.start.opt_state)
      for key in path
  }
  assert not [n for n in names if 'amax' in n or 'output_grad' in n]
  # Nor do its cotangents reach the masters, the moments or the norm.
  gradients = _whole()[0]
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 3 * x, gradients.fp8)
  )
  state, _, info = run.apply(run.start, louder)
  expected, _, expected_info = _applied()
  tiny_run.assert_same_bits(state.trainable, expected.trainable)
  tiny_run.assert_same_bits(state.opt_state, expected.opt_state)
  assert info.grad_norm == expected_info.grad_norm


def _slots(state, operand, key):
  return {
      (name, dot): slot[operand][key]
      for name, part in state.fp8_state['layers_0'].items()
      for dot, slot in part.items()
  }


def test_input_scales_move_in_roll_inputs_and_not_in_apply():
  run = tiny_run.fp8_run()
  gradients = _whole()[0]
  # Inputs eight times as large as those the scales were made for.
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 8 * x, gradients.fp8)
  )
  state, _, _ = run.apply(run.start, louder)
  rolled = dataclasses.replace(
      state, fp8_state=run.step.roll_inputs(state.fp8_state)
  )
  for place, scale in _slots(run.start, 'input', 'scale').items():
    assert _slots(state, 'input', 'scale')[place] == scale
    assert _slots(rolled, 'input', 'scale')[place] == 8 * scale
    waiting = _slots(state, 'input', 'amax_history')[place]
    shifted = _slots(rolled, 'input', 'amax_history')[place]
    assert waiting[0] > 0 and shifted[0] == 0
    assert shifted[1] == waiting[0]
  for operand in ('kernel', 'output_grad'):
    for key in ('scale', 'amax_history'):
      tiny_run.assert_same_bits(
          list(_slots(rolled, operand, key).values()),
          list(_slots(state, operand, key).values()),
      )


def test_output_gradient_scales_move_in_apply():
  run = tiny_run.fp8_run()
  gradients = _whole()[0]
  louder = dataclasses.replace(
      gradients, fp8=jax.tree.map(lambda x: 64 * x, gradients.fp8)
  )
  state, _, _ = run.apply(run.start, louder)
  quiet, _, _ = _applied()
  for place, scale in _slots(quiet, 'output_grad', 'scale').items():
    assert _slots(state, 'output_grad', 'scale')[place] == 64 * scale
    history = _slots(state, 'output_grad', 'amax_history')[place]
    assert history[0] == 0 and history[1] > 0


def test_kernels_never_saturate_after_an_update():
  for update in tiny_updates.updates('fp8'):
    state = update.after
    masters = state.trainable['layers_0']
    for (name, dot), scale in _slots(state, 'kernel', 'scale').items():
      largest = float(jnp.abs(masters[name][dot]['kernel']).max())
      # E4M3 ends at 448; the scale is the next power of two.
      assert largest <= 448 * float(scale) < 2 * largest * (1 + 1e-6) or (
          # An older amax of the history may be larger.
          float(_slots(state, 'kernel', 'amax_history')[name, dot].max())
          > largest
      )


def _poison_leaf(tree, value):
  leaves, structure = jax.tree.flatten(tree)
  leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(value)
  return structure.unflatten(leaves)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('recipe', ['fp8', 'bf16'])
def test_a_gradient_that_is_not_finite_changes_nothing(recipe, value):
  run, (update, *_) = (
      {'fp8': tiny_run.fp8_run, 'bf16': tiny_run.bf16_run}[recipe](),
      tiny_updates.updates(recipe),
  )
  gradients = dataclasses.replace(
      update.gradients,
      trainable=_poison_leaf(update.gradients.trainable, value),
  )
  for before in (update.before, update.after):
    state, emptied, info = run.apply(before, gradients)
    assert not bool(info.applied)
    tiny_run.assert_same_bits(state, before)
    for leaf in _leaves(emptied):
      assert not tiny_run.bits(leaf).any()
    assert not any(leaf.any() for leaf in _leaves(info.changed_bytes))
  # The next one goes through as if nothing had been.
  state, _, info = run.apply(state, update.gradients)
  assert bool(info.applied) and int(state.opt_step) == 2


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_loss_that_is_not_finite_changes_nothing(value):
  run = tiny_run.fp8_run()
  batch = tiny_updates.batches(tiny_run.completions())[0]
  place = tuple(np.argwhere(batch.loss_mask > 0)[3])
  advantages = batch.advantages.copy()
  advantages[place] = value
  gradients, _ = run.accumulate(
      run.start, [dataclasses.replace(batch, advantages=advantages)]
  )
  state, _, info = run.apply(run.start, gradients)
  assert not np.isfinite(float(info.metrics['actor/pg_loss'].sum))
  assert not bool(info.applied)
  tiny_run.assert_same_bits(state, run.start)


def test_a_loss_alone_that_is_not_finite_is_enough():
  run = tiny_run.fp8_run()
  gradients = _whole()[0]
  metrics = dict(gradients.metrics)
  loss = metrics['actor/pg_loss']
  metrics['actor/pg_loss'] = dataclasses.replace(loss, sum=loss.sum * np.nan)
  state, _, info = run.apply(
      run.start, dataclasses.replace(gradients, metrics=metrics)
  )
  assert not bool(info.applied)
  tiny_run.assert_same_bits(state, run.start)


def test_frozen_masters_stay_and_have_no_moments():
  first, *_, last = tiny_updates.updates('bf16')
  assert list(first.before.frozen) == ['embed']
  tiny_run.assert_same_bits(last.after.frozen, first.before.frozen)
  tiny_run.assert_same_bits(
      last.after.weights['embed'], first.before.weights['embed']
  )
  assert 'embed' not in last.after.trainable
  assert 'embed' not in last.after.opt_state[0].mu
  for old, new in zip(
      _leaves(first.before.trainable),
      _leaves(last.after.trainable),
      strict=True,
  ):
    assert np.any(old != new)


@pytest.mark.parametrize('factor', [1e-2, 1.0, 1e3])
def test_the_clip_bounds_the_global_norm_and_leaves_small_ones(factor):
  run, (update, *_) = tiny_run.bf16_run(), tiny_updates.updates('bf16')
  gradients = jax.tree.map(lambda x: x * factor, update.gradients.trainable)
  state, _, info = run.apply(
      run.start, dataclasses.replace(update.gradients, trainable=gradients)
  )
  norm = float(info.grad_norm)
  # mu = (1 - 0.9) * what the optimiser saw.
  seen = [leaf / 0.1 for leaf in _leaves(state.opt_state[0].mu)]
  total = math.sqrt(sum(np.square(leaf).sum() for leaf in seen))
  clip = run.config.grad_clip
  assert (norm > clip) == (factor >= 1.0)
  np.testing.assert_allclose(total, min(norm, clip), rtol=2e-5)
  shrink = min(1.0, clip / norm)
  for leaf, gradient in zip(seen, _leaves(gradients), strict=True):
    np.testing.assert_allclose(
        leaf, gradient * shrink, rtol=2e-5, atol=1e-9 * factor
    )


def test_the_weights_are_quantised_from_the_masters_once():
  for update in tiny_updates.updates('fp8'):
    state = update.after
    masters = state.trainable['layers_0']
    for (name, dot), scale in _slots(state, 'kernel', 'scale').items():
      weight = state.weights['layers_0'][name][dot]['kernel']
      assert float(weight.scale) == float(scale)
      quantised = (masters[name][dot]['kernel'] / scale).astype(
          jnp.float8_e4m3fn
      )
      tiny_run.assert_same_bits(weight.values, quantised)


@pytest.mark.slow
@pytest.mark.parametrize('rows', [1, 2, 4, 8, 32])
def test_micro_batches_of_another_shape_give_the_same_gradients(rows):
  run = tiny_run.fp8_run()
  packed = tiny_updates.batches(tiny_run.completions())
  cut = [
      jax.tree.map(lambda x, b=batch, i=i: x[i : i + rows], batch)
      for batch in packed
      for i in range(0, tiny_run.ROWS, rows)
  ]
  if rows > tiny_run.ROWS:
    cut = [jax.tree.map(lambda *x: np.concatenate(x), *packed)]
  gradients, logprobs = run.accumulate(run.start, cut)
  assert tiny_updates.mismatched(cut, logprobs)[0] == 0
  _assert_close(gradients.trainable, _whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, _whole()[0].fp8)
