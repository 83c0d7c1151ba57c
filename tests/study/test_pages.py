"""The numbers of the study pages are those of its runs."""

import functools
import itertools
import json
import pathlib
import re
from statistics import median

import numpy as np
import pytest
from scipy import stats

from jetrl_jax.rl.settings import GUARD_MAX_K3, GuardConfig
from study import arms, results, statistics

_ROOT = pathlib.Path(__file__).parents[2]


def _text(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8')


def _study() -> str:
  """Returns the design and the pages of its cells."""
  pages = 'study', 'study_gsm8k', 'study_math', 'study_sums'
  return '\n'.join(_text(_ROOT / f'docs/{page}.md') for page in pages)


def _cut_off(arm: str, kind: str = 'cut_off') -> list[dict[str, float]]:
  """Returns what was kept of a run of the main cell that did not end."""
  file = f'benchmarks/results/gsm8k_{arm}_{kind}_h200_2026-11-28.json'
  return json.loads(_text(_ROOT / file))['rows']


def _pooled(finals, pair):
  """The 95% interval of a difference, its deviation that of three arms.

  Returns points by which the second arm is higher.
  """
  table = np.array(
      [
          [100 * finals[arm, 'core'][seed] for seed in (1, 2, 3)]
          for arm in ('jetrl', 'bf16', 'fp8_rollout')
      ]
  )
  rest = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
  deviation = np.sqrt((rest**2).sum() / 4)
  t_of_four_degrees = 2.7764
  half = t_of_four_degrees * deviation * np.sqrt(2 / 3)
  names = ('jetrl', 'bf16', 'fp8_rollout')
  low, high = (table[names.index(arm)].mean() for arm in pair)
  return high - low - half, high - low + half


def _of_the_long_cell(folder: str, arm: str):
  """Returns the run of seed 1, its right answers at both ends, the final."""
  run = next(r for r in _runs((folder,)) if r.arm.name == f'math_{arm}')
  assert run.seed == 1
  steps = {line['step']: line for line in run.rows}
  right = [
      10 * sum(steps[s]['critic/acc/mean'] for s in range(first, first + 10))
      for first in (1, 51)
  ]
  final = statistics.final([value for _, value in run.accuracy()])
  return run, right, 100 * final


def _finals(folders, arm, precision='core') -> dict[int, float]:
  curves = _curves(folders, arm, precision)
  return {seed: statistics.final(curve) for seed, curve in curves.items()}


def _said(ours: dict[int, float], others: dict[int, float]) -> list[float]:
  """Returns a paired difference and its interval, in points."""
  d = statistics.paired(ours, others)
  return [100 * x for x in (d.mean, *d.interval)]


# The main cell's runs of docs/study.md.
_MAIN = (
    'gsm8k_h100_2026-11-25',
    'gsm8k_h200_2026-11-27',
    'gsm8k_seed3_h200_2026-11-27',
    'gsm8k_seeds45_h100_2026-11-27',
    'gsm8k_mixed_h100_2026-11-27',
    'gsm8k_flashrl_h100_2026-11-27',
    'gsm8k_qurl_h100_2026-11-27',
    'gsm8k_qurl_seed2_h200_2026-11-28',
    'gsm8k_qurl_seed3_h200_2026-11-28',
    'gsm8k_block_h100_2026-11-28',
    'gsm8k_block_seeds23_h200_2026-11-28',
    'gsm8k_inexact_h200_2026-11-28',
    'gsm8k_inexact_seed2_h200_2026-11-28',
    'gsm8k_inexact_seed3_h200_2026-11-28',
    'gsm8k_bf16_inexact_h200_2026-11-28',
    'gsm8k_bf16_inexact_seed2_h200_2026-11-29',
    'gsm8k_bf16_inexact_seed3_h200_2026-11-29',
)


@functools.cache
def _runs(folders: tuple[str, ...]) -> list[results.Run]:
  root = _ROOT / 'benchmarks/results/study'
  return results.read(*(root / folder for folder in folders))


def _curves(
    folders: tuple[str, ...], arm: str, precision: str
) -> dict[int, list[float]]:
  """Returns held-out accuracies by step, of every seed of an arm."""
  return {
      run.seed: [value for _, value in run.accuracy(precision)]
      for run in _runs(folders)
      if run.arm.name == arm
  }


def _mean(curves: dict[int, list[float]]) -> list[float]:
  return [sum(v) / len(v) for v in zip(*curves.values(), strict=True)]


def _percent(values: list[float]) -> list[str]:
  return [f'{100 * value:.1f}' for value in values]


def test_the_accuracies_of_the_real_run_are_those_of_its_files():
  study, readme = _study(), _text(_ROOT / 'README.md')
  config = ' '.join(_text(_ROOT / 'configs/qwen0_5b.py').split())
  five = 'jetrl', 'bf16', 'fp8_rollout'
  three = 'flashrl', 'qurl', 'jetrl_block', 'jetrl_inexact'
  curves = {
      (arm, side): _curves(_MAIN, f'gsm8k_{arm}', side)
      for arm in (*five, *three)
      for side in ('core', 'bf16')
  }
  means = {key: _mean(found) for key, found in curves.items()}
  for (arm, side), found in curves.items():
    seeds = 5 if arm in five else 3
    assert sorted(found) == [1, 2, 3, 4, 5][:seeds]
    row = f'`{arm}`'
    if arm != 'bf16':
      row += ', in FP8' if side == 'core' else ', in BF16'
    row += f', mean of {"five" if seeds == 5 else "three"} seeds'
    assert ' | '.join([f'| {row}', *_percent(means[arm, side])]) in study
  for arm in (*five, *three):
    found = curves[arm, 'core'].values()
    for row, values in (
        # Of steps 0, 20 .. 200 those from 60 on.
        ('endpoint', [sum(curve[3:]) / len(curve[3:]) for curve in found]),
        ('after 200 steps', [curve[-1] for curve in found]),
    ):
      *values, mean = _percent([*values, sum(values) / len(values)])
      values += [''] * (5 - len(values))
      line = ' | '.join([f'| {row}, `{arm}`', *values, mean])
      assert line.replace('  ', ' ') in study
  ours, theirs = means['jetrl', 'core'], means['bf16', 'core']
  first, last = _percent([ours[0], ours[-1]])
  assert f'from {first}% to {last}% in 200 steps' in readme
  first, last = _percent([theirs[0], theirs[-1]])
  assert f'our BF16 from {first}% to {last}%' in readme
  # All seeds are named, the lower ends too.
  pairs = [
      _percent([curve[0], curve[-1]])
      for _, curve in sorted(curves['jetrl', 'core'].items())
  ]
  ends = '{}%, {}%, {}%, {}% and {}%'.format(*(end for _, end in pairs))
  assert ends in readme
  assert 'from {} to {} percent'.format(*pairs[0]) in config
  assert all('from {} to {}'.format(*pair) in config for pair in pairs)
  first = pairs[0][0]
  assert f'gsm8k_test/acc/mean@1 {first}%' in _text(_ROOT / 'docs/tutorial.md')


def test_what_is_said_of_the_mixed_flow_is_what_the_design_concludes():
  study, readme = _study(), _text(_ROOT / 'README.md')
  pairs = (
      ('jetrl', 'bf16'),
      ('fp8_rollout', 'bf16'),
      ('jetrl', 'fp8_rollout'),
      ('flashrl', 'bf16'),
      ('flashrl', 'jetrl'),
      ('flashrl', 'fp8_rollout'),
      ('qurl', 'bf16'),
      ('jetrl_block', 'bf16'),
      ('jetrl', 'jetrl_inexact'),
      ('jetrl_block', 'jetrl'),
      ('bf16', 'bf16_inexact'),
  )
  found = {}
  for precision, row in (('bf16', 'in BF16, '), ('core', '')):
    for pair in pairs:
      if row and pair == ('bf16', 'bf16_inexact'):
        continue  # These are in BF16 anyway.
      ends = []
      for arm in pair:
        curves = _curves(_MAIN, f'gsm8k_{arm}', precision)
        # Of steps 0, 20 .. 200 those from 60 on.
        ends.append({s: sum(c[3:]) / len(c[3:]) for s, c in curves.items()})
      shared = ends[0].keys() & ends[1].keys()
      ends = [{s: end[s] for s in shared} for end in ends]
      d = found[pair] = statistics.paired(*ends)
      mean, low, high = (f'{100 * x:+.1f}' for x in (d.mean, *d.interval))
      assert any(
          line.startswith(f'| {row}`{pair[0]}` - `{pair[1]}` | ')
          and line.endswith(f' | {mean} | {low} to {high} |')
          for line in study.splitlines()
      )
  assert statistics.is_as_good(found[pairs[0]], 5) == 'not decided'
  p_values = {
      names: found[tuple(name.removeprefix('gsm8k_') for name in names)].p_value
      for names in arms.SECONDARY
  }
  assert len(p_values) == 7
  adjusted = statistics.holm(p_values)
  below_bf16 = adjusted['gsm8k_fp8_rollout', 'gsm8k_bf16']
  below_jetrl = adjusted['gsm8k_jetrl', 'gsm8k_fp8_rollout']
  assert f'below `bf16` (p {below_bf16:.2g} after Holm' in study
  assert f'below `jetrl` (p {below_jetrl:.2g})' in study
  assert max(below_bf16, below_jetrl) < 0.05
  for arm, said in (
      ('flashrl', '1.0 points below `bf16` (p {:.2f} after'),
      ('qurl', '2.4 points below `bf16` (8.5 below to 3.7 above; p {:.2f})'),
      (
          'jetrl_block',
          '2.2 points below `bf16` (5.6 below to 1.1 above; p {:.2f} after',
      ),
  ):
    assert said.format(adjusted[f'gsm8k_{arm}', 'gsm8k_bf16']) in study
  before = found['jetrl', 'jetrl_inexact'].p_value
  after = adjusted['gsm8k_jetrl', 'gsm8k_jetrl_inexact']
  assert f'p {after:.3f} after Holm' in study
  assert f'and {before:.3f} before it' in study
  d = found['jetrl', 'jetrl_inexact']
  mean, low, high = (100 * x for x in (d.mean, *d.interval))
  for page in ('README.md', 'docs/flows.md'):
    text = _text(_ROOT / page)
    said = f'(95%: {low:.1f} to {high:.1f}'
    assert re.search(rf'{mean:.1f} points \S+( than `jetrl`)? ', text), page
    assert said in text, page
  for other, pages in (
      ('jetrl', ('README.md', 'docs/flows.md', 'docs/limits.md')),
      ('bf16', ('README.md', 'docs/flows.md')),
  ):
    d = found['flashrl', other]
    mean, low, high = (
        100 * x for x in (-d.mean, -d.interval[0], d.interval[1])
    )
    said = re.compile(
        rf'{mean:.1f} (points )?below (one FP8 flow |BF16 )?'
        rf'\({low:.1f} below to {high:.1f} above\)'
    )
    for page in pages:
      assert said.search(' '.join(_text(_ROOT / page).split())), page
  d = found['jetrl', 'fp8_rollout']
  mean, low, high = (100 * x for x in (d.mean, *d.interval))
  said = f'points below one FP8 flow (95%: {low:.1f} to {high:.1f})'
  for page in (readme, _text(_ROOT / 'docs/limits.md')):
    assert f'{mean:.1f} {said}' in ' '.join(page.split())


def test_the_answers_in_short_are_those_of_all_runs_of_the_main_cell():
  page = _text(_ROOT / 'docs/study.md')
  short = page[page.index('## In short') : page.index('## Cells')]
  rows = [line for line in short.splitlines() if ' | ' in line]
  ends = {}
  for run in _runs(_MAIN):
    points = [value for step, value in run.accuracy() if step >= 60]
    ends.setdefault(run.arm.name, {})[run.seed] = sum(points) / len(points)
  p_values = {}
  questions = (arms.PRIMARY, *arms.SECONDARY)
  for ours, others in questions:
    seeds = sorted(ends[ours].keys() & ends[others].keys())
    a, b = ({s: ends[arm][s] for s in seeds} for arm in (ours, others))
    d = statistics.paired(a, b)
    p_values[ours, others] = d.p_value
    values = (100 * x for x in (d.mean, *d.interval))
    said = '{:+.1f} ({:+.1f} to {:+.1f})'.format(*values)
    (row,) = [row for row in rows if f'| {said} |' in row]
    named = {3: 'three', 5: 'five'}[len(seeds)]
    assert f' | {named} | ' in row
    # A flow and what it is held against: each by its name, or as BF16.
    for arm in {ours, others} - {'gsm8k_jetrl', 'gsm8k_bf16'}:
      name = f'`{arm.removeprefix("gsm8k_")}`'
      assert name in row or 'mixed flow without a correction |' in row
  del p_values[arms.PRIMARY]
  adjusted = statistics.holm(p_values)
  for question, said in (
      (('gsm8k_fp8_rollout', 'gsm8k_bf16'), '**lower** (p {:.2g})'),
      (('gsm8k_jetrl', 'gsm8k_fp8_rollout'), '**higher** (p {:.1g})'),
      (('gsm8k_jetrl', 'gsm8k_jetrl_inexact'), 'differ (p {:.2g}, before'),
  ):
    assert said.format(adjusted[question]) in short
  differ = [q for q, p in adjusted.items() if p < 0.05]
  assert len(differ) == short.count('**lower**') + short.count('**higher**')


def test_slopes_of_accuracy_are_those_of_the_study():
  study = _study()
  steps = np.arange(60, 201, 20)

  def slopes(arm, side):
    curves = _curves(_MAIN, f'gsm8k_{arm}', side)
    return {
        seed: np.polyfit(steps, curve[3:], 1)[0]
        for seed, curve in curves.items()
    }

  def interval(of, by='{:.1f} ({:+.1f} to {:+.1f}'):
    zero = dict.fromkeys(of, 0.0)
    d = statistics.paired(of, zero)
    # Points in 100 steps, of shares a step.
    return by.format(*(1e4 * x for x in (d.mean, *d.interval)))

  mixed = slopes('fp8_rollout', 'core')
  assert f'`fp8_rollout` {interval(mixed)};' in study
  read = interval(slopes('fp8_rollout', 'bf16'), '{:.1f}, {:.1f} to {:.1f}')
  assert f'read in BF16 {read})' in study
  for other, said in (('jetrl', 'below `jetrl`'), ('bf16', 'below `bf16`')):
    theirs = slopes(other, 'core')
    d = statistics.paired(theirs, mixed)
    low, high = (1e4 * x for x in d.interval)
    text = f'{1e4 * d.mean:.1f} ({low:.1f} to {high:.1f}) {said}'
    assert text in study
  ends = {
      arm: [sum(c[3:]) for c in _curves(_MAIN, f'gsm8k_{arm}', 'core').values()]
      for arm in ('fp8_rollout', 'jetrl', 'bf16')
  }
  assert max(ends['fp8_rollout']) < min(*ends['jetrl'], *ends['bf16'])
  assert [len(of) for of in ends.values()] == [5, 5, 5]


def test_the_guard_would_have_warned_when_its_page_says():
  patience = GuardConfig().patience

  def steps(arm):
    acts, best = {}, {}
    for run in _runs(_MAIN):
      if run.arm.name != f'gsm8k_{arm}':
        continue
      over = 0
      for step, k3 in run.series('rollout_corr/k3_kl'):
        over = over + 1 if k3 > GUARD_MAX_K3 else 0
        if over == patience:
          acts[run.seed] = step
          break
      best[run.seed] = max(run.accuracy(), key=lambda point: point[1])[0]
    return acts, best

  page = _text(_ROOT / 'docs/guard.md')
  for found in (*steps('fp8_rollout'), steps('flashrl')[0]):
    *first, last = (found[seed] for seed in sorted(found))
    assert f'at steps {", ".join(map(str, first))} and {last}' in page


def test_runs_of_bf16_without_equal_bits_are_those_of_their_files():
  study = _study()
  curves = _curves(_MAIN, 'gsm8k_bf16_inexact', 'core')
  assert list(curves) == [1, 2, 3]
  cells = ['| `bf16_inexact`, in BF16, mean of three seeds']
  assert ' | '.join(cells + _percent(_mean(curves))) in study
  exact = _curves(_MAIN, 'gsm8k_bf16', 'core')
  for row, values in (
      ('endpoint', [sum(c[3:]) / len(c[3:]) for c in curves.values()]),
      ('after 200 steps', [c[-1] for c in curves.values()]),
  ):
    cells = ' | '.join(_percent(values))
    (mean,) = _percent([sum(values) / len(values)])
    assert f'| {row}, `bf16_inexact` | {cells} | | | {mean} | |' in study
  ends = _percent([sum(c[3:]) / len(c[3:]) for c in curves.values()])
  theirs = _percent([sum(exact[s][3:]) / len(exact[s][3:]) for s in curves])
  both = zip(ends, theirs, strict=True)
  assert f': {", ".join(" and ".join(pair) for pair in both)}.' in study
  said = '({}, {} and {}%, exact {}, {} and {})'.format(*ends, *theirs)
  assert said in _text(_ROOT / 'docs/flows.md')
  # The first run of the second seed has every test but the last.
  first = _cut_off('bf16_inexact_seed2')
  assert first[-1]['step'] == 199
  tests = [row['accuracy'] for row in first if 'accuracy' in row]
  assert ' and '.join(_percent(tests)[-2:]) in _text(_ROOT / 'docs/study.md')
  stands = _percent(
      [sum(of) / len(of) for of in (tests[3:], curves[2][3:-1], exact[2][3:-1])]
  )
  said = 'it stood at {}% then and at {} now, its exact pair at {}:'
  assert said.format(*stands) in study


def test_what_is_said_of_smooth_keys_is_in_the_files_of_both_runs():
  page = _text(_ROOT / 'docs/study_gsm8k.md')
  (smooth,) = _runs(('gsm8k_smooth_keys_h200_2026-11-29',))
  pair = {r.arm.name: r for r in _runs(_MAIN) if r.seed == smooth.seed == 2}
  named = (
      ('`jetrl` with smooth keys', smooth),
      ('`jetrl`', pair['gsm8k_jetrl']),
      ('`bf16`', pair['gsm8k_bf16']),
  )
  for name, run in named:
    curve = [value for step, value in run.accuracy() if step <= 120]
    cells = _percent([*curve, sum(curve[3:]) / len(curve[3:])])
    assert f'| {" | ".join([name, *cells])} |' in page
  unequal = [x for _, x in smooth.series('training/mismatch_token_frac')]
  assert len(unequal) == 120 and not any(unequal)
  moved = [
      [x for step, x in run.series('actor/update_k3') if step <= 120]
      for run in (smooth, pair['gsm8k_jetrl'])
  ]
  said = 'by {:.3f} (median over its 120 steps), without smooth keys by {:.3f}'
  assert said.format(*map(median, moved)) in page
  assert 'at most by {:.3f} and {:.3f}.'.format(*map(max, moved)) in page


def test_what_is_said_of_the_papers_recipe_is_in_its_files():
  study = _study()
  page = study[study.index("## The paper's recipe") : study.index('## Time')]
  runs = [run for run in _runs(_MAIN) if run.arm.name == 'gsm8k_jetrl_block']
  assert [run.seed for run in runs] == [1, 2, 3]
  unequal = [
      x for run in runs for _, x in run.series('training/mismatch_token_frac')
  ]
  assert len(unequal) == 600 and not any(unequal)
  assert 'no token was unequal in 600 steps' in page
  best = [max(run.accuracy(), key=lambda point: point[1]) for run in runs]
  said = 'at steps {}, {} and {} ({}, {} and {}%)'
  shares = _percent([share for _, share in best])
  assert said.format(*(step for step, _ in best), *shares) in page
  moved = [median(x for _, x in run.series('actor/update_k3')) for run in runs]
  assert f'(k3 {min(moved):.3f} to {max(moved):.3f}, medians' in page
  ends = [
      median([x for _, x in run.series('actor/grad_norm')][-20:])
      for run in runs
  ]
  assert f'ends at {min(ends):.2f} to {max(ends):.2f}' in page
  ours, theirs = (
      [
          100 * sum(curve[3:]) / len(curve[3:])
          for curve in _curves(_MAIN, f'gsm8k_{arm}', 'core').values()
      ]
      for arm in ('jetrl_block', 'bf16')
  )
  test = stats.ttest_ind(ours, theirs, equal_var=False)
  ends = np.mean(ours) - np.mean(theirs), *test.confidence_interval()
  assert '{:.1f} ({:.1f} to {:.1f}, Welch)'.format(*ends) in page
  d = statistics.paired(
      *({i: e / 100 for i, e in enumerate(of)} for of in (ours, theirs[:3]))
  )
  values = (100 * x for x in (-d.mean, -d.interval[0], d.interval[1]))
  said = 'it is {:.1f} below ({:.1f} below to {:.1f} above, three seeds)'
  assert said.format(*values) in _text(_ROOT / 'README.md')


def test_flows_without_equal_bits_are_those_of_their_files():
  study = _study()
  runs = {(run.arm.name, run.seed): run for run in _runs(_MAIN)}
  endpoints = {}
  for arm, seed in (
      *itertools.product(('jetrl', 'jetrl_inexact', 'fp8_rollout'), (1, 2, 3)),
      *itertools.product(('bf16', 'bf16_inexact'), (1, 2, 3)),
  ):
    run = runs[f'gsm8k_{arm}', seed]

    def ends(name, form, run=run):
      values = [value for _, value in run.series(name)]
      both = median(values[:20]), median(values[-20:])
      return ', '.join(form.format(x) for x in both) if any(both) else '0'

    unequal = median(x for _, x in run.series('training/mismatch_token_frac'))
    far = [step for step, k3 in run.series('actor/update_k3') if k3 > 1]
    cells = [
        f'{unequal:.0%}' if unequal else '0',
        ends('rollout_corr/k3_kl', '{:.2g}'),
        ends('actor/grad_norm', '{:.2f}'),
        f'{len(far)} of 200, the first at step {far[0]}' if far else '0',
    ]
    for side in ('core', 'bf16'):
      curve = _curves(_MAIN, f'gsm8k_{arm}', side)[seed]
      endpoints[arm, side, seed] = sum(curve[3:]) / len(curve[3:])
      cells += _percent([endpoints[arm, side, seed]])
    cells += _percent(_curves(_MAIN, f'gsm8k_{arm}', 'core')[seed][-1:])
    assert f'{" | ".join([f"| `{arm}`, seed {seed}", *cells])} |' in study
  inexact = [endpoints['jetrl_inexact', 'core', seed] for seed in (1, 2, 3)]
  assert '{}, {} and {}, are below'.format(*_percent(inexact)) in _text(
      _ROOT / 'README.md'
  )
  exact = _curves(_MAIN, 'gsm8k_jetrl', 'core')
  assert len(exact) == 5
  lowest = min(sum(curve[3:]) / len(curve[3:]) for curve in exact.values())
  assert max(inexact) < lowest


def test_runs_that_were_cut_off_went_as_the_study_says():
  names = {
      'k3': 'rollout_corr/k3_kl',
      'grad_norm': 'actor/grad_norm',
      'update_k3': 'actor/update_k3',
      'score': 'critic/score/mean',
  }
  runs = {(run.arm.name, run.seed): run for run in _runs(_MAIN)}

  def differ(arm, seed):
    """Returns the names by which the run that ended differs, step by step."""
    found = {}
    series = {
        name: dict(runs[f'gsm8k_{arm}', seed].series(of))
        for name, of in names.items()
    }
    for row in _cut_off(arm)[1:]:
      found[row['step']] = [
          name
          for name, values in series.items()
          if name in row
          and row[name] != pytest.approx(values[row['step']], rel=5e-5)
      ]
    return found

  again = differ('jetrl_inexact', 3)
  assert len(again) == 93 and not any(again.values())
  assert differ('bf16_inexact', 1)[1] == ['k3', 'grad_norm', 'update_k3']
  qurl = differ('qurl', 3)
  assert next(step for step, names in qurl.items() if names) == 87
  assert 'k3' not in qurl[87] and 'score' in qurl[87]
  score = dict(runs['gsm8k_qurl', 3].series(names['score']))
  changed = _cut_off('qurl')[87]['score'] - score[87]
  assert changed == pytest.approx(1 / 512, abs=1e-5)
  percents = [
      _percent([values[step] for step in (100, 120, 140)])
      for values in (
          {row['step']: row.get('accuracy') for row in _cut_off('qurl')},
          dict(runs['gsm8k_qurl', 3].accuracy()),
      )
  ]
  said = '{}, {} and {}% at steps 100, 120 and 140, now {}, {} and {}%'
  assert said.format(*percents[0], *percents[1]) in _study()


def test_a_correction_without_equal_bits_is_that_of_its_file():
  runs = {
      kind: _cut_off('jetrl_inexact', kind) for kind in ('cut_off', 'corrected')
  }

  def middle(kind, name):
    return median(row[name] for row in runs[kind] if 47 <= row['step'] <= 66)

  def percent(kind):
    return f'{100 * runs[kind][60]["accuracy"]:.1f}'

  far = {
      kind: [row['step'] for row in rows if row.get('update_k3', 0) > 1]
      for kind, rows in runs.items()
  }
  page = _study()
  k3, norm = (
      {kind: middle(kind, name) for kind in runs}
      for name in ('k3', 'grad_norm')
  )
  (exact,) = (
      median(x for step, x in run.series('actor/grad_norm') if 47 <= step <= 66)
      for run in _runs(('gsm8k_seed3_h200_2026-11-27',))
      if run.arm.name == 'gsm8k_jetrl'
  )
  assert len(runs['corrected']) == 67
  assert len(far['corrected']) == sum(s <= 66 for s in far['cut_off']) == 1
  assert (
      f'k3 is {k3["corrected"]:.4f} (without a correction {k3["cut_off"]:.4f})'
      f' and the gradient norm {norm["corrected"]:.2f} ({norm["cut_off"]:.2f};'
      f' exact {exact:.2f})'
  ) in page
  assert f'{percent("corrected")}% ({percent("cut_off")}; exact' in page


def test_the_stress_cell_is_that_of_its_files():
  study = _study()
  folders = (
      'stress_h100_2026-11-27',
      'stress_jetrl_h100_2026-11-27',
      'stress_bf16_h100_2026-11-27',
      'stress_mixed_h100_2026-11-28',
      'stress_mixed_seed2_h200_2026-11-28',
      'stress_mixed_seed3_h200_2026-11-28',
  )
  for arm, seeds in (('jetrl', 3), ('bf16', 3), ('fp8_rollout', 3)):
    curves = _curves(folders, f'stress_{arm}', 'core')
    assert sorted(curves) == list(range(1, seeds + 1))
    for seed, curve in curves.items():
      cells = [f'| `{arm}`, seed {seed}', *_percent(curve)]
      assert ' | '.join(cells) in study


def test_the_long_cell_is_that_of_its_files():
  study = _study()
  folders = (
      'math_h100_2026-11-27',
      'math_seed2_h100_2026-11-28',
      'math_seed3_h100_2026-11-28',
  )
  finals = {}
  for arm, precision, name in (
      ('jetrl', 'core', '`jetrl`, in FP8'),
      ('jetrl', 'bf16', '`jetrl`, in BF16'),
      ('bf16', 'core', '`bf16`'),
      ('fp8_rollout', 'core', '`fp8_rollout`, in FP8'),
      ('fp8_rollout', 'bf16', '`fp8_rollout`, in BF16'),
  ):
    curves = _curves(folders, f'math_{arm}', precision)
    assert sorted(curves) == [1, 2, 3]
    finals[arm, precision] = {s: statistics.final(c) for s, c in curves.items()}
    final = sum(finals[arm, precision].values()) / 3
    row = ' | '.join([name, *_percent([*_mean(curves), final])])
    assert f'| {row} |' in study
  finals['bf16', 'bf16'] = finals['bf16', 'core']
  for pair in (
      ('jetrl', 'bf16'),
      ('fp8_rollout', 'bf16'),
      ('jetrl', 'fp8_rollout'),
  ):
    cells = []
    for precision in ('core', 'bf16'):
      ends = [finals[arm, precision] for arm in pair]
      d = statistics.paired(*ends)
      if precision == 'core':
        cells += [f'{100 * (ends[0][s] - ends[1][s]):+.1f}' for s in (1, 2, 3)]
      values = [100 * x for x in (d.mean, *d.interval)]
      cells.append('{:+.1f} ({:+.1f} to {:+.1f})'.format(*values))
    row = ' | '.join([f'| `{pair[0]}` - `{pair[1]}`', *cells])
    assert f'{row} |' in study
    if pair[0] == 'jetrl':
      mean, *both = re.findall(r'[\d.]+', cells[-2])
      if pair[1] == 'bf16':
        both = [f'{x:.1f}' for x in sorted(_pooled(finals, pair))]
        said = f'{mean} points below BF16 (95%: {both[0]} to {both[1]}'
        assert said in _text(_ROOT / 'README.md'), said
        assert f'-{both[1]} to -{both[0]}' in study
      else:
        said = '{} points below the mixed flow ({} below to {} above)'
        assert said.format(mean, *both) in _text(_ROOT / 'docs/flows.md')

  runs = {(run.arm.name, run.seed): run.rows for run in _runs(folders)}
  arms, seeds = ('jetrl', 'bf16', 'fp8_rollout'), (1, 2, 3)
  assert sorted(runs) == sorted((f'math_{a}', s) for a in arms for s in seeds)

  def of(arm, name, of_seeds=seeds):
    """The mean of steps 1 to 10, and of 51 to 60."""
    for first in (1, 51):
      found = [
          line[name]
          for seed in of_seeds
          for line in runs[f'math_{arm}', seed]
          if line['step'] in range(first, first + 10) and name in line
      ]
      yield sum(found) / len(found)

  for row, name, form, scale in (
      ('entropy', 'actor/entropy', '{:.2f}', 1),
      ('k3 of an update', 'actor/update_k3', '{:.2g}', 1),
      ('clipped tokens', 'actor/pg_clipfrac', '{:.3f}%', 100),
      ('gradient norm', 'actor/grad_norm', '{:.2f}', 1),
      ('tokens an answer', 'response_length/mean', '{:.0f}', 1),
      (
          'answers cut at 2048 tokens',
          'response_length/clip_ratio',
          '{:.1f}%',
          100,
      ),
  ):
    cells = [
        ', '.join(form.format(scale * value) for value in of(arm, name))
        for arm in arms
    ]
    assert f'| {row} | ' + ' | '.join(cells) + ' |' in study
  gains = {}
  for seed in seeds:
    cells = []
    for arm in arms:
      both = [100 * v for v in of(arm, 'critic/acc/mean', (seed,))]
      cells.append(', '.join(f'{value:.1f}%' for value in both))
      gains[arm, seed] = f'{both[1] - both[0]:.1f}'
    assert f'| seed {seed} | ' + ' | '.join(cells) + ' |' in study
  said = (
      "{}, {} and {} points more become right, of `bf16`'s {}, {} and {}, of"
      " the mixed flow's {}, {} and {} "
  )
  assert said.format(*(gains[arm, s] for arm in arms for s in seeds)) in study
  said = "{}, {} and {} points more became right, of BF16's {}, {} and {}."
  assert said.format(
      *(gains[arm, s] for arm in arms[:2] for s in seeds)
  ) in _text(_ROOT / 'docs/tuning.md')
  for row, name, form, scale in (
      ('k3 of rollout and training', 'rollout_corr/k3_kl', '{:.4f}', 1),
      ('unequal tokens', 'training/mismatch_token_frac', '{:.0f}%', 100),
  ):
    for key, rows in runs.items():
      assert key[0] == 'math_fp8_rollout' or not any(r.get(name) for r in rows)
    cell = ', '.join(form.format(scale * v) for v in of('fp8_rollout', name))
    assert f'| {row} | 0, 0 | 0, 0 | {cell} |' in study
  seconds = {
      (arm, seed): median(
          line['timing_s/step']
          for line in runs[f'math_{arm}', seed]
          if line['step'] > 10 and 'val-core/test/acc/mean@1' not in line
      )
      for arm in arms
      for seed in seeds
  }
  cells = [', '.join(f'{seconds[a, s]:.2f}' for s in seeds) for a in arms]
  row = ' | '.join(['seconds a step, seeds 1 to 3', *cells])
  assert f'| {row} |' in study
  ratios = [
      f'{seconds[a, s] / seconds["bf16", s]:.2f}' for a in arms for s in seeds
  ]
  said = "`jetrl` {}, {} and {} of `bf16`'s time, the mixed flow {}, {} and {} "
  assert said.format(*ratios[:3], *ratios[6:]) in study


def test_the_long_cell_with_cispo_is_that_of_its_files():
  study = _study()
  cispo, with_cispo, its_final = _of_the_long_cell(
      'math_cispo_h100_2026-11-28', 'jetrl'
  )
  assert cispo.about['set'] == {'algorithm.policy_loss': 'cispo'}
  assert not cispo.is_of_design
  row = '| `jetrl`, four updates with CISPO | {:.1f}%, {:.1f}% | {:.1f} '
  assert row.format(*with_cispo, its_final) in study


def test_the_long_cell_with_one_update_is_that_of_its_files():
  study, numerics = (
      _text(_ROOT / f'docs/{page}.md') for page in ('study_math', 'numerics')
  )
  right, final = {}, {}
  for updates, folder in (
      (1, 'math_one_update_h100_2026-11-28'),
      (4, 'math_h100_2026-11-27'),
  ):
    for arm in ('jetrl', 'bf16'):
      run, right[arm, updates], final[arm, updates] = _of_the_long_cell(
          folder, arm
      )
      assert run.is_of_design == (updates == 4)
      if updates == 1:
        assert run.about['set'] == {'trainer.mini_batch_size': '64'}
      name = {1: 'one update', 4: 'four updates'}[updates]
      ends = '{:.1f}%, {:.1f}%'.format(*right[arm, updates])
      row = f'| `{arm}`, {name} | {ends} | {final[arm, updates]:.1f} '
      assert row in study
      assert not any(
          line.get('training/mismatch_token_frac') for line in run.rows
      )
  gaps = [final['jetrl', n] - final['bf16', n] for n in (1, 4)]
  assert (
      'held out {:.1f} (in BF16 -0.7) in the place of {:.1f}'.format(*gaps)
      in study
  )
  said = (
      'of its sampled answers {:.1f}% are right at first and {:.1f} at last,'
      " with four updates {:.1f} and {:.1f}; of BF16's {:.1f} and {:.1f}, with"
      ' four {:.1f} and {:.1f}.'
  )
  values = [x for a in ('jetrl', 'bf16') for u in (1, 4) for x in right[a, u]]
  assert said.format(*values) in numerics
  gains = [right[arm, 1][1] - right[arm, 1][0] for arm in ('jetrl', 'bf16')]
  said = '{:.1f} more became right in FP8 and {:.1f} in BF16'
  assert said.format(*gains) in _text(_ROOT / 'docs/tuning.md')


def test_the_sums_with_four_updates_are_those_of_their_files():
  study, readme = _study(), _text(_ROOT / 'README.md')
  folders = ('sums_four_h100_2026-11-27', 'sums_four_arms_h100_2026-11-27')

  def final(arm, precision='core'):
    curves = _curves(folders, f'sums_four_{arm}', precision)
    assert len(curves) == 10
    return {seed: statistics.final(curve) for seed, curve in curves.items()}

  for arm, name in (
      ('jetrl', '`jetrl`'),
      ('bf16', '`bf16`, spread masters'),
      ('fp8_rollout', '`fp8_rollout`'),
      ('int8', '`int8`'),
      ('fake_e4m3', '`fake_e4m3`'),
  ):
    means = _mean(_curves(folders, f'sums_four_{arm}', 'core'))
    ends = final(arm).values()
    row = ' | '.join([name, *_percent([*means, sum(ends) / len(ends)])])
    assert f'| {row} ' in study
  for pair in (
      ('jetrl', 'bf16'),
      ('fp8_rollout', 'bf16'),
      ('jetrl', 'fp8_rollout'),
      ('int8', 'bf16'),
      ('fake_e4m3', 'bf16'),
  ):
    said = []
    for precision in ('core', 'bf16'):
      d = statistics.paired(*(final(arm, precision) for arm in pair))
      values = [100 * x for x in (d.mean, *d.interval)]
      said.append('{:+.1f} ({:+.1f} to {:+.1f})'.format(*values))
    row = f'| `{pair[0]}` - `{pair[1]}` | {said[0]} | {said[1]} |'
    assert row in study
    if pair == ('jetrl', 'bf16'):
      assert said[0] == '-3.5 (-6.9 to -0.1)'
  said = '3.5 points below BF16 from spread masters (95%: 0.1 to 6.9)'
  assert said in readme


def test_four_updates_against_one_are_as_the_page_says():
  study = _text(_ROOT / 'docs/study_sums.md')
  one = 'sums_h100_2026-11-26', 'sums_h200_2026-11-27'
  four = 'sums_four_h100_2026-11-27', 'sums_four_arms_h100_2026-11-27'
  found = {}
  for precision in ('core', 'bf16'):
    for arm in ('jetrl', 'bf16', 'fp8_rollout'):
      folders = ('sums_spread_h200_2026-11-27',) if arm == 'bf16' else one
      found[arm, precision] = (
          _finals(four, f'sums_four_{arm}', precision),
          _finals(folders, f'sums_{arm}', precision),
      )
  ours = [*_said(*found['jetrl', 'core']), *_said(*found['jetrl', 'bf16'])]
  said = (
      '{:.1f} points ({:.1f} to {:.1f}; read in BF16 {:.1f}, {:.1f} to {:.1f})'
  )
  assert said.format(*ours) in study
  for page in ('README.md', 'docs/tuning.md'):
    text = _text(_ROOT / page)
    assert re.search(
        r'{:.1f} points (lower in FP8|below itself with one)'
        r' \(95%: {:.1f} to {:.1f}\)'.format(*(-x for x in ours[:3])),
        text,
    )
  for arm, name in (('bf16', 'from spread masters'), ('fp8_rollout', '')):
    said = f'`{arm}` {name} '.replace('  ', ' ') + '{:.1f} ({:.1f} to {:+.1f})'
    assert said.format(*_said(*found[arm, 'core'])) in study
  gaps = [
      {s: found['jetrl', 'core'][i][s] - value for s, value in other.items()}
      for i, other in enumerate(found['bf16', 'core'])
  ]
  said = 'more than BF16 is not shown: {:.1f} ({:.1f} to {:+.1f})'
  assert said.format(*_said(*gaps)) in study
  stress = ('sums_stress_h200_2026-11-27',)
  corrected, plain = (
      [
          _finals(stress, f'sums_stress_{arm}', precision)
          for precision in ('core', 'bf16')
      ]
      for arm in ('flashrl', 'fp8_rollout')
  )
  values = [
      x for pair in zip(corrected, plain, strict=True) for x in _said(*pair)
  ]
  said = (
      '{:.1f} points below that without one ({} to {:.1f}; read in BF16 {:.1f},'
      ' {:.1f} to {:.1f};'
  )
  values[0], values[1] = -values[0], f'{values[1]:.1f}'
  assert said.format(*values) in study


def test_the_windows_of_the_main_cell_are_those_of_its_files():
  study = _text(_ROOT / 'docs/study_gsm8k.md')
  for arm in ('jetrl', 'bf16', 'fp8_rollout', 'flashrl'):
    cells = []
    for precision in ('core', 'bf16'):
      curves = sorted(_curves(_MAIN, f'gsm8k_{arm}', precision).items())
      # Of steps 0, 20 .. 200 those from 60 to 100, and from 160 on.
      first, last = (
          {seed: sum(curve[part]) / 3 for seed, curve in curves}
          for part in (slice(3, 6), slice(8, 11))
      )
      values = [100 * (last[seed] - first[seed]) for seed in first]
      cells.append(', '.join(f'{value:+.1f}' for value in values))
      said = '{:+.1f} ({:+.1f} to {:+.1f})'
      cells.append(said.format(*_said(last, first)))
    if arm == 'bf16':
      cells[2:] = ['the same', 'the same']
    assert ' | '.join([f'| `{arm}`', *cells]) + ' |' in study
