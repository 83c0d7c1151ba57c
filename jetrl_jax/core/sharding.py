"""The mesh, where the leaves of a tree lie on it, and how they come and go.

Every function of the policy runs in `shard_map`: each device runs the
one-device program on its own rows, and exchanges with others by
`core/collectives.py`. Matrices are split over `fsdp` and `tensor` along their
first axis (`leaf_spec`), whatever reads them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core.typing import Array, NpArray, PyTree

AXES = DATA, FSDP, TENSOR = 'data', 'fsdp', 'tensor'
# Rows (sequences, slots) are split over both axes.
ROWS = P((DATA, FSDP))
# Keys and values [rows, K, ...], where `tensor` is above 1.
ROWS_OF_HEADS = P((DATA, FSDP), TENSOR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """The devices of a run, as a mesh.

  Attributes:
    data: devices that hold copies of the weights.
    fsdp: devices over which weights are split.
    tensor: devices that share each sequence: the outputs of every dot, heads
      and their KV cache are split over them (docs/scale.md).
    overlap: whether an update computes while devices exchange split weights and
      gradients (docs/scale.md); the same numbers, more memory.
    whole_gradients: whether each device of `fsdp` keeps gradients of all
      weights, so that devices add them up once an update and not once a
      micro-batch (docs/scale.md); more memory. Only with tensor=1.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  overlap: bool = False
  whole_gradients: bool = False


def make_mesh(
    *,
    data: int = MeshConfig.data,
    fsdp: int = MeshConfig.fsdp,
    tensor: int = MeshConfig.tensor,
) -> Mesh:
  """Returns a mesh with axes (data, fsdp, tensor).

  Raises:
    ValueError: an axis below 1, or fewer devices than the mesh needs.
  """
  sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
  if min(sizes.values()) < 1:
    found = ', '.join(f'{name}={size}' for name, size in sizes.items())
    raise ValueError(f'mesh axes must be >= 1, found {found}')
  need, have = math.prod(sizes.values()), jax.devices()
  if jax.process_count() > 1:
    what = f'mesh data={data} x fsdp={fsdp}'
    what += f' x tensor={tensor}' if tensor > 1 else ''
    have = _equal_shares(need, have, what)
    count = jax.process_count()
    each = need // count
    if each % tensor and tensor % each:
      raise ValueError(
          f'mesh.tensor is {tensor}, but each of {count} processes has {each}'
          f' of the {need} devices. One must divide the other: a process has'
          ' all devices of its sequences, or shares them with whole processes.'
          ' Change mesh.tensor or the number of processes'
      )
  if need > len(have):
    product = ' x '.join(
        f'{name}={size}'
        for name, size in sizes.items()
        if size > 1 or name != TENSOR
    )
    raise ValueError(
        f'mesh {product} needs {need} devices; found'
        f' {len(have)} ({have[0].platform}). Lower mesh.data or mesh.fsdp'
        f'{" or mesh.tensor" if tensor > 1 else ""}; for'
        ' a dry run, JAX_PLATFORMS=cpu'
        f' XLA_FLAGS=--xla_force_host_platform_device_count={need} makes a CPU'
        f' count as {need}.'
    )
  grid = np.asarray(have[:need]).reshape(data, fsdp, tensor)
  return Mesh(grid, (DATA, FSDP, TENSOR))


def _equal_shares(need: int, found: list, what: str) -> list:
  """Returns the same number of devices of each process, in their order.

  Raises:
    ValueError: the processes cannot have equally many, or one has too few.
  """
  processes = jax.process_count()
  shares = [
      [device for device in found if device.process_index == p]
      for p in range(processes)
  ]
  each, most = need // processes, min(map(len, shares))
  if need % processes or each > most:
    raise ValueError(
        f'{what} is {need} devices, but there are {processes} processes, each'
        f' with {most} or more ({found[0].platform}): their product must be'
        f' {processes} times 1 to {most}. Change mesh.data or mesh.fsdp, or the'
        ' number of processes'
    )
  return [device for share in shares for device in share[:each]]


def spans_processes(mesh: Mesh) -> bool:
  """Whether some of the mesh's devices belong to another process."""
  here = jax.process_index()
  return any(device.process_index != here for device in mesh.devices.flat)


def processes_of_sequence(mesh: Mesh) -> int:
  """Returns over the devices of how many processes each sequence is split."""
  return len({device.process_index for device in mesh.devices[0, 0]})


def local_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh on which this process samples.

  It has this process's devices, and those of the processes that it shares
  sequences with. Its tensor axis is that of `mesh`. Its fsdp axis too, if these
  devices hold whole copies of the weights; otherwise it is 1.
  """
  shared = processes_of_sequence(mesh)
  group = jax.process_index() // shared
  mine = [d for d in mesh.devices.flat if d.process_index // shared == group]
  fsdp, tensor = mesh.shape[FSDP], mesh.shape[TENSOR]
  fsdp = fsdp if len(mine) % (fsdp * tensor) == 0 else 1
  grid = np.asarray(mine).reshape(-1, fsdp, tensor)
  return Mesh(grid, (DATA, FSDP, TENSOR))


def on_local_mesh(tree: PyTree, local: Mesh) -> PyTree:
  """Returns arrays over all processes as arrays over those of `local_mesh`.

  Nothing is copied. These devices must hold whole arrays, as `local_mesh` says.
  """

  def view(x: Array) -> Array:
    return jax.make_array_from_single_device_arrays(
        x.shape,
        NamedSharding(local, x.sharding.spec),  # type: ignore[attr-defined]
        [shard.data for shard in x.addressable_shards],
    )

  return jax.tree.map(view, tree)


def put(values: NpArray, where: NamedSharding) -> Array:
  """Puts values on devices; some may belong to a process that has the same."""
  if where.is_fully_addressable:
    return jax.device_put(values, where)
  return jax.make_array_from_callback(
      values.shape, where, lambda index: values[index]
  )


@functools.lru_cache
def _replicated(mesh: Mesh):
  return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))


def to_host(x: Array | NpArray) -> NpArray:
  """Returns the whole of an array, which may lie in several processes.

  All processes must call it.
  """
  if (
      isinstance(x, jax.Array)
      and not x.is_fully_addressable
      and not x.is_fully_replicated
  ):
    x = _replicated(x.sharding.mesh)(x)  # type: ignore[attr-defined]
  return np.asarray(x)


@jax.jit
def _joined(leaves: list[Array]) -> Array:
  return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


def fetch(groups: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """Returns float32 arrays on the host, in one transfer for each group.

  Of a GPU each small array takes as long as a large one: of a model of 30
  layers there are 1080 scales, histories and sums.

  Args:
    groups: trees of arrays that every device has whole; those of the same
      shapes share a compiled program.
  """
  joined = jax.device_get(
      {
          key: _joined(leaves)
          for key, tree in groups.items()
          if (leaves := jax.tree.leaves(tree))
      }
  )
  found = {}
  for key, tree in groups.items():
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = np.split(joined[key], ends) if leaves else []
    found[key] = structure.unflatten(
        part.reshape(leaf.shape)
        for part, leaf in zip(parts, leaves, strict=True)
    )
  return found


def whole_in_first(tree: PyTree) -> PyTree:
  """Gathers arrays of several processes on the host of process 0.

  All processes must call it. In one process it returns the tree as it is.

  Returns:
    The tree with whole arrays in process 0, and with None elsewhere.
  """
  if jax.process_count() == 1:
    return tree
  keep = jax.process_index() == 0

  def whole(x: Array) -> NpArray | None:
    if x.is_fully_replicated:
      return np.asarray(x) if keep else None
    # Leaf by leaf: a device need not have room for all.
    found = _replicated(x.sharding.mesh)(x)  # type: ignore[attr-defined]
    found.block_until_ready()
    return np.asarray(found.addressable_data(0)) if keep else None

  return jax.tree.map(whole, tree)


def stored_over(tensor: int) -> Any:
  """Returns the names of the axes over which leaves are stored."""
  return (TENSOR, FSDP) if tensor > 1 else FSDP


def leaf_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
  """Returns a leaf's spec: how matrices are stored, split along axis 0."""
  tensor = mesh.shape[TENSOR]
  parts = mesh.shape[FSDP] * tensor
  if len(shape) >= 2 and parts > 1 and shape[0] % parts == 0:
    return P(stored_over(tensor))
  return P()


def apart_specs(
    tree: PyTree, mesh: Mesh, names: tuple[str, ...] = (DATA,)
) -> PyTree:
  """Returns the specs of leaves of which devices have sums of their own.

  These have one more axis, the first one; `tree` has their shapes without it.

  Args:
    tree: arrays or shapes.
    mesh: devices.
    names: the axes of these devices, see `Axes.gradient_sums`. Those of `fsdp`
      have whole leaves.
  """

  def spec(leaf):
    return P(names, *(() if FSDP in names else leaf_spec(leaf.shape, mesh)))

  return jax.tree.map(spec, tree)


def tree_specs(tree: PyTree, mesh: Mesh) -> PyTree:
  """Returns the PartitionSpec of every leaf of a state tree."""
  return jax.tree.map(lambda leaf: leaf_spec(leaf.shape, mesh), tree)


def tree_shardings(tree: PyTree, mesh: Mesh) -> PyTree:
  """Returns the NamedSharding of every leaf of a state tree."""
  return named(tree_specs(tree, mesh), mesh)


def named(specs: PyTree, mesh: Mesh) -> PyTree:
  """Returns the NamedSharding of every PartitionSpec of a tree."""
  return jax.tree.map(
      lambda spec: NamedSharding(mesh, spec),
      specs,
      is_leaf=lambda node: isinstance(node, P),
  )


def per_device(function, mesh: Mesh, in_specs, out_specs):
  """Wraps `function` in shard_map; on one device it returns it unchanged."""
  if math.prod(mesh.shape.values()) == 1:
    return function
  return jax.shard_map(
      function,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
  )
