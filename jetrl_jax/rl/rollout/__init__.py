"""Prompts to completions: engine, decode step, KV pages, scheduler."""

from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout

__all__ = ['Engine', 'EngineConfig', 'rollout']
