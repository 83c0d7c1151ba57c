"""Draws what FP8 gives over BF16: python -m benchmarks.plot_speed.

Reads benchmarks/results/*_qwen7b_h200_2026-11-21.json and writes
docs/speed.png. Both recipes of a row were measured in one run.
"""

import json
import pathlib

import matplotlib.pyplot as plt

_RESULTS = pathlib.Path(__file__).parent / 'results'
_RUN = 'qwen7b_h200_2026-11-21'
# What the project set out for, for decode and update.
_AIM = 1.6
# Rows of the single dots drawn: a micro-batch of 8 x 4096 tokens.
_ROWS = 32768


def speedups() -> dict[str, tuple[float, float]]:
  """Returns name -> (milliseconds in BF16, in FP8)."""
  decode = {
      row['variant']: row['ms_per_step']
      for row in _rows('rollout')
      if row['workload'] == '128x128x1x2048'
  }
  update = {row['variant']: row['accumulate_ms'] for row in _rows('train_step')}
  found = {
      'decode, 128 x 2048 tokens': (decode['bf16'], decode['fp8_delayed']),
      'the same, FP8 KV cache': (decode['bf16'], decode['fp8_delayed+kv8']),
      'forward + backward, 8 x 4096': (update['bf16'], update['fp8_delayed']),
  }
  dots = {
      (row['projection'], row['recipe']): row['us'] / 1000
      for row in _rows('gemm')
      if row['rows'] == _ROWS
  }
  for name in ('qkv', 'o', 'gate_up', 'down'):
    pair = dots[name, 'bf16'], dots[name, 'fp8_delayed']
    found[f'one dot: {name}'] = pair
  return found


def _rows(theme: str) -> list[dict]:
  path = _RESULTS / f'{theme}_{_RUN}.json'
  return json.loads(path.read_text(encoding='utf-8'))['rows']


def main() -> None:
  """Draws a bar per measurement."""
  found = speedups()
  figure, axes = plt.subplots(figsize=(7, 3.6), layout='constrained')
  for place, (name, (slow, fast)) in enumerate(found.items()):
    single = name.startswith('one dot')
    ink = 'black' if single else 'white'
    color = '#b9c6d3' if single else '#1b6ca8'
    axes.barh(place, slow / fast, color=color, height=0.7)
    digits = 2 if slow < 100 else 0
    said = f'{slow:,.{digits}f} to {fast:,.{digits}f} ms'
    axes.text(0.03, place, said, va='center', color=ink, fontsize=9)
    said = f'{slow / fast:.2f}x '
    end = {'va': 'center', 'ha': 'right', 'weight': 'bold'}
    axes.text(slow / fast, place, said, color=ink, **end)
  axes.set_yticks(range(len(found)), list(found))
  axes.set_ylim(len(found) - 0.5, -0.5)
  axes.axvline(1.0, color='black', lw=1, ls=':')
  axes.plot([_AIM, _AIM], [-0.5, 2.5], color='#c8553d', lw=1.5, ls='--')
  axes.text(_AIM + 0.02, 0, f'aimed at: {_AIM}x', color='#c8553d', va='center')
  axes.set_xlim(0, 2)
  axes.set_xlabel(f'times as fast as BF16 (one dot: at {_ROWS:,} rows)')
  figure.suptitle(
      'One H200, shape of Qwen2.5-7B, random weights: our FP8 beside our BF16',
      fontsize=10,
  )
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig('docs/speed.png', dpi=130)


if __name__ == '__main__':
  main()
