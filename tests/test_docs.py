"""The documents: what they name exists, and the code they show runs."""

import ast
import functools
import gzip
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

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
from jetrl_jax.rl.settings import GuardConfig
from tools import config_reference

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


@functools.cache
def _anchors(page: pathlib.Path) -> set[str]:
  """Returns the names of a page's headings, as the site makes them."""
  text = re.sub(r'^```.*?^```', '', _text(page), flags=re.M | re.S)
  headings = re.findall(r'^#+ (.*)', text, re.M)
  words = (re.sub(r'[^\w\s-]', '', heading) for heading in headings)
  return {re.sub(r'[-\s]+', '-', text.strip().lower()) for text in words}


@pytest.mark.parametrize('page', _PAGES, ids=_name)
def test_a_link_into_a_page_leads_to_a_heading(page):
  links = re.findall(r'\]\(([^)#\s]*)#([^)\s]+)\)', _text(page))
  for file, anchor in links:
    target = (page.parent / file).resolve() if file else page
    if '://' not in file and target.suffix == '.md':
      assert anchor in _anchors(target), f'{file}#{anchor}'


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


def test_a_message_that_troubleshooting_quotes_is_one_of_the_code():
  table = (_ROOT / 'docs' / 'troubleshooting.md').read_text().splitlines()
  rows = [line.split('|')[1] for line in table if line.startswith('| ')]
  quoted = [text for row in rows for text in re.findall('"([^"]+)"', row)]
  said = '\n'.join(
      node.value
      for file in (_ROOT / 'jetrl_jax').rglob('*.py')
      for node in ast.walk(ast.parse(file.read_text()))
      if isinstance(node, ast.Constant) and isinstance(node.value, str)
  )
  assert len(quoted) >= 5
  for text in quoted:
    if not text.startswith('An NVIDIA GPU may be present'):  # It is jax's.
      for part in re.split(r'\.\.\.|[0-9.]+$', text):
        assert part.strip() in said, text


def test_the_dry_run_in_the_page_prints_what_the_page_shows():
  text = _text(_ROOT / 'docs' / 'dry_run.md')
  block = text[text.index('    $ python') : text.index('**Mesh.**')]
  command, *shown = block.replace('\\\n', '').splitlines()
  done = subprocess.run(
      [sys.executable, *shlex.split(command.lstrip(' $'))[1:]],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=False,
  )
  said = done.stdout.splitlines()
  lost = [
      line for line in shown if line and line.removeprefix('    ') not in said
  ]
  assert not lost, done.stderr[-2000:]


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


def test_the_guard_lets_pass_what_a_run_that_learned_flushed():
  file = 'benchmarks/results/smollm2_135m_sums_h100_2026-11-26'
  lines = map(json.loads, _text(_ROOT / f'{file}.jsonl').splitlines())
  name = 'fp8/output_grad/flushed_frac/max'
  most = max(line[name] for line in lines if name in line)
  assert 0.5 < most < GuardConfig().max_flushed_frac
  page = _text(_ROOT / 'docs/guard.md')
  assert f'up to {most:.0%} for some steps ([raw](../{file}.md))' in page


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
