"""The precision table: every dot, how it computes in rollout and training.

Read out of the functions that the run compiles (see `fp8/flow/subgraph.py`),
not out of the settings. Layers that compute alike share a line.
"""

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp

from jetrl_jax.core.collectives import Axes
from jetrl_jax.dry_run import memory as dry_run_memory
from jetrl_jax.fp8 import flow
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.run import flow_check, gradients, mixed_flow
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.types import TrainBatch

# Our kernels that multiply; the others quantise, transpose or normalise.
DOT_KERNELS = 'block_dot|gate_up|flash_attention'
_FP8_CALL = '__cublas$lt$matmul$f8'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One dot, in all layers that compute it alike.

  Attributes:
    name: path, the layer's number left out: 'layers_*/attn/qkv'.
    shape: the shape of the kernel, [out, in]; '' for attention.
    rollout: formats in decode and prefill.
    training: formats in the training forward.
    backward: formats of its two dots in the backward pass.
    granularity: what a scale is shared by.
    layers: how many layers.
  """

  name: str
  shape: str
  rollout: str
  training: str
  backward: str
  granularity: str
  layers: int


def table(spec: RunSpec) -> list[Row]:
  """Traces decode, prefill and a training step, and lists their dots.

  Raises:
    ValueError: the rollout of a unified flow rounds where training does not.
  """
  total, spec = spec.policy.model.num_layers, _shallow(spec)
  policy, like = spec.policy, dry_run_memory.abstract_state(spec)
  loss = functools.partial(policy_loss, spec.loss)
  train = flow_check.train_graph(policy, loss, like)
  side = mixed_flow.as_rollout(like) if spec.is_mixed else like
  decode = flow_check.decode_graph(spec.rollout_policy, spec.engine, side)
  if not spec.is_mixed:
    prefill = flow_check.prefill_graph(policy, like)
    for graph in (decode, prefill):
      flow.require_subgraph(graph, train)
  backward = _backward_graph(spec, like)
  rows = []
  for path, shape in _dots(policy.model):
    # Only training quantises some; a kernel scales others, and the backward
    # pass shows by what.
    scales = [_granularity(graph, path) for graph in (decode, train, backward)]
    name = re.sub(r'layers_\d+', 'layers_*', path)
    rows.append(
        Row(
            name=name,
            shape=shape,
            rollout=_formats(decode, path),
            training=_formats(train, path),
            backward=_formats(backward, path, backward=True),
            granularity=next((x for x in scales if x != '-'), '-'),
            # If one layer was traced, it stands for all.
            layers=total // policy.model.num_layers if '*' in name else 1,
        )
    )
  return [
      dataclasses.replace(row, layers=alike * row.layers)
      for row, alike in collections.Counter(rows).items()
  ]


def fp8_dots(rows: list[Row], side: str = 'rollout') -> list[Row]:
  """Returns the dots whose operands are FP8.

  Not attention, which multiplies what an FP8 KV cache holds in float16.

  Args:
    rows: the rows of `table`.
    side: 'rollout' or 'training', which differ in a mixed flow.
  """

  def formats(row: Row) -> str:
    return row.rollout if side == 'rollout' else row.training

  return [
      row for row in rows if row.shape and re.search('e4m3|e5m2', formats(row))
  ]


def not_in_fp8(hlo: str, rows: list[Row]) -> list[str]:
  """Returns the dots for which the compiled program has no FP8 GEMM.

  Args:
    hlo: text of the compiled program.
    rows: dots that are meant to run in FP8.

  Returns:
    Their names, 'layers_*/attn/qkv'.
  """
  # A kernel's name, and what JAX calls kernels with: one name for each version.
  ours = rf'/({DOT_KERNELS})/\w+$'
  names = [
      match[1]
      for line in hlo.splitlines()
      if (match := re.search(r'op_name="([^"]*)"', line))
      if _FP8_CALL in line
      or 'custom_call_target=' in line
      and re.search(ours, match[1])
  ]
  missing = []
  for row in rows:
    pattern = re.escape(row.name).replace(r'layers_\*', r'layers_\d+')
    # A module's method is a scope: 'attn/qkv.unscaled'.
    if not any(re.search(rf'\b{pattern}[./]', name) for name in names):
      missing.append(row.name)
  return missing


def _shallow(spec: RunSpec) -> RunSpec:
  """Returns the run with one layer, if no pattern distinguishes layers."""
  if spec.policy.recipe.high_precision_layers:
    return spec
  model = dataclasses.replace(spec.policy.model, num_layers=1)
  tree = {
      name: leaf
      for name, leaf in spec.param_shapes.items()
      if not name.startswith('layers_') or name == 'layers_0'
  }
  return dataclasses.replace(
      spec,
      policy=dataclasses.replace(spec.policy, model=model),
      rollout_policy=dataclasses.replace(spec.rollout_policy, model=model),
      param_shapes=tree,
      freeze=(),
  )


def _backward_graph(spec: RunSpec, like: Any) -> flow.FlowGraph:
  """Returns the flow of a micro-batch's forward and backward."""
  policy = dataclasses.replace(spec.policy, remat='none', axes=Axes())
  loss = functools.partial(policy_loss, spec.loss)

  def step(state, batch, temperature):
    objective = gradients.differentiable_loss(
        policy, loss, state, batch, temperature
    )
    grad = jax.grad(objective, argnums=(0, 1), has_aux=True)
    return grad(state.trainable, state.fp8_state)

  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
  temperature = jax.ShapeDtypeStruct((), jnp.float32)
  batch = TrainBatch.of_shapes(1, policy.tile)
  return flow.extract(jax.make_jaxpr(step)(shapes, batch, temperature))


def _dots(model) -> list[tuple[str, str]]:
  """Lists (path, kernel shape) of every dot, in the order of the forward."""
  dots = []
  for row in hf_layout.layout(model):
    if row.path.endswith('/kernel'):
      path = row.path.removesuffix('/kernel')
      shape = f'{row.shape[0]} x {row.shape[1]}'
      dots.append((path, shape))
      if path.endswith('/qkv'):
        dots.append((path.removesuffix('qkv') + 'attention', ''))
  if model.tied_embeddings:
    dots.append(('embed.logits', f'{model.vocab_size} x {model.model_dim}'))
  return dots


def _under(graph: flow.FlowGraph, path: str):
  """Yields the operations of a dot: its scopes end with the path."""
  for node in graph.nodes:
    if re.search(rf'(^|[/.]){re.escape(path)}$', node.path):
      yield node


def _formats(
    graph: flow.FlowGraph, path: str, *, backward: bool = False
) -> str:
  dots = [
      f'{" x ".join(_operands(node))} -> {node.outputs[0]}'
      for node in _under(graph, path)
      if node.kind == 'dot' or re.match(DOT_KERNELS, node.op)
      if node.backward == backward
  ]
  return ', '.join(dict.fromkeys(dots)) or '-'


def _operands(node: flow.FlowNode) -> list[str]:
  """Lists formats of factors, without a kernel's scales and places."""
  others = ('i32', 'f32') if node.kind == 'kernel' else ()
  return [x for x in node.inputs if x not in others] or ['f32', 'f32']


def _granularity(graph: flow.FlowGraph, path: str) -> str:
  if not re.search('e4m3|e5m2|int8|i8', _formats(graph, path)):
    return '-'
  found = [
      node.granularity
      for node in _under(graph, path)
      if node.kind == 'scale' and node.granularity
  ]
  return ', '.join(dict.fromkeys(found)) or '-'
