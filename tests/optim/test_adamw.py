"""Tests of the optimiser's settings, schedule and moments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jetrl_jax.optim.adamw import OptimizerConfig


def _rates(config, steps):
  return [float(config.learning_rate(step)) for step in steps]


def test_warmup_rises_by_equal_steps_and_its_first_step_moves():
  config = OptimizerConfig(lr=0.4, lr_warmup_steps=4)
  # 0.4 * (1, 2, 3, 4) / 4, then constant.
  np.testing.assert_allclose(
      _rates(config, range(6)), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6
  )


def test_cosine_falls_from_the_peak_to_zero_after_the_warmup():
  config = OptimizerConfig(
      lr=2.0, lr_warmup_steps=2, lr_decay='cosine', lr_decay_steps=10
  )
  # 8 steps of decay: (1 + cos(pi n / 8)) at n = step - 2.
  expected = [1.0, 2.0, 2.0, 1 + math.cos(math.pi / 4), 1.0, 0.0, 0.0]
  np.testing.assert_allclose(
      _rates(config, [0, 1, 2, 4, 6, 10, 99]), expected, atol=1e-6
  )


def test_linear_falls_from_the_peak_to_zero():
  config = OptimizerConfig(lr=1.0, lr_decay='linear', lr_decay_steps=4)
  np.testing.assert_allclose(
      _rates(config, range(6)), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0], atol=1e-6
  )


def test_the_learning_rate_is_the_same_traced_or_not():
  config = OptimizerConfig(
      lr=1e-3, lr_warmup_steps=3, lr_decay='cosine', lr_decay_steps=20
  )
  traced = jax.jit(config.learning_rate)
  for step in (0, 2, 3, 11, 20):
    np.testing.assert_allclose(
        float(traced(jnp.int32(step))),
        float(config.learning_rate(step)),
        rtol=1e-6,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'lr': 0.0}, r'lr is 0\.0; it must be > 0'),
        ({'eps': 0.0}, r'eps is 0\.0; it must be > 0'),
        ({'grad_clip': -1.0}, r'grad_clip is -1\.0; it must be > 0'),
        ({'lr': float('nan')}, 'lr is nan; it must be > 0'),
        ({'betas': (0.9, 1.0)}, r'betas are \(0\.9, 1\.0\); allowed: two in'),
        ({'betas': (0.9,)}, 'allowed: two in'),
        ({'weight_decay': -0.1}, r'weight_decay is -0\.1.*must be >= 0'),
        ({'lr_warmup_steps': -1}, 'lr_warmup_steps is -1; both must be >= 0'),
        ({'moments': 'int8'}, "moments is 'int8'; allowed: fp8, float32"),
        (
            {'master_rounding': 'up'},
            "master_rounding is 'up'; allowed: nearest, stochastic",
        ),
        ({'lr_decay': 'step'}, "'step'; allowed: constant, cosine, linear"),
        (
            {'lr_decay': 'linear', 'lr_warmup_steps': 5, 'lr_decay_steps': 5},
            r"has 5 optimiser steps, and optim.lr_decay is 'linear', which"
            r' needs more than optim.lr_warmup_steps \(5\)',
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    OptimizerConfig(**changes)


def _moved(config, params, gradients):
  optimizer = config.build()
  updates, state = optimizer.update(gradients, optimizer.init(params), params)
  return optax.apply_updates(params, updates), state


def test_matrices_decay_and_vectors_do_not():
  params = {'kernel': jnp.full((2, 4), 3.0), 'scale': jnp.full((4,), 3.0)}
  config = OptimizerConfig(lr=0.1, weight_decay=0.5, moments='float32')
  moved, _ = _moved(config, params, jax.tree.map(jnp.zeros_like, params))
  # 3 - 0.1 * 0.5 * 3
  np.testing.assert_allclose(moved['kernel'], 2.85, rtol=1e-6)
  np.testing.assert_array_equal(moved['scale'], 3.0)


@pytest.mark.parametrize('moments', ['fp8', 'float32'])
def test_the_first_step_is_the_learning_rate_against_the_sign(moments):
  config = OptimizerConfig(lr=0.25, weight_decay=0.0, moments=moments)
  gradient = jnp.asarray([[2.0, -0.5, 1e-4, 0.0]])
  moved, _ = _moved(config, {'w': jnp.zeros((1, 4))}, {'w': gradient})
  # mu / (1 - b1) = g and nu / (1 - b2) = g^2: g / (|g| + 1e-8).
  np.testing.assert_allclose(moved['w'], [[-0.25, 0.25, -0.25, 0]], rtol=2e-4)


def test_betas_and_eps_reach_the_moments():
  config = OptimizerConfig(
      lr=1.0, betas=(0.5, 0.75), eps=1.0, weight_decay=0.0, moments='float32'
  )
  moved, state = _moved(config, {'w': jnp.zeros(1)}, {'w': jnp.full(1, 4.0)})
  # mu = 0.5 * 4, nu = 0.25 * 16; 4 / (4 + eps) = 0.8.
  adam = state[0]
  np.testing.assert_allclose(adam.mu['w'], 2.0)
  np.testing.assert_allclose(adam.nu['w'], 4.0)
  np.testing.assert_allclose(moved['w'], -0.8, rtol=1e-6)


def _minimise(moments, steps):
  """Least squares with noisy gradients; returns the loss of every step."""
  generator = np.random.default_rng(0)
  a = jnp.asarray(generator.normal(size=(64, 16)), jnp.float32)
  target = jnp.asarray(generator.normal(size=(8, 16)), jnp.float32)
  config = OptimizerConfig(lr=0.05, weight_decay=0.0, moments=moments)
  optimizer = config.build()

  def loss(params, rows):
    return jnp.mean(jnp.square((params['w'] - target) @ rows.T))

  @jax.jit
  def step(params, state, rows):
    value, gradient = jax.value_and_grad(loss)(params, rows)
    updates, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, value

  params = {'w': jnp.zeros((8, 16))}
  state, losses = optimizer.init(params), []
  for i in range(steps):
    rows = a[(i % 8) * 8 : (i % 8) * 8 + 8]
    params, state, value = step(params, state, rows)
    losses.append(float(value))
  return params['w'], target, losses


def test_fp8_moments_train_as_float32_moments_do():
  exact, target, exact_losses = _minimise('float32', 120)
  rounded, _, losses = _minimise('fp8', 120)
  assert losses[-1] < 1e-2 * losses[0]
  assert exact_losses[-1] < 1e-2 * exact_losses[0]
  # Both arrive; on the way they part by a few percent of the distance.
  distance = float(jnp.linalg.norm(target))
  assert float(jnp.linalg.norm(rounded - exact)) < 0.1 * distance
  assert not np.array_equal(np.asarray(rounded), np.asarray(exact))


def test_fp8_moments_take_a_quarter_of_the_memory():
  params = {'w': jnp.zeros((64, 1024))}

  def size(moments):
    state = OptimizerConfig(moments=moments).build().init(params)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))

  # 1 + 12 / 128 bytes a value against 4.
  assert size('fp8') / size('float32') == pytest.approx(1.09375 / 4, rel=1e-3)


def test_moments_of_bfloat16_masters_are_float32_too():
  # In bfloat16 0.999 times a second moment rounds back to it.
  params = {'w': jnp.zeros((2, 4), jnp.bfloat16)}
  adam = OptimizerConfig(moments='float32').build().init(params)[0]
  assert (adam.mu['w'].dtype, adam.nu['w'].dtype) == (jnp.float32, jnp.float32)
