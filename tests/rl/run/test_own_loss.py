"""Losses of a user's own in `UpdatePrograms`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax import rl
from jetrl_jax.core import sharding
from jetrl_jax.rl.objective import with_loss_metric
from tests.rl import tiny_run, tiny_updates


def _sum(batch, logprobs_BT):
  return -jnp.sum(batch.loss_mask * batch.loss_weight * logprobs_BT)


def _own(batch, logprobs_BT, entropy_BT):
  loss = _sum(batch, logprobs_BT)
  entropy = rl.Mean(
      sum=(entropy_BT * batch.loss_mask).sum(), weight=batch.loss_mask.sum()
  )
  return loss, {'own/entropy': entropy}


def test_a_loss_of_ones_own_is_applied_and_reported():
  mesh = sharding.make_mesh()
  of = tiny_run.policy(tiny_run.BF16, mesh)
  config = rl.OptimizerConfig(lr=1e-3, moments='float32')
  state = tiny_run.cold_state(of, mesh, config.build())
  update = rl.UpdatePrograms(of, _own, config.build(), config, mesh, state)
  old = tiny_run.leaves(state.trainable)
  gradients, expected = update.zero_gradients(state), 0.0
  for batch in tiny_updates.batches(tiny_run.completions()):
    gradients, logprobs_BT, _ = update.accumulate(
        state, gradients, batch, jnp.float32(1)
    )
    expected += float(_sum(batch, logprobs_BT))
  after, info = update.apply(state, gradients)
  assert bool(info.applied) and float(info.grad_norm) > 0
  np.testing.assert_allclose(
      info.metrics['actor/pg_loss'].value(), expected, rtol=1e-5
  )
  assert info.metrics['own/entropy'].value() > 0
  new = tiny_run.leaves(after.trainable)
  assert any((a != b).any() for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize(
    'loss, message',
    [
        (rl.LossConfig(), r'is a LossConfig; .* functools.partial\(rl.policy_'),
        (lambda b, lp, e: lp.sum(), r'returns an array float32\[\]; .* pair'),
        (lambda b, lp, e: (lp.sum(), {}, lp), 'returns a tuple of 3; .* pair'),
        (lambda b, lp, e: (lp, {}), r'float32\[1, 16\] as its loss; .* scalar'),
        (lambda b, lp, e: (lp.sum(), None), 'a NoneType as its metrics; .* {}'),
        (
            lambda b, lp, e: (lp.sum(), {'x': lp.mean()}),
            r"metric 'x' .* is an array float32\[\]; .* rl.Mean\(sum=",
        ),
        (
            lambda b, lp, e: (lp.sum(), {'x': rl.Mean(sum=lp, weight=1.0)}),
            r"metric 'x' .* a Mean of an array float32\[1, 16\]; .* scalars",
        ),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
  with pytest.raises(ValueError, match=message):
    with_loss_metric(loss)


def test_metrics_of_ones_own_may_be_none_at_all():
  _, metrics = with_loss_metric(lambda b, lp, e: (lp.sum(), {}))
  assert list(metrics) == ['actor/pg_loss']


def test_the_built_in_losses_are_traced_as_they_are():
  loss = functools.partial(rl.policy_loss, rl.LossConfig())
  found, metrics = with_loss_metric(loss)
  assert found is loss and 'actor/pg_loss' in metrics
  assert all(
      isinstance(leaf, jax.ShapeDtypeStruct)
      for leaf in jax.tree.leaves(metrics)
  )
