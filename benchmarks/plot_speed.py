"""Draws what FP8 gives over BF16: python -m benchmarks.plot_speed.

Reads of each theme the newest benchmarks/results/THEME_qwen7b_h200_DATE.json
and writes docs/speed.png and docs/step.png. Both recipes of a row were measured
in one run.
"""

import json
import pathlib
import statistics

import matplotlib.pyplot as plt

_RESULTS = pathlib.Path(__file__).parent / 'results'
# What the project set out for, for decode and update.
_AIM = 1.6
# Rows of the single dots drawn: a micro-batch of 8 x 4096 tokens.
_ROWS = 32768
# Phases of a step that are drawn; what is left of it is the rest.
_PHASES = {
    'gen': 'rollout',
    'old_log_prob': 'score',
    'update_actor': 'update',
}
# What is drawn of whole steps: the variant's name, and ours.
_STEPS = {
    'fp8_delayed+kv8+selective+head8': 'FP8, FP8 head',
    'fp8_delayed+kv8+selective': 'FP8',
    'bf16+selective': 'BF16',
}
_COLORS = ('#1b6ca8', '#8fb8d8', '#c8553d', '#b9c6d3')


def speedups() -> dict[str, tuple[float, float]]:
  """Returns name -> (milliseconds in BF16, in FP8)."""
  decode = {
      row['variant']: row['ms_per_step']
      for row in _rows('rollout_chunk')
      if row['workload'] == '128x128x1x2048'
  }
  wide = {
      row['variant']: row['ms_per_step']
      for row in _rows('rollout_256slots_chunk')
  }
  update = {
      row['variant']: row['accumulate_ms'] for row in _rows('train_step_head8')
  }
  step = {
      name: 1000 * sum(spent.values())
      for name, spent in seconds_by_phase().items()
  }
  found = {
      'decode, 128 x 2048 tokens': (decode['bf16'], decode['fp8_delayed+kv8']),
      'decode, FP8 head': (decode['bf16'], decode['fp8_delayed+kv8+head8']),
      'decode, 256 x 1024 tokens': (wide['bf16'], wide['fp8_delayed+kv8']),
      'forward + backward, 8 x 4096': (update['bf16'], update['fp8_delayed']),
      'the same, FP8 head': (update['bf16'], update['fp8_delayed+head8']),
      'a GRPO step': (step['BF16'], step['FP8']),
      'a step, FP8 head': (step['BF16'], step['FP8, FP8 head']),
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


def seconds_by_phase() -> dict[str, dict[str, float]]:
  """Returns name -> phase -> median seconds of whole steps but the first."""
  found = {}
  for variant, name in _STEPS.items():
    rows = [
        row
        for row in _rows('grpo_step_selective')
        if row['variant'] == variant and row['step'] > 1
    ]

    def median(phase, rows=rows):
      return statistics.median(row[f'timing_s/{phase}'] for row in rows)

    spent = {label: median(phase) for phase, label in _PHASES.items()}
    found[name] = spent | {'rest': median('step') - sum(spent.values())}
  return found


def _rows(theme: str) -> list[dict]:
  path = max(_RESULTS.glob(f'{theme}_qwen7b_h200_*.json'))
  return json.loads(path.read_text(encoding='utf-8'))['rows']


def draw_phases() -> None:
  """Draws where a step's time goes, a bar per recipe."""
  figure, axes = plt.subplots(figsize=(7, 2.5), layout='constrained')
  found = seconds_by_phase()
  for place, (name, spent) in enumerate(reversed(found.items())):
    left = 0.0
    for (label, value), color in zip(spent.items(), _COLORS, strict=True):
      axes.barh(place, value, left=left, color=color, height=0.65)
      if value > 3:
        said = f'{label}\n{value:.1f} s'
        middle = left + value / 2
        ink = 'black' if color in _COLORS[1::2] else 'white'
        axes.text(
            middle, place, said, ha='center', va='center', color=ink, fontsize=9
        )
      left += value
    axes.text(left + 1, place, f'{left:.1f} s', va='center', weight='bold')
    axes.text(-1, place, name, va='center', ha='right')
  axes.set_yticks([])
  axes.set_xlim(0, 74)
  axes.set_xlabel('seconds of a GRPO step: 32 x 8 answers of up to 2048 tokens')
  axes.spines[['top', 'right', 'left']].set_visible(False)
  figure.savefig('docs/step.png', dpi=130)


def main() -> None:
  """Draws a bar per measurement."""
  draw_phases()
  found = speedups()
  figure, axes = plt.subplots(figsize=(7, 4.8), layout='constrained')
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
  # Behind the bars, whose numbers it would cross.
  line = dict(color='#c8553d', lw=1.5, ls='--', zorder=0)
  axes.plot([_AIM, _AIM], [-0.5, 4.5], **line)
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
