"""What runs are made of: tiny ones, mixed ones, those of a large shape."""

import dataclasses
import functools

import jax

from jetrl_jax.config import build as configs
from jetrl_jax.config import presets as config_presets
from jetrl_jax.dry_run import memory as dry_run_memory
from jetrl_jax.models import published
from jetrl_jax.models.hf import layout as hf_layout
from tests import whole_run


@functools.cache
def tiny(**changes):
  """Returns the spec of the tiny run, with other settings."""
  return configs.build(whole_run.config(**changes))


@functools.cache
def seven_b():
  """The tiny run's parts around a 7B, and their shapes; nothing is made."""
  spec = shape(published.QWEN2_5_7B)
  return spec, dry_run_memory.shapes(spec)


def shape(model, **changes):
  """Returns the tiny run's parts around a large model of that config."""
  spec = tiny(**changes)
  tree = hf_layout.build_tree(
      model, lambda row: jax.ShapeDtypeStruct(row.shape, jax.numpy.float32)
  )
  return dataclasses.replace(
      spec,
      policy=(
          policy := dataclasses.replace(
              spec.policy, model=model, tile=64, remat='full'
          )
      ),
      rollout_policy=policy,
      param_shapes=tree,
      engine=dataclasses.replace(
          spec.engine,
          num_slots=128,
          max_prompt_length=1024,
          max_response_length=3072,
      ),
      optimizer=dataclasses.replace(spec.optimizer, moments='fp8'),
      run=dataclasses.replace(spec.run, micro_batch_size=4),
      initial_checkpoint=None,
      export_source=None,
  )


def mixed():
  """Returns the spec of a tiny run that samples in another precision."""
  return configs.build(config_presets.resolve(whole_run.config(flow='flashrl')))
