"""The precision flow of a program, and whether one is part of another."""

from jetrl_jax.fp8.flow.graph import (
    FlowEdge,
    FlowGraph,
    FlowKernel,
    FlowNode,
)
from jetrl_jax.fp8.flow.subgraph import (
    Difference,
    check_subgraph,
    require_subgraph,
)
from jetrl_jax.fp8.flow.walk import SAMPLING, extract

__all__ = [
    'SAMPLING',
    'Difference',
    'FlowEdge',
    'FlowGraph',
    'FlowKernel',
    'FlowNode',
    'check_subgraph',
    'extract',
    'require_subgraph',
]
