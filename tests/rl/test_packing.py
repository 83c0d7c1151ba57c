import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetrl_jax.rl import packing, types

_FIELDS = [
    f.name for f in dataclasses.fields(packing.Sequence) if f.name != 'origin'
]


def _sequence(length, origin=0):
  """A sequence in which no two values of a field are equal, nor 0."""
  value = 1000 * (origin + 1) + np.arange(length)
  fields = {name: (value + 0.5).astype(np.float32) for name in _FIELDS}
  fields['tokens'] = value.astype(np.int32)
  fields['weight_version'] = value.astype(np.int32)
  fields['loss_mask'] = (np.arange(length) > 0).astype(np.float32)
  return packing.Sequence(**fields, origin=origin)


def _pack(lengths, row_length=16, rows=2, tile=4):
  sequences = [_sequence(n, origin=i) for i, n in enumerate(lengths)]
  packed = packing.pack(
      sequences, row_length=row_length, rows_per_micro_batch=rows, tile=tile
  )
  return sequences, packed


_LENGTHS = st.lists(st.integers(1, 24), max_size=15)
_SIZES = st.tuples(st.sampled_from([24, 32, 48]), st.integers(1, 4))


@given(_LENGTHS, _SIZES)
def test_every_token_appears_once(lengths, sizes):
  sequences, packed = _pack(lengths, *sizes, tile=8)
  held = [b.tokens[b.segment_ids > 0] for b in packed.batches]
  expected = [s.tokens for s in sequences]
  assert sorted(np.concatenate([*held, []])) == sorted(
      np.concatenate([*expected, []])
  )


@given(_LENGTHS, _SIZES)
def test_segments_start_at_tiles_and_never_overlap(lengths, sizes):
  _, packed = _pack(lengths, *sizes, tile=8)
  used = set()
  for p, length in zip(packed.placements, lengths, strict=True):
    assert p.start % 8 == 0
    assert p.length == length
    assert p.start + p.length <= sizes[0]
    places = {(p.batch, p.row, p.start + t) for t in range(length)}
    assert not places & used
    used |= places


@given(_LENGTHS, _SIZES)
def test_unpack_undoes_pack_for_every_field(lengths, sizes):
  sequences, packed = _pack(lengths, *sizes, tile=8)
  for name in _FIELDS:
    values = [getattr(batch, name) for batch in packed.batches]
    found = packing.unpack(values, packed)
    for sequence, array in zip(sequences, found, strict=True):
      np.testing.assert_array_equal(array, getattr(sequence, name))
      assert array.dtype == getattr(sequence, name).dtype


@given(_LENGTHS, _SIZES)
def test_padding_is_zero_in_every_field(lengths, sizes):
  _, packed = _pack(lengths, *sizes, tile=8)
  for batch in packed.batches:
    for field in dataclasses.fields(batch):
      array = getattr(batch, field.name)
      assert array.shape == (sizes[1], sizes[0])
      assert not array[batch.segment_ids == 0].any()


@given(_LENGTHS, _SIZES)
def test_segment_ids_rise_by_one_and_positions_start_at_zero(lengths, sizes):
  _, packed = _pack(lengths, *sizes, tile=8)
  for batch in packed.batches:
    for ids, positions in zip(batch.segment_ids, batch.positions, strict=True):
      present = ids[ids > 0]
      assert sorted(set(present)) == list(range(1, 1 + len(set(present))))
      assert (np.diff(present) >= 0).all()
      for segment in set(present):
        places = positions[ids == segment]
        np.testing.assert_array_equal(places, np.arange(len(places)))


def test_three_sequences_by_hand():
  # Tiles of 4: lengths 5, 9, 3 take 2, 3, 1 tiles; rows hold 4. Longest
  # first: 9 into row 0, 5 into row 1, 3 into the last tile of row 0.
  _, packed = _pack([5, 9, 3])
  found = [(p.batch, p.row, p.start) for p in packed.placements]
  assert found == [(0, 1, 0), (0, 0, 0), (0, 0, 12)]
  np.testing.assert_array_equal(
      packed.batches[0].segment_ids,
      [[1] * 9 + [0] * 3 + [2] * 3 + [0], [1] * 5 + [0] * 11],
  )
  assert packed.efficiency == 17 / 32


def test_six_sequences_that_fill_two_rows_by_hand():
  # Tiles of 4: 5, 4, 4, 3, 2, 2 in rows of 10. Longest first, each into the
  # first row where it fits, would take three rows: 5 4, 4 3 2, 2.
  _, packed = _pack([20, 16, 16, 12, 8, 8], row_length=40, rows=1)
  assert packed.efficiency == 1.0
  assert sorted(p.batch for p in packed.placements) == [0, 0, 0, 1, 1, 1]


@given(st.lists(st.integers(1, 24), min_size=1, max_size=8), _SIZES)
def test_no_choice_of_sequences_fills_the_first_row_better(lengths, sizes):
  _, packed = _pack(lengths, *sizes, tile=8)
  tiles = [-(-length // 8) for length in lengths]
  first = sum(
      n
      for n, p in zip(tiles, packed.placements, strict=True)
      if p.batch == p.row == 0
  )
  best = max(
      total
      for count in range(len(tiles) + 1)
      for chosen in itertools.combinations(tiles, count)
      if (total := sum(chosen)) <= sizes[0] // 8
  )
  assert first == best


def test_the_last_micro_batch_is_filled_with_empty_rows():
  _, packed = _pack([16, 16, 16])
  assert len(packed.batches) == 2
  assert packed.batches[1].segment_ids[0].all()
  assert not packed.batches[1].segment_ids[1].any()
  assert packed.efficiency == 48 / 64


def _last(rows, row_length, tile):
  """The halves of a micro-batch: of its rows, then of their length."""
  return packing.halved_shapes(
      (rows, row_length), tile, tile=tile, devices=1, count=4
  )


@given(_LENGTHS, _SIZES)
def test_a_smaller_last_micro_batch_holds_what_a_full_one_held(lengths, sizes):
  row_length, rows = sizes
  sequences, full = _pack(lengths, row_length, rows, tile=8)
  last = _last(rows, row_length, 8)
  packed = packing.pack(
      sequences,
      row_length=row_length,
      rows_per_micro_batch=rows,
      tile=8,
      last=last,
  )
  shapes = [batch.tokens.shape for batch in packed.batches]
  assert len(shapes) == len(full.batches)
  assert set(shapes[:-1]) <= {(rows, row_length)}
  assert set(shapes[-1:]) <= {(rows, row_length), *last}
  # The others are as they were.
  for batch, before in zip(packed.batches[:-1], full.batches, strict=False):
    np.testing.assert_array_equal(batch.tokens, before.tokens)
  for name in _FIELDS:
    values = [getattr(batch, name) for batch in packed.batches]
    for sequence, array in zip(
        sequences, packing.unpack(values, packed), strict=True
    ):
      np.testing.assert_array_equal(array, getattr(sequence, name))
  # The smallest: what is left does not fit into the next.
  if shapes:
    sizes_of = [(rows, row_length), *last]
    smaller = sizes_of[sizes_of.index(shapes[-1]) + 1 :]
    left = [p.length for p in packed.placements if p.batch == len(shapes) - 1]
    for count, length in smaller:
      again = (
          _pack(left, length, count, tile=8) if max(left) <= length else None
      )
      assert again is None or len(again[1].batches) > 1


def test_a_quarter_holds_what_is_left_by_hand():
  # Rows of four tiles of 4. Longest first: 16, 16 and 13 fill the first
  # micro-batch and a row of the second; 4 and 3 share its other row.
  sequences, full = _pack([16, 16, 4, 3])
  assert full.efficiency == 39 / 64
  packed = packing.pack(
      sequences,
      row_length=16,
      rows_per_micro_batch=2,
      tile=4,
      last=[(1, 16), (1, 8), (1, 4)],
  )
  assert [batch.tokens.shape for batch in packed.batches] == [(2, 16), (1, 8)]
  assert packed.efficiency == 39 / 40
  found = [(p.batch, p.row, p.start) for p in packed.placements]
  assert found == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 4)]


@pytest.mark.parametrize(
    'shape, devices, expected',
    [
        ((8, 64), 1, [(4, 64), (2, 64), (1, 64)]),
        ((8, 64), 2, [(4, 64), (2, 64)]),
        # Then rows get shorter, while a sequence of full length fits.
        ((2, 256), 1, [(1, 256), (1, 128), (1, 64)]),
        ((2, 256), 2, [(2, 128), (2, 64)]),
        ((1, 192), 1, [(1, 96)]),
        ((1, 64), 1, []),
        ((1, 112), 1, [(1, 64)]),
    ],
)
def test_halves_of_a_micro_batch_by_hand(shape, devices, expected):
  for longest in (60, 64):
    found = packing.halved_shapes(
        shape, longest, tile=16, devices=devices, count=3
    )
    assert found == expected


def test_the_number_of_smaller_shapes_has_an_end():
  found = packing.halved_shapes((2, 64), 60, tile=16, devices=1, count=2**31)
  assert found == [(1, 64)]


@pytest.mark.parametrize(
    'packed_rows, devices, shape',
    [
        # 2100 tokens are 33 tiles of 64, so 2112.
        (0, 1, (6, 2112)),
        (6, 1, (6, 2112)),
        (1, 1, (1, 12672)),
        (2, 1, (2, 6336)),
        # Rows that four devices cannot share evenly are made up, as long.
        (0, 4, (8, 2112)),
        (2, 4, (4, 6336)),
    ],
)
def test_the_shape_of_a_micro_batch_by_hand(packed_rows, devices, shape):
  found = packing.batch_shape(
      2100,
      micro_batch_size=6,
      packed_rows=packed_rows,
      tile=64,
      devices=devices,
  )
  assert found == shape


def test_sequences_above_half_the_limit_pack_closer_in_longer_rows():
  # 32 x 8 short prompts with responses of 1029 to 2046 tokens.
  random = np.random.default_rng(0)
  lengths = random.integers(50, 100, 256) + random.integers(1029, 2047, 256)
  efficiency = {}
  for packed_rows in (0, 1):
    rows, length = packing.batch_shape(
        2304, micro_batch_size=8, packed_rows=packed_rows, tile=64, devices=1
    )
    efficiency[packed_rows] = _pack(lengths, length, rows, 64)[1].efficiency
  # Two do not fit into a row of 2304: 256 rows, 32 micro-batches of 8.
  assert efficiency[0] == lengths.sum() / (256 * 2304) < 0.72
  assert efficiency[1] > 0.92


def test_no_sequences_give_no_micro_batch():
  _, packed = _pack([])
  assert packed.batches == []
  assert packing.unpack([], packed) == []


def test_the_same_lengths_are_placed_the_same_way():
  lengths = np.random.default_rng(0).integers(1, 17, 40).tolist()
  assert _pack(lengths)[1].placements == _pack(lengths)[1].placements


def test_sequences_that_fill_rows_exactly_waste_nothing():
  _, packed = _pack([4, 8, 12, 8], row_length=16, rows=2)
  assert packed.efficiency == 1.0


def test_origins_travel_with_the_placements():
  sequences = [_sequence(3, origin=17), _sequence(9, origin=4)]
  packed = packing.pack(
      sequences, row_length=16, rows_per_micro_batch=1, tile=4
  )
  assert [p.origin for p in packed.placements] == [17, 4]


def test_outputs_computed_on_device_are_unpacked_to_the_bit():
  sequences, packed = _pack([5, 9, 3, 16, 2])
  outputs = [
      jax.jit(lambda b: b.log_mu * 2.0)(jax.tree.map(jnp.asarray, batch))
      for batch in packed.batches
  ]
  for s, found in zip(sequences, packing.unpack(outputs, packed), strict=True):
    np.testing.assert_array_equal(found, s.log_mu * np.float32(2.0))


def test_bits_survive_packing():
  sequence = _sequence(4)
  bits = np.array([0x7FC00001, 0x80000000, 1, 0xFF800000], np.uint32)
  sequence = dataclasses.replace(sequence, log_mu=bits.view(np.float32))
  packed = packing.pack(
      [sequence], row_length=8, rows_per_micro_batch=1, tile=4
  )
  (found,) = packing.unpack([packed.batches[0].log_mu], packed)
  np.testing.assert_array_equal(found.view(np.uint32), bits)


def test_a_sequence_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match='Sequence 0 has 17 tokens.*1 to 16'):
    _pack([17])


def test_a_sequence_without_tokens_is_refused():
  with pytest.raises(ValueError, match='Sequence 0 has 0 tokens.*1 to 16'):
    _pack([0])


@pytest.mark.parametrize('row_length, tile', [(18, 4), (0, 4), (16, 0)])
def test_a_row_that_is_no_multiple_of_the_tile_is_refused(row_length, tile):
  with pytest.raises(ValueError, match='row_length is .* multiple'):
    _pack([3], row_length=row_length, tile=tile)


def test_a_micro_batch_without_rows_is_refused():
  with pytest.raises(ValueError, match='rows_per_micro_batch is 0'):
    _pack([3], rows=0)


def test_fields_of_different_lengths_are_refused():
  broken = dataclasses.replace(_sequence(4), log_mu=np.zeros(3, np.float32))
  with pytest.raises(ValueError, match=r'log_mu has shape \(3,\)'):
    packing.pack([broken], row_length=8, rows_per_micro_batch=1, tile=4)


def test_loss_on_the_first_token_is_refused():
  broken = dataclasses.replace(_sequence(4), loss_mask=np.ones(4, np.float32))
  with pytest.raises(ValueError, match='loss on its first token'):
    packing.pack([broken], row_length=8, rows_per_micro_batch=1, tile=4)


def test_an_observation_s_tokens_carry_no_loss():
  found = packing.sequence_from_completion(
      _completion(observed=True),
      advantage=1.0,
      loss_weight=0.5,
      mask_truncated=False,
      origin=0,
  )
  assert found.tokens.tolist() == [11, 12, 21, 22, 2]
  assert found.loss_mask.tolist() == [0, 0, 1, 0, 1]
  assert found.loss_weight.tolist() == [0, 0, 0.5, 0, 0.5]
  counted = packing.masked_response_length(
      _completion(observed=True), mask_truncated=False
  )
  assert counted == 2


def test_values_of_another_number_of_micro_batches_are_refused():
  _, packed = _pack([5])
  with pytest.raises(ValueError, match='values of 0 micro-batches, but 1'):
    packing.unpack([], packed)


def _completion(finish_reason='stop', observed=False):
  return types.Completion(
      prompt_id=3,
      sample=1,
      prompt_tokens=np.array([11, 12], np.int32),
      tokens=np.array([21, 22, 2], np.int32),
      log_mu=np.array([-0.5, -0.25, -0.125], np.float32),
      logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
      weight_version=np.array([7, 7, 8], np.int32),
      finish_reason=finish_reason,
      sampled=np.array([True, observed is False, True]),
  )


def _from_completion(finish_reason='stop', mask_truncated=False):
  return packing.sequence_from_completion(
      _completion(finish_reason),
      advantage=-1.5,
      loss_weight=0.25,
      mask_truncated=mask_truncated,
      origin=9,
  )


def test_only_response_tokens_carry_loss():
  found = _from_completion()
  expected = {
      'tokens': [11, 12, 21, 22, 2],
      'loss_mask': [0, 0, 1, 1, 1],
      'loss_weight': [0, 0, 0.25, 0.25, 0.25],
      'advantages': [0, 0, -1.5, -1.5, -1.5],
      'log_mu': [0, 0, -0.5, -0.25, -0.125],
      'rollout_logprobs': [0, 0, -1.0, -2.0, -3.0],
      'old_logprobs': [0, 0, -1.0, -2.0, -3.0],
      'ref_logprobs': [0, 0, 0, 0, 0],
      'weight_version': [0, 0, 7, 7, 8],
  }
  assert set(expected) == set(_FIELDS)
  for name, values in expected.items():
    np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)
    ids = name in ('tokens', 'weight_version')
    assert getattr(found, name).dtype == (np.int32 if ids else np.float32)
  assert found.origin == 9


@pytest.mark.parametrize(
    'finish_reason, mask_truncated, counted',
    [
        ('stop', False, 3),
        ('stop', True, 3),
        ('length', False, 3),
        ('length', True, 0),
        # The end of an episode is no truncation.
        ('turns', True, 3),
        ('error', True, 3),
    ],
)
def test_a_truncated_response_can_be_taken_out_of_the_loss(
    finish_reason, mask_truncated, counted
):
  found = _from_completion(finish_reason, mask_truncated)
  assert found.loss_mask.sum() == counted
  assert found.loss_weight.sum() == 0.25 * counted
  assert counted == packing.masked_response_length(
      _completion(finish_reason), mask_truncated=mask_truncated
  )
