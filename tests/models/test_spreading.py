import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax import export, fp8, models
from jetrl_jax.core import sharding
from jetrl_jax.kernels.quantized_dot import weights
from jetrl_jax.models import spreading
from jetrl_jax.models.hf.layout import flatten_tree
from tests import whole_run
from tests.models import tiny

KERNEL = 'layers_0/mlp/down/kernel'
# Half of a 16-bit cell, in float32 words.
HALF = {'bfloat16': 2**15, 'float16': 2**12}
DTYPES = {'bfloat16': ml_dtypes.bfloat16, 'float16': np.float16}


def spread(values, path=KERNEL, grid='bfloat16'):
  leaf = jnp.array(values, jnp.float32)
  return np.asarray(spreading.spread(leaf, path, grid))


def every(grid):
  """All finite values of a 16-bit format."""
  values = np.arange(2**16, dtype=np.uint16).view(DTYPES[grid])
  return values[np.isfinite(values.astype(np.float32))]


@pytest.mark.parametrize('grid', ['bfloat16', 'float16'])
def test_every_spread_value_rounds_back_to_the_stored_one(grid):
  stored = every(grid)
  wide = stored.astype(np.float32)
  for seed in range(4):
    moved = spread(wide, f'{KERNEL}{seed}', grid)
    # As an export of a run with an invariant scale: divided and multiplied.
    scaled = (moved / np.float32(1.5)) * np.float32(1.5)
    for found in (moved, scaled):
      # XLA takes what float32 holds as a subnormal for 0; numpy does not.
      normal = np.abs(wide) >= np.finfo(np.float32).tiny
      back = found.astype(DTYPES[grid])
      np.testing.assert_array_equal(
          back.view(np.uint16)[normal], stored.view(np.uint16)[normal]
      )


def test_places_are_uniform_in_the_cell_and_never_its_middle_or_border():
  half = HALF['bfloat16']
  ones = np.ones(200_000, np.float32)
  offset = spread(ones).view(np.int32) - ones.view(np.int32)
  assert np.abs(offset).min() >= 4 and np.abs(offset).max() <= half - 4
  share = (offset + half) / (2 * half)
  # Standard error of the mean of n uniform numbers: 0.289 / sqrt(n).
  assert abs(share.mean() - 0.5) < 4 * 0.289 / np.sqrt(len(ones))
  counts, _ = np.histogram(share, 16, (0, 1))
  assert np.abs(counts - len(ones) / 16).max() < 5 * np.sqrt(len(ones) / 16)
  # Of neighbours, too: the hash leaves no pattern along a row.
  left, right = share[:-1] - 0.5, share[1:] - 0.5
  assert abs(np.mean(left * right) * 12) < 4 / np.sqrt(len(ones))


def test_zeros_stay_zeros_and_signs_stay_signs():
  values = np.array([0.0, -0.0, 0.5, -0.5], np.float32)
  moved = spread(values)
  np.testing.assert_array_equal(
      moved.view(np.uint32)[:2], values.view(np.uint32)[:2]
  )
  assert moved[2] > 0 > moved[3]


def test_a_place_depends_on_path_and_index_alone():
  values = np.linspace(0.1, 1, 64 * 32).astype(ml_dtypes.bfloat16)
  values = values.astype(np.float32).reshape(64, 32)
  alone = spread(values)
  np.testing.assert_array_equal(alone, spread(values))
  assert np.mean(alone == spread(values, f'{KERNEL}2')) < 0.01
  mesh = sharding.make_mesh(fsdp=8)
  leaf = jax.device_put(values, NamedSharding(mesh, P('fsdp')))
  split = spreading.spread(leaf, KERNEL, 'bfloat16')
  assert split.sharding.is_equivalent_to(NamedSharding(mesh, P('fsdp')), 2)
  np.testing.assert_array_equal(alone, np.asarray(split))


def test_a_float32_file_of_bfloat16_values_is_known_for_what_it_is():
  wide = np.array([1.0, 0.015625, -3.0], np.float32)
  assert spreading.grid_of(wide) == 'bfloat16'
  assert spreading.grid_of(np.float32([1.0, 0.1])) is None
  assert spreading.grid_of(wide.astype(np.float16)) == 'float16'
  assert spreading.grid_of(wide.astype(ml_dtypes.float8_e4m3fn)) is None


def test_what_is_not_float32_is_refused():
  with pytest.raises(ValueError, match="bfloat16 on the grid 'bfloat16'"):
    spreading.spread(jnp.ones(4, jnp.bfloat16), KERNEL, 'bfloat16')


def test_the_first_update_changes_as_many_bytes_as_its_size_deserves():
  """A BF16 checkpoint under a power-of-two scale, and a step of 2e-6."""
  generator = np.random.default_rng(0)
  shape = 512, 512
  stored = (0.02 * generator.standard_normal(shape)).astype(ml_dtypes.bfloat16)
  step = 2e-6 * np.sign(generator.standard_normal(shape)).astype(np.float32)
  recipe = fp8.Recipe()

  def changed(master):
    slot = {'kernel': {'scale': jnp.float32(2.0**-12)}}
    quantize = functools.partial(
        weights.quantize_kernel, dot_state=slot, recipe=recipe
    )
    before, after = (
        np.asarray(quantize(jnp.asarray(m)).values).view(np.uint8)
        for m in (master, master + step)
    )
    return np.mean(before != after)

  centre = stored.astype(np.float32)
  tied = changed(centre)
  free = changed(spread(centre))
  # A step of E4M3 is 1/8 of the power of two below a value: the share that an
  # update of 2e-6 crosses is the mean of 2e-6 / (that step).
  gap = np.exp2(np.floor(np.log2(np.abs(centre) + 1e-30))) / 8
  gap = np.maximum(gap, 2.0**-9 * 2.0**-12)  # Among the subnormals.
  deserved = np.mean(np.minimum(2e-6 / gap, 1))
  assert free == pytest.approx(deserved, rel=0.1)
  # Half of the ties, 1/16 of all.
  assert tied > 0.9 / 32 and tied > 4 * free


def test_bfloat16_weights_get_a_first_update_only_of_masters_that_are_spread():
  """The same checkpoint and step, and compute weights in bfloat16."""
  generator = np.random.default_rng(0)
  shape = 512, 512
  stored = (0.02 * generator.standard_normal(shape)).astype(ml_dtypes.bfloat16)
  step = 2e-6 * np.sign(generator.standard_normal(shape)).astype(np.float32)

  def arrives(master):
    """Share of the update that the compute weights make, along itself."""
    before, after = (
        np.asarray(m, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
        for m in (master, master + step)
    )
    return np.sum((after - before) * step) / np.sum(step * step)

  centre = stored.astype(np.float32)
  # In the middle of a cell only those whose half cell is below 2e-6 move.
  assert arrives(centre) < 0.2
  # Noise: a weight that moves does so by a whole cell.
  assert arrives(spread(centre)) == pytest.approx(1, abs=0.1)


def load(folder, **kwargs):
  config = models.load_config(folder)
  tree = models.load_checkpoint(folder, config, dtype='float32', **kwargs)
  return config, tree


def test_masters_of_a_16_bit_checkpoint_are_spread_where_asked(tmp_path):
  folder = tiny.save(tmp_path / 'x', tiny.config(), dtype='bfloat16')
  config, plain = load(folder)
  _, moved = load(folder, spreads=lambda path: path.endswith('/kernel'))
  flat_plain, flat_moved = flatten_tree(plain), flatten_tree(moved)
  for path, leaf in flat_moved.items():
    same = np.mean(np.asarray(leaf) == np.asarray(flat_plain[path]))
    assert same < 0.1 if path.endswith('/kernel') else same == 1, path
  # An export without training gives the checkpoint's bytes back.
  models.save_checkpoint(tmp_path / 'y', moved, config, source_folder=folder)
  for file in ('model.safetensors', 'config.json'):
    assert (tmp_path / 'y' / file).read_bytes() == (folder / file).read_bytes()


def test_masters_of_a_float32_checkpoint_stay_what_they_are(tmp_path):
  config = tiny.config()
  params = jax.tree.map(lambda x: x * np.float32(1.1), tiny.params(config))
  folder = tmp_path / 'x'
  models.save_checkpoint(folder, params, config, dtype='float32')
  _, moved = load(folder, spreads=lambda path: True)
  for a, b in zip(*map(jax.tree.leaves, (params, moved)), strict=True):
    if a.any():  # Of zeros the grid is any, and they stay.
      np.testing.assert_array_equal(a, np.asarray(b))


def test_fp8_kernels_stay_on_the_grid_that_they_were_trained_on(tmp_path):
  folder = whole_run.home() / 'fp8_grid'
  if not folder.exists():
    values = {name: default for name, _, default, _ in export.FLAGS} | {
        'workdir': str(whole_run.finished()),
        'out': str(folder),
        'format': 'fp8',
    }
    export.export(values)
  _, plain = load(folder)
  _, moved = load(folder, spreads=lambda path: True)
  kernels = [p for p in flatten_tree(plain) if p.endswith('down/kernel')]
  assert kernels
  for path in kernels:
    np.testing.assert_array_equal(
        flatten_tree(plain)[path], flatten_tree(moved)[path]
    )


def test_bfloat16_masters_have_no_room_to_be_spread_in(tmp_path):
  folder = tiny.save(tmp_path / 'x', tiny.config(), dtype='bfloat16')
  config = models.load_config(folder)
  loaded = [
      models.load_checkpoint(folder, config, dtype='bfloat16', spreads=spreads)
      for spreads in (lambda path: False, lambda path: True)
  ]
  for a, b in zip(*map(jax.tree.leaves, loaded), strict=True):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
