"""Decode steps of two devices that share sequences."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jetrl_jax.core import rng, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.fp8 import Recipe
from jetrl_jax.kernels.dispatch import Kernels
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.rl.rollout import decode_step
from jetrl_jax.rl.rollout.decode_state import DecodeState
from jetrl_jax.rl.rollout.engine import Engine
from tests.models import tiny
from tests.rl import tiny_run


def policy(kernels: Kernels, recipe: Recipe, axes: Axes) -> Policy:
  """D 512, F 1024, two layers, of which a GPU's kernels take all."""
  sizes = dict(model_dim=512, head_dim=64, ffn_dim=1024, vocab_size=128)
  return Policy(
      model=tiny.config('qwen2', **sizes),
      recipe=recipe,
      tile=64,
      axes=axes,
      kernels=kernels,
  )


def ready(
    of: Policy, slots: int = 16
) -> tuple[Callable[[DecodeState, int], DecodeState], DecodeState]:
  """Returns (takes steps in a state, a state in which all slots decode)."""
  mesh = sharding.make_mesh(tensor=2)
  config = tiny_run.engine_config(stop_ids=(), num_slots=slots)
  engine = Engine(of, config, mesh)
  start = tiny_run.cold_state(of, mesh)
  params = engine.replicate(PolicyParams(start.weights, start.fp8_state))
  state, number = engine.init_decode_state(), np.arange(slots, dtype=np.int32)
  pages = np.arange(state.table.size, dtype=np.int32)
  changed = {
      'active': number >= 0,
      'limit': np.full_like(number, config.max_response_length),
      'token': number % tiny_run.VOCAB,
      'table': pages.reshape(state.table.shape),
  }
  changed = {name: engine._put(value) for name, value in changed.items()}

  def run(state: DecodeState, steps: int) -> DecodeState:
    decode = functools.partial(engine._decode, decode_step.generate, params)
    return decode(state, base_key=rng.key(0, rng.ROLLOUT, 0), steps=steps)

  return run, dataclasses.replace(state, **changed)
