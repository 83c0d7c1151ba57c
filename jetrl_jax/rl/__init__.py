"""Reinforcement learning: the mathematics, and one package per part of a run.

`rollout/` samples completions, `scoring/` rewards them, `run/` compiles the
update and builds the state, `training/` is the loop. The names below are what a
notebook needs.
"""

from jetrl_jax.metrics.writer import Mean
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import rollout
from jetrl_jax.rl.advantages import group_advantages
from jetrl_jax.rl.aggregation import loss_weights
from jetrl_jax.rl.mismatch import mismatch_metrics
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.packing import pack, sequence_from_completion, unpack
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.run.calibration import Calibration
from jetrl_jax.rl.run.flow_check import decode_graph, train_graph
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.run.train_state import create as create_state
from jetrl_jax.rl.types import Completion, TrainBatch

__all__ = [
    'Calibration',
    'Completion',
    'Engine',
    'EngineConfig',
    'LossConfig',
    'Mean',
    'OptimizerConfig',
    'Policy',
    'PolicyParams',
    'TrainBatch',
    'TrainState',
    'UpdatePrograms',
    'create_state',
    'decode_graph',
    'group_advantages',
    'loss_weights',
    'mismatch_metrics',
    'pack',
    'policy_loss',
    'rollout',
    'sequence_from_completion',
    'train_graph',
    'unpack',
]
