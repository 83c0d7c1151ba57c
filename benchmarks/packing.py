"""Counts micro-batches of updates, by the lengths of answers alone.

    python -m benchmarks.packing --output=benchmarks/results/NAME

Lengths are those that `benchmarks.scaling` draws: seed 0, the quickstart's
prompts, 32 x 8 answers a device and step, half to all of the longest. A
micro-batch takes the same time whether it is full or not, so their number, with
a half for one of half of the size, is what an update takes. The least is what
the tokens fill if nothing is left empty. For comparison: full micro-batches,
and in each row the longest sequence first that fits.
"""

import numpy as np
from absl import app, flags

from benchmarks import common, launch
from configs import base
from jetrl_jax.config import build
from jetrl_jax.config.sections import take
from jetrl_jax.data import PromptSampler, Tokenizer
from jetrl_jax.data.settings import DataConfig
from jetrl_jax.rl import packing, synthetic

_CASES = flags.DEFINE_list(
    'cases',
    ['2048x0x64x8', '3072x200x1024x4'],
    'LONGEST ANSWER x PROMPT (0: its own) x LONGEST PROMPT x SEQUENCES of full'
    ' length that a device has room for, in one row.',
)
_DEVICES = flags.DEFINE_list(
    'devices', ['1', '2', '4', '8'], 'Numbers of them.'
)
_SIZES = flags.DEFINE_list('sizes', ['0', '1', '2', '3'], 'Smaller ones.')
_STEPS = flags.DEFINE_integer('steps', 6, 'Of four updates of 64 answers each.')
_TILE = 64
_COLUMNS = (
    ('case', 'case', ''),
    ('devices', 'devices', 'd'),
    ('sizes', 'smaller_micro_batches', 'd'),
    ('least', 'least', '.2f'),
    ('first_fit', 'by first fit', '.2f'),
    ('micro_batches', 'micro-batches an update', '.2f'),
    ('efficiency', 'positions that hold a token', '.1%'),
)


def _sequence(length: int, origin: int) -> packing.Sequence:
  """Returns a sequence of zeros."""
  names = [n for n in packing.Sequence.__annotations__ if n != 'origin']
  zeros = np.zeros(length, np.float32)
  return packing.Sequence(**dict.fromkeys(names, zeros), origin=origin)


def _updates(longest: int, prompt: int, devices: int) -> list[list[int]]:
  """Returns the lengths of each update's sequences, four updates a step."""
  example = launch.ROOT / launch.EXAMPLE
  config = base.get_config()
  config.data.template, config.data.max_prompt_length = '{prompt}', 64
  data = build.build_dataset(
      take(DataConfig, config),
      (str(example / 'train.jsonl'),),
      Tokenizer(example / 'model_init'),
  )
  sampler = PromptSampler(
      num_prompts=len(data), seed=0, shuffle=True, fingerprint=data.fingerprint
  )
  found: list[list[int]] = []
  for step in range(_STEPS.value):
    prompts = [data[i] for i in sampler.next_batch(32 * devices)]
    own = np.asarray([[prompt or len(p.tokens)] for p in prompts])
    limits = synthetic.response_limits(0, step, prompts, 8, longest, 'uniform')
    found += (limits + own).reshape(4, -1).tolist()
  return found


def _first_fit(lengths: list[int], row_length: int, rows: int) -> int:
  """Returns the micro-batches where the longest comes first, where it fits."""
  used: list[int] = []
  for size in sorted((-(-n // _TILE) for n in lengths), reverse=True):
    room = row_length // _TILE - size
    row = next((n for n, u in enumerate(used) if u <= room), len(used))
    used += [0] * (row == len(used))
    used[row] += size
  return -(-len(used) // rows)


def _rows(case: str, devices: int) -> list[dict]:
  answer, prompt, longest_prompt, per_row = map(int, case.split('x'))
  longest = answer + longest_prompt
  shape = packing.batch_shape(
      longest,
      micro_batch_size=per_row,
      packed_rows=1,
      tile=_TILE,
      devices=devices,
  )
  full, rows = shape[0] * shape[1], []
  updates = _updates(answer, prompt, devices)
  first_fit = [_first_fit(x, shape[1], shape[0]) for x in updates]
  for sizes in map(int, _SIZES.value):
    last = packing.halved_shapes(
        shape, longest, tile=_TILE, devices=devices, count=sizes
    )
    packed = [
        packing.pack(
            [_sequence(length, n) for n, length in enumerate(lengths)],
            row_length=shape[1],
            rows_per_micro_batch=shape[0],
            tile=_TILE,
            last=last,
        )
        for lengths in updates
    ]
    positions = [sum(b.tokens.size for b in p.batches) for p in packed]
    rows.append(
        {
            'case': case,
            'devices': devices,
            'sizes': sizes,
            'first_fit': float(np.mean(first_fit)),
            'first_fit_by_update': first_fit,
            'least': float(np.mean([sum(x) for x in updates]) / full),
            'micro_batches': float(np.mean(positions) / full),
            'micro_batches_by_update': [count / full for count in positions],
            'efficiency': float(np.mean([p.efficiency for p in packed])),
        }
    )
  return rows


def main(argv: list[str]) -> None:
  """Counts them."""
  if argv[1:]:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  rows = [
      row
      for case in _CASES.value
      for devices in map(int, _DEVICES.value)
      for row in _rows(case, devices)
  ]
  common.write(rows, {}, common.table(rows, _COLUMNS), 'none')


if __name__ == '__main__':
  common.run(main)
