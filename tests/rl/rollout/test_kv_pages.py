"""Pages are handed out, given back, and taken from whoever came last."""

import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe
from jetrl_jax.models.policy import Policy
from jetrl_jax.rl.rollout import decode_state as decode_states
from jetrl_jax.rl.rollout.kv_pages import PageAllocator, PagesConfig
from tests.models import tiny
from tests.rl import tiny_run


def _book(pages=4, devices=1, slots=4, per_slot=4):
  return PageAllocator(
      PagesConfig(
          num_slots=slots,
          num_devices=devices,
          pages_per_device=pages,
          page_size=8,
          pages_per_slot=per_slot,
      )
  )


def _pages(book, slot, count):
  return book.table[slot, :count].tolist()


def test_a_slot_takes_a_page_only_when_it_grows_into_it():
  book = _book()
  assert book.start(0, 5)
  first = _pages(book, 0, 1)
  book.changed = False
  book.grow({0: 8})
  assert not book.changed
  book.grow({0: 9})
  assert book.changed
  assert _pages(book, 0, 1) == first
  assert len(set(_pages(book, 0, 2))) == 2


def test_no_page_belongs_to_two_slots():
  book = _book(pages=16)
  for slot in range(4):
    book.start(slot, 1)
  book.grow({slot: 8 * (slot + 1) for slot in range(4)})
  held = [p for slot in range(4) for p in _pages(book, slot, slot + 1)]
  assert len(set(held)) == len(held) == 10


def test_a_full_pool_parks_what_started_last_and_brings_it_back():
  book = _book(pages=5)
  for slot in (2, 0, 1):
    assert book.start(slot, 1)
  # Three pages for 2 and two for 0: one of them must come from 1.
  assert book.grow({2: 24, 0: 16, 1: 8}) == set()
  assert book.preempted == {1}
  assert book.grow({2: 24, 0: 16, 1: 8}) == set()
  book.release(0)
  # One page for 1, and one for 2 to grow.
  assert book.grow({2: 24, 1: 8}) == {1}
  assert book.preempted == set()


def test_a_new_sequence_waits_when_there_is_no_room_beside_the_others():
  book = _book()
  assert book.start(0, 16)
  # Two pages are free: one for slot 0 to grow, and two are needed.
  assert not book.start(1, 16)
  assert book.preempted == {1} and book.times_preempted == 1
  # Nor does it come back to where it would soon be parked again.
  assert book.grow({0: 16, 1: 16}) == set()
  assert book.start(2, 8)


def test_the_device_is_told_of_a_sequence_that_gives_its_pages_back():
  book = _book()
  book.start(0, 8)
  book.start(1, 8)
  book.grow({0: 24, 1: 8})
  book.changed = False
  # Slot 1 came last and makes room for itself: it would write to free pages.
  book.grow({0: 24, 1: 16})
  assert book.preempted == {1} and book.changed


def test_of_those_that_wait_the_first_to_start_comes_back_first():
  book = _book()
  book.start(3, 32)
  assert not book.start(2, 24) and not book.start(1, 24)
  book.release(3)
  assert book.grow({1: 24, 2: 24}) == {2}


def test_a_slot_that_starts_again_is_the_last_to_have_started():
  book = _book()
  book.start(0, 32)
  book.start(0, 8)  # Of what it held before one page is left to it.
  assert book.start(1, 16)
  book.start(0, 8)
  book.grow({0: 16, 1: 32})
  assert book.preempted == {0}


def test_the_oldest_sequence_always_runs():
  book = _book()
  for slot in range(4):
    book.start(slot, 1)
  for length in (8, 16, 24, 32):
    book.grow({slot: length for slot in range(4)})
    assert 0 not in book.preempted
  assert book.preempted == {1, 2, 3}
  assert len(set(_pages(book, 0, 4))) == 4


def test_with_room_for_every_slot_nothing_is_ever_parked():
  book = _book(pages=16)
  for slot in range(4):
    assert book.start(slot, 32)
  assert book.grow({slot: 32 for slot in range(4)}) == set()
  assert not book.preempted


def test_a_slot_s_pages_are_free_again_when_its_sequence_is_over():
  book = _book()
  book.start(0, 32)
  assert not book.start(1, 8)
  book.grow({0: 8})  # Back by some tokens, it keeps its pages until then.
  book.release(0)
  assert book.grow({1: 8}) == {1}
  book.release(1)
  assert book.start(2, 32)
  assert not book.start(3, 8)
  book.release(3)
  assert not book.preempted


def test_a_device_hands_out_its_own_pages():
  book = _book(pages=4, devices=2)
  assert [book.device(slot) for slot in range(4)] == [0, 0, 1, 1]
  book.start(0, 32)
  # Device 0 is full, device 1 is not.
  assert not book.start(1, 8)
  assert book.start(2, 8)
  pages = book.global_pages([0, 2], 4)
  assert sorted(pages[0]) == [0, 1, 2, 3]
  assert 4 <= pages[1, 0] < 8


def test_a_full_device_parks_its_own_and_no_other_counts():
  book = _book(pages=4, devices=2)
  # Two that may grow on device 1 leave room for two on device 0.
  for slot, tokens in ((2, 16), (3, 8), (0, 8), (1, 8)):
    assert book.start(slot, tokens)
  assert book.grow({0: 8, 1: 8, 2: 32, 3: 8}) == set()
  assert book.preempted == {3}


def test_pages_that_a_slot_does_not_hold_point_nowhere():
  book = _book()
  book.start(0, 8)
  pages = book.global_pages([-1, 0], 3)
  assert pages[1, 0] < 4
  rest = [*pages[0], *pages[1, 1:]]
  assert min(rest) >= 4 and len(set(rest)) == len(rest)
  assert pages.dtype == np.int32
  # A slot that took room to grow has more than its prefix fills.
  book.grow({0: 24})
  assert book.global_pages([0], 2).tolist() == [_pages(book, 0, 2)]


def test_a_pool_smaller_than_one_sequence_is_refused():
  with pytest.raises(ValueError, match='Raise kv_cache_tokens to at least 64'):
    _book(pages=3, devices=2)


def test_fp8_keys_that_a_kernel_cannot_count_are_refused():
  # Two heads of two channels: 2^29 tokens are 2^31 values.
  policy = Policy(
      model=tiny.config(), recipe=Recipe(), kv_cache_dtype='float8_e4m3fn'
  )
  sizes = PagesConfig(
      num_slots=32,
      num_devices=2,
      pages_per_device=2**22 + 1,
      page_size=128,
      pages_per_slot=4,
  )
  with pytest.raises(ValueError, match=f'kv_cache_tokens to {2**30} or less'):
    decode_states.idle(policy, tiny_run.engine_config(), sizes)
