"""Micro-batches of a tiny run's answers, and the updates made of them."""

import dataclasses
import functools

import jax
import numpy as np

from jetrl_jax.optim import apply
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import packing
from jetrl_jax.rl.types import Completion, TrainBatch
from tests.rl import tiny_run
from tests.rl.tiny_run import LENGTH, ROWS, TILE, VOCAB, Run


def sequences(samples: list[Completion]) -> list[packing.Sequence]:
  """Advantages by turns; the reference is the policy itself."""
  tokens = sum(len(c.tokens) for c in samples)
  made = [
      packing.sequence_from_completion(
          c,
          advantage=(1.0, -1.0, 0.5)[i % 3],
          loss_weight=1 / tokens,
          mask_truncated=False,
          origin=i,
      )
      for i, c in enumerate(samples)
  ]
  return [dataclasses.replace(s, ref_logprobs=s.rollout_logprobs) for s in made]


def batches(samples: list[Completion]) -> list[TrainBatch]:
  """Packed micro-batches of [16, 32]."""
  return packing.pack(
      sequences(samples),
      row_length=LENGTH,
      rows_per_micro_batch=ROWS,
      tile=TILE,
  ).batches


def one_per_row(samples: list[Completion]) -> list[TrainBatch]:
  """The same sequences with no neighbours in their rows."""
  rows = [
      packing.pack(
          [s], row_length=LENGTH, rows_per_micro_batch=1, tile=TILE
      ).batches[0]
      for s in sequences(samples)
  ]
  assert not len(rows) % 8
  empty = jax.tree.map(np.zeros_like, rows[0])
  return [
      jax.tree.map(
          lambda *leaves: np.concatenate(leaves),
          *(rows[i : i + 8] + [empty] * (ROWS - 8)),
      )
      for i in range(0, len(rows), 8)
  ]


def in_micro_batches(samples: list[Completion], count: int) -> list[TrainBatch]:
  """Spreads the same sequences over `count` micro-batches of [16, 32]."""
  made = []
  for i in range(count):
    made += packing.pack(
        sequences(samples)[i::count],
        row_length=LENGTH,
        rows_per_micro_batch=ROWS,
        tile=TILE,
    ).batches
  return made


@functools.cache
def whole() -> tuple[apply.Gradients, list[np.ndarray]]:
  """What `accumulate` makes of all samples in the fewest micro-batches."""
  run = tiny_run.fp8_run()
  return run.accumulate(run.start, batches(tiny_run.completions()))


def mismatched(
    packed: list[TrainBatch], logprobs: list[np.ndarray]
) -> tuple[int, int]:
  """Returns (tokens whose bits differ from the rollout's, tokens)."""
  differ = tokens = 0
  for batch, logprobs_BT in zip(packed, logprobs, strict=True):
    mask = batch.loss_mask > 0
    ours = np.asarray(logprobs_BT)[mask].view(np.int32)
    theirs = np.asarray(batch.rollout_logprobs)[mask].view(np.int32)
    differ, tokens = differ + int((ours != theirs).sum()), tokens + len(ours)
  return differ, tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
  """One on-policy update.

  Attributes:
    before: the state that sampled.
    samples: its completions.
    batches: the micro-batches.
    logprobs: by `accumulate`, per micro-batch.
    scores: by `score`, per micro-batch.
    gradients: what was applied.
    info: what `apply` returned.
    applied: the state after `apply`.
    after: the state after `roll_inputs`.
  """

  before: TrainState
  samples: list[Completion]
  batches: list[TrainBatch]
  logprobs: list[np.ndarray]
  scores: list[np.ndarray]
  gradients: apply.Gradients
  info: apply.UpdateInfo
  applied: TrainState
  after: TrainState


@functools.cache
def updates(recipe: str) -> tuple[Update, ...]:
  """Three updates in a row, each with a new rollout; 'fp8' or 'bf16'."""
  run = {'fp8': tiny_run.fp8_run, 'bf16': tiny_run.bf16_run}[recipe]()
  before, made = run.start, []
  for i in range(3):
    samples = run.rollout(before, i, weight_version=i)
    packed = batches(samples)
    gradients, logprobs = run.accumulate(before, packed)
    applied, info = run.apply(before, gradients)
    after = dataclasses.replace(
        applied, fp8_state=run.step.roll_inputs(applied.fp8_state)
    )
    made.append(
        Update(
            before=before,
            samples=samples,
            batches=packed,
            logprobs=logprobs,
            scores=[run.score(before, b) for b in packed],
            gradients=gradients,
            info=info,
            applied=applied,
            after=after,
        )
    )
    before = after
  return tuple(made)


def next_logprobs(
    run: Run, params: TrainState, tokens: np.ndarray, temperature: float
) -> np.ndarray:
  """Log-probs of every token of the vocabulary after `tokens`, float32."""
  length = len(tokens) + 1
  tokens_VT = np.zeros((VOCAB, LENGTH), np.int32)
  tokens_VT[:, :length] = [[*tokens, v] for v in range(VOCAB)]
  index = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens_VT.shape)
  inside = index < length
  zeros = np.zeros(tokens_VT.shape, np.float32)
  fields = {f.name: zeros for f in dataclasses.fields(TrainBatch)}
  fields |= {
      'tokens': tokens_VT,
      'positions': np.where(inside, index, 0).astype(np.int32),
      'segment_ids': inside.astype(np.int32),
      'weight_version': np.zeros(tokens_VT.shape, np.int32),
  }
  whole = TrainBatch(**fields)
  scores = [
      run.score(
          params,
          jax.tree.map(lambda x, i=i: x[i : i + ROWS], whole),
          temperature,
      )
      for i in range(0, VOCAB, ROWS)
  ]
  return np.concatenate(scores)[:, length - 1]
