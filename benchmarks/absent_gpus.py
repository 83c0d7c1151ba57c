"""GPUs that are not there: what their programs take, launch and receive."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import common
from jetrl_jax.core import sharding
from jetrl_jax.fp8 import scaling_state
from jetrl_jax.kernels.quantized_dot.weights import prepare_weights
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.types import TrainBatch


class Gpu(NamedTuple):
  """What XLA would ask a device, as CUDA describes it."""

  capability: tuple[int, int]
  cores: int
  shared: int  # KiB that a block may have
  l2: int  # KiB
  gigabytes: float
  bandwidth: float  # 1e9 bytes/s
  ghz: float

  def target(self, name: str) -> str:
    """Returns the description that XLA reads."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {(self.shared + 1) * 1024}
  threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {self.bandwidth * 1e9:.0f}
  l2_cache_size: {self.l2 * 1024} clock_rate_ghz: {self.ghz}
  device_memory_size: {self.gigabytes * 1e9:.0f}
  shared_memory_per_block_optin: {self.shared * 1024}
  cuda_compute_capability {{
    major: {self.capability[0]} minor: {self.capability[1]}
  }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "NVIDIA {name}"
"""


GPUS = {
    'H200': Gpu((9, 0), 132, 227, 61440, 150.75482, 4800, 1.98),
    'A100': Gpu((8, 0), 108, 163, 40960, 85, 2039, 1.41),
    'L40': Gpu((8, 9), 142, 99, 98304, 48, 864, 2.49),
    'B200': Gpu((10, 0), 148, 227, 129536, 191, 7700, 1.96),
}
_BYTES = {'bf16': 2, 'f16': 2, 'u16': 2, 's8': 1, 'u8': 1, 'pred': 1}
_BYTES |= {'f8e4m3fn': 1, 'f8e5m2': 1, 's64': 8, 'u64': 8}
# Ops that launch nothing.
_FREE = ('get-tuple-element', 'parameter', 'tuple', 'bitcast', 'constant')
# How often the result travels.
_COLLECTIVES = {'all-gather': 1, 'all-to-all': 1, 'collective-permute': 1}
_COLLECTIVES |= {'all-reduce': 2, 'reduce-scatter': 1}
_OP = re.compile(r'\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)')


def _size(shape: str) -> int:
  """Bytes of an HLO shape, tuples included."""
  total = 0
  for dtype, dims in re.findall(r'(\w+)\[([\d,]*)\]', shape):
    count = np.prod([int(d) for d in dims.split(',') if d], dtype=np.int64)
    total += int(count) * _BYTES.get(dtype, 4)
  return total


def kernels(hlo: str, of: str = 'custom-call') -> list[dict]:
  """Returns the kernels of the computation that has most of something."""
  parts = re.split(r'\n(?=(?:ENTRY )?%[\w.\-]+ \()', hlo)
  body = max(parts, key=lambda part: part.count(of))
  shapes, rows = {}, []
  for line in body.splitlines():
    if not (found := _OP.match(line)):
      continue
    name, shape, op, rest = found.groups()
    shapes[name] = shape
    if op in _FREE:
      continue
    operands = re.findall(r'%([\w.\-]+)', rest.split('), ')[0])
    moved = _size(shape) + sum(_size(shapes.get(o, '')) for o in operands)
    source = re.search(r'op_name="([^"]+)"', line)
    target = re.search(r'custom_call_target="([^"]+)"', line)
    rows.append(
        {
            'kernel': target.group(1) if target else name,
            'us': moved / common.BYTES_PER_S * 1e6,
            'shape': shape[:60],
            'from': source.group(1)[-60:] if source else '',
        }
    )
  return rows


def received(hlo: str, devices: int) -> list[dict]:
  """Returns the collectives of a program, with what a device receives.

  Each is counted once, whatever loop it is in.
  """
  rows, share = [], 1 - 1 / devices
  for line in hlo.splitlines():
    if not (found := _OP.match(line)):
      continue
    _, shape, op, rest = found.groups()
    op = op.removesuffix('-start')
    if op not in _COLLECTIVES:
      continue
    # What starts one returns what it takes as well.
    made = shape.rpartition(', ')[2] if '-start' in line else shape
    # Each device receives parts of its own rows from all others.
    parts = devices if op == 'reduce-scatter' else 1
    source = re.search(r'op_name="([^"]+)"', line)
    rows.append(
        {
            'op': op,
            'mb': parts * _size(made) * _COLLECTIVES[op] * share / 1e6,
            'shape': made[:60],
            'from': source.group(1)[-60:] if source else '',
        }
    )
  return rows


def mesh_of(name: str, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
  """Returns GPUs that are not there, of a name in `GPUS`."""
  devices = topologies.get_topology_desc(
      platform='cuda',
      topology_name=name,
      topology=f'1x1x{data * fsdp * tensor}',
      target_config=GPUS[name].target(name),
  ).devices
  return Mesh(
      np.array(devices).reshape(data, fsdp, tensor),
      (sharding.DATA, sharding.FSDP, sharding.TENSOR),
  )


def state_of(
    policy: Policy, masters_dtype: str, optimizer: optax.GradientTransformation
) -> TrainState:
  """Returns a state's shapes; no weights are made."""
  masters = hf_layout.build_tree(
      policy.model, lambda row: jax.ShapeDtypeStruct(row.shape, masters_dtype)
  )
  scales = jax.eval_shape(
      lambda p: scaling_state.init_state(p, policy.recipe), masters
  )
  weights = jax.eval_shape(
      lambda p, s: prepare_weights(p, s, policy.recipe), masters, scales
  )
  return TrainState(
      trainable=masters,
      frozen={},
      fp8_state=scales,
      opt_state=jax.eval_shape(optimizer.init, masters),
      weights=weights,
      opt_step=jax.eval_shape(lambda: jnp.int32(0)),
  )


def update_arguments(
    state: TrainState, mesh: Mesh, rows: int, tokens: int
) -> tuple[TrainState, TrainBatch, jax.ShapeDtypeStruct]:
  """Returns shapes of a state, a micro-batch and a temperature, with places.

  Args:
    state: shapes, see `state_of`.
    mesh: devices.
    rows: of the micro-batch.
    tokens: of a row.
  """

  def at(leaf, where):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  state = jax.tree.map(at, state, sharding.tree_shardings(state, mesh))
  by_rows = jax.NamedSharding(mesh, sharding.ROWS)
  batch = TrainBatch.of_shapes(rows, tokens)
  batch = jax.tree.map(lambda leaf: at(leaf, by_rows), batch)
  everywhere = jax.NamedSharding(mesh, jax.P())
  return state, batch, at(jnp.zeros(()), everywhere)
