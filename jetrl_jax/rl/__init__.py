"""Learning: rollouts, advantages, the objective, the update and the loop.

The names below are what a notebook needs; `trainer.py` makes a run of them.
`rollout` is the function; its module is only for `from ... import`.
"""

from jetrl_jax.rl.advantages import group_advantages
from jetrl_jax.rl.engine import Engine, EngineConfig
from jetrl_jax.rl.optimizer import OptimizerConfig
from jetrl_jax.rl.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import rollout
from jetrl_jax.rl.train_step import LossConfig, TrainStep, policy_loss
from jetrl_jax.rl.types import Completion, TrainBatch, TrainState

__all__ = [
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
    'group_advantages',
    'policy_loss',
    'rollout',
]
