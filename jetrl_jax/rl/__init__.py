"""Learning: rollouts, advantages, the objective, the update and the loop.

The names below are what a notebook needs; `trainer.py` makes a run of them.
`rollout` is the function; its module is only for `from ... import`.
"""

from jetrl_jax.rl.advantages import group_advantages
from jetrl_jax.rl.aggregation import loss_weights
from jetrl_jax.rl.calibration import Calibration
from jetrl_jax.rl.engine import Engine, EngineConfig
from jetrl_jax.rl.flow_check import decode_graph, train_graph
from jetrl_jax.rl.mismatch import mismatch_metrics
from jetrl_jax.rl.objective import LossConfig, policy_loss
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.packing import pack, sequence_from_completion, unpack
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import rollout
from jetrl_jax.rl.state import create as create_state
from jetrl_jax.rl.train_step import TrainStep
from jetrl_jax.rl.types import Completion, TrainBatch, TrainState

__all__ = [
    'Calibration',
    'Completion',
    'Engine',
    'EngineConfig',
    'LossConfig',
    'OptimizerConfig',
    'Policy',
    'PolicyParams',
    'TrainBatch',
    'TrainState',
    'TrainStep',
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
