"""The arrays of a checkpoint: names, checks, and Orbax underneath.

A pytree of any node types is written as nested dicts that are named by its
paths. Any Orbax user can open them. They are read into the structure that the
caller gives. This file compares the name, shape and dtype of every leaf,
because Orbax may silently cast or pad.
"""

import concurrent.futures
import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jetrl_jax.checkpoint import manifest as checkpoint_manifest
from jetrl_jax.checkpoint.manifest import Manifest
from jetrl_jax.core import processes
from jetrl_jax.core.typing import PyTree

# With files of this size several threads can hash; Orbax's default is 2 GB.
_DATA_FILE_BYTES = 256 * 2**20
# Arrays that are copied to the host at the same time.
AT_A_TIME = 4
# Alignment in bytes at which JAX uses host memory without another copy.
_ALIGNMENT = 64
# In another model every leaf differs, so only the first few are listed.
_PROBLEMS_SHOWN = 10


class OtherStateError(ValueError):
  """The saved leaves differ from the wanted ones in name, shape or dtype."""


def named_leaves(tree: PyTree) -> dict[str, Any]:
  """Maps 'a/b/0' to the leaf at that path, in the order of the tree."""
  named = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    parts = [jax.tree_util.keystr((part,), simple=True) for part in path]
    name = '/'.join(parts)
    # Orbax joins names with dots, so {'a': {'b'}} and {'a.b'} would collide.
    if not parts or name in named or any(set('./') & set(p) for p in parts):
      raise ValueError(
          f'leaf {name!r} has no unique name; allowed: a dict at the root and '
          "keys without '/' and '.'"
      )
    named[name] = leaf
  return named


def signature(leaf: Any) -> tuple[str, tuple[int, ...]]:
  """Returns an array's (dtype, shape) as the manifest holds them."""
  if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
    raise ValueError(f'found a leaf {leaf!r}; allowed: jax arrays')
  return str(leaf.dtype), tuple(leaf.shape)


def on_host(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Copies arrays to the host, a few at a time; random keys are not copied.

  If Orbax copied them, saving would take three to eight times as long, and a
  rollout at the same time more than twice (docs/performance_log.md). XLA fills
  new host memory in one thread, and stages all arrays at once in a pinned pool
  of up to 64 GiB that is never freed. Here each piece is copied to pinned
  memory, which the pool reuses for the next piece, and one of a few threads
  copies it to its destination. If JAX_PLATFORMS excludes the CPU, Orbax copies.
  """
  # TODO(when a large run on several hosts shows that it matters): copy the
  # shards of several processes here too. Orbax does it, more slowly.
  if jax.default_backend() == 'cpu' or processes.count() > 1:
    return named
  try:
    cpu = jax.local_devices(backend='cpu')[0]
  except RuntimeError:
    return named
  copy = functools.partial(_copied, place=SingleDeviceSharding(cpu))
  with concurrent.futures.ThreadPoolExecutor(AT_A_TIME) as pool:
    return dict(zip(named, pool.map(copy, named.values()), strict=True))


def _copied(leaf: jax.Array, place: SingleDeviceSharding) -> jax.Array:
  """Returns a copy of a whole array in host memory."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
    return leaf
  size = math.prod(leaf.shape) * leaf.dtype.itemsize
  memory = np.empty(size + _ALIGNMENT, np.uint8)
  start = -memory.ctypes.data % _ALIGNMENT
  host = memory[start : start + size].view(leaf.dtype).reshape(leaf.shape)
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      pinned = SingleDeviceSharding(shard.device, memory_kind='pinned_host')
      piece = np.asarray(jax.device_put(shard.data, pinned))
      np.copyto(host[(*shard.index, ...)], piece)
  # The memory is aligned, so JAX uses it without another copy.
  return jax.device_put(host, place)


def writer(options: dict[str, Any]) -> ocp.AsyncCheckpointer:
  """Returns Orbax's writer, for one process or several.

  Args:
    options: the options of `ocp.PyTreeCheckpointHandler`.
  """
  together = _processes()
  return ocp.AsyncCheckpointer(
      ocp.PyTreeCheckpointHandler(**options, multiprocessing_options=together),
      multiprocessing_options=together,
  )


def _processes() -> ocp.options.MultiprocessingOptions:
  """Returns Orbax's options for the processes of this run.

  If they are not named, Orbax waits for them with a collective over the
  devices, from a thread, while the main thread uses the devices: a deadlock.
  """
  everybody = set(range(processes.count()))
  if len(everybody) == 1:
    return ocp.options.MultiprocessingOptions()
  return ocp.options.MultiprocessingOptions(active_processes=everybody)


def save_args(named: dict[str, jax.Array]) -> ocp.args.PyTreeSave:
  """Returns Orbax's arguments to save these leaves."""
  return ocp.args.PyTreeSave(
      _nested(named), ocdbt_target_data_file_size=_DATA_FILE_BYTES
  )


def _nested(named: dict[str, Any]) -> dict[str, Any]:
  """Turns {'a/b': x} into {'a': {'b': x}}, without arrays of no elements.

  Orbax refuses to write those. Their names, shapes and dtypes are in the
  manifest.
  """
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    if math.prod(leaf.shape) == 0:
      continue
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def load(folder: pathlib.Path, manifest: Manifest, like: PyTree) -> PyTree:
  """Reads the arrays of a verified step into the structure of `like`."""
  wanted = named_leaves(like)
  check_leaves(folder, manifest.leaves, wanted)
  abstract = {
      name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
      for name, leaf in wanted.items()
  }
  target = _nested(abstract)
  together = _processes()
  handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=together)
  with ocp.Checkpointer(handler, multiprocessing_options=together) as reader:
    loaded = reader.restore(
        folder.resolve() / checkpoint_manifest.PAYLOAD,
        args=ocp.args.PyTreeRestore(
            item=target,
            restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        ),
    )
  found = named_leaves(loaded)
  leaves = []
  for name, leaf in abstract.items():
    if math.prod(leaf.shape) == 0:
      empty = np.zeros(leaf.shape, leaf.dtype)
      leaves.append(jax.device_put(empty, leaf.sharding))
      continue
    array = found[name]
    # Orbax can cast and pad to the target; make sure that it did not.
    assert signature(array) == manifest.leaves[name], name
    assert array.sharding.is_equivalent_to(leaf.sharding, array.ndim), name
    leaves.append(array)
  return jax.tree.unflatten(jax.tree.structure(like), leaves)


def check_leaves(
    folder: pathlib.Path,
    saved: dict[str, tuple[str, tuple[int, ...]]],
    wanted: dict[str, Any],
) -> None:
  """Raises an error if saved and wanted leaves differ.

  Raises:
    OtherStateError: a name, shape or dtype differs; the message lists them.
  """
  problems = [f'{name} is not saved' for name in wanted if name not in saved]
  problems += [f'{name} is not wanted' for name in saved if name not in wanted]
  for name, leaf in wanted.items():
    if name in saved and signature(leaf) != saved[name]:
      dtype, shape = signature(leaf)
      saved_dtype, saved_shape = saved[name]
      problems.append(
          f'{name} is saved as {saved_dtype}{list(saved_shape)}, wanted as '
          f'{dtype}{list(shape)}'
      )
    if leaf.sharding is None:
      problems.append(f'{name} is wanted without a sharding')
  if problems:
    shown = problems[:_PROBLEMS_SHOWN]
    if more := len(problems) - len(shown):
      shown.append(f'and {more} more')
    raise OtherStateError(
        f'the checkpoint {folder} belongs to another model or optimiser; use'
        ' another folder, or the settings that it was made with:\n  '
        + '\n  '.join(shown)
    )
