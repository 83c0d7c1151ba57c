"""`fake_*`: any number of bits, multiplied in the compute dtype."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe
from jetrl_jax.fp8.formats import FAKE
from jetrl_jax.fp8.recipes import FAKE_RECIPES, RECIPES
from jetrl_jax.kernels.quantized_dot import per_row_fake
from tests.kernels import test_dynamic as dynamic


def _grid(name) -> np.ndarray:
  """All values of a format, ascending."""
  grid = FAKE[name.removeprefix('fake_')]
  if grid.dtype == jnp.int8:
    return np.arange(-grid.limit, grid.limit + 1)
  values = np.arange(256, dtype=np.uint8).view(grid.dtype).astype(np.float64)
  return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize(
    'name, values',
    # 2^b - 1 for integers; E4M3 has 256 less two NaNs and a second zero, E5M2
    # less three NaNs and an infinity per sign and a second zero.
    [
        ('fake_e4m3', 253),
        ('fake_e5m2', 247),
        ('fake_int6', 63),
        ('fake_int5', 31),
        ('fake_int4', 15),
        ('fake_int3', 7),
    ],
)
def test_a_grid_has_the_values_of_its_bits(name, values):
  assert len(_grid(name)) == values
  # The dot multiplies them in bfloat16: it must hold each of them.
  held = np.asarray(jnp.asarray(_grid(name), jnp.bfloat16), np.float64)
  np.testing.assert_array_equal(held, _grid(name))


def test_every_grid_is_a_recipe():
  assert set(FAKE_RECIPES) == {f'fake_{name}' for name in FAKE}
  assert set(FAKE_RECIPES) < set(RECIPES)
  with pytest.raises(ValueError, match="recipe is 'fake_int7'; allowed"):
    Recipe(name='fake_int7')


@pytest.mark.parametrize('name', FAKE_RECIPES)
def test_values_go_to_the_nearest_of_the_grid_and_none_saturates(name):
  x = dynamic.data()[0]
  q = per_row_fake.quantize_rows(Recipe(name=name), jnp.asarray(x))
  scale, grid = np.asarray(q.scale, np.float64), _grid(name)
  scaled = x / scale
  nearest = np.abs(scaled[..., None] - grid).min(-1)
  found = np.asarray(q.values).astype(np.float64)
  assert np.isin(found, grid).all()
  np.testing.assert_array_equal(np.abs(scaled - found), nearest)
  # A power of two that is rounded up: each row uses more than half the range.
  largest = np.abs(scaled).max(1)
  assert np.all(largest <= grid[-1]) and np.all(largest > grid[-1] / 2)


def test_int4_by_hand():
  # Row: amax 3, 3/7 -> 2^-1: 2, -6, 0.2 -> 0. Channel: 1/7 -> 2^-2: 4, 2, 4.
  x = dynamic.padded([1, -3, 0.1], (dynamic.ROWS, dynamic.INNER))
  w = dynamic.padded([1, 0.5, 1], (dynamic.OUTER, dynamic.INNER))
  y, weight = dynamic.forward(dynamic.recipe_of('fake_int4'), x, w)
  assert y[0, 0] == (2 * 4 - 6 * 2 + 0 * 4) / 8
  assert weight.values.dtype == np.int8


def test_fewer_bits_lose_more():
  x, w, _ = dynamic.data()
  names = ('fake_int6', 'fake_int5', 'fake_int4', 'fake_int3')
  errors = []
  for name in names:
    y = dynamic.forward(dynamic.recipe_of(name), x, w)[0]
    errors.append(np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T))
  # A bit less doubles the step.
  assert all(
      1.6 < b / a < 2.5 for a, b in zip(errors, errors[1:], strict=False)
  )


@pytest.mark.parametrize(
    'name, power_of_two', [('fake_e5m2', True), ('fake_int4', False)]
)
def test_a_row_does_not_see_the_others_and_training_has_its_bits(
    name, power_of_two
):
  recipe = Recipe(name=name, power_of_two_scales=power_of_two)
  x, w, dy = dynamic.data()
  alone = dynamic.forward(recipe, x, w)[0]
  other = np.concatenate([x[:16], 1e4 * x[16:], x, x])
  np.testing.assert_array_equal(
      dynamic.forward(recipe, other, w)[0][:16], alone[:16]
  )
  np.testing.assert_array_equal(dynamic.train(recipe, x, w, dy)[0], alone)


def test_e4m3_by_emulation_is_the_e4m3_of_fp8_token():
  # The same values and scales: what differs is the order and width of sums.
  x, w, _ = dynamic.data()
  fake, weight = dynamic.forward(dynamic.recipe_of('fake_e4m3'), x, w)
  real, weight8 = dynamic.forward(dynamic.recipe_of('fp8_token'), x, w)
  np.testing.assert_array_equal(weight.values, weight8.values)
  np.testing.assert_array_equal(weight.scale, weight8.scale)
  np.testing.assert_allclose(fake, real, rtol=1e-5, atol=1e-5 * abs(real).max())
