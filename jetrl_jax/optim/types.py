"""What an optimiser step changes, as a pytree."""

import dataclasses

import jax

from jetrl_jax.core.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """All that training changes; what a checkpoint holds, less `weights`.

  Attributes:
    trainable: master weights the optimiser moves, nested dict.
    frozen: master weights it does not, nested dict with disjoint paths.
    fp8_state: the `_overwrite_with_gradient` collection.
    opt_state: the optax state, over `trainable` alone.
    weights: the compute weights, `prepare_weights(params, fp8_state)`.
    opt_step: int32 scalar, optimiser steps applied (skipped ones not counted).
    rollout_fp8_state: the rollout's own slots in a mixed flow, see
      `rl/run/mixed_flow.py`; empty in a unified one, whose rollout reads
      `weights`.
    rollout_weights: the rollout's own compute weights, likewise.
  """

  trainable: PyTree
  frozen: PyTree
  fp8_state: PyTree
  opt_state: PyTree
  weights: PyTree
  opt_step: Array
  rollout_fp8_state: PyTree = dataclasses.field(default_factory=dict)
  rollout_weights: PyTree = dataclasses.field(default_factory=dict)
