import jax.numpy as jnp

from jetrl_jax.kernels.quantize_transpose import grid


def test_tiles_are_joined_by_the_largest_amax_and_by_sums():
  counts = jnp.asarray([[3, grid.FLUSHED], [2 * grid.FLUSHED + 1, 0]])
  amax = jnp.asarray([[1.0, 5.0], [2.0, 0.0]])
  signal, noise = jnp.full((2, 2), 8.0), jnp.full((2, 2), 0.5)
  amax, lost = grid.join_tiles(amax, counts, signal, noise)
  assert amax == 5
  assert lost.tolist() == [4, 3, 32, 2]  # Saturated, flushed, signal, noise.


def test_only_whole_tiles_fit():
  assert grid.fits((256, 128))
  assert not grid.fits((256, 192))
