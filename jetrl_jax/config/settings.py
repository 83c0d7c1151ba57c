"""The settings that no other package owns."""

import dataclasses

from jetrl_jax.models import invariant_scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopLevel:
  """Settings of a run as a whole.

  Attributes:
    compile_cache_dir: folder for compiled programs: a second start with the
      same config compiles nothing and has the same bits. Several runs may share
      one. What a kill or a full disk tore there is compiled at each start, with
      a warning, until the folder is deleted. '' is off.
    flow: a published flow by name, which sets the precision of both sides and
      the correction: 'jetrl', 'bf16', 'fp8_rollout', 'flashrl', 'qurl',
      'jetrl_inexact' or 'bf16_inexact' (docs/flows.md); '' leaves them to the
      settings below.
    kernels: which implementation of each operation runs (jetrl_jax/kernels):
      'auto' takes the kernels where they run (a Hopper GPU, jax 0.11 or later)
      and plain JAX elsewhere; 'reference' is plain JAX alone, which is slower
      and the first thing to try when a kernel is suspected; or one by one:
      'attention=reference,swiglu=reference'. 'gather_columns=mosaic_sm90', for
      mesh.tensor, is not in 'auto'.
  """

  compile_cache_dir: str = ''
  flow: str = ''
  kernels: str = 'auto'


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
  """The model, its master weights, and how it is computed.

  Attributes:
    path: a Hugging Face checkpoint: a folder, or a repo id when online.
    init: 'checkpoint', or 'random' for benchmarks (config.json or `shape`
      suffices).
    shape: for init='random' without config.json: 'qwen2.5-0.5b',
      'qwen2.5-1.5b', 'qwen2.5-3b', 'qwen2.5-7b', 'qwen2.5-14b', 'qwen2.5-32b',
      'qwen3-8b', 'llama-3.1-8b' or 'llama-3.1-70b'.
    master_dtype: dtype of the master weights, 'float32' or 'bfloat16'.
    spread_masters: place each float32 master of an 8-bit dot at random within
      the rounding cell of the 16-bit checkpoint that it comes from. Without it
      the first update moves the policy about fifteen times too far
      (docs/numerics.md). An export without training gives the checkpoint's
      bytes back. 'bf16' never does it.
    freeze: regular expressions (full match) of masters that do not train, for
      example ('embed/.*',).
    invariant_scale: kernels after norms (qkv, gate_up) are divided by this
      once, the norms' gains multiplied by it; undone on export. 1 is off; QuRL
      uses 1.5.
  """

  path: str = ''
  init: str = 'checkpoint'
  shape: str = ''
  master_dtype: str = 'float32'
  spread_masters: bool = True
  freeze: tuple[str, ...] = ()
  invariant_scale: float = 1.0

  def __post_init__(self):
    if self.init not in ('checkpoint', 'random'):
      raise ValueError(
          f'model.init is {self.init!r}; allowed: checkpoint, random'
      )
    if self.master_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
          f'model.master_dtype is {self.master_dtype!r}; allowed: float32,'
          ' bfloat16'
      )
    invariant_scaling.check(self.invariant_scale)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedFlow:
  """A rollout in another precision than training's.

  Attributes:
    rollout_recipe: recipe of a rollout that is not training's (a mixed flow,
      docs/flows.md); '' is the same: one unified flow.
  """

  rollout_recipe: str = ''
