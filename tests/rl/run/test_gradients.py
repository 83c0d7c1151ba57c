"""Tests of `accumulate`: micro-batches, exactness, what has no influence."""

import dataclasses

import jax
import numpy as np
import pytest

from jetrl_jax.rl import packing
from tests.rl import tiny_run, tiny_updates


def _assert_close(found, expected):
  """Gradients of the same tokens, added up in another order."""
  for a, b in zip(
      tiny_run.leaves(found), tiny_run.leaves(expected), strict=True
  ):
    # Float32 sums over up to 512 rows and 24 micro-batches, relative to the
    # largest: each addition rounds by 2^-24 of a partial sum.
    np.testing.assert_allclose(a, b, rtol=0, atol=5e-6 * np.abs(b).max())


def _assert_same_amaxes(found, expected):
  """Amaxes to the bit, health within summation order."""
  for a, b in zip(
      jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(
        tiny_run.bits(a[..., 0]), tiny_run.bits(b[..., 0])
    )
    np.testing.assert_allclose(a[..., 1:], b[..., 1:], rtol=1e-5)


def test_accumulate_twice_gives_the_same_bits():
  run = tiny_run.fp8_run()
  again = run.accumulate(
      run.start, tiny_updates.batches(tiny_run.completions())
  )
  tiny_run.assert_same_bits(again, tiny_updates.whole())


@pytest.mark.parametrize('count', [1, 2, 4, 8, 16])
def test_any_number_of_micro_batches_gives_the_same_gradients(count):
  run = tiny_run.fp8_run()
  packed = tiny_updates.in_micro_batches(tiny_run.completions(), count)
  assert len(packed) >= count
  gradients, logprobs = run.accumulate(run.start, packed)
  assert tiny_updates.mismatched(packed, logprobs)[0] == 0
  _assert_close(gradients.trainable, tiny_updates.whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, tiny_updates.whole()[0].fp8)
  for name, metric in gradients.metrics.items():
    expected = tiny_updates.whole()[0].metrics[name]
    np.testing.assert_allclose(metric.sum, expected.sum, rtol=1e-5, atol=1e-7)
    assert float(metric.weight) == float(expected.weight)


def test_packing_changes_no_gradient_and_no_amax():
  run = tiny_run.fp8_run()
  gradients, _ = run.accumulate(
      run.start, tiny_updates.one_per_row(tiny_run.completions())
  )
  _assert_close(gradients.trainable, tiny_updates.whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, tiny_updates.whole()[0].fp8)


@pytest.mark.parametrize(
    'tile, row_length, message',
    [
        (
            8,
            64,
            r'^in row \d+ a segment starts at token \d+, which is no multiple',
        ),
        (8, 40, '^rows have 40 tokens, which is no multiple of the attention'),
        (32, 64, None),  # Every multiple of 32 is one of 16.
    ],
)
def test_rows_that_were_packed_with_another_tile_are_refused(
    tile, row_length, message
):
  run = tiny_run.fp8_run()
  batch, *_ = packing.pack(
      tiny_updates.sequences(tiny_run.completions()),
      row_length=row_length,
      rows_per_micro_batch=tiny_run.ROWS,
      tile=tile,
  ).batches
  for call in (run.score, lambda s, b: run.accumulate(s, [b])):
    if message is None:
      call(run.start, batch)
      continue
    with pytest.raises(
        ValueError,
        match=message + '.* that of the policy is 16'
        ' tokens: pack with tile=policy.tile$',
    ):
      call(run.start, batch)


def test_a_micro_batch_of_padding_adds_nothing():
  run = tiny_run.fp8_run()
  packed = tiny_updates.batches(tiny_run.completions())
  empty = jax.tree.map(np.zeros_like, packed[0])
  gradients, _ = run.accumulate(run.start, [*packed, empty])
  tiny_run.assert_same_bits(gradients, tiny_updates.whole()[0])


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
    # Tokens after the segments' ends, too.
    fields['tokens'] = np.where(batch.segment_ids == 0, 33, batch.tokens)
    garbage.append(dataclasses.replace(batch, **fields))
  gradients, logprobs = run.accumulate(run.start, garbage)
  assert tiny_updates.mismatched(garbage, logprobs)[0] == 0
  tiny_run.assert_same_bits(gradients, tiny_updates.whole()[0])


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


@pytest.mark.slow
@pytest.mark.parametrize('rows', [1, 4, 32])
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
  _assert_close(gradients.trainable, tiny_updates.whole()[0].trainable)
  _assert_same_amaxes(gradients.fp8, tiny_updates.whole()[0].fp8)
