"""The mesh, which leaves are split over it, and the collectives.

Every function of the policy runs in `shard_map`: each device runs the
one-device program on its own rows. Weights are sharded over `fsdp` along their
first axis. They are gathered after quantisation, so that FP8 bytes travel: in
training where they are used, and once before each rollout
(`rl/rollout/engine.py`). The cotangent of a gathered weight is
reduce-scattered.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jetrl_jax.core.typing import Array, NpArray, PyTree

DATA, FSDP, TENSOR = 'data', 'fsdp', 'tensor'
# Rows (sequences, slots) are split over both axes.
ROWS = P((DATA, FSDP))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """The devices of a run, as a mesh.

  Attributes:
    data: devices that hold copies of the weights.
    fsdp: devices over which weights are split.
    tensor: devices over which dots are split; only 1 is supported: a split
      contraction adds in another order.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1


def make_mesh(
    *,
    data: int = MeshConfig.data,
    fsdp: int = MeshConfig.fsdp,
    tensor: int = MeshConfig.tensor,
) -> Mesh:
  """Returns a mesh with axes (data, fsdp, tensor).

  Raises:
    ValueError: tensor > 1, or fewer devices than the mesh needs.
  """
  if tensor != 1:
    raise ValueError(
        f'mesh.tensor is {tensor}; only 1 is supported: a contraction split'
        ' over devices adds in another order, and equality to the bit is not'
        ' proven for it. Use data and fsdp.'
    )
  if min(data, fsdp) < 1:
    raise ValueError(f'mesh axes must be >= 1, found data={data}, fsdp={fsdp}')
  need, have = data * fsdp, jax.devices()
  if jax.process_count() > 1:
    have = _equal_shares(need, have, f'mesh data={data} x fsdp={fsdp}')
  if need > len(have):
    raise ValueError(
        f'mesh data={data} x fsdp={fsdp} needs {need} devices; found'
        f' {len(have)} ({have[0].platform}). Lower mesh.data or mesh.fsdp; for'
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
        f' with {most} or more ({found[0].platform}): data x fsdp must be'
        f' {processes} times 1 to {most}. Change mesh.data or mesh.fsdp, or the'
        ' number of processes'
    )
  return [device for share in shares for device in share[:each]]


def spans_processes(mesh: Mesh) -> bool:
  """Whether some of the mesh's devices belong to another process."""
  here = jax.process_index()
  return any(device.process_index != here for device in mesh.devices.flat)


def local_mesh(mesh: Mesh) -> Mesh:
  """Returns the mesh of this process's devices.

  Its fsdp axis is that of `mesh` if these devices hold whole copies of the
  weights, and 1 otherwise.
  """
  here = jax.process_index()
  mine = [d for d in mesh.devices.flat if d.process_index == here]
  fsdp = mesh.shape[FSDP]
  fsdp = fsdp if len(mine) % fsdp == 0 else 1
  grid = np.asarray(mine).reshape(len(mine) // fsdp, fsdp, 1)
  return Mesh(grid, (DATA, FSDP, TENSOR))


def on_local_mesh(tree: PyTree, local: Mesh) -> PyTree:
  """Returns arrays over all processes as arrays over this one's devices.

  Nothing is copied. The devices of this process must hold whole arrays, as
  `local_mesh` says.
  """

  def view(x: Array) -> Array:
    return jax.make_array_from_single_device_arrays(
        x.shape,
        NamedSharding(local, x.sharding.spec),  # type: ignore[attr-defined]
        [shard.data for shard in x.addressable_shards],
    )

  return jax.tree.map(view, tree)


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


@dataclasses.dataclass(frozen=True)
class Axes:
  """Sizes of the row axes, and collectives that do nothing on one device.

  Attributes:
    data: devices that hold copies of the weights.
    fsdp: devices over which weights are split.
  """

  data: int = 1
  fsdp: int = 1

  @property
  def size(self) -> int:
    """Number of devices over which rows are split."""
    return self.data * self.fsdp

  def psum(self, x: PyTree) -> PyTree:
    """Returns the sum over all devices."""
    if self.size == 1:
      return x
    return jax.tree.map(
        lambda leaf: _ordered_sum(leaf, (DATA, FSDP), self.size), x
    )

  def pmax(self, x: PyTree) -> PyTree:
    """Returns the maximum over all devices."""
    return lax.pmax(x, (DATA, FSDP)) if self.size > 1 else x

  def index(self) -> int | Array:
    """Returns this device's number among those over which rows are split."""
    return lax.axis_index((DATA, FSDP)) if self.size > 1 else 0

  def gather_rows(self, x: PyTree) -> PyTree:
    """Returns the rows of all devices."""
    if self.size == 1:
      return x
    return lax.all_gather(x, (DATA, FSDP), axis=0, tiled=True)

  def first_row(self, local_rows: int) -> int | Array:
    """Returns the index of this device's first row in a split leaf."""
    return lax.axis_index(FSDP) * local_rows if self.fsdp > 1 else 0

  def gather(self, x: Array, full_dim: int) -> Array:
    """Returns the whole of a leaf whose first axis may be split over fsdp."""
    if x.ndim == 0 or x.shape[0] == full_dim:
      return x
    return lax.all_gather(x, FSDP, axis=0, tiled=True)

  def reduce_scatter(self, x: Array, local_dim: int) -> Array:
    """Adds over devices; returns this device's part of the first axis."""
    if self.size == 1:
      return x
    if x.ndim == 0 or x.shape[0] == local_dim:
      return self.psum(x)
    x = _ordered_sum_scatter(x, FSDP, self.fsdp)
    return _ordered_sum(x, DATA, self.data) if self.data > 1 else x


# Of two numbers the order does not matter. Of more it does, and collectives
# choose it: by topology, size and number of processes. So more than two are
# sent unchanged and added here, in the order of the devices.
_SMALL = 4096


def _ordered_sum_scatter(x: Array, axis, size: int) -> Array:
  """Adds over devices; returns this device's part of the first axis."""
  if size <= 2:
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
  parts = x.reshape(size, x.shape[0] // size, *x.shape[1:])
  parts = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)
  return _sum_of(parts)


def _ordered_sum(x: Array, axis, size: int) -> Array:
  """Adds over devices."""
  x = jnp.asarray(x)
  if size <= 2:
    return lax.psum(x, axis)
  if x.size <= _SMALL:
    return _sum_of(lax.all_gather(x, axis))
  flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
  part = _ordered_sum_scatter(flat, axis, size)
  whole = lax.all_gather(part, axis, tiled=True)
  return whole[: x.size].reshape(x.shape)


def _sum_of(parts: Array) -> Array:
  """Adds along the first axis, from the first to the last."""
  total = parts[0]
  for i in range(1, parts.shape[0]):
    total = total + parts[i]
  return total


def axes_of(mesh: Mesh) -> Axes:
  """Returns the sizes of a mesh's row axes."""
  return Axes(mesh.shape[DATA], mesh.shape[FSDP])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grad_sink(axes: Axes, full_shape: tuple[int, ...], master: Array) -> Array:
  """Stands for a whole master: it has no values and receives the cotangent.

  The dots read the compute weight and never the master, so XLA does not
  materialise this array.
  """
  return jnp.zeros(full_shape, master.dtype)


def _grad_sink_fwd(axes, full_shape, master):
  return grad_sink(axes, full_shape, master), master.shape


def _grad_sink_bwd(axes, full_shape, local_shape, cotangent):
  del full_shape
  local_dim = local_shape[0] if local_shape else 0
  return (axes.reduce_scatter(cotangent, local_dim),)


grad_sink.defvjp(_grad_sink_fwd, _grad_sink_bwd)


def leaf_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
  """Returns a leaf's spec: matrices are split over fsdp along axis 0."""
  fsdp = mesh.shape[FSDP]
  if len(shape) >= 2 and fsdp > 1 and shape[0] % fsdp == 0:
    return P(FSDP)
  return P()


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
