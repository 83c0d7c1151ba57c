"""The training state, a pytree, and the control of an optimiser step."""

import dataclasses
from typing import NamedTuple

import jax

from jetrl_jax.core.typing import Array, PyTree


def merge(trainable: PyTree, frozen: PyTree) -> PyTree:
  """Joins two nested dicts with disjoint leaves."""
  merged = dict(trainable)
  for key, value in frozen.items():
    merged[key] = merge(merged[key], value) if key in merged else value
  return merged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """Everything that training changes.

  A checkpoint holds all of it except `weights` and `rollout_weights`, which are
  computed from the masters.

  Attributes:
    trainable: master weights that the optimiser updates, nested dict.
    frozen: the other master weights, nested dict with disjoint paths.
    fp8_state: the scaling state, Flax's `_overwrite_with_gradient` collection.
    opt_state: the optax state, for `trainable` only.
    weights: the compute weights, `prepare_weights(params, fp8_state)`.
    opt_step: int32 scalar, optimiser steps applied; skipped ones do not count.
    rollout_fp8_state: the rollout's own scaling state in a mixed flow, see
      `rl/run/mixed_flow.py`; empty in a unified flow, whose rollout reads
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

  @property
  def masters(self) -> PyTree:
    """All master weights, `trainable` and `frozen`, as one nested dict."""
    return merge(self.trainable, self.frozen)


class StepControl(NamedTuple):
  """What an optimiser step decides for all parameter groups; on the device.

  Attributes:
    applied: bool scalar, False if a gradient was not finite: nothing changes.
    clip_factor: float32 scalar, factor of the gradients; 0 if not `applied`.
    rounding_keys: this group's keys, see `rounding.rounding_keys`; {} rounds
      masters to the nearest.
  """

  applied: Array
  clip_factor: Array
  rounding_keys: Array | dict
