"""Draws what FP8 gives over BF16: python -m benchmarks.plot_speed.

Reads of each theme the newest benchmarks/results/THEME_qwen7b_h200_DATE.json
and writes docs/speed.png and docs/step.png. Both recipes of a row were measured
in one run.
"""

import json
import pathlib
import statistics

import matplotlib.pyplot as plt

from tools import figure_style

_RESULTS = pathlib.Path(__file__).parent / 'results'
# What the project set out for, for decode and update.
_AIM = 1.6
# Rows of the single dots drawn: a micro-batch of 8 x 4096 tokens.
_ROWS = 32768
# Phases of a step that are drawn; what is left of it is the rest.
_PHASES = {'gen': 'rollout', 'update_actor': 'update'}
# What is drawn of whole steps: the variant's name, and ours.
_STEPS = {
    'fp8_delayed+kv8': 'FP8, FP8 keys',
    'fp8_delayed': 'FP8',
    'bf16': 'BF16',
}
_COLORS = dict(
    zip(
        (*_PHASES.values(), 'rest'),
        (
            figure_style.BLUE,
            figure_style.VERMILLION,
            figure_style.GREY,
        ),
        strict=True,
    )
)


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
      'a GRPO step, as shipped': (step['BF16'], step['FP8']),
      'a step, FP8 keys': (step['BF16'], step['FP8, FP8 keys']),
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
  for name in _STEPS.values():
    spent = {
        label: statistics.median(_seconds(name, phase))
        for phase, label in _PHASES.items()
    }
    whole = statistics.median(_seconds(name, 'step'))
    found[name] = spent | {'rest': whole - sum(spent.values())}
  return found


def _seconds(name: str, phase: str) -> list[float]:
  """Returns a phase's seconds in every step but the first."""
  return [
      row[f'timing_s/{phase}']
      for row in _rows('grpo_step_one_update')
      if _STEPS.get(row['variant']) == name and row['step'] > 1
  ]


# Bars that several steps were measured for: what their FP8 is called there.
_RATIOS_OF = {
    'a GRPO step, as shipped': 'FP8',
    'a step, FP8 keys': 'FP8, FP8 keys',
}


def _ratio_range(name: str) -> tuple[float, float]:
  """Returns the least and the largest ratio of a BF16 step to one in FP8."""
  slow, fast = _seconds('BF16', 'step'), _seconds(name, 'step')
  return min(slow) / max(fast), max(slow) / min(fast)


def _rows(theme: str) -> list[dict]:
  path = max(_RESULTS.glob(f'{theme}_qwen7b_h200_*.json'))
  return json.loads(path.read_text(encoding='utf-8'))['rows']


def draw_phases() -> None:
  """Draws where a step's time goes, a bar per recipe."""
  figure, axes = plt.subplots(figsize=(7.5, 2.7))
  found = seconds_by_phase()
  for place, (name, spent) in enumerate(reversed(found.items())):
    left = 0.0
    for label, value in spent.items():
      color = _COLORS[label]
      axes.barh(place, value, left=left, color=color, height=0.65)
      if value > 3:
        said = f'{label}\n{value:.1f} s'
        middle = left + value / 2
        axes.text(
            middle,
            place,
            said,
            ha='center',
            va='center',
            color='white',
            fontsize=9,
        )
      left += value
    whole = _seconds(name, 'step')
    ends = [[left - min(whole)], [max(whole) - left]]
    axes.errorbar(left, place, xerr=ends, color='black')
    said = f'{left:.1f} s'
    axes.text(max(whole) + 1, place, said, va='center', weight='bold')
  axes.set_yticks(range(len(found)), list(reversed(found)))
  axes.set_xlim(0, 76)
  axes.set_xlabel(
      'seconds of a GRPO step: 32 x 8 answers of up to 2048 tokens'
      '\n(mean of steps 2 and 3; whiskers: the faster and the slower)'
  )
  axes.spines['left'].set_visible(False)
  axes.tick_params(axis='y', length=0)
  figure_style.without_grid(axes, along='y')
  axes.set_axisbelow(True)
  figure.suptitle('One H200, shape of Qwen2.5-7B, random weights')
  figure_style.save(figure, 'docs/step.png')


def main() -> None:
  """Draws a bar per measurement."""
  figure_style.use()
  draw_phases()
  found = speedups()
  figure, axes = plt.subplots(figsize=(7.5, 4.8))
  for place, (name, (slow, fast)) in enumerate(found.items()):
    single = name.startswith('one dot')
    ink = 'black' if single else 'white'
    color = figure_style.SKY if single else figure_style.BLUE
    axes.barh(place, slow / fast, color=color, height=0.7)
    digits = 2 if slow < 100 else 0
    said = f'{slow:,.{digits}f} to {fast:,.{digits}f} ms'
    axes.text(0.03, place, said, va='center', color=ink, fontsize=9)
    if name in _RATIOS_OF:
      low, high = _ratio_range(_RATIOS_OF[name])
      axes.errorbar(
          slow / fast,
          place,
          xerr=[[slow / fast - low], [high - slow / fast]],
          color='black',
      )
    said = f'{slow / fast:.2f}x '
    end = {'va': 'center', 'ha': 'right', 'weight': 'bold'}
    axes.text(slow / fast - 0.03, place, said, color=ink, **end)
  axes.set_yticks(range(len(found)), list(found))
  axes.set_ylim(len(found) - 0.5, -0.5)
  axes.axvline(1.0, color='black', lw=1, ls=':')
  # Behind the bars, whose numbers it would cross.
  line = dict(color=figure_style.VERMILLION, lw=1.5, ls='--', zorder=0)
  axes.plot([_AIM, _AIM], [-0.5, 4.5], **line)
  axes.text(
      2, -0.5, f'aimed at: {_AIM}x', color=figure_style.VERMILLION, ha='right'
  )
  axes.set_xlim(0, 2)
  axes.set_xlabel(
      f'times as fast as BF16 (one dot: at {_ROWS:,} rows)'
      '\nwhiskers: every step of FP8 over every step of BF16; others were'
      ' measured once'
  )
  figure.suptitle(
      'One H200, shape of Qwen2.5-7B, random weights: our FP8 beside our BF16'
  )
  figure_style.without_grid(axes, along='y')
  axes.set_axisbelow(True)
  figure_style.save(figure, 'docs/speed.png')


if __name__ == '__main__':
  main()
