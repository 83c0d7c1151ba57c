"""The sizes for which the engine compiles programs: rows, lengths, few slots.

Sizes are rounded up to one of a few, so that few programs are compiled. The
numbers of a sequence do not depend on the size.
"""

from collections.abc import Iterable

import numpy as np

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import NpArray
from jetrl_jax.rl.rollout.decode_state import EngineConfig
from jetrl_jax.rl.rollout.kv_pages import PagesConfig

# Programs for the tail of a rollout, fewest slots first, as (share, tokens).
# Once at most 1/share of the slots still decode, a program for that many slots
# takes over. Compiling it pays off only if responses may have at least `tokens`
# tokens.
TAILS = (16, 8192), (4, 1024)
# Prompts per prefill, with empty rows; also the most preempted sequences.
PREFILL_ROWS = 16
# A size that fewer batches need is compiled when one does.
_LEAST_SHARE = 0.05
# Attention tiles per page.
_PAGE_TILES = 2
# Steps that a GPU takes before the host reads whether a slot still runs.
STEPS_PER_SYNC = 8


def round_up(value: int, multiple: int) -> int:
  """Returns the least multiple that is at least `value`."""
  return -(-value // multiple) * multiple


def pages_config(config: EngineConfig, devices: int, tile: int) -> PagesConfig:
  """Returns the slots and pages of an engine.

  Args:
    config: the configured sizes.
    devices: number of devices over which the slots are split.
    tile: see `attention.flash_attention`.

  Raises:
    ValueError: kv_cache_tokens is less than one sequence of full length.
  """
  num_slots = round_up(config.num_slots, 16 * devices)
  page_size = _PAGE_TILES * tile
  longest = config.max_prompt_length + config.max_response_length
  length = round_up(longest, page_size)
  full = num_slots * length  # The slots cannot use more than this.
  tokens = min(config.kv_cache_tokens or full, full)
  return PagesConfig(
      num_slots=num_slots,
      num_devices=devices,
      pages_per_device=tokens // (page_size * devices),
      page_size=page_size,
      pages_per_slot=length // page_size,
  )


def buckets(longest: int, tile: int, factor: int) -> list[int]:
  """Returns sizes: `tile` times the powers of `factor`, then the longest.

  Args:
    longest: tokens or sequences; the last size is this, rounded up to `tile`.
    tile: the least size; for tokens see `attention.flash_attention`.
    factor: ratio of neighbouring sizes.
  """
  found, size = [], tile
  while size < longest:
    found.append(size)
    size *= factor
  return [*found, round_up(longest, tile)]


def likely(lengths: Iterable[int], sizes: list[int]) -> list[int]:
  """Returns the sizes that prefills need, the likeliest first.

  A prefill has the size that holds its longest prompt, of `PREFILL_ROWS` that
  are drawn at random. What fewer than one in twenty need is left out.

  Args:
    lengths: tokens of each prompt.
    sizes: from which the engine takes, see `buckets`.
  """
  lengths_P = np.fromiter(lengths, int)
  fits = [float(np.mean(lengths_P <= size)) ** PREFILL_ROWS for size in sizes]
  share = np.diff(np.array([0.0, *fits]))
  order = np.argsort(-share, kind='stable')
  return [sizes[i] for i in order if share[i] >= _LEAST_SHARE]


def steps_per_sync(steps: int) -> int:
  """Returns the steps between two checks, see `decode_step.generate`."""
  # On a CPU the check is free, and a superfluous step costs as much as any.
  return STEPS_PER_SYNC if on_gpu() and steps % STEPS_PER_SYNC == 0 else 1


def tail_sizes(slots: int, max_response_length: int) -> list[int]:
  """Returns the sizes of the programs for a rollout's tail, see `TAILS`.

  Args:
    slots: of a device.
    max_response_length: tokens.
  """
  sizes = [
      round_up(-(-slots // share), 16)
      for share, tokens in TAILS
      if max_response_length >= tokens
  ]
  return [size for size in sizes if size < slots]


def few_slots(
    running_B: NpArray, devices: int, max_response_length: int
) -> NpArray | None:
  """Returns the few slots that still run, if they are few enough.

  Args:
    running_B: bool, slots that will take a step; a device holds neighbours.
    devices: number of devices over which the slots are split.
    max_response_length: tokens.

  Returns:
    int32, slots by their number on their device, equally many on each device
    (some may be idle), see `TAILS`; None to decode all slots.
  """
  running_DB = running_B.reshape(devices, -1)
  slots, most = running_DB.shape[1], running_DB.sum(1).max()
  for size in tail_sizes(slots, max_response_length):
    if most <= size:
      # Running ones first.
      order_DB = np.argsort(~running_DB, axis=1, kind='stable')
      return order_DB[:, :size].reshape(-1).astype(np.int32)
  return None
