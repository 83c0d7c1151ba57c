"""What runs are made of: tiny ones, mixed ones, those of a large shape."""

import dataclasses
import functools

import jax

from jetrl_jax import config as configs
from jetrl_jax import config_flow, dry_run_memory
from jetrl_jax.models import families, hf_layout
from tests import whole_run


@functools.cache
def tiny(**changes):
  """Returns the parts of the tiny run, with other settings."""
  return configs.build(whole_run.config(**changes))


@functools.cache
def seven_b():
  """The tiny run's parts around a 7B, and their shapes; nothing is made."""
  parts = shape(families.QWEN2_5_7B)
  return parts, dry_run_memory.shapes(parts)


def shape(model, **changes):
  """Returns the tiny run's parts around a large model of that config."""
  parts = tiny(**changes)
  tree = hf_layout.build_tree(
      model, lambda row: jax.ShapeDtypeStruct(row.shape, jax.numpy.float32)
  )
  return dataclasses.replace(
      parts,
      policy=(
          policy := dataclasses.replace(
              parts.policy, model=model, tile=64, remat='full'
          )
      ),
      rollout_policy=policy,
      param_shapes=tree,
      engine=dataclasses.replace(
          parts.engine,
          num_slots=128,
          max_prompt_length=1024,
          max_response_length=3072,
      ),
      optimizer=dataclasses.replace(parts.optimizer, moments='fp8'),
      run=dataclasses.replace(parts.run, micro_batch_size=4),
      initial_checkpoint=None,
      export_source=None,
  )


def mixed():
  """Returns the parts of a tiny run that samples in another precision."""
  return configs.build(config_flow.resolve(whole_run.config(flow='flashrl')))
