"""The precision flow of a program, and whether one is part of another."""

from jetrl_jax.fp8.flow.subgraph import (
    SAMPLING,
    Difference,
    FlowEdge,
    FlowGraph,
    FlowNode,
    check_subgraph,
    extract,
    require_subgraph,
)

__all__ = [
    'SAMPLING',
    'Difference',
    'FlowEdge',
    'FlowGraph',
    'FlowNode',
    'check_subgraph',
    'extract',
    'require_subgraph',
]
