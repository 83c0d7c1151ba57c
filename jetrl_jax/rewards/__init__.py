"""Text to a score, in processes that can be killed."""

from jetrl_jax.rewards.pool import RewardPool, Scoring
from jetrl_jax.rewards.types import (
    RewardFunctionError,
    RewardRequest,
    RewardResult,
    RewardSpec,
)

__all__ = [
    'RewardFunctionError',
    'RewardPool',
    'RewardRequest',
    'RewardResult',
    'RewardSpec',
    'Scoring',
]
