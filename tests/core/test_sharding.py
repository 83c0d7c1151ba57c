import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jetrl_jax.core import collectives, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.sharding import FSDP

MESHES = [(1, 8), (2, 4), (8, 1)]
DEVICES, PER_DEVICE, INNER, OUTER = 8, 16, 32, 24


def test_too_few_devices_are_counted():
  message = (
      'mesh data=4 x fsdp=4 needs 16 devices; found 8 (cpu). Lower mesh.data or'
      ' mesh.fsdp; for a dry run, JAX_PLATFORMS=cpu'
      ' XLA_FLAGS=--xla_force_host_platform_device_count=16 makes'
  )
  with pytest.raises(ValueError, match=re.escape(message)):
    sharding.make_mesh(data=4, fsdp=4)
  with pytest.raises(ValueError, match='tensor=2 needs 16 .* or mesh.tensor;'):
    sharding.make_mesh(data=8, tensor=2)


@pytest.mark.parametrize('axes', [(0, 1), (1, 0), (-2, -4)])
def test_an_axis_of_no_devices_is_refused(axes):
  data, fsdp = axes
  message = f'mesh axes must be >= 1, found data={data}, fsdp={fsdp}'
  with pytest.raises(ValueError, match=message):
    sharding.make_mesh(data=data, fsdp=fsdp)


def test_a_mesh_takes_the_first_devices_in_order():
  mesh = sharding.make_mesh(data=2, fsdp=3)
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 3, 'tensor': 1}
  assert list(mesh.devices.flat) == jax.devices()[:6]
  assert collectives.axes_of(mesh) == Axes(2, 3)
  assert Axes(2, 3).size == 6


def test_matrices_are_split_along_their_first_dim_if_it_divides():
  mesh = sharding.make_mesh(data=2, fsdp=4)
  tree = {
      'kernel': np.zeros((8, 3)),
      'odd': np.zeros((6, 3)),
      'gain': np.zeros(8),
      'scale': np.zeros(()),
  }
  expected = {'kernel': P(FSDP), 'odd': P(), 'gain': P(), 'scale': P()}
  assert sharding.tree_specs(tree, mesh) == expected
  shardings = sharding.tree_shardings(tree, mesh)
  assert {k: s.spec for k, s in shardings.items()} == expected
  alone = sharding.make_mesh()
  assert sharding.leaf_spec((8, 3), alone) == P()


def test_small_arrays_of_all_devices_arrive_as_they_are():
  everywhere = sharding.NamedSharding(sharding.make_mesh(data=8), P())
  trees = {
      'layers_0': {'scale': np.float32(3), 'sums': np.arange(5.0)},
      'layers_1': {'scale': np.float32(-0.0), 'sums': np.full(5, np.nan)},
      'head': np.arange(6.0).reshape(2, 3),
      'norm': {},
  }
  trees = jax.tree.map(np.float32, trees)
  found = sharding.fetch(jax.device_put(trees, everywhere))
  assert jax.tree.structure(found) == jax.tree.structure(trees)
  for a, b in zip(*map(jax.tree.leaves, (found, trees)), strict=True):
    assert a.shape == b.shape and a.tobytes() == b.tobytes()
