"""What a step costs at most: tokens, FLOPs, seconds at the roofline, disk."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jetrl_jax.dry_run.memory import Shapes, num_bytes
from jetrl_jax.fp8.recipes import LM_HEAD
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.run import flops, mixed_flow
from jetrl_jax.rl.run.spec import RunSpec

# name -> (memory in 1e9 bytes, bandwidth in 1e9 bytes/s), from NVIDIA's data
# sheets, which round memory down; that of an H200 and an H100 with HBM3 is what
# nvidia-smi says of one, 143771 and 81559 MiB. The names and the FLOP/s are
# those of `flops.PEAK_TFLOPS`.
DEVICES: dict[str, tuple[float, float]] = {
    'NVIDIA A100-SXM4-40GB': (40, 1555),
    'NVIDIA A100-SXM4-80GB': (80, 2039),
    'NVIDIA A100-PCIE-40GB': (40, 1555),
    'NVIDIA A100 80GB PCIe': (80, 1935),
    'NVIDIA L4': (24, 300),
    'NVIDIA L40S': (48, 864),
    'NVIDIA H100 PCIe': (80, 2000),
    'NVIDIA H100 NVL': (94, 3900),
    'NVIDIA H100 80GB HBM3': (85.5, 3350),
    'NVIDIA GH200 480GB': (96, 4000),
    'NVIDIA H200': (150.7, 4800),
    'NVIDIA H200 NVL': (141, 4800),
    'NVIDIA B200': (180, 7700),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
  """One training step if every response has full length.

  Attributes:
    sequences: sampled.
    prompt_tokens: mean number of tokens of a prompt of the data.
    tokens: prompts and responses of all sequences.
    rollout_flops: model FLOPs of sampling.
    update_flops: model FLOPs of all forward and backward passes, recomputed
      blocks and scoring included.
    rollout_s: seconds at the roofline; None where the device is not known.
    update_s: seconds of all updates of a step.
  """

  sequences: int
  prompt_tokens: float
  tokens: int
  rollout_flops: float
  update_flops: float
  rollout_s: float | None
  update_s: float | None


def cost(spec: RunSpec, found: Shapes, device: str) -> Cost:
  """Estimates a step from FLOPs, bytes and the device's data sheet.

      rollout = prefill FLOPs / peak
                + steps max(bytes of weights and KV / bandwidth, FLOPs / peak)
      update = FLOPs of the recipe's dots / peaks of their precisions
               + FLOPs of attention, and of a head that is none of them,
                 / peak of bfloat16

  No run is faster; launches, collectives, rewards and the host come on top.

  Args:
    spec: the specification of the run.
    found: see `dry_run_memory.shapes`.
    device: name as in `DEVICES`.
  """
  run, model = spec.run, spec.policy.model
  devices = spec.policy.axes.devices
  prompt = float(np.mean([len(p.tokens) for p in spec.train_set]))
  response = spec.engine.max_response_length
  sequences = run.train_batch_size * run.num_generations
  lengths = [(round(prompt), response)] * sequences
  prompts = [round(prompt)] * run.train_batch_size
  prefill = flops.rollout_flops(model, prompts, [])
  decode = flops.rollout_flops(model, [], lengths)
  dots, head = flops.matmul_params(model)
  if spec.policy.recipe.quantizes(LM_HEAD):
    dots, head = dots + head, 0
  tokens = sum(map(sum, lengths))
  attention = sequences * flops.attention_flops(
      model, 0, round(prompt) + response
  )
  # Forward and backward are 6 per parameter, a recomputed forward 2 more.
  again, attention_passes = _recomputed(spec.policy)
  epochs = spec.algorithm.ppo_epochs
  scored = _scored_share(spec)
  of_dots = tokens * (dots * (6 * epochs + 2 * scored) + again * 2 * epochs)
  of_rest = tokens * head * (6 * epochs + 2 * scored) + attention * (
      (3 + attention_passes) * epochs + scored
  )
  rollout_s = update_s = None
  peaks = _peaks(spec, device)
  if peaks is not None:
    sampling, forward, backward, wide = (peak * devices for peak in peaks)
    bandwidth = DEVICES[device][1] * 1e9 * devices
    slots = min(found.engine.num_slots, sequences)
    steps = -(-sequences // slots) * response
    keys = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    cache = keys * jnp.dtype(spec.rollout_policy.kv_dtype).itemsize
    weights = mixed_flow.rollout_params(found.state).weights
    read = num_bytes(weights) * devices + slots * cache * (
        prompt + response / 2
    )
    rollout_s = prefill / sampling + steps * max(
        read / bandwidth, decode / (steps * sampling)
    )
    of_backward = 4 * epochs * tokens * dots
    update_s = (
        (of_dots - of_backward) / forward
        + of_backward / backward
        + of_rest / wide
    )
  return Cost(
      sequences=sequences,
      prompt_tokens=prompt,
      tokens=tokens,
      rollout_flops=prefill + decode,
      update_flops=of_dots + of_rest,
      rollout_s=rollout_s,
      update_s=update_s,
  )


def _recomputed(policy: Policy) -> tuple[int, int]:
  """Returns the work that a backward repeats, see `models/remat.py`.

  Returns:
    (numbers in the kernels of the blocks' dots, passes of attention)
  """
  model = policy.model
  blocks, _ = flops.matmul_params(model)
  one_of_mlp = model.num_layers * model.model_dim * model.ffn_dim
  match policy.remat:
    case 'none':
      return 0, 0
    case 'selective':
      return 2 * one_of_mlp, 0
    case _:
      return blocks - one_of_mlp, 1


def _scored_share(spec: RunSpec) -> float:
  """Returns the forward passes over the rollout in addition to the update's."""
  run = spec.run
  batches = run.train_batch_size // run.mini_batch_size
  recompute = spec.algorithm.old_logprobs == 'recompute'
  share = 1.0 if recompute else 1 - 1 / batches
  return share + (1.0 if spec.needs_reference else 0.0)


def _peaks(
    spec: RunSpec, device: str
) -> tuple[float, float, float, float] | None:
  """Returns a device's FLOP/s for the recipe's dots and for the rest.

  In order: those dots in the rollout, in training's forward and in its
  backward, and the rest. None if one of them is not known.
  """
  recipe = spec.policy.recipe
  names = (
      flops.precisions(spec.rollout_policy.recipe)[0],
      *flops.precisions(recipe),
      recipe.compute_dtype,
  )
  peaks = [flops.peak_flops(device, name) for name in names]
  sampling, forward, backward, wide = peaks
  if not (sampling and forward and backward and wide):
    return None
  return sampling, forward, backward, wide
