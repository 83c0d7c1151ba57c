"""The collectives: what devices exchange, forward and backward.

Weights are sharded over `fsdp` along their first axis. They are gathered after
quantisation, so that FP8 bytes travel: in training where they are used, and
once before each rollout (`rl/rollout/engine.py`). The cotangent of a gathered
weight is reduce-scattered.

Devices along `tensor` have the same rows and share each dot: a device computes
some of its outputs, of all of its inputs, so that no sum is split and a result
has the bits of one device. Which rows of a weight a device reads is its
`Pieces`; for storage, masters, moments and weights are split over `tensor` and
`fsdp` alike, whatever reads them.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.sharding import (
    DATA,
    FSDP,
    ROWS,
    ROWS_OF_HEADS,
    TENSOR,
    stored_over,
)
from jetrl_jax.core.typing import Array, PyTree

# How the devices of `tensor` share a leaf's rows: for each piece (number of
# rows, number of equal parts). Device t reads part t of each piece, or part t *
# parts // tensor if there are fewer parts than devices. () if all devices read
# the whole leaf.
Pieces = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Axes:
  """Sizes of the axes, and collectives that do nothing on one device.

  Attributes:
    data: devices that hold copies of the weights.
    fsdp: devices over which weights are split.
    tensor: devices over which the outputs of dots are split.
    placed: whether weights are here as dots read them (`rl/rollout/engine.py`)
      and not as they are stored; only with `tensor` above 1.
    apart: whether devices keep their own sums of a leaf's cotangents, those of
      `data` and with `whole_gradients` all; they are added up later
      (`sum_apart`).
    overlap: see `MeshConfig`.
    whole_gradients: see `MeshConfig`.
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  placed: bool = False
  apart: bool = False
  overlap: bool = False
  whole_gradients: bool = False

  @property
  def size(self) -> int:
    """Number of devices over which rows are split."""
    return self.data * self.fsdp

  @property
  def devices(self) -> int:
    """Number of all devices."""
    return self.size * self.tensor

  @property
  def kv_spec(self) -> P:
    """Spec of keys and values [rows, K, ...]."""
    return ROWS if self.tensor == 1 else ROWS_OF_HEADS

  @property
  def stored(self) -> int:
    """Number of devices over which a leaf is stored."""
    return self.fsdp * self.tensor

  @property
  def exchanges(self) -> bool:
    """Whether devices gather weights before they read them."""
    return self.stored > 1 and not self.placed

  @property
  def overlaps(self) -> bool:
    """Whether they compute meanwhile, as far as `in_turn` lets them."""
    return self.overlap and self.exchanges

  @property
  def gradient_sums(self) -> tuple[str, ...]:
    """Axes whose devices keep sums of their own until the update."""
    if self.whole_gradients and self.fsdp > 1:
      return DATA, FSDP
    return (DATA,) if self.data > 1 else ()

  def psum(self, x: PyTree) -> PyTree:
    """Returns the sum over the devices that have rows of their own."""
    if self.size == 1:
      return x
    return jax.tree.map(
        lambda leaf: _ordered_sum(leaf, (DATA, FSDP), self.size), x
    )

  def psum_all(self, x: PyTree) -> PyTree:
    """Returns the sum over all devices."""
    x = self.psum(x)
    if self.tensor == 1:
      return x
    return jax.tree.map(lambda leaf: _ordered_sum(leaf, TENSOR, self.tensor), x)

  def pmax(self, x: PyTree) -> PyTree:
    """Returns the maximum over all devices."""
    names = (DATA, FSDP, TENSOR) if self.tensor > 1 else (DATA, FSDP)
    return lax.pmax(x, names) if self.devices > 1 else x

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
    if self.stored == 1:
      return 0
    return lax.axis_index(stored_over(self.tensor)) * local_rows

  # --- leaves: from where they are stored to the devices that read them ----

  def gather(self, x: Array, full_dim: int, pieces: Pieces = ()) -> Array:
    """Returns the part of a leaf that this device reads.

    Args:
      x: the part of the leaf that is stored here; its first axis may be split.
      full_dim: the whole leaf's first axis.
      pieces: which rows are read.
    """
    if x.ndim == 0 or self.placed:
      return x
    is_split, pieces = x.shape[0] != full_dim, self._shared(pieces)
    if is_split and self._is_stored_in_turn(pieces):
      # The devices of `fsdp` hold exactly these rows, or whole pieces.
      if self.fsdp > 1:
        x = lax.all_gather(x, FSDP, axis=0, tiled=True)
      return _swap_parts(x) if len(pieces) > 1 else x
    if is_split:
      names = stored_over(self.tensor)
      x = lax.all_gather(x, names, axis=0, tiled=True)
    return self._take(x, pieces) if pieces else x

  def reduce_scatter(
      self,
      x: Array,
      local_dim: int,
      full_dim: int | None = None,
      pieces: Pieces = (),
  ) -> Array:
    """Adds the cotangents of all devices; returns the part stored here.

    With `apart` the devices of `data` are not added. With `whole_gradients` too
    none are, and the whole cotangent is returned.

    Args:
      x: a cotangent of what `gather` returned.
      local_dim: first axis of the part that is stored here.
      full_dim: the first axis of the whole leaf; by default that of x.
      pieces: which rows were read.
    """
    return self.reduce_scatter_in_turn(x, local_dim, full_dim, pieces)[0]

  def reduce_scatter_in_turn(
      self,
      x: Array,
      local_dim: int,
      full_dim: int | None = None,
      pieces: Pieces = (),
  ) -> tuple[Array, Array]:
    """Adds the cotangents of all devices; says when they have been sent.

    Args:
      x: see `reduce_scatter`, as for the others.
      local_dim: the same.
      full_dim: the same.
      pieces: the same.

    Returns:
      (the part stored here; 0 as a float32 [] for `in_turn`, which is there
      once the devices that store parts of the leaf have sent what is added).
    """
    sent = jnp.zeros((), jnp.float32)
    if self.devices == 1 or (self.apart and self.whole_gradients):
      return x, sent
    pieces = self._shared(pieces)
    full_dim = x.shape[0] if full_dim is None and x.ndim else full_dim or 0
    is_split = x.ndim > 0 and local_dim != full_dim
    if not is_split:
      if pieces:
        x = self._put_back(x, pieces)
      if not self.apart:
        x = self.psum(x)
      elif self.fsdp > 1:
        x = _ordered_sum(x, FSDP, self.fsdp)
      # Without pieces it is equal on all devices of `tensor`.
      return _ordered_sum(x, TENSOR, self.tensor) if pieces else x, sent
    if self._is_stored_in_turn(pieces):
      x = _swap_parts(x) if len(pieces) > 1 else x
      if self.fsdp > 1:
        x, sent = _ordered_sum_scatter(x, FSDP, self.fsdp)
    else:
      x = self._put_back(x, pieces) if pieces else x
      names = stored_over(self.tensor)
      x, sent = _ordered_sum_scatter(x, names, self.stored)
    if self.data > 1 and not self.apart:
      x = _ordered_sum(x, DATA, self.data)
    return x, sent

  def sum_apart(self, x: Array, local_dim: int) -> Array:
    """Adds what devices have kept apart; returns the part stored here.

    Args:
      x: this device's sum of a leaf's cotangents.
      local_dim: first axis of the part that is stored here.
    """
    if self.whole_gradients:
      return self.reduce_scatter(x, local_dim)
    return _ordered_sum(x, DATA, self.data)

  def _shared(self, pieces: Pieces) -> Pieces:
    return pieces if self.tensor > 1 else ()

  def _is_stored_in_turn(self, pieces: Pieces) -> bool:
    """Whether device t of `tensor` stores part t of a split leaf, or piece t.

    Then it has the rows that it reads, or one part for every device.
    """
    equal = set(pieces) == {(pieces[0][0], self.tensor)} if pieces else False
    return equal and len(pieces) in (1, self.tensor)

  def _starts(self, pieces: Pieces) -> list[tuple[Array, int]]:
    """Returns (first row, rows) of this device's part of each piece."""
    device, before, found = lax.axis_index(TENSOR), 0, []
    for rows, parts in pieces:
      part = device * parts // self.tensor
      found.append((before + part * (rows // parts), rows // parts))
      before += rows
    return found

  def _take(self, x: Array, pieces: Pieces) -> Array:
    parts = [
        lax.dynamic_slice_in_dim(x, start, rows)
        for start, rows in self._starts(pieces)
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

  def _put_back(self, x: Array, pieces: Pieces) -> Array:
    """Returns the whole leaf's rows, 0 where this device has none."""
    device, done, found = lax.axis_index(TENSOR), 0, []
    for rows, parts in pieces:
      size = rows // parts
      part = lax.slice_in_dim(x, done, done + size)
      here = jnp.arange(parts) == device * parts // self.tensor
      # Not written into zeros: XLA would make them for all layers at once, and
      # keep what waits for them.
      whole = jnp.where(here.reshape(-1, *[1] * x.ndim), part, 0)
      found.append(whole.reshape(rows, *x.shape[1:]))
      done += size
    return jnp.concatenate(found)

  # --- rows in a forward pass ----------------------------------------------

  def enter(self, x_MI: Array) -> Array:
    """Returns rows that all devices have, before a dot that they share.

    The derivative sums the cotangents of all devices.
    """
    is_8_bit = x_MI.dtype.itemsize == 1  # It has no derivative.
    return x_MI if self.tensor == 1 or is_8_bit else _enter(x_MI)

  def gather_inputs(self, x_MI: Array) -> Array:
    """Returns whole rows; each device of `tensor` has some of their columns.

    It stands before a dot that the devices share, so the derivative sums the
    cotangents of all devices.
    """
    return _gather_inputs(x_MI) if self.tensor > 1 else x_MI

  def whole_columns(self, ct_MO: Array) -> Array:
    """Returns whole rows of a cotangent; each device has some columns."""
    return gather_columns(ct_MO) if self.tensor > 1 else ct_MO

  def own_inputs(self, w_OI: Array) -> Array:
    """Returns all rows of a kernel, for the inputs that this device has.

    Args:
      w_OI: this device's rows, for all inputs.
    """
    if self.tensor == 1:
      return w_OI
    return lax.all_to_all(w_OI, TENSOR, split_axis=1, concat_axis=0, tiled=True)

  def gather_transposed(self, x_IM: Array) -> Array:
    """Does what `gather_inputs` does, for transposed rows; no derivative."""
    if self.tensor == 1:
      return x_IM
    return lax.all_gather(x_IM, TENSOR, axis=0, tiled=True)

  def psum_shared(self, x: Array) -> Array:
    """Returns the sum over devices with equal rows."""
    return _shared_sum(x) if self.tensor > 1 else x

  def gather_outputs(self, y_MO: Array) -> Array:
    """Returns whole rows of the result of a dot that devices share.

    All devices compute alike with the result, so the derivative is this
    device's columns of the cotangent.
    """
    return _gather_outputs(y_MO) if self.tensor > 1 else y_MO

  def share_of(self, rows: int) -> int:
    """Returns how many of the rows that all have a device takes for itself.

    All of them, where the devices would not have multiples of 16: with fewer a
    CPU's sums have another order (`kernels/row_sum.py`).
    """
    return rows if rows % (16 * self.tensor) else rows // self.tensor

  def whole_rows(self, y_MO: Array) -> Array:
    """Returns whole rows of a dot's result, of this device's share of rows.

    It has no derivative.
    """
    if self.tensor == 1:
      return y_MO
    rows, columns = y_MO.shape
    share = self.share_of(rows)
    if share == rows:
      return gather_columns(y_MO)
    parts = y_MO.reshape(self.tensor, share, columns)
    # Part t is what device t had of these rows.
    parts = lax.all_to_all(
        parts, TENSOR, split_axis=0, concat_axis=0, tiled=True
    )
    return jnp.moveaxis(parts, 0, 1).reshape(share, self.tensor * columns)

  def own_rows(self, x_M: Array) -> Array:
    """Returns this device's share of rows that all have."""
    rows = x_M.shape[0]
    share = self.share_of(rows)
    if share == rows:
      return x_M
    start = lax.axis_index(TENSOR) * share
    return lax.dynamic_slice_in_dim(x_M, start, share)

  def all_rows(self, values: Sequence[Array], rows: int) -> list[Array]:
    """Returns numbers of all rows, [M] each, of the devices' shares of them.

    Args:
      values: float32 or int32. They travel together.
      rows: M.
    """
    if self.share_of(rows) == rows:
      return list(values)
    words = [lax.bitcast_convert_type(x, jnp.uint32) for x in values]
    whole = lax.all_gather(jnp.stack(words), TENSOR, axis=1, tiled=True)
    return [
        lax.bitcast_convert_type(word, x.dtype)
        for word, x in zip(whole, values, strict=True)
    ]

  def add(self, x_MD: Array, y_MO: Array) -> Array:
    """Returns x + y, [M, D]; each device of `tensor` has some columns of y.

    Args:
      x_MD: the residual stream.
      y_MO: what is added, in x's dtype or in float32. The sum is then rounded
        once, as in a GEMM that adds (`linear.added_dtype`).
    """
    if y_MO.shape == x_MD.shape:
      return x_MD + y_MO
    return _add_columns(x_MD, y_MO)

  def own_sum(self, x_MD: Array, y_MO: Array) -> Array:
    """Returns this device's columns of `add`; it has no derivative."""
    return _own_sum(x_MD, y_MO)

  def first_column(self, columns: int) -> int | Array:
    """Returns the number of this device's first column of a shared dot."""
    return lax.axis_index(TENSOR) * columns if self.tensor > 1 else 0

  def pick_rows(self, index_M: Array, rows: int) -> tuple[Array, Array | None]:
    """Returns indices into this device's part of a leaf, and which are there.

    Args:
      index_M: int32, indices into the whole leaf.
      rows: number of rows of this device's part.
    """
    if self.tensor == 1:
      return index_M, None
    index_M = index_M - lax.axis_index(TENSOR) * rows
    here_M = (index_M >= 0) & (index_M < rows)
    return jnp.where(here_M, index_M, 0), here_M

  def join(self, x_MD: Array, here_M: Array | None) -> Array:
    """Returns rows of which one device of `tensor` each has the values."""
    if here_M is None:
      return x_MD
    return _join(jnp.where(here_M[:, None], x_MD, 0))


def _swap_parts(x: Array) -> Array:
  """Device t gives part s to device s, and gets its part t; of the rows."""
  return lax.all_to_all(x, TENSOR, split_axis=0, concat_axis=0, tiled=True)


# One device.
ALONE = Axes()
# The order does not matter for two numbers. For more it does, and collectives
# choose it: by topology, size and number of processes. So more than two are
# sent unchanged and added here, in the order of the devices.
_SMALL = 4096


def _may_scatter(size: int) -> bool:
  """Whether XLA's own reduce-scatter adds in one order.

  Not on a CPU: with two processes (gloo, jax 0.10.2) and fsdp=2 its sums did
  not repeat to the bit.
  """
  return size <= 2 and on_gpu()


def _ordered_sum_scatter(x: Array, axis, size: int) -> tuple[Array, Array]:
  """Adds over devices.

  Returns:
    (this device's part of the first axis; 0 as a float32 [], which is there
    once devices have sent what is added).
  """
  sent = jnp.zeros((), jnp.float32)
  if _may_scatter(size):
    x = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return lax.optimization_barrier((x, sent))
  parts = x.reshape(size, x.shape[0] // size, *x.shape[1:])
  parts = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)
  # Before the addition, which XLA joins to that of the gradients so far.
  parts, sent = lax.optimization_barrier((parts, sent))
  return _sum_of(parts), sent


def _ordered_sum(x: Array, axis, size: int) -> Array:
  """Adds over devices."""
  x = jnp.asarray(x)
  if size <= 2:
    return lax.psum(x, axis)
  if x.size <= _SMALL:
    return _sum_of(lax.all_gather(x, axis))
  flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
  part, _ = _ordered_sum_scatter(flat, axis, size)
  whole = lax.all_gather(part, axis, tiled=True)
  return whole[: x.size].reshape(x.shape)


def _shared_sum(x: Array) -> Array:
  """Adds over the devices of `tensor`, in float32; all get the result."""
  size = lax.axis_size(TENSOR)
  if size <= 2:
    return lax.psum(x, TENSOR)
  flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
  whole = lax.all_gather(_scatter_columns(flat), TENSOR, tiled=True)
  return whole[: x.size].reshape(x.shape)


def _scatter_columns(x: Array) -> Array:
  """Adds over the devices of `tensor`, in float32; each gets some columns."""
  size = lax.axis_size(TENSOR)
  if _may_scatter(size):
    return lax.psum_scatter(x, TENSOR, scatter_dimension=x.ndim - 1, tiled=True)
  parts = jnp.moveaxis(x.reshape(*x.shape[:-1], size, -1), -2, 0)
  parts = lax.all_to_all(parts, TENSOR, split_axis=0, concat_axis=0, tiled=True)
  wide = jnp.promote_types(x.dtype, jnp.float32)
  return _sum_of(parts.astype(wide)).astype(x.dtype)


def _sum_of(parts: Array) -> Array:
  """Adds along the first axis, from the first to the last."""
  total = parts[0]
  for i in range(1, parts.shape[0]):
    total = total + parts[i]
  return total


def gather_columns(x: Array) -> Array:
  """Returns the columns of all devices, next to each other."""
  # If they were gathered along the columns, XLA would transpose them, and the
  # dot that reads them might differ from that on one device.
  parts = jnp.moveaxis(lax.all_gather(x, TENSOR), 0, -2)
  return parts.reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _enter(x: Array) -> Array:
  return x


_enter.defvjp(
    lambda x: (x, None), lambda _, cotangent: (_shared_sum(cotangent),)
)


@jax.custom_vjp
def _gather_inputs(x: Array) -> Array:
  return gather_columns(x)


_gather_inputs.defvjp(
    lambda x: (gather_columns(x), None),
    lambda _, cotangent: (_scatter_columns(cotangent),),
)


@jax.custom_vjp
def _gather_outputs(y: Array) -> Array:
  return gather_columns(y)


def _gather_outputs_fwd(y):
  return _gather_outputs(y), jnp.zeros((0, y.shape[-1]))


def _gather_outputs_bwd(like, cotangent):
  columns = like.shape[1]
  start = lax.axis_index(TENSOR) * columns
  axis = cotangent.ndim - 1
  return (lax.dynamic_slice_in_dim(cotangent, start, columns, axis),)


_gather_outputs.defvjp(_gather_outputs_fwd, _gather_outputs_bwd)


def _own_sum(x_MD: Array, y_MO: Array) -> Array:
  columns = y_MO.shape[1]
  start = lax.axis_index(TENSOR) * columns
  mine_MO = lax.dynamic_slice_in_dim(x_MD, start, columns, 1)
  if y_MO.dtype != x_MD.dtype:
    # Without the barrier the GEMM would add, in float32, with two more passes
    # over memory.
    y_MO = lax.optimization_barrier(y_MO)
  total_MO = mine_MO.astype(y_MO.dtype) + y_MO
  return total_MO.astype(x_MD.dtype)


@jax.custom_vjp
def _add_columns(x_MD: Array, y_MO: Array) -> Array:
  return gather_columns(_own_sum(x_MD, y_MO))


def _add_columns_fwd(x_MD, y_MO):
  return _add_columns(x_MD, y_MO), jnp.zeros((0, y_MO.shape[1]), y_MO.dtype)


def _add_columns_bwd(like, cotangent):
  (dy_MO,) = _gather_outputs_bwd(like, cotangent)
  return cotangent, dy_MO.astype(like.dtype)


_add_columns.defvjp(_add_columns_fwd, _add_columns_bwd)


@jax.custom_vjp
def _join(x_MD: Array) -> Array:
  # Sums of integers, because a sum of floats would turn -0.0 into 0.0.
  pairs = x_MD.reshape(x_MD.shape[0], -1, 4 // x_MD.dtype.itemsize)
  pairs = pairs[..., 0] if pairs.shape[-1] == 1 else pairs
  words = lax.psum(lax.bitcast_convert_type(pairs, jnp.uint32), TENSOR)
  return lax.bitcast_convert_type(words, x_MD.dtype).reshape(x_MD.shape)


_join.defvjp(
    lambda x_MD: (_join(x_MD), None), lambda _, cotangent: (cotangent,)
)


def axes_of(
    mesh: Mesh, *, overlap: bool = False, whole_gradients: bool = False
) -> Axes:
  """Returns the sizes of a mesh's axes.

  Args:
    mesh: devices.
    overlap: see `MeshConfig`.
    whole_gradients: the same.

  Raises:
    ValueError: whole gradients of devices that share dots.
  """
  sizes = mesh.shape[DATA], mesh.shape[FSDP], mesh.shape[TENSOR]
  if whole_gradients and mesh.shape[TENSOR] > 1:
    raise ValueError(
        f'mesh.whole_gradients is True and mesh.tensor is {sizes[2]}; allowed'
        ' with mesh.tensor=1: set mesh.whole_gradients=False'
    )
  return Axes(*sizes, overlap=overlap, whole_gradients=whole_gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 3))
def grad_sink(
    axes: Axes,
    full_shape: tuple[int, ...],
    master: Array,
    pieces: Pieces = (),
    after: Array | None = None,
) -> Array:
  """Stands in for a master where a device reads it, and gets its cotangent.

  It has no values: the dots read the compute weight and never the master, so
  XLA does not materialise this array. The cotangent of `after` is there once
  devices have sent each other that of the master, see `in_turn`.
  """
  del after
  if axes.tensor > 1 and pieces:
    rows = sum(rows // parts for rows, parts in pieces)
    full_shape = (rows, *full_shape[1:])
  return jnp.zeros(full_shape, master.dtype)


def _grad_sink_fwd(axes, full_shape, master, pieces, after):
  shape = master.shape, after is not None
  return grad_sink(axes, full_shape, master, pieces), shape


def _grad_sink_bwd(axes, full_shape, pieces, shape, cotangent):
  local_shape, has_after = shape
  local_dim = local_shape[0] if local_shape else 0
  full_dim = full_shape[0] if full_shape else 0
  added, sent = axes.reduce_scatter_in_turn(
      cotangent, local_dim, full_dim, pieces
  )
  if not has_after:
    return added, None
  if axes.overlaps:
    # Else what is sent would wait to be added, for all layers.
    added, sent = lax.optimization_barrier((added, sent))
  return added, sent


grad_sink.defvjp(_grad_sink_fwd, _grad_sink_bwd)


@jax.custom_vjp
def in_turn(x_MD: Array, chain: Array) -> tuple[Array, Array, Array]:
  """Lets others wait for x, and x's cotangent for theirs.

  XLA orders a program by what depends on what. It starts a collective as early
  as it can, and postpones what nobody waits for, such as gradients of weights;
  then it keeps what they are made of, for all layers.

  Args:
    x_MD: rows.
    chain: float32 [], of the call before, or of `first_turn`.

  Returns:
    (x; a float32 [] that is there once x is; the chain). What takes the scalar
    waits for x. In a backward pass, x's cotangent waits for the scalar's.
  """
  return x_MD, x_MD[0, 0].astype(jnp.float32), chain


def _in_turn_fwd(x_MD, chain):
  return in_turn(x_MD, chain), None


def _in_turn_bwd(_, cotangents):
  x_MD, scalar, chain = cotangents
  # XLA takes out of a barrier what nothing reads: the chain's end reads it.
  return lax.optimization_barrier((x_MD, scalar + chain))


in_turn.defvjp(_in_turn_fwd, _in_turn_bwd)


@jax.custom_vjp
def first_turn(x_MD: Array) -> tuple[Array, Array]:
  """Returns (x, a chain for `in_turn`)."""
  return x_MD, jnp.zeros((), jnp.float32)


def _first_turn_fwd(x_MD):
  return first_turn(x_MD), None


def _first_turn_bwd(_, cotangents):
  x_MD, chain = cotangents
  # The value is always x's, but XLA cannot know that.
  return (jnp.where(jnp.isnan(chain), chain.astype(x_MD.dtype), x_MD),)


first_turn.defvjp(_first_turn_fwd, _first_turn_bwd)
