"""Packs sequences of different lengths into rows of one length, and unpacks.

A row holds several segments. Each starts at a multiple of the attention tile.
A segment then has the same tiles as in a row of its own (or in a KV cache that
starts at 0), and its log-probs have the same bits. Otherwise they would change.
This costs half a tile of padding per segment on average.

Packing runs on the host. It fills one row after the other, each as well as the
sequences that are left can, so the placement depends only on the lengths and
their order.

A micro-batch takes the same time whether it is full or not, so the last one may
have a smaller shape if that holds what is left.
"""

import dataclasses
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from jetrl_jax.core import sharding
from jetrl_jax.core.typing import Array, NpArray, Shaped
from jetrl_jax.rl.types import Completion, TrainBatch

# The per-token fields that a `Sequence` and a `TrainBatch` share.
_DTYPES = {
    'tokens': np.int32,
    'loss_mask': np.float32,
    'loss_weight': np.float32,
    'advantages': np.float32,
    'log_mu': np.float32,
    'rollout_logprobs': np.float32,
    'old_logprobs': np.float32,
    'ref_logprobs': np.float32,
    'weight_version': np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
  """One training sequence on the host.

  It is a prompt and its response, or a conversation. Every array is [length]
  and aligned with its token, with the meaning that `TrainBatch` gives it. The
  first token has loss mask 0, because nothing predicts it.

  Attributes:
    tokens: int32 token ids, at least one.
    loss_mask: float32, 1 on sampled tokens that count.
    loss_weight: float32, see `rl/aggregation.py`.
    advantages: float32.
    log_mu: float32, nats.
    rollout_logprobs: float32, nats.
    old_logprobs: float32, nats.
    ref_logprobs: float32, nats.
    weight_version: int32, optimiser steps.
    origin: the caller's index of the sequence, for example its completion's
      index in the rollout.
  """

  tokens: NpArray
  loss_mask: NpArray
  loss_weight: NpArray
  advantages: NpArray
  log_mu: NpArray
  rollout_logprobs: NpArray
  old_logprobs: NpArray
  ref_logprobs: NpArray
  weight_version: NpArray
  origin: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """The place of one sequence.

  Attributes:
    batch: index of the micro-batch.
    row: row within the micro-batch.
    start: index of its first token in the row, a multiple of the tile.
    length: tokens.
    origin: `Sequence.origin`.
  """

  batch: int
  row: int
  start: int
  length: int
  origin: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packed:
  """Micro-batches, and where each sequence is in them.

  Attributes:
    batches: `TrainBatch` with numpy leaves [B, T]; all but the last one have
      one shape.
    placements: one per sequence, in the order that `pack` was given.
    efficiency: packing efficiency, the share of all micro-batches' positions
      that hold a token, in [0, 1].
  """

  batches: list[TrainBatch]
  placements: list[Placement]
  efficiency: float


def batch_shape(
    longest: int,
    *,
    micro_batch_size: int,
    packed_rows: int,
    tile: int,
    devices: int,
) -> tuple[int, int]:
  """Returns (rows, row_length) of a micro-batch, over all devices.

      rows = packed_rows or micro_batch_size, rounded up to the devices
      row_length = longest, rounded up to the tile,
                   times micro_batch_size / packed_rows

  Example:
    8 sequences of 2304 tokens in 1 row give (1, 18432) on one device and (4,
    18432) on four devices: the three additional rows are equally long.

  Args:
    longest: tokens of a sequence of full length.
    micro_batch_size: sequences of full length in a micro-batch.
    packed_rows: rows that hold these sequences, a divisor of their number; 0
      for one row per sequence.
    tile: tokens, see `pack`.
    devices: number of devices that share the rows.
  """
  rows = packed_rows or micro_batch_size
  per_row = micro_batch_size // rows
  return _round_up(rows, devices), _round_up(longest, tile) * per_row


def halved_shapes(
    shape: tuple[int, int], longest: int, *, tile: int, devices: int, count: int
) -> list[tuple[int, int]]:
  """Returns smaller shapes of a micro-batch, each half of the one before.

  Rows are halved while devices share them evenly, then their length, while a
  row holds a sequence of full length.

  Args:
    shape: (rows, row_length), see `batch_shape`.
    longest: tokens of a sequence of full length.
    tile: tokens, see `pack`.
    devices: number of devices that share the rows.
    count: shapes at most.
  """
  found: list[tuple[int, int]] = []
  for _ in range(count):
    rows, length = found[-1] if found else shape
    half = _round_up(-(-length // 2), tile)
    if rows % (2 * devices) == 0:
      found.append((rows // 2, length))
    elif longest <= half < length:
      found.append((rows, half))
    else:
      break
  return found


def pack(
    sequences: SequenceOf[Sequence],
    *,
    row_length: int,
    rows_per_micro_batch: int,
    tile: int,
    last: SequenceOf[tuple[int, int]] = (),
) -> Packed:
  """Packs sequences into micro-batches of [rows_per_micro_batch, row_length].

  A row takes those sequences that leave the least of it empty, in tiles; of
  several such choices one of longer sequences. A sequence is never split. The
  last micro-batch may have empty rows.

  Args:
    sequences: sequences to pack; without any there is no micro-batch.
    row_length: tokens per row, a multiple of `tile`.
    rows_per_micro_batch: rows of every micro-batch.
    tile: tokens; every segment starts at a multiple of it.
    last: (rows, row_length) that the last micro-batch may have instead, the
      largest first: it has the smallest in which all that is left fits.

  Returns:
    The micro-batches and the placements.

  Raises:
    ValueError: a sequence is longer than a row, is empty, has a field of
      another length, or has a loss mask on its first token; or row_length is
      not a multiple of the tile.
  """
  if tile < 1 or row_length < 1 or row_length % tile:
    raise ValueError(
        f'row_length is {row_length} and must be a positive multiple of the'
        f' attention tile, {tile}.'
    )
  if rows_per_micro_batch < 1:
    raise ValueError(
        f'rows_per_micro_batch is {rows_per_micro_batch}; it must be at least'
        ' 1.'
    )
  for sequence in sequences:
    _check(sequence, row_length)
  lengths = [len(sequence.tokens) for sequence in sequences]
  sizes = [-(-length // tile) for length in lengths]
  shape = rows_per_micro_batch, row_length
  shapes = [shape] * -(-len(sequences) // rows_per_micro_batch)
  places = _place(sizes, shapes, tile)
  assert places is not None  # There are as many rows as sequences.
  shapes = shapes[: max((batch for batch, _, _ in places), default=-1) + 1]
  for smaller in reversed(last if shapes else ()):
    others = [*shapes[:-1], smaller]
    if found := _place(sizes, others, tile):
      places, shapes = found, others
      break
  placements = [
      Placement(
          batch=batch,
          row=row,
          start=start * tile,
          length=length,
          origin=sequence.origin,
      )
      for (batch, row, start), length, sequence in zip(
          places, lengths, sequences, strict=True
      )
  ]
  positions = sum(rows * tokens for rows, tokens in shapes)
  return Packed(
      batches=_fill(sequences, placements, shapes),
      placements=placements,
      efficiency=sum(lengths) / positions if positions else 1.0,
  )


def check_tile(batch: TrainBatch, tile: int) -> None:
  """Refuses rows in which a segment starts within a tile.

  Attention would give its tokens other bits than in the rollout. Rows of a
  larger tile, a multiple of this one, are right.

  Args:
    batch: [B, T]. Of arrays on a device only the length of the rows is looked
      at, since to read them is to wait for them.
    tile: attention tile in tokens, see `Policy`.

  Raises:
    ValueError: rows of another length, or a segment that starts elsewhere than
      at a multiple of the tile.
  """
  fix = f'that of the policy is {tile} tokens: pack with tile=policy.tile'
  length = batch.tokens.shape[1]
  if length % tile:
    raise ValueError(
        f'rows have {length} tokens, which is no multiple of the attention'
        f' tile; {fix}'
    )
  positions, ids = batch.positions, batch.segment_ids
  if not (isinstance(positions, np.ndarray) and isinstance(ids, np.ndarray)):
    return
  rows, starts = np.nonzero((positions == 0) & (ids > 0))
  wrong = np.flatnonzero(starts % tile)
  if wrong.size:
    row, start = rows[wrong[0]], starts[wrong[0]]
    raise ValueError(
        f'in row {row} a segment starts at token {start}, which is no multiple'
        f' of the attention tile; {fix}'
    )


def unpack(
    values: SequenceOf[Shaped[Array | NpArray, '_B _T']], packed: Packed
) -> list[NpArray]:
  """Splits a per-token output into its sequences; the inverse of `pack`.

  Args:
    values: one [B, T] array per micro-batch, in order.
    packed: the result of `pack`.

  Returns:
    One array [length] per sequence, in the order that `pack` was given. The
    arrays are copies with the values' dtype and bits.

  Raises:
    ValueError: the number of micro-batches differs.
  """
  if len(values) != len(packed.batches):
    raise ValueError(
        f'There are values of {len(values)} micro-batches, but'
        f' {len(packed.batches)} were packed.'
    )
  # One transfer per micro-batch, not one per sequence.
  host = [sharding.to_host(value) for value in values]
  return [
      host[p.batch][p.row, p.start : p.start + p.length].copy()
      for p in packed.placements
  ]


def sequence_from_completion(
    completion: Completion,
    *,
    advantage: float,
    loss_weight: float,
    mask_truncated: bool,
    origin: int,
    is_scored: bool = True,
) -> Sequence:
  """Builds the training sequence of one sampled response.

  The loss mask is 1 on the sampled tokens, with stop tokens. The old log-probs
  are the rollout's. In a unified flow they equal the training forward's to the
  bit; otherwise replace the field with recomputed ones. The reference log-probs
  are 0 until they are computed.

  Args:
    completion: a response with its prompt.
    advantage: the advantage of all its tokens.
    loss_weight: the weight of each of its tokens, see `aggregation`.
    mask_truncated: whether to take a response that reached the length limit out
      of the loss (mask_truncated_completions).
    origin: see `Sequence`.
    is_scored: without a score a response is taken out of the loss, too.

  Returns:
    The sequence; at prompt tokens all fields except `tokens` are 0.
  """
  prompt, response = completion.prompt_tokens, completion.tokens
  counted = bool(
      masked_response_length(
          completion, mask_truncated=mask_truncated, is_scored=is_scored
      )
  )
  mask = _after(prompt, (completion.sampled & counted).astype(np.float32))
  return Sequence(
      tokens=np.concatenate([prompt, response]).astype(np.int32),
      loss_mask=mask,
      loss_weight=mask * np.float32(loss_weight),
      advantages=_after(prompt, np.full(len(response), advantage, np.float32)),
      log_mu=_after(prompt, completion.log_mu),
      rollout_logprobs=_after(prompt, completion.logprobs),
      old_logprobs=_after(prompt, completion.logprobs),
      ref_logprobs=np.zeros(len(mask), np.float32),
      weight_version=_after(prompt, completion.weight_version),
      origin=origin,
  )


def masked_response_length(
    completion: Completion, *, mask_truncated: bool, is_scored: bool = True
) -> int:
  """Returns the number of sampled tokens that count in the loss.

  Args:
    completion: a response.
    mask_truncated: responses that met the length limit do not count.
    is_scored: a response without a score does not.

  Returns:
    The tokens in the loss mask, for `aggregation.loss_weights`.
  """
  if not is_scored:
    return 0
  if mask_truncated and completion.finish_reason == 'length':
    return 0
  return int(np.count_nonzero(completion.sampled))


def _after(prompt: NpArray, values: NpArray) -> NpArray:
  """Returns the response's values after zeros for the prompt."""
  return np.concatenate([np.zeros(len(prompt), values.dtype), values])


def _round_up(value: int, multiple: int) -> int:
  return -(-value // multiple) * multiple


def _check(sequence: Sequence, row_length: int) -> None:
  length = len(sequence.tokens)
  if not 1 <= length <= row_length:
    raise ValueError(
        f'Sequence {sequence.origin} has {length} tokens; a row holds 1 to'
        f' {row_length}. Raise row_length or filter long prompts.'
    )
  for name in _DTYPES:
    shape = getattr(sequence, name).shape
    if shape != (length,):
      raise ValueError(
          f'Sequence {sequence.origin}: {name} has shape {shape}, tokens have'
          f' ({length},).'
      )
  if sequence.loss_mask[0] != 0:
    raise ValueError(
        f'Sequence {sequence.origin} has loss on its first token, which no'
        ' hidden state predicts.'
    )


def _place(
    sizes: list[int], shapes: SequenceOf[tuple[int, int]], tile: int
) -> list[tuple[int, int, int]] | None:
  """Returns each size's (micro-batch, row, start in tiles).

  Args:
    sizes: in tiles.
    shapes: of the micro-batches, in tokens.
    tile: tokens.

  Returns:
    None if there is no room for one of them.
  """
  # sorted() is stable: among equal sizes the earlier comes first.
  left = sorted(range(len(sizes)), key=lambda i: -sizes[i])
  places = [(0, 0, 0)] * len(sizes)
  for batch, (rows, length) in enumerate(shapes):
    for row in range(rows):
      start, chosen = 0, _best_fill([sizes[i] for i in left], length // tile)
      for n in chosen:
        places[left[n]] = batch, row, start
        start += sizes[left[n]]
      gone = set(chosen)
      left = [i for n, i in enumerate(left) if n not in gone]
      if not left:
        return places
  return None if left else places


def _best_fill(sizes: list[int], room: int) -> list[int]:
  """Returns which sizes fill a row best.

  Of all sums that fit it is the largest, of those equal the one of the earlier
  sizes: bit s of `sums[n]` says whether the first n have a sum s.

  Args:
    sizes: in tiles, the largest first.
    room: tiles of the row.
  """
  sums, fits = [1], (1 << (room + 1)) - 1
  for size in sizes:
    sums.append((sums[-1] | sums[-1] << size) & fits)
    if sums[-1] >> room:
      break
  total, chosen = sums[-1].bit_length() - 1, []
  for n in range(len(sums) - 1, 0, -1):
    if not sums[n - 1] >> total & 1:
      chosen.append(n - 1)
      total -= sizes[n - 1]
  return chosen[::-1]


def _fill(
    sequences: SequenceOf[Sequence],
    placements: list[Placement],
    shapes: SequenceOf[tuple[int, int]],
) -> list[TrainBatch]:
  """Writes the sequences' fields, positions and segment ids into batches."""
  dtypes = _DTYPES | {'positions': np.int32, 'segment_ids': np.int32}
  batches: list[dict[str, Any]] = [
      {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
      for shape in shapes
  ]
  segments: dict[tuple[int, int], int] = {}
  pairs = list(zip(placements, sequences, strict=True))
  # From left to right in each row, so that segment ids increase.
  for p, sequence in sorted(pairs, key=lambda pair: pair[0].start):
    place = p.row, slice(p.start, p.start + p.length)
    batch = batches[p.batch]
    for name in _DTYPES:
      batch[name][place] = getattr(sequence, name)
    batch['positions'][place] = np.arange(p.length)
    segments[p.batch, p.row] = segments.get((p.batch, p.row), 0) + 1
    batch['segment_ids'][place] = segments[p.batch, p.row]
  return [TrainBatch(**batch) for batch in batches]
