"""Model FLOPs of a step's phases, and their share of the device's peak.

The count covers what the model needs, not what is executed: recomputation and
padding do not count. The peak is that of the recipe's dots. In an 8-bit recipe,
attention and usually the output projection still run in bfloat16, so the share
cannot reach 1.
"""

from collections.abc import Sequence

import jax

from jetrl_jax.data import Prompt
from jetrl_jax.fp8 import Recipe
from jetrl_jax.fp8.recipes import FAKE_RECIPES
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import Policy
from jetrl_jax.models.types import ModelConfig
from jetrl_jax.rl.types import Completion

# Device name -> dense peak in 1e12 FLOP/s (bfloat16, FP8, INT8); None if its
# tensor cores have no FP8. NVIDIA's data sheets print the numbers with
# sparsity, which are twice these.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float]] = {
    'NVIDIA A100-SXM4-40GB': (312.0, None, 624.0),
    'NVIDIA A100-SXM4-80GB': (312.0, None, 624.0),
    'NVIDIA A100-PCIE-40GB': (312.0, None, 624.0),
    'NVIDIA A100 80GB PCIe': (312.0, None, 624.0),
    'NVIDIA L4': (121.0, 242.5, 242.5),
    'NVIDIA L40S': (362.0, 733.0, 733.0),
    'NVIDIA H100 PCIe': (756.5, 1513.0, 1513.0),
    'NVIDIA H100 NVL': (835.5, 1671.0, 1671.0),
    'NVIDIA H100 80GB HBM3': (989.5, 1979.0, 1979.0),
    'NVIDIA GH200 480GB': (989.5, 1979.0, 1979.0),
    'NVIDIA H200': (989.5, 1979.0, 1979.0),
    'NVIDIA H200 NVL': (835.5, 1670.5, 1670.5),
    'NVIDIA B200': (2250.0, 4500.0, 4500.0),
}


def peak_flops(device_kind: str, precision: str) -> float | None:
  """Returns a device's dense peak in FLOP/s.

  Args:
    device_kind: `jax.Device.device_kind`.
    precision: 'bfloat16', 'float8', 'int8', or another dtype's name.

  Returns:
    None if the table lacks the device or the precision, or the device does not
    support the precision. A share of a guessed peak would mean nothing.
  """
  if device_kind not in PEAK_TFLOPS:
    return None
  bfloat16, float8, int8 = PEAK_TFLOPS[device_kind]
  peaks = {'bfloat16': bfloat16, 'float8': float8, 'int8': int8}
  tera = peaks.get(precision)
  return None if tera is None else tera * 1e12


def precisions(recipe: Recipe) -> tuple[str, str]:
  """Returns the precision of a recipe's dots in (forward, backward)."""
  match recipe.name:
    case 'bf16':
      return recipe.compute_dtype, recipe.compute_dtype
    case 'int8':
      return 'int8', recipe.compute_dtype
    case name if name in FAKE_RECIPES:
      return recipe.compute_dtype, recipe.compute_dtype
    case _:
      return 'float8', 'float8'


def matmul_params(model: ModelConfig) -> tuple[int, int]:
  """Returns the kernel weights of (the blocks, the output projection).

  The embedding is a look-up and does not count. The output projection counts,
  tied or not. Norm scales and biases do not count.
  """
  width, heads = model.model_dim, model.num_heads * model.head_dim
  keys = 2 * model.num_kv_heads * model.head_dim
  block = width * (heads + keys) + heads * width + 3 * width * model.ffn_dim
  return model.num_layers * block, width * model.vocab_size


def attention_flops(model: ModelConfig, first: int, last: int) -> int:
  """Returns the FLOPs of causal attention of queries `first` to `last` - 1.

      4 L N H sum_{p = first}^{last - 1} (p + 1)

  A query at position p attends to p + 1 keys. Each pair costs 2 H for the
  attention score and 2 H for the weighted values, in each of N heads and L
  layers.
  """
  pairs = (last * (last + 1) - first * (first + 1)) // 2
  return 4 * model.num_layers * model.num_heads * model.head_dim * pairs


def rollout_flops(
    model: ModelConfig,
    prompt_lengths: Sequence[int],
    lengths: Sequence[tuple[int, int]],
) -> int:
  """Returns the FLOPs of sampling.

      prefill, once per prompt of P tokens:
          2 (P - 1) blocks + attention(0, P - 1)
      decode, per response of R tokens:
          2 R (blocks + head) + attention(P - 1, P + R - 1)

  The last prompt token is the first decode step's input.

  Args:
    model: shape.
    prompt_lengths: P of each prompt, tokens.
    lengths: (P, R) of each response, tokens.
  """
  blocks, head = matmul_params(model)
  total = 0
  for prompt in prompt_lengths:
    total += 2 * (prompt - 1) * blocks + attention_flops(model, 0, prompt - 1)
  for prompt, response in lengths:
    total += 2 * response * (blocks + head)
    total += attention_flops(model, prompt - 1, prompt + response - 1)
  return total


def update_flops(model: ModelConfig, lengths: Sequence[tuple[int, int]]) -> int:
  """Returns the FLOPs of one forward and backward over all sequences.

      per sequence of T = P + R tokens:
          6 T (blocks + head) + 3 attention(0, T)

  The backward of a dot is two dots. Frozen kernels count like trained ones.

  Args:
    model: shape.
    lengths: (P, R) of each sequence, tokens.
  """
  params = sum(matmul_params(model))
  total = 0
  for prompt, response in lengths:
    length = prompt + response
    total += 6 * length * params + 3 * attention_flops(model, 0, length)
  return total


def mfu_metrics(
    policy: Policy,
    rollout_recipe: Recipe,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    timer: Timer,
    *,
    trained: Sequence[Completion],
    ppo_epochs: int,
) -> dict[str, float]:
  """Returns perf/mfu/rollout and perf/mfu/actor of a step.

      MFU = sum over directions of model FLOPs / peak
            / (seconds of the phase x devices)

  The rollout is a forward. A third of the update is a forward and two thirds
  are a backward, which may run in another precision.

  Args:
    policy: shape, training recipe and devices.
    rollout_recipe: the rollout's recipe.
    prompts: all prompts of the rollout.
    completions: all completions of the rollout.
    timer: holds the seconds of 'gen' and 'update_actor'.
    trained: the completions that the step learnt from.
    ppo_epochs: passes of the update over the completions.

  Returns:
    Shares of the peak in [0, 1]; empty if the peak is not known.

  References:
    Chowdhery et al. 2022, arXiv:2204.02311, appendix B (6 N + 12 L H Q T per
    token; its attention is not causal, ours counts the causal half).
  """
  lengths = [(len(c.prompt_tokens), len(c.tokens)) for c in completions]
  forward, backward = precisions(policy.recipe)
  rollout = rollout_flops(
      policy.model, [len(p.tokens) for p in prompts], lengths
  )
  learnt = [(len(c.prompt_tokens), len(c.tokens)) for c in trained]
  update = ppo_epochs * update_flops(policy.model, learnt)
  rollout_s = _ideal_seconds([(rollout, precisions(rollout_recipe)[0])])
  update_s = _ideal_seconds([(update / 3, forward), (update * 2 / 3, backward)])
  devices = policy.axes.devices
  metrics = {}
  if rollout_s is not None:
    metrics['perf/mfu/rollout'] = rollout_s / timer.seconds('gen') / devices
  if update_s is not None:
    spent = timer.seconds('update_actor')
    metrics['perf/mfu/actor'] = update_s / spent / devices
  return metrics


def _ideal_seconds(work: list[tuple[float, str]]) -> float | None:
  """Returns the seconds at the peaks of (FLOPs, precision) on one device."""
  kind = jax.local_devices()[0].device_kind
  seconds = 0.0
  for amount, precision in work:
    peak = peak_flops(kind, precision)
    if peak is None:
      return None
    seconds += amount / peak
  return seconds
