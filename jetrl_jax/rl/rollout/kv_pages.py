"""Assigns the pages of the KV pools to slots (on the host).

A slot takes pages as its sequence grows. If a device's pool is empty, the
sequence that started last is preempted: it gives its pages back. Once enough
pages are free, it is prefilled again, to the same bits, and continues
(preempt/recompute). A pool holds at least one sequence of full length, so the
oldest sequence is never preempted.
"""

import dataclasses

import numpy as np

from jetrl_jax.core.typing import NpArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagesConfig:
  """Sizes of the slots and the page pools.

  Attributes:
    num_slots: a multiple of `num_devices`; a device holds neighbouring slots.
    num_devices: number of devices; each has its own pool.
    pages_per_device: pages in a device's pool.
    page_size: tokens per page.
    pages_per_slot: most pages of one sequence.
  """

  num_slots: int
  num_devices: int
  pages_per_device: int
  page_size: int
  pages_per_slot: int

  def __post_init__(self):
    if self.pages_per_device < self.pages_per_slot:
      raise ValueError(
          f'kv_cache_tokens leaves {self.pages_per_device} pages of'
          f' {self.page_size} tokens on each device; one sequence of'
          f' max_prompt_length + max_response_length needs'
          f' {self.pages_per_slot}. Raise kv_cache_tokens to at least'
          f' {self.pages_per_slot * self.page_size * self.num_devices}, or'
          ' lower the two limits'
      )


class PageAllocator:
  """Knows which pages each slot of one decode state has.

  Attributes:
    table: int32 [num_slots, pages_per_slot], pages by index in the device's
      own pool; entries after a slot's last page mean nothing.
    preempted: slots whose sequences wait for pages.
    times_preempted: how often a sequence was preempted so far.
    changed: whether `table` or `preempted` changed since they were last copied
      to the device.
  """

  def __init__(self, config: PagesConfig):
    self.config = config
    self.table = np.zeros((config.num_slots, config.pages_per_slot), np.int32)
    self.preempted: set[int] = set()
    self.times_preempted = 0
    self.changed = True
    self._owned: dict[int, int] = {}
    # Insertion order is the order in which sequences started.
    self._started: dict[int, None] = {}
    self._free = [
        list(range(config.pages_per_device))[::-1]
        for _ in range(config.num_devices)
    ]

  def device(self, slot: int) -> int:
    """Returns the device that holds the slot."""
    return slot * self.config.num_devices // self.config.num_slots

  def pages_for(self, tokens: int) -> int:
    """Returns the number of pages that hold `tokens` tokens."""
    return -(-tokens // self.config.page_size)

  def start(self, slot: int, tokens: int) -> bool:
    """Gives a new sequence its pages; preempts it if too few are free.

    Args:
      slot: the sequence's slot; pages that it had before are freed.
      tokens: tokens that the sequence starts with.

    Returns:
      Whether the sequence can run now.
    """
    self.release(slot)
    self._started[slot] = None
    if not self._has_free_pages(slot, tokens):
      self._preempt(slot)
      return False
    return self._take(slot, tokens)

  def grow(self, wanted: dict[int, int]) -> set[int]:
    """Gives slots the pages that they need for the next steps.

    Args:
      wanted: slot -> tokens after those steps, for every sequence that runs or
        is preempted.

    Returns:
      Slots that were preempted and may run again; they must be prefilled again.
    """
    order = [slot for slot in self._started if slot in wanted]
    for slot in order:
      while slot not in self.preempted and not self._take(slot, wanted[slot]):
        self._preempt_last(self.device(slot))
    returned = set()
    for slot in order:
      if slot in self.preempted and self._has_free_pages(slot, wanted[slot]):
        self.preempted.remove(slot)
        self.changed = True
        self._take(slot, wanted[slot])
        returned.add(slot)
    return returned

  def release(self, slot: int) -> None:
    """Frees a slot's pages, because its sequence has ended."""
    self._give_back(slot)
    self._started.pop(slot, None)
    if slot in self.preempted:
      self.preempted.remove(slot)
      self.changed = True

  def global_pages(self, slots: list[int], count: int) -> NpArray:
    """Returns int32 [len(slots), count], pages by index over all devices.

    If a slot has fewer pages, and in rows of padding (slot -1), the entries are
    distinct indices beyond the last page, so that a scatter drops them.
    """
    config = self.config
    total = config.pages_per_device * config.num_devices
    pages = total + np.arange(len(slots) * count, dtype=np.int32)
    pages = pages.reshape(len(slots), count)
    for row, slot in enumerate(slots):
      held = min(self._owned.get(slot, 0), count)
      first = self.device(slot) * config.pages_per_device
      pages[row, :held] = first + self.table[slot, :held]
    return pages

  def _has_free_pages(self, slot: int, tokens: int) -> bool:
    """Whether the sequence fits and every running one can take another page."""
    device = self.device(slot)
    growing = sum(
        held < self.config.pages_per_slot
        for other, held in self._owned.items()
        if self.device(other) == device
    )
    return len(self._free[device]) >= self.pages_for(tokens) + growing

  def _take(self, slot: int, tokens: int) -> bool:
    held, need = self._owned.get(slot, 0), self.pages_for(tokens)
    free = self._free[self.device(slot)]
    if need - held > len(free):
      return False
    for i in range(held, need):
      self.table[slot, i] = free.pop()
      self.changed = True
    self._owned[slot] = max(held, need)
    return True

  def _give_back(self, slot: int) -> None:
    held = self._owned.pop(slot, 0)
    self._free[self.device(slot)].extend(
        int(page) for page in self.table[slot, :held]
    )

  def _preempt_last(self, device: int) -> None:
    """Preempts the sequence that started last of those that have pages."""
    victim = next(
        slot
        for slot in reversed(self._started)
        if slot in self._owned and self.device(slot) == device
    )
    self._give_back(victim)
    self._preempt(victim)

  def _preempt(self, slot: int) -> None:
    self.times_preempted += 1
    self.preempted.add(slot)
    self.changed = True
