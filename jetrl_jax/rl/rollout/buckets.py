"""The sizes that the engine compiles programs for: rows, lengths, few slots.

What is asked for is rounded up to one of few sizes. No number that a sequence
gets depends on which.
"""

import numpy as np

from jetrl_jax.core.compilation import on_gpu
from jetrl_jax.core.typing import NpArray
from jetrl_jax.rl.rollout.decode_state import EngineConfig
from jetrl_jax.rl.rollout.kv_pages import PagesConfig

# (share, tokens): when one slot in so many or less is at work, a program for as
# many takes over, the tail of a rollout of long answers. It must be compiled,
# which answers below so many tokens would not pay for. Fewest slots first.
TAILS = (16, 8192), (4, 1024)
# Prompts per prefill, empty rows included; of preempted sequences the most.
PREFILL_ROWS = 16
# Attention tiles per page.
_PAGE_TILES = 2
# Steps that a GPU takes without asking whether a slot still runs.
STEPS_PER_SYNC = 8


def round_up(value: int, multiple: int) -> int:
  """Returns the least multiple that is not below the value."""
  return -(-value // multiple) * multiple


def pages(config: EngineConfig, devices: int, tile: int) -> PagesConfig:
  """Returns slots and pages of an engine.

  Args:
    config: what is asked for.
    devices: over which the slots are split.
    tile: see `attention.flash_attention`.

  Raises:
    ValueError: kv_cache_tokens hold no sequence of full length.
  """
  num_slots = round_up(config.num_slots, 16 * devices)
  page_size = _PAGE_TILES * tile
  longest = config.max_prompt_length + config.max_response_length
  length = round_up(longest, page_size)
  full = num_slots * length  # More would never be filled.
  tokens = min(config.kv_cache_tokens or full, full)
  return PagesConfig(
      num_slots=num_slots,
      num_devices=devices,
      pages_per_device=tokens // (page_size * devices),
      page_size=page_size,
      pages_per_slot=length // page_size,
  )


def buckets(longest: int, tile: int, factor: int) -> list[int]:
  """Returns sizes: powers of `factor` times the tile, and the end.

  Args:
    longest: tokens or sequences; the last size is this, up to the tile.
    tile: the least; of tokens, see `attention.flash_attention`.
    factor: between neighbours.
  """
  found, size = [], tile
  while size < longest:
    found.append(size)
    size *= factor
  return [*found, round_up(longest, tile)]


def steps_per_sync(steps: int) -> int:
  """Returns how many of the steps are taken at a time, see `generate`."""
  # A CPU asks itself, and a step that nobody wanted costs what others do.
  return STEPS_PER_SYNC if on_gpu() and steps % STEPS_PER_SYNC == 0 else 1


def few_slots(
    running_B: NpArray, devices: int, max_response_length: int
) -> NpArray | None:
  """Returns some of each device's slots, if no other one runs.

  Args:
    running_B: bool, slots that will take a step; a device holds neighbours.
    devices: over which the slots are split.
    max_response_length: tokens.

  Returns:
    int32, slots by their number on their device, equally many of each, see
    `TAILS`; None where all slots are to go on.
  """
  running_DB = running_B.reshape(devices, -1)
  slots, most = running_DB.shape[1], running_DB.sum(1).max()
  for share, tokens in TAILS:
    size = round_up(-(-slots // share), 16)
    if max_response_length >= tokens and most <= size < slots:
      # Running ones first.
      order_DB = np.argsort(~running_DB, axis=1, kind='stable')
      return order_DB[:, :size].reshape(-1).astype(np.int32)
  return None
