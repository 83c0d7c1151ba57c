"""Gathers of columns in a decode step, between devices that share sequences.

    y[m] = x_0[m], x_1[m] ...     x_t: the columns that device t has, [M, C]

The reference is XLA's: NCCL's kernel, which starts outside of CUDA graphs, and
one that puts columns next to each other. The kernel pushes a device's columns
into memory of the others that the decode state keeps for it, its `Workspace`,
so a decode step takes a workspace and returns it, as it does with KV pages.
Where there is none, the reference runs: without tensor parallelism, and where
`dispatch` says so. All others, of training and prefill, are XLA's.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.sharding import TENSOR
from jetrl_jax.core.typing import Array
from jetrl_jax.fp8.products import Rows
from jetrl_jax.kernels import dispatch

# Most rows that travel as packets: with more, twice the bytes take longer than
# to wait until they have arrived.
_PACKETS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Workspace:
  """Memory into which other devices push, see `mosaic_sm90`.

  It counts gathers, so it lives as long as the devices gather in step. It must
  not be copied: only programs that gather may take it, and they must have it
  donated.

  Attributes:
    words: int32 [devices that have rows of their own, `tensor`, words].
    form: how parts travel through it.
  """

  words: Array
  form: str = dataclasses.field(metadata={'static': True})


def workspace(axes: Axes, rows: int, row_bytes: int) -> Workspace:
  """Returns the zeros with which a workspace begins, of all devices.

  All devices must have written them before the first of them gathers.

  Args:
    axes: devices.
    rows: most rows of a device's gathers.
    row_bytes: most bytes of a device's part of a row.
  """
  from jetrl_jax.kernels.gather_columns import mosaic_sm90

  form = 'packets' if rows <= _PACKETS else 'flags'
  size = mosaic_sm90.workspace_words(form, axes.tensor, rows * row_bytes)
  words = jnp.zeros((axes.size, axes.tensor, size), jnp.int32)
  return Workspace(words=words, form=form)


def is_used(kernels: dispatch.Kernels, axes: Axes) -> bool:
  """Whether a decode step on these devices gathers by the kernel."""
  is_kernel = kernels.of('gather_columns') != dispatch.REFERENCE
  return is_kernel and axes.tensor > 1


def check(kernels: dispatch.Kernels, axes: Axes, mesh: Mesh) -> None:
  """Raises a ValueError if the kernel is chosen and cannot run.

  That NVLink connects the devices is not looked at.

  Args:
    kernels: what is chosen.
    axes: the sizes of the mesh's axes.
    mesh: the devices.
  """
  if not is_used(kernels, axes):
    return

  def refuse(found: str) -> None:
    raise ValueError(
        f'kernels has gather_columns=mosaic_sm90 and mesh.tensor is'
        f' {axes.tensor}; {found}, or leave gather_columns out'
    )

  processes = {device.process_index for device in mesh.devices.flat}
  if len(processes) > 1:
    refuse(
        f'the devices are in {len(processes)} processes, and the kernel needs'
        ' them in one: start one process for all GPUs'
    )
  ids = [device.id for device in mesh.devices.flat]
  if ids != list(range(len(ids))):
    refuse(
        f'the ids of the devices are {ids}, and the kernel needs them from 0'
        ' on, in order: make the mesh of the first of jax.devices()'
    )
  if jax.__version_info__ < (0, 11, 2):
    refuse(f'jax is {jax.__version__}, and the kernel needs 0.11.2: upgrade')


class Gathers:
  """The gathers of a block, one after the other; the workspace goes through.

  Such an object lives while a block is traced. The block is given a workspace
  and returns `workspace` as it is then.

  Args:
    axes: devices.
    workspace: None for those of XLA, which have derivatives.

  Attributes:
    workspace: to be returned.
  """

  def __init__(self, axes: Axes, workspace: Workspace | None):
    self.workspace = workspace
    self._axes = axes

  def inputs(self, x_MI: Array) -> Array:
    """Returns whole rows of a dot's inputs, see `Axes.gather_inputs`."""
    if self.workspace is None:
      return self._axes.gather_inputs(x_MI)
    return self._by_kernel(x_MI, self.workspace)

  def rows(self, rows: Rows) -> Rows:
    """Returns whole rows of a dot's inputs; only numbers travel."""
    values, fp8 = rows.values, rows.fp8
    if isinstance(values, jax.ShapeDtypeStruct):
      values = jax.eval_shape(self._axes.gather_inputs, values)
    else:
      values = self.inputs(values)
    return Rows(values, None if fp8 is None else self.inputs(fp8))

  def outputs(self, y_MO: Array) -> Array:
    """Returns whole rows of a dot's result, see `Axes.gather_outputs`."""
    if self.workspace is None:
      return self._axes.gather_outputs(y_MO)
    return self._by_kernel(y_MO, self.workspace)

  def add(self, x_MD: Array, y_MO: Array) -> Array:
    """Returns x + y, see `Axes.add`."""
    if self.workspace is None or y_MO.shape == x_MD.shape:
      return self._axes.add(x_MD, y_MO)
    own_MO = self._axes.own_sum(x_MD, y_MO)
    return self._by_kernel(own_MO, self.workspace)

  def _by_kernel(self, x_MC: Array, before: Workspace) -> Array:
    """Returns whole rows, and keeps the workspace as it is then."""
    from jetrl_jax.kernels.gather_columns import mosaic_sm90

    whole, words = mosaic_sm90.gather_columns(
        x_MC, before.words, axis=TENSOR, form=before.form
    )
    self.workspace = dataclasses.replace(before, words=words)
    return whole
