"""Numbers of docs/numerics.md are those of their files."""

import json
import math
import pathlib

import pytest

from study import statistics
from tools import exactness_record

_ROOT = pathlib.Path(__file__).parents[1]


def _text(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8')


def _percent(values: list[float]) -> list[str]:
  return [f'{100 * value:.1f}' for value in values]


def test_the_recipes_with_four_updates_are_those_of_their_file():
  path = (
      _ROOT / 'benchmarks/results/four_updates_quickstart_cpu_2026-11-27.json'
  )
  page = _text(_ROOT / 'docs/numerics.md')
  record = json.loads(path.read_text())
  runs = record['runs']
  assert len(runs) == 11 * 5 and not any(run['unequal'] for run in runs)

  def of(recipe, updates, name):
    return {
        run['seed']: run[name]
        for run in runs
        if (run['recipe'], run['updates_a_rollout']) == (recipe, updates)
    }

  for recipe, updates in {
      (run['recipe'], run['updates_a_rollout']) for run in runs
  }:
    ends, reference = (
        {
            seed: statistics.final(v)
            for seed, v in of(name, updates, 'accuracy').items()
        }
        for name in (recipe, 'bf16')
    )
    d = statistics.paired(ends, reference)
    against = '{:+.1f} ({:+.1f} to {:+.1f})'.format(
        *(100 * x for x in (d.mean, *d.interval))
    )
    k3 = of(recipe, updates, 'update_k3').values()
    clipped = of(recipe, updates, 'clipped').values()
    row = ' | '.join(
        [
            f'`{recipe}`',
            *_percent([sum(ends.values()) / 5]),
            '' if recipe == 'bf16' else against,
            f'{20 * sum(clipped):.2f}%' if updates > 1 else '0',
            # From Python 3.12 on `sum` rounds once; here that is a half.
            f'{math.fsum(k3) / 5:.4f}',
        ]
    ).replace('|  |', '| |')
    assert f'| {row} |' in page
  # Ten seeds of three arms, and BF16 from other masters.
  ends = {}
  for run in (*runs, *record['more']):
    if run['updates_a_rollout'] == 4:
      recipe = run['recipe']
      masters = 'stored' if recipe == 'bf16' else 'spread'
      arm = recipe, run.get('ratio', 'plain'), run.get('masters', masters)
      of_arm = ends.setdefault(arm, {})
      of_arm[run['seed']] = 100 * statistics.final(run['accuracy'])
  bf16, fp8 = (
      ends['bf16', 'plain', 'stored'],
      ends['fp8_delayed', 'plain', 'spread'],
  )
  smooth = ends['fp8_delayed', 'smooth', 'spread']
  spread = ends['bf16', 'plain', 'spread']
  assert len(bf16) == len(fp8) == len(smooth) == 2 * len(spread) == 10
  for ours, others, words in (
      (bf16, fp8, '{:.1f} points below `bf16` (95%: {:.1f} to {:.1f})'),
      (bf16, smooth, 'with these ratios {:.1f} ({:.1f} to {:+.1f})'),
      (bf16, spread, 'it ends {:.1f} points lower (95%: {:.1f} to {:+.1f})'),
      (smooth, fp8, '{:.1f} come back ({:.1f} to {:+.1f})'),
  ):
    d = statistics.paired(ours, others)
    assert words.format(d.mean, *d.interval) in page


def test_what_the_clip_meets_is_that_of_its_files():
  page, folder = _text(_ROOT / 'docs/numerics.md'), _ROOT / 'benchmarks/results'
  name = 'four_updates_rates_quickstart_cpu_2026-11-27.json'
  ends = {}
  for run in json.loads((folder / name).read_text(encoding='utf-8'))['runs']:
    assert run['unequal'] == 0
    of_arm = ends.setdefault((run['recipe'], run['lr'], run['ratio']), {})
    of_arm[run['seed']] = 100 * statistics.final(run['accuracy'])
  bf16, fp8, one = (
      ends[recipe, 1e-5, ratio]
      for recipe, ratio in (
          ('bf16', 'plain'),
          ('fp8_delayed', 'plain'),
          ('fp8_delayed', 'one'),
      )
  )
  assert (len(bf16), len(fp8), len(one)) == (6, 6, 5)
  d = statistics.paired(bf16, fp8)
  words = 'cost FP8 {:.1f} points (six seeds, {:.1f} to {:+.1f})'
  assert words.format(d.mean, *d.interval) in page
  d = statistics.paired(fp8, one)
  words = (
      'ends {:.1f} points lower than with it (five seeds, {:.1f} to {:+.1f})'
  )
  assert words.format(d.mean, *d.interval) in page
  falls = [ends[recipe, 5e-5, 'one'] for recipe in ('bf16', 'fp8_delayed')]
  assert [len(found) for found in falls] == [3, 3]
  bf16, fp8 = (sum(found.values()) / 3 for found in falls)
  assert f'BF16 falls to {bf16:.1f}% and FP8 to {fp8:.1f}% (three' in page

  name = 'clip_after_updates_qwen0_5b_cpu_2026-11-27.json'
  rows = json.loads((folder / name).read_text(encoding='utf-8'))['rows']
  rows = {(row['arm'], row['size']): row for row in rows}
  for size in ('2e-6', '2e-7', '2e-8'):
    cells = []
    for arm in ('BF16', '8-bit weights and inputs'):
      for of in ('all', 'rare'):
        both = (
            f'{100 * rows[arm, float(size)][f"clipped_{sign}_{of}"]:.1f}'
            for sign in ('positive', 'negative')
        )
        cells.append(', '.join(both) + '%')
    assert f'| {size} | {" | ".join(cells)} |' in page


def test_the_sides_with_four_updates_are_those_of_their_file():
  folder, page = _ROOT / 'benchmarks/results', _text(_ROOT / 'docs/numerics.md')
  ends: dict[tuple[str, str], dict[int, float]] = {}

  def add(arm, run):
    final = 100 * statistics.final(run['accuracy'])
    ends.setdefault((arm, run['recipe']), {})[run['seed']] = final

  file = folder / 'four_updates_quickstart_cpu_2026-11-27.json'
  before = json.loads(file.read_text(encoding='utf-8'))
  for run in before['runs']:
    if run['updates_a_rollout'] == 4:
      add('ppo', run)
  for run in before['more']:
    if run['ratio'] == 'plain':
      is_spread_bf16 = run['recipe'] == 'bf16' and run['masters'] == 'spread'
      add('spread' if is_spread_bf16 else 'ppo', run)
  file = folder / 'four_updates_sides_quickstart_cpu_2026-11-28.json'
  found = json.loads(file.read_text(encoding='utf-8'))['runs']
  for run in found:
    assert not run['unequal']
    add(run['arm'], run)

  def differ(one, other, seeds):
    found = statistics.paired(ends[one], ends[other])
    assert len(found.differences) == seeds
    return found

  def said(difference):
    return '{:+.1f} to {:+.1f}'.format(*difference.interval)

  spread, sides = ('spread', 'bf16'), [
      (side, 'fake_e4m3') for side in ('weights', 'inputs')
  ]
  weights, inputs = (differ(side, spread, 5) for side in sides)
  assert f'{weights.mean:.1f} points above BF16 from spread' in page
  assert f'masters ({said(weights)})' in page
  assert f'end {-inputs.mean:.1f} below ({said(inputs)})' in page
  between = differ(sides[0], sides[1], 5)
  assert f'are {between.mean:.1f} points ({said(between)})' in page
  fp8, bf16 = (('cispo', recipe) for recipe in ('fp8_delayed', 'bf16'))
  means = [sum(ends[arm].values()) / len(ends[arm]) for arm in (fp8, bf16)]
  assert [len(ends[fp8]), len(ends[bf16])] == [10, 5]
  words = 'end at {:.1f} in FP8 (ten seeds) and {:.1f} in BF16 (five)'
  assert words.format(*means) in page
  d = differ(fp8, bf16, 5)
  assert f'FP8 - BF16 is {d.mean:+.1f} ({said(d)})' in page
  less = [
      differ(('ppo', arm[1]), arm, seeds)
      for arm, seeds in ((fp8, 10), (bf16, 5))
  ]
  low, high = less[1].interval
  words = '{:.1f} less in FP8 ({}) and {:.1f} less in BF16 ({:.1f} to {:.1f})'
  assert (
      words.format(less[0].mean, said(less[0]), less[1].mean, low, high) in page
  )
  fp8, bf16 = (('one update', recipe) for recipe in ('fp8_delayed', 'bf16'))
  means = [sum(ends[arm].values()) / len(ends[arm]) for arm in (fp8, bf16)]
  d = differ(fp8, bf16, 10)
  four = [('ppo', arm[1]) for arm in (fp8, bf16)]
  means += [sum(ends[arm].values()) / len(ends[arm]) for arm in four]
  words = (
      '{:.1f} in FP8 and {:.1f} in BF16, ten seeds, where four end at {:.1f}'
      ' and {:.1f}. FP8 - BF16 is {:+.1f} ({}) with that one update and {:+.1f}'
  )
  with_four = differ(*four, 10).mean
  spread = differ(fp8, ('one update, spread masters', 'bf16'), 8)
  against = f'spread masters it is {spread.mean:+.1f} ({said(spread)}, eight'
  assert against in page
  assert words.format(*means, d.mean, said(d), with_four) in page


def test_a_real_models_gradients_after_an_update_are_those_of_their_file():
  name = 'later_gradients_qwen0_5b_h100_2026-11-28.json'
  text = (_ROOT / 'benchmarks/results' / name).read_text(encoding='utf-8')
  rows, found = json.loads(text)['rows'], []
  for variant in ('fp8_delayed+kv8', 'bf16'):
    mine = [row for row in rows if row['variant'] == variant]
    assert len(mine) == 3
    for of in ('ppo_cosine', 'cispo_cosine', 'one_cosine', 'ppo_drift'):
      found.append(f'{sum(row[of] for row in mine) / 3:.2f}')
  page = _text(_ROOT / 'docs/numerics.md')
  said = (
      'in FP8 {} in PPO, {} in CISPO and {} with ratios of 1,'
      ' in BF16 {}, {} and {}'
  )
  assert said.format(*found[:3], *found[4:7]) in page
  drifts = f'{found[3]} times as long as the gradient, in BF16 {found[7]} times'
  assert drifts in page


@pytest.mark.parametrize(('name', 'rollouts'), [('', 12), ('small_rate_', 8)])
def test_the_gradients_after_an_update_are_those_of_their_files(name, rollouts):
  file = f'later_gradients_{name}quickstart_cpu_2026-11-27.json'
  text = (_ROOT / 'benchmarks/results' / file).read_text(encoding='utf-8')
  rows, found = json.loads(text)['rows'], {}
  for variant in ('fp8_delayed', 'bf16'):
    mine = [row for row in rows if row['variant'] == variant]
    assert len(mine) == rollouts
    found[variant] = [
        f'{sum(row[f"{of}_cosine"] for row in mine) / rollouts:.2f}'
        for of in ('ppo', 'cispo', 'one')
    ]
  page = _text(_ROOT / 'docs/numerics.md')
  fp8, bf16 = found['fp8_delayed'], found['bf16']
  words = 'in BF16 {}, {} and {}'.format(*bf16)
  if name:
    words = 'in FP8 {}, {} and {}, '.format(*fp8) + words
  else:
    said = "in FP8 {} with PPO's ratios, {} with CISPO's, {} with ratios of 1; "
    words = said.format(*fp8) + words
  assert words in page


def test_the_record_of_exactness_is_that_of_the_results():
  page = _text(exactness_record.OUTPUT)
  stale = page != exactness_record.render(page)
  assert not stale, 'run: python -m tools.exactness_record'
