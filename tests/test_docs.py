"""The documents: what they name exists, and the code they show runs."""

import ast
import functools
import gzip
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
from statistics import median

import numpy as np
import pytest
import yaml

from benchmarks import plot_race, plot_speed
from configs import base, llama8b, qwen0_5b, qwen3_8b, qwen7b, qwen14b
from jetrl_jax import cli
from jetrl_jax.config import model as config_model
from jetrl_jax.config import schema as config_schema
from jetrl_jax.config import sections
from jetrl_jax.fp8.recipes import RECIPES
from jetrl_jax.rl import advantages, aggregation, corrections
from jetrl_jax.rl.objective import POLICY_LOSSES
from jetrl_jax.rl.settings import GUARD_MAX_K3, GuardConfig
from study import arms, results, statistics
from tools import config_reference, exactness_record

_ROOT = pathlib.Path(__file__).parent.parent
_PAGES = [
    _ROOT / 'README.md',
    _ROOT / 'CHANGELOG.md',
    _ROOT / 'CONTRIBUTING.md',
    *sorted((_ROOT / 'docs').glob('*.md')),
]
_METRICS = _ROOT / 'docs' / 'metrics.md'
_CONFIGS = sorted((_ROOT / 'configs').glob('[!_]*.py'))
# Lab records show commands too.
_WITH_COMMANDS = [*_PAGES, *_CONFIGS]
_LARGE = [
    (qwen0_5b, 'qwen2.5-0.5b'),
    (qwen7b, 'qwen2.5-7b'),
    (qwen14b, 'qwen2.5-14b'),
    (qwen3_8b, 'qwen3-8b'),
    (llama8b, 'llama-3.1-8b'),
]


def _name(path: pathlib.Path) -> str:
  return path.relative_to(_ROOT).as_posix()


def _text(path: pathlib.Path) -> str:
  return path.read_text(encoding='utf-8')


def test_the_table_of_the_configuration_is_that_of_the_base_config():
  stale = _text(config_reference.OUTPUT) != config_reference.render()
  assert not stale, 'run: python -m tools.config_reference'


@pytest.mark.parametrize('page', _PAGES, ids=_name)
def test_a_relative_link_leads_to_a_file(page):
  links = re.findall(r'\]\(([^)#\s]+)', _text(page))
  local = [link for link in links if '://' not in link]
  assert not [link for link in local if not (page.parent / link).exists()]


@pytest.mark.parametrize(
    ('setting', 'page', 'names'),
    [
        ('algorithm.adv_estimator', 'algorithms', advantages.ESTIMATORS),
        ('algorithm.loss_agg_mode', 'algorithms', aggregation.MODES),
        ('algorithm.policy_loss', 'algorithms', POLICY_LOSSES),
        ('algorithm.rollout_is', 'algorithms', corrections.DEFAULT_THRESHOLD),
        ('precision.recipe', 'extending', RECIPES),
        ('model.shape', 'configuration', config_model.SHAPES),
    ],
)
def test_every_choice_of_a_name_is_explained(setting, page, names):
  # In the docstring of the field, from which the table is made, and on a page.
  section, _, key = setting.partition('.')
  table = _text(config_reference.OUTPUT).split(f'\n## {section}\n')[1]
  (meaning,) = re.findall(rf'^\| `{key}` \|.*', table.split('\n## ')[0], re.M)
  assert not [name for name in names if f"'{name}'" not in meaning]
  explained = re.findall(r'[\w.-]+', _text(_ROOT / f'docs/{page}.md'))
  assert set(names) <= set(explained)


# docs/export.md names files of vLLM, the changelog what was.
_WITH_PATHS = [
    page for page in _PAGES if page.stem not in ('export', 'CHANGELOG')
]


@pytest.mark.parametrize('page', _WITH_PATHS, ids=_name)
def test_a_file_that_a_page_names_is_there_with_what_is_named_in_it(page):
  places = _ROOT, _ROOT / 'jetrl_jax'
  rooms = {f.name for place in places for f in place.iterdir() if f.is_dir()}
  named = re.findall(r'`([\w./]+(?:\.py|/))(?:: ([\w.]+))?`', _text(page))
  for path, symbol in named:
    if path.split('/')[0] in rooms and '/' in path.rstrip('/'):
      found = [p / path for p in places if (p / path).exists()]
      assert found, path
      name = symbol.rpartition('.')[2]
      assert not name or name in _text(found[0]), (path, symbol)


@pytest.mark.parametrize('path', _WITH_COMMANDS, ids=_name)
def test_a_command_names_what_exists(path):
  text, make = _text(path), _text(_ROOT / 'Makefile')
  targets = set(re.search(r'\.PHONY: (.*)', make).group(1).split())
  # At the start of a line or of a code span: "make sure" is prose.
  for words in re.findall(r'(?:^ {4}|`)make ((?:[a-z-]+\b ?)+)', text, re.M):
    assert set(words.split()) <= targets
  for module in re.findall(r'python -m ([\w.]+)', text):
    assert importlib.util.find_spec(module) or module == 'pytest', module
  for file in re.findall(r'--config=(configs/\w+\.py)', text):
    assert (_ROOT / file).exists(), file


@pytest.mark.parametrize('folder', ['benchmarks', 'tools'])
def test_a_script_is_run_as_a_module(folder):
  # Run by its path it would not find the other folders of the clone.
  files = [*_WITH_COMMANDS, *sorted((_ROOT / folder).glob('*.py'))]
  shown = re.compile(rf'python {folder}/')
  assert not [_name(path) for path in files if shown.search(_text(path))]


@pytest.mark.parametrize('path', _WITH_COMMANDS, ids=_name)
def test_an_override_names_a_value_of_the_config(path):
  found = set(re.findall(r'--config\.([\w.]+)=', _text(path)))
  assert found <= set(config_schema.names(base.get_config()))


_SHELL = ('&&', '||', '|', ';', '&')


def _commands(
    text: str, rooms: str = 'jetrl_jax'
) -> list[tuple[str, list[str]]]:
  """Lists (module, arguments) of the commands that have arguments.

  Args:
    text: of a page or file.
    rooms: pattern of the packages whose modules count.
  """
  found = []
  joined = re.sub(r'\\\n\s*', ' ', text)
  module = rf'(?:{rooms})\b[\w.]*'
  shown = re.findall(rf'python -m ({module})([^`\n]*)', joined)
  for command, rest in re.findall(
      r'(?:^ {4}|`)jetrl_jax (\w+)([^`\n]*)', joined, re.MULTILINE
  ):
    assert command in cli.COMMANDS, command
    shown.append((f'jetrl_jax.{cli.COMMANDS[command][0]}', rest))
  for module, rest in shown:
    words = shlex.split(rest, comments=True)
    # Up to what the shell does next, and without what a page leaves out.
    end = next((i for i, x in enumerate(words) if x in _SHELL), len(words))
    arguments = [word for word in words[:end] if word != '...']
    if any(argument.startswith('-') for argument in arguments):
      found.append((module, arguments))
  return found


# One process, because importing is what takes time; a child per command,
# because commands define flags of the same name, and configs define more. Each
# runs as the command would, up to the point where its flags are parsed.
_PARSE = """
import argparse, json, os, runpy, sys
import jetrl_jax.config.build, jetrl_jax.config.saved_policy
import jetrl_jax.dry_run.checks, jetrl_jax.report, ml_collections.config_flags
from absl import app, flags

def parse_only(main, argv=None, flags_parser=flags.FLAGS):
  flags_parser(sys.argv)
  os._exit(0)

parse_args = argparse.ArgumentParser.parse_args

def parse_words_only(parser, args=None, namespace=None):
  parse_args(parser, args, namespace)
  os._exit(0)

app.run = parse_only
argparse.ArgumentParser.parse_args = parse_words_only
for module, arguments in json.load(sys.stdin):
  child = os.fork()
  if not child:
    sys.argv = [module, *arguments]
    try:
      runpy.run_module(module, run_name='__main__')
      print(module, 'did not parse flags', flush=True)
    except BaseException as error:
      print(module, arguments, repr(error), flush=True)
    os._exit(0)
  os.waitpid(child, 0)
"""


# Files and what their commands stand under.
_BESIDE_OTHERS = [(_ROOT / 'docs/comparison.md', 'Repeat it')] + [
    (path, 'To run it again')
    for theme in ('rollout_beside', 'export_in', 'race_beside', 'verl')
    for path in sorted((_ROOT / 'benchmarks/results').glob(f'{theme}_*.md'))
]


def test_the_flags_of_every_command_parse():
  commands = [c for path in _WITH_COMMANDS for c in _commands(_text(path))]
  for path, heading in _BESIDE_OTHERS:
    # Of a raw file what ran stands above, and may be shortened.
    shown = _text(path).partition(f'\n## {heading}\n')[2]
    again = _commands(shown, 'jetrl_jax|benchmarks|study|tools')
    assert again, path
    commands += again
  assert len(commands) > 5
  done = subprocess.run(
      [sys.executable, '-W', 'ignore', '-c', _PARSE],
      input=json.dumps(commands),
      cwd=_ROOT,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      capture_output=True,
      text=True,
  )
  assert done.returncode == 0, done.stderr
  assert not done.stdout


@pytest.mark.parametrize('library', ['verl', 'TRL', 'Tunix'])
def test_what_a_foreign_key_becomes_is_a_value_of_the_config(library):
  known = {*config_schema.names(base.get_config()), *sections.SECTIONS}
  page = _text(_ROOT / 'docs/migrating.md')
  (part,) = re.findall(rf'^## {library}\n(.*?)(?=^## |\Z)', page, re.M | re.S)
  rows = re.findall(r'^\| (.*?) \| (.*?) \| .*\|$', part, re.M)
  ours = [
      re.findall(r'`([^`]+)`', right) for left, right in rows if '`' in left
  ]
  assert len(ours) > 30
  found = {name for names in ours for name in names}
  assert found <= known, found - known


def test_every_page_is_in_the_index():
  index = _ROOT / 'docs' / 'index.md'
  pages = {page.name for page in index.parent.glob('*.md')} - {'index.md'}
  listed = set(re.findall(r'\]\(([\w.]+\.md)\)', _text(index)))
  assert not pages - listed, 'give the page a row in docs/index.md'


def test_the_formatters_of_the_hooks_are_those_of_the_development_environment():
  hooks = yaml.safe_load(_text(_ROOT / '.pre-commit-config.yaml'))
  pinned = {
      requirement
      for repo in hooks['repos']
      for hook in repo['hooks']
      for requirement in hook.get('additional_dependencies', [])
  }
  project = tomllib.loads(_text(_ROOT / 'pyproject.toml'))['project']
  development = project['optional-dependencies']['dev']
  assert len(pinned) == 2 and pinned <= set(development)
  assert any(r.startswith('pyright[nodejs]==') for r in development)


def test_the_public_checks_run_on_the_oldest_and_the_newest_versions():
  workflow = yaml.safe_load(_text(_ROOT / '.github/workflows/ci.yml'))
  check = workflow['jobs']['check']
  oldest, newest = check['strategy']['matrix']['include']
  project = tomllib.loads(_text(_ROOT / 'pyproject.toml'))['project']
  assert project['requires-python'] == f'>={oldest["python"]}'
  floor = oldest['jax'].replace('==', '>=')
  # The newest there is: no release is kept out.
  assert newest['jax'] == 'jax' and floor in project['dependencies']
  assert newest['python'] > oldest['python']
  assert any('make check' in step.get('run', '') for step in check['steps'])


def test_no_python_is_claimed_that_was_not_tried():
  project = tomllib.loads(_text(_ROOT / 'pyproject.toml'))['project']
  claimed = {line.rpartition(' :: ')[2] for line in project['classifiers']}
  rows = re.findall(
      r'^\| (3\.\d+)[\d.]* \| (.*?) \|', _text(_ROOT / 'docs/limits.md'), re.M
  )
  assert claimed == {python for python, jax in rows if jax != '-'}
  workflow = yaml.safe_load(_text(_ROOT / '.github/workflows/ci.yml'))
  wheel = workflow['jobs']['wheel']['strategy']['matrix']['python']
  assert set(wheel) == claimed


def test_a_tag_is_refused_while_the_changelog_calls_it_unreleased(tmp_path):
  workflow = yaml.safe_load(_text(_ROOT / '.github/workflows/release.yml'))
  (check,) = (s for s in workflow['jobs']['build']['steps'] if 'if' in s)
  (tmp_path / 'pyproject.toml').write_text('version = "1.2.3"\n')
  log, codes = tmp_path / 'CHANGELOG.md', []
  for heading in ('(2026-12-31)', '(unreleased)'):
    log.write_text(f'# Changelog\n\n## 1.2.3 {heading}\n')
    done = subprocess.run(
        ['bash', '-ec', check['run']],
        cwd=tmp_path,
        env=os.environ | {'GITHUB_REF_NAME': 'v1.2.3'},
        check=False,
    )
    codes.append(done.returncode)
  assert codes == [0, 1]


def _study() -> str:
  """Returns the design and the pages of its cells."""
  pages = 'study', 'study_gsm8k', 'study_math', 'study_sums'
  return '\n'.join(_text(_ROOT / f'docs/{page}.md') for page in pages)


def test_the_accuracies_of_the_real_run_are_those_of_its_files():
  study, readme = _study(), _text(_ROOT / 'README.md')
  config = ' '.join(_text(_ROOT / 'configs/qwen0_5b.py').split())
  five = 'jetrl', 'bf16', 'fp8_rollout'
  three = 'flashrl', 'qurl', 'jetrl_inexact'
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
      ('jetrl', 'jetrl_inexact'),
  )
  found = {}
  for precision, row in (('bf16', 'in BF16, '), ('core', '')):
    for pair in pairs:
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
  p_values = dict.fromkeys(arms.SECONDARY, 1.0)
  for a, b in (*pairs[1:4], *pairs[6:]):
    p_values[f'gsm8k_{a}', f'gsm8k_{b}'] = found[a, b].p_value
  # The two others have not the seeds that answer them.
  assert sorted(p_values.values())[5:] == [1, 1]
  adjusted = statistics.holm(p_values)
  below_bf16 = adjusted['gsm8k_fp8_rollout', 'gsm8k_bf16']
  below_jetrl = adjusted['gsm8k_jetrl', 'gsm8k_fp8_rollout']
  assert f'below `bf16` (p {below_bf16:.2g} after Holm' in study
  assert f'below `jetrl` (p {below_jetrl:.2g})' in study
  assert max(below_bf16, below_jetrl) < 0.05
  for arm, said in (
      ('flashrl', '1.0 points below `bf16` (p {:.2f} after'),
      ('qurl', '2.4 points below `bf16` (8.5 below to 3.7 above; p {:.2f})'),
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
    if len(seeds) == 1:
      said = f'{100 * (a[seeds[0]] - b[seeds[0]]):+.1f} | open'
      p_values[ours, others] = 1.0
    else:
      d = statistics.paired(a, b)
      p_values[ours, others] = d.p_value
      values = (100 * x for x in (d.mean, *d.interval))
      said = '{:+.1f} ({:+.1f} to {:+.1f})'.format(*values)
    (row,) = [row for row in rows if f'| {said} |' in row]
    named = {1: 'one of three', 3: 'three', 5: 'five'}[len(seeds)]
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


def test_the_guard_lets_pass_what_a_run_that_learned_flushed():
  file = 'benchmarks/results/smollm2_135m_sums_h100_2026-11-26'
  lines = map(json.loads, _text(_ROOT / f'{file}.jsonl').splitlines())
  name = 'fp8/output_grad/flushed_frac/max'
  most = max(line[name] for line in lines if name in line)
  assert 0.5 < most < GuardConfig().max_flushed_frac
  page = _text(_ROOT / 'docs/guard.md')
  assert f'up to {most:.0%} for some steps ([raw](../{file}.md))' in page


def test_single_runs_of_the_real_model_are_those_of_their_files():
  study = _study()
  for arm, names in (
      ('jetrl_block', {'core': 'FP8', 'bf16': 'BF16'}),
      ('bf16_inexact', {'core': 'BF16'}),
  ):
    for side, name in names.items():
      ((seed, curve),) = _curves(_MAIN, f'gsm8k_{arm}', side).items()
      cells = [f'| `{arm}`, in {name}, seed {seed}', *_percent(curve)]
      assert ' | '.join(cells) in study
      (end,) = _percent([sum(curve[3:]) / len(curve[3:])])
      if side == 'core':
        assert f'| endpoint, `{arm}` | {end} |' in study
      else:
        assert f'(read in BF16 {end})' in study


def test_flows_without_equal_bits_are_those_of_their_files():
  study = _study()
  runs = {(run.arm.name, run.seed): run for run in _runs(_MAIN)}
  endpoints = {}
  for arm, seed in (
      *itertools.product(('jetrl', 'jetrl_inexact', 'fp8_rollout'), (1, 2, 3)),
      ('bf16', 1),
      ('bf16_inexact', 1),
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


def _cut_off(arm: str, kind: str = 'cut_off') -> list[dict[str, float]]:
  """Returns what was kept of a run of the main cell that did not end."""
  file = f'benchmarks/results/gsm8k_{arm}_{kind}_h200_2026-11-28.json'
  return json.loads(_text(_ROOT / file))['rows']


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


def test_the_five_steps_of_verl_are_those_of_their_file():
  folder, page = _ROOT / 'benchmarks/results', _text(
      _ROOT / 'docs/comparison.md'
  )
  name = 'verl_five_steps_qwen0_5b_h100_2026-11-27'
  record = _text(folder / f'{name}.md')
  rows = json.loads((folder / f'{name}.json').read_text(encoding='utf-8'))
  for row in rows:
    seconds = [
        row[f'timing_s/{part}']
        for part in ('step', 'gen', 'old_log_prob', 'update_actor')
    ]
    cells = ' | '.join(f'{value:.1f}' for value in seconds)
    assert f'| {row["step"]} | {cells} |' in record
  last = [row['timing_s/step'] for row in rows[2:]]
  assert f'the last three took {min(last):.1f} to {max(last):.1f} s' in page


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


def _finals(folders, arm, precision='core') -> dict[int, float]:
  curves = _curves(folders, arm, precision)
  return {seed: statistics.final(curve) for seed, curve in curves.items()}


def _said(ours: dict[int, float], others: dict[int, float]) -> list[float]:
  """Returns a paired difference and its interval, in points."""
  d = statistics.paired(ours, others)
  return [100 * x for x in (d.mean, *d.interval)]


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
            f'{sum(k3) / 5:.4f}',
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
    'gsm8k_inexact_h200_2026-11-28',
    'gsm8k_inexact_seed2_h200_2026-11-28',
    'gsm8k_inexact_seed3_h200_2026-11-28',
    'gsm8k_bf16_inexact_h200_2026-11-28',
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


def test_the_race_in_page_and_readme_is_that_of_its_file():
  found = plot_race.read()
  last = plot_race.evaluations(found['trl'])[-1][0]
  step = {k: plot_race.seconds_a_step(v, last) for k, v in found.items()}
  after = {
      name: next(
          seconds
          for _, seconds, accuracy in plot_race.evaluations(lines)
          if accuracy >= plot_race.GOAL
      )
      for name, lines in found.items()
  }
  page, readme = _text(_ROOT / 'docs/comparison.md'), _text(_ROOT / 'README.md')
  seconds = ' | '.join(f'{step[name]:.2f}' for name in found)
  assert f'| seconds a step | {seconds} |' in page
  for name in ('jetrl', 'bf16'):
    assert f'{step["trl"] / step[name]:.1f}x' in page
    assert f'{step["trl"] / step[name]:.1f}x' in readme
    assert f'{after["trl"] / after[name]:.1f}' in page
  for value in after.values():
    assert f'{value:.0f} s' in page and f'{value:.0f} s' in readme


def _speeds() -> set[str]:
  return {
      f'{slow / fast:.2f}x'
      for name, (slow, fast) in plot_speed.speedups().items()
      if not name.startswith('one dot')
  }


def _beside_vllm() -> set[str]:
  ratios = set()
  for file in (_ROOT / 'benchmarks/results').glob('rollout_beside_vllm_*.json'):
    found = json.loads(_text(file))
    ours = {row['workload']: row['ms_per_step'] for row in found['ours']}
    ratios |= {
        f'{row["ms_per_step"] / ours[row["workload"]]:.2f}x'
        for row in found['vllm']
    }
  return ratios


def test_the_speeds_in_the_page_are_those_of_the_results():
  assert len(_speeds()) > 4
  page = _text(_ROOT / 'docs/performance.md')
  assert _speeds() <= set(re.findall(r'\d\.\d\dx', page))


def test_the_readme_names_no_speed_that_no_result_has():
  shown = set(re.findall(r'\d\.\d\dx', _text(_ROOT / 'README.md')))
  assert shown and shown <= _speeds() | _beside_vllm()


def test_the_reward_in_the_readme_scores_whatever_a_model_writes():
  code = re.search(
      r'^    (def compute_score.*?\n)\n',
      _text(_ROOT / 'README.md'),
      re.M | re.S,
  )
  namespace = {}
  exec(code[1].replace('\n    ', '\n'), namespace)
  score = namespace['compute_score']
  answers = ('', '\n', 'It is\n18\n', '18 or 17')
  assert [score('s', a, '18', {}) for a in answers] == [0.0, 0.0, 1.0, 0.0]


def test_the_record_of_exactness_is_that_of_the_results():
  page = _text(exactness_record.OUTPUT)
  stale = page != exactness_record.render(page)
  assert not stale, 'run: python -m tools.exactness_record'


# What a record has to say, in whatever form.
_RECORD = {
    'date': r'20\d\d-\d\d-\d\d',
    'hardware': r'(?i)hardware|H[12]00|cpu',
    'versions': r'(?i)versions|\bjax\W{1,4}\d',
    'commit': r'\b[0-9a-f]{7,40}\b|commit: not recorded',
    'command': r'(?i)\bcommands?\b|\bpython ',
}


def _not_said(record: str) -> set[str]:
  return {what for what, form in _RECORD.items() if not re.search(form, record)}


def test_a_raw_file_has_a_record_of_what_ran():
  folder = _ROOT / 'benchmarks/results'
  pages = {page: _text(page) for page in folder.glob('*.md')}
  for page, text in pages.items():
    assert not _not_said(f'{page.stem} {text}'), page.name
  for file in folder.iterdir():
    if file.is_dir() or file in pages or file.with_suffix('.md') in pages:
      continue
    # In a page of several, or in its own first lines.
    known = any(file.name in text for text in pages.values())
    said = f'{file.name} {_text(file)[:3000]}'
    assert known or not _not_said(said), file.name


def test_the_runs_of_a_study_have_a_record_of_what_ran():
  for folder in (_ROOT / 'benchmarks/results/study').iterdir():
    start = f'{folder.name} {_text(folder / "start.md")}'
    files = sorted(folder.glob('*.jsonl.gz'))
    assert files, folder.name
    for file in files:
      with gzip.open(file, 'rt', encoding='utf-8') as lines:
        assert not _not_said(f'{start} {next(lines)}'), (folder.name, file.name)


def test_a_link_of_a_record_leads_to_a_file():
  for page in (_ROOT / 'benchmarks/results').rglob('*.md'):
    links = re.findall(r'\]\(([^)#\s]+)', _text(page))
    local = [link for link in links if '://' not in link]
    lost = [link for link in local if not (page.parent / link).exists()]
    assert not lost, page.name


def test_the_accuracies_in_the_readme_are_those_of_the_results():
  name, shown = 'val-core/heldout/acc/mean@1', []
  files = sorted((_ROOT / 'benchmarks/results').glob('quickstart_seed*.jsonl'))
  files += (_ROOT / 'benchmarks/results').glob('unified_quickstart_*.jsonl')
  assert len(files) == 6
  for file in files:
    lines = [json.loads(line) for line in _text(file).splitlines()]
    shown += [f'{100 * lines[i][name]:.1f}%' for i in (0, -1)]
    mismatch = [line.get('training/mismatch_token_frac', 0.0) for line in lines]
    assert not any(mismatch)
  readme = _text(_ROOT / 'README.md')
  block = re.search(r'<!-- quickstart-numbers -->(.*?)<!-- /', readme, re.S)
  assert set(re.findall(r'\d+\.\d%', block[1])) == set(shown)


_FIGURES = sorted(
    p for p in (_ROOT / 'docs').iterdir() if p.suffix in ('.png', '.webp')
)


@pytest.mark.parametrize('figure', _FIGURES, ids=_name)
def test_a_figure_is_shown_and_a_command_draws_it(figure):
  pages = ''.join(_text(page) for page in _PAGES)
  assert f']({figure.name})' in pages or f'](docs/{figure.name})' in pages
  # Of what was done in a browser by hand there is no command.
  if not figure.name.startswith('report_'):
    drawn_by = sorted((_ROOT / 'benchmarks').glob('plot_*.py'))
    code = ''.join(_text(path) for path in drawn_by)
    commands = [
        f'--{flag}=docs/{figure.name}' for flag in ('output', 'screenshot')
    ]
    assert any(c in pages for c in commands) or f"{figure.name}'" in code


@pytest.mark.parametrize('folder', ['benchmarks', 'study'])
def test_whoever_draws_takes_the_style_that_all_figures_have(folder):
  for path in sorted((_ROOT / folder).glob('*.py')):
    text = _text(path)
    if 'savefig' in text or 'plt.subplots' in text:
      assert 'figure_style.save(' in text and 'savefig' not in text, path
      assert not re.search(r"'#[0-9a-fA-F]{6}'", text), path


def _metric_names() -> set[str]:
  """Metric names in docs/metrics.md, `a/{b,c}` written out."""
  names = set()
  for span in re.findall(r'`([^`\s]+)`', _text(_METRICS)):
    before, braces, after = re.fullmatch(
        r'([^{]*)(\{.*?\})?(.*)', span
    ).groups()
    options = braces[1:-1].split(',') if braces else ['']
    names |= {before + option + after for option in options}
  return names


def test_every_metric_that_the_code_names_is_explained():
  rooms = r'actor|critic|fp8|perf|prompt_length|response_length|rollout_corr'
  named = re.compile(rf'(?:{rooms}|sft|timing_s|training)/[\w/]+')
  found = set()
  for path in (_ROOT / 'jetrl_jax').rglob('*.py'):
    for node in ast.walk(ast.parse(_text(path))):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found |= {node.value} if named.fullmatch(node.value) else set()
    timed = re.findall(r"timer\('(\w+)'\)", _text(path))
    found |= {f'timing_s/{phase}' for phase in timed}
  assert {'actor/pg_loss', 'timing_s/gen', 'critic/rewards'} <= found
  explained = _metric_names()
  missing = {
      name
      for name in found - explained
      # `critic/rewards` is what '/mean' and the like are appended to.
      if not any(known.startswith(name) for known in explained)
  }
  assert not missing


def test_every_metric_that_runs_have_written_is_explained():
  files = sorted((_ROOT / 'benchmarks/results').glob('*.jsonl'))
  lines = [json.loads(x) for file in files for x in _text(file).splitlines()]
  # A file of several runs says which one a line is of.
  written = {name for line in lines for name in line} - {'step', 'arm'}
  assert len(written) > 60  # Of several kinds of run.
  as_listed = [
      # In the recipe that samples, and in `trainer.val_recipes`.
      (r'^val-(?:core|bf16)/[^/]+', 'val-core/<source>'),
      (r'@\d+', '@N'),
      (r'/ci95$', ''),  # '<any of these>/ci95'
      (r'^fp8/(?:input|kernel|output_grad)/', 'fp8/<operand>/'),
      (r'^rollout_fp8/.*', 'rollout_fp8/...'),
  ]
  for pattern, listed in as_listed:
    written = {re.sub(pattern, listed, name) for name in written}
  assert not written - _metric_names()


def test_every_metric_in_the_tables_has_words_of_its_own():
  rows = re.findall(r'^\| (`.*?`.*?) \| (.*?) \|', _text(_METRICS), re.M)
  assert len(rows) > 60
  assert not [name for name, words in rows if len(words) < 5]
  assert len({name for name, _ in rows}) == len(rows)


@pytest.mark.parametrize(
    ('module', 'shape'), _LARGE, ids=[shape for _, shape in _LARGE]
)
def test_a_large_config_takes_random_weights_of_its_shape(module, shape):
  config = module.get_config()
  config.model.init, config.model.shape = 'random', shape
  config_schema.check(config, base.get_config())
  policy, _, folder = config_model.build_policy(config)
  assert folder is None and policy.model == config_model.SHAPES[shape]
  rows = config.data.max_prompt_length + config.rollout.max_response_length
  assert rows % policy.tile == 0 and rows <= policy.model.max_position


@pytest.mark.parametrize(
    'module', [module for module, _ in _LARGE], ids=lambda m: m.__name__
)
def test_a_large_config_without_a_checkpoint_says_what_to_give(module):
  with pytest.raises(ValueError, match=r'--config\.model\.path='):
    config_model.build_policy(module.get_config())
