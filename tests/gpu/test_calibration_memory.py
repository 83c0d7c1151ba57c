"""What a cold start's backward pass needs of a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

from jetrl_jax import kernels
from jetrl_jax.core import sharding
from jetrl_jax.fp8 import Recipe, scaling_state
from jetrl_jax.models import published
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.models.policy import Policy
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.run.calibration import Calibration
from jetrl_jax.rl.types import TrainBatch

pytestmark = pytest.mark.gpu

WIDTH = 2048


def temporary_bytes(layers: int, mesh) -> int:
  """Returns what XLA asks for beside the arguments."""
  model = dataclasses.replace(
      published.QWEN2_5_7B,
      num_layers=layers,
      vocab_size=2048,
      model_dim=WIDTH,
      num_heads=WIDTH // 128,
      ffn_dim=4 * WIDTH,
  )
  recipe = Recipe()
  policy = Policy(model=model, recipe=recipe, tile=64, remat='none')
  masters = hf_layout.build_tree(
      model, lambda row: jax.ShapeDtypeStruct(row.shape, jnp.bfloat16)
  )
  scales = jax.eval_shape(
      lambda p: scaling_state.init_state(p, recipe), masters
  )
  weights = jax.eval_shape(
      lambda p, s: kernels.prepare_weights(p, s, recipe), masters, scales
  )
  state = TrainState(
      trainable=masters,
      frozen={},
      fp8_state=scales,
      opt_state=jax.eval_shape(optax.identity().init, masters),
      weights=weights,
      opt_step=jax.ShapeDtypeStruct((), jnp.int32),
  )
  calibration = Calibration(policy, mesh, state)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)
  arguments = state, TrainBatch.of_shapes(1, 512), scalar
  place = sharding.tree_shardings(arguments, mesh)
  arguments = jax.tree.map(
      lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
      arguments,
      place,
  )
  compiled = calibration.observe.lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_a_calibration_widens_a_layer_s_weights_when_it_comes_to_them():
  mesh = sharding.make_mesh()
  more = temporary_bytes(12, mesh) - temporary_bytes(4, mesh)
  # Of each layer its input waits, and two more from some layer on; a gate_up
  # kernel in bfloat16 is 67 MB.
  assert more < 8 * 1.5 * 2 * 512 * WIDTH
