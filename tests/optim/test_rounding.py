"""Tests of masters that are rounded at random."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetrl_jax.core import collectives, rng, sharding
from jetrl_jax.kernels.adamw import random_bits
from jetrl_jax.metrics.writer import Mean
from jetrl_jax.optim import rounding
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.apply import Apply, Gradients
from jetrl_jax.rl.run import train_state
from tests.rl import tiny_run

_STEPS = jnp.arange(2**16, dtype=jnp.uint32)
_TINY = 2.0**-149  # the smallest float32


@functools.cache
def _jitted():
  return jax.jit(random_bits.stochastic_bfloat16)


def _round(x, bits) -> np.ndarray:
  x, bits = jnp.broadcast_arrays(jnp.asarray(x, jnp.float32), bits)
  return np.asarray(_jitted()(x, bits))


@pytest.mark.parametrize(
    'value',
    [
        1.0009765625,  # 1 + 2^-10: an eighth of the step above 1
        -3.1415927,
        1.998046875,  # its upper neighbour, 2, has another exponent
        -0.99999994,  # the float32 next to -1
        2.0**-126 * 1.3,  # the smallest exponent of normal numbers
        -77777 * _TINY,  # subnormal
        3 * _TINY,  # below the smallest bfloat16: 0 or 2^-133
        3.3e38,
    ],
)
def test_over_all_bits_the_mean_is_the_value_itself(value):
  # Every number of 16 bits once: 2^16 times the mean. The neighbours and their
  # sums have few significant bits, so float64 adds without rounding.
  rounded = _round(value, _STEPS).astype(np.float64)
  assert rounded.sum() / 2**16 == float(np.float32(value))
  assert len(set(rounded.tolist())) == 2


def test_what_bfloat16_holds_stays_itself():
  # All 65536 of them: zeros, subnormals, infinities and NaN too.
  every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
  for bits in (0, 1, 2**15, 2**16 - 1):
    found = _round(every.astype(np.float32), jnp.uint32(bits))
    is_nan = np.isnan(every.astype(np.float32))
    assert np.isnan(found[is_nan].astype(np.float32)).all()
    np.testing.assert_array_equal(
        found[~is_nan].view(np.uint16), every[~is_nan].view(np.uint16)
    )


def test_nothing_finite_becomes_infinite_and_nan_stays_nan():
  largest = np.float32(np.finfo(np.float32).max)
  top = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  # To the nearest it would be infinite.
  assert np.isinf(np.asarray(largest).astype(ml_dtypes.bfloat16))
  for sign in (1, -1):
    assert set(_round(sign * largest, _STEPS).tolist()) == {sign * top}
  # A carry out of this NaN would give -0; cut off, the other would be infinity.
  nans = np.asarray([0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)
  for nan in nans:
    assert np.isnan(_round(nan, _STEPS).astype(np.float32)).all()


def _words(step=0, seed=0, paths=('w',)):
  leaves = {path: jnp.zeros(()) for path in paths}
  root = rng.key(seed, rng.ROUNDING)
  return rounding.rounding_keys(root, jnp.int32(step), {'part': leaves})['part']


def test_the_mean_of_many_elements_is_their_value():
  # Each stored value has a variance of at most (step / 2)^2. The mean of n
  # independent ones is off by more than 5 deviations, 5 step / (2 sqrt n), once
  # in two million seeds; this is one seed.
  shape = (512, 512)
  bits = rounding.element_bits(_words()[0], shape)
  step, n = 2.0**-7, 512 * 512
  for part in (0.03, 0.25, 0.5, 0.9):
    value = np.float32(-1 - part * step)
    mean = _round(value, bits).astype(np.float64).mean()
    assert abs(mean - float(value)) < 5 * step / (2 * n**0.5)


def test_bits_are_uniform_and_independent_of_step_place_and_parameter():
  shape = (256, 1024)
  first, other = _words(paths=('a', 'b'))
  draws = [
      np.asarray(rounding.element_bits(rounding_keys, shape)).astype(np.float64)
      for rounding_keys in (
          first,
          other,
          _words(1, paths=('a',))[0],
          _words(0, 1)[0],
      )
  ]
  n = draws[0].size
  for bits in draws:
    assert bits.min() >= 0 and bits.max() < 2**16
    # Chi squared of 256 equal cells: mean 255, deviation sqrt(2 255) = 22.6.
    counts = np.bincount((bits // 256).astype(int).ravel(), minlength=256)
    chi = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi - 255) < 5 * 22.6
    # Neighbours in a row and in a column, and in powers of two.
    for shift in (1, 2, 256, 1024, 4096):
      flat = bits.ravel()
      correlation = np.corrcoef(flat[shift:], flat[:-shift])[0, 1]
      assert abs(correlation) < 5 / n**0.5
  for i, a in enumerate(draws):
    for b in draws[:i]:
      assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / n**0.5


def test_bits_keep_their_values_for_ever():
  # Written down once: a change of them breaks every run that is resumed.
  rounding_keys = _words(step=3, seed=7, paths=('attn/qkv/kernel',))[0]
  found = rounding.element_bits(rounding_keys, (2, 3)).tolist()
  assert found == [[36613, 14607, 59226], [37921, 50906, 15830]]


def test_rows_on_another_device_have_the_bits_of_the_whole():
  rounding_keys = _words()[0]
  whole = rounding.element_bits(rounding_keys, (12, 5, 2))
  parts = [
      rounding.element_bits(rounding_keys, (4, 5, 2), i * 4) for i in range(3)
  ]
  np.testing.assert_array_equal(np.concatenate(parts), whole)


_LR = 2.0**-12


@functools.cache
def _applied(data: int, fsdp: int, steps=3, seed=11):
  """Masters of two equal parts, all 1, after steps of -2^-12 or so."""
  mesh = sharding.make_mesh(data=data, fsdp=fsdp)
  policy = tiny_run.policy(tiny_run.BF16, mesh)
  config = OptimizerConfig(
      lr=_LR,
      weight_decay=0.0,
      # Never reached: the norm adds up in another order on other meshes.
      grad_clip=1e9,
      moments='float32',
      master_rounding='stochastic',
      seed=seed,
  )

  def leaves():
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    return {
        f'layers_{i}': {'o': {'kernel': ones((32, 48))}, 'norm': ones((48,))}
        for i in range(2)
    }

  optimizer, ones = config.build(), leaves()
  masters = jax.device_put(ones, sharding.tree_shardings(ones, mesh))
  moving = train_state.create(policy, masters, optimizer, mesh)

  def gradients():
    """1 of each master, if the devices of `data` are added."""
    loss = Mean(sum=jnp.zeros(()), weight=jnp.zeros(()))
    made = leaves()
    where = sharding.tree_shardings(made, mesh)
    if data > 1:
      where = sharding.named(sharding.apart_specs(made, mesh), mesh)
      made = jax.tree.map(lambda x: jnp.stack([x / data] * data), made)
    return Gradients(
        trainable=jax.device_put(made, where),
        fp8={},
        metrics={'actor/pg_loss': loss},
    )

  apply = Apply(policy, optimizer, config, mesh, moving)
  states = [jax.device_get(moving)]
  for _ in range(steps):
    moving, info = apply(tiny_run.copy(moving), gradients())
    assert bool(info.applied)
    # What is read below is the copy of the first device.
    tiny_run.assert_same_on_all_devices(moving.trainable)
    states.append(jax.device_get(moving))
  return apply, states, gradients


def test_small_updates_add_up_at_random_and_are_lost_to_the_nearest():
  one, moved = {'w': jnp.ones((1,), jnp.bfloat16)}, {'w': jnp.ones((1,)) - _LR}
  split = {'w': False}
  kept = rounding.stored(moved, one, split, {}, collectives.Axes())
  assert kept['w'].dtype == jnp.bfloat16 and kept['w'].tolist() == [1]
  _, states, _ = _applied(1, 1)
  values = np.concatenate(
      [
          leaf.astype(np.float64).ravel()
          for leaf in jax.tree.leaves(states[-1].trainable)
      ]
  )
  # The step below 1 is 2^-8. Of three updates of 2^-12, 3/16 of a step on
  # average, each rounding has a variance of at most step^2 / 4.
  wanted = 1 - 3 * _LR
  deviation = (3 / 4) ** 0.5 * 2.0**-8 / len(values) ** 0.5
  assert abs(values.mean() - wanted) < 5 * deviation
  assert set(values.tolist()) <= {
      1.0,
      1 - 2.0**-8,
      1 - 2.0**-7,
      1 - 3 * 2.0**-8,
  }


def test_layers_that_share_a_program_have_bits_of_their_own():
  _, states, _ = _applied(1, 1)
  kernels = [
      states[-1].trainable[f'layers_{i}']['o']['kernel'] for i in range(2)
  ]
  assert (kernels[0] != kernels[1]).mean() > 0.1


def test_another_seed_rounds_other_masters_up():
  _, states, _ = _applied(1, 1)
  _, other, _ = _applied(1, 1, steps=1, seed=12)
  pairs = zip(
      tiny_run.leaves(states[1].trainable),
      tiny_run.leaves(other[1].trainable),
      strict=True,
  )
  # One in sixteen moves by chance, in either.
  assert all(0.03 < (a != b).mean() < 0.3 for a, b in pairs if a.ndim == 2)


def test_on_eight_devices_masters_have_the_bits_of_one():
  _, one, _ = _applied(1, 1)
  _, eight, _ = _applied(2, 4)
  for a, b in zip(one, eight, strict=True):
    tiny_run.assert_same_bits(a.trainable, b.trainable)


def test_the_bits_are_the_states_and_not_the_process():
  apply, states, gradients = _applied(1, 1)
  # As a resumed run does: from the second state, by a step of its own.
  again, _ = apply(jax.device_put(states[1]), gradients())
  tiny_run.assert_same_bits(jax.device_get(again), states[2])


def test_masters_in_float32_are_refused():
  with pytest.raises(
      ValueError, match='are bfloat16, float32; allowed: bfloat16'
  ):
    rounding.check({'w': jnp.ones((2,)), 'v': jnp.ones((2,), jnp.bfloat16)})
