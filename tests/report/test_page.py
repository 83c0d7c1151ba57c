"""The page: whole, inert, and honest about what is missing."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import plotly.offline
import pytest

from jetrl_jax import report
from jetrl_jax.report import contents
from jetrl_jax.report.run import MEASURES, OPERANDS, Health, default_config
from tests import whole_run
from tests.report import pages, workdirs
from tests.report.test_answers import save_rollouts
from tests.report.test_figures import run

_HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror=alert(2)>'
    '"\'><svg onload=alert(3)>&lt;b&gt;{{ 7*7 }}<!-- \u202egnp.\x00 \ud800 -->'
)


@pytest.fixture
def workdir(tmp_path):
  return workdirs.write(tmp_path / 'run')


def _text(*folders) -> str:
  return pages.Elements(pages.written(*folders)).text


def test_a_hostile_text_is_inert_wherever_it_stands(tmp_path):
  folder = workdirs.write(
      tmp_path / '<img src=x onerror=alert(4)>',
      answer=_HOSTILE,
      config={'data': {_HOSTILE: _HOSTILE}, 'reward': {'functions': ['math']}},
  )
  (folder / 'starts.jsonl').write_text(json.dumps({'command': [_HOSTILE]}))
  name = f'val-core/{_HOSTILE}/acc/mean@1'
  with open(folder / 'metrics.jsonl', 'a') as file:
    for step, value in ((7, 0.5), (8, 0.6)):
      line = {'step': step, name: value, f'reward/{_HOSTILE}': 1}
      line['fp8_health'] = {_HOSTILE: {'input': {'flushed_frac': 0.5}}}
      file.write(json.dumps(line) + '\n')
  for folders in (
      [folder],
      [folder, workdirs.write(tmp_path / 'b')],
      [tmp_path],
  ):
    written = pages.written(*folders)
    written.encode()  # No lone surrogate is left.
    elements = pages.Elements(written)
    tags = {tag for tag, _ in elements.tags}
    # What the page itself is made of: nothing loads, runs or submits.
    loading = {
        'img',
        'svg',
        'iframe',
        'object',
        'embed',
        'link',
        'form',
        'base',
    }
    assert not tags & loading
    assert len(elements.all('script')) == 3
    attributes = {name for _, found in elements.tags for name in found}
    assert not any(name.startswith('on') for name in attributes)
    own = written.replace(plotly.offline.get_plotlyjs(), '')
    assert '<!--' not in own and '\u202e' not in own and '\x00' not in own
  written = pages.written(folder)
  # It is all there to be read, as text and in what the script reads.
  text = pages.Elements(written).text
  assert '</script><script>alert(1)</script><img src=x' in text
  assert '{{ 7*7 }}' in text and '\\u202egnp.\\x00 \\ud800' in text
  answer = pages.answers(written, 0)[6][0]['answers'][0]['text']
  assert answer.startswith(_HOSTILE[:40]) and '\\u202egnp' in answer


def test_the_page_needs_no_network_and_runs_no_other_script(workdir):
  written = pages.written(workdir)
  elements = pages.Elements(written)
  for _, attributes in elements.tags:
    for name in ('src', 'href', 'action'):
      assert attributes.get(name, '#').startswith('#')
  scripts = re.findall(r'<script>(.*?)</script>', written, re.S)
  assert scripts[0] == plotly.offline.get_plotlyjs() and len(scripts) == 2
  policy = elements.all('meta')[1]['content']
  assert policy.startswith("default-src 'none'; img-src data: blob:; style-src")
  digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
  named = ' '.join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
  assert f'script-src {named}; base-uri' in policy


@pytest.mark.skipif(not shutil.which('node'), reason='needs node')
def test_the_script_is_javascript(workdir, tmp_path):
  scripts = re.findall(r'<script>(.*?)</script>', pages.written(workdir), re.S)
  (tmp_path / 'own.js').write_text(scripts[1])
  subprocess.run(['node', '--check', tmp_path / 'own.js'], check=True)


def test_a_page_says_what_a_run_was_and_became(workdir):
  text = _text(workdir)
  assert 'a/model, None · 1 x cpu' in text
  assert 'Held-out accuracy25% → 85%heldout, mean@1, ± 5%' in text
  assert 'Answers that got 0 by an error18 timeoutThe reward ran out' in text
  assert '12.5% (last step 12.5%)They are in the loss' in text
  assert 'jax 9.9.9' in text and 'abc123' in text and 'main.py --config' in text
  assert 'Checkpoints in the workdir, by step: none.' in text
  assert 'Of 4 problems, from step 0 to step 6: 1 became right' in text
  for name in ('40', '5', '7.orbax-checkpoint-tmp-1'):
    (workdir / f'checkpoints/{name}').mkdir(parents=True)
  assert 'by step: 5, 40.' in _text(workdir)


def test_alarms_stand_on_top(workdir):
  assert 'class="alarm"' not in pages.written(workdir)
  with open(workdir / 'metrics.jsonl', 'a') as file:
    for step in range(7, 12):
      line = {'step': step, 'response_length/clip_ratio': 1.0}
      file.write(json.dumps(line) + '\n')
  written = pages.written(workdir)
  assert written.index('class="alarm"') < written.index('<main>')
  assert 'Nearly all answers are cut at the length limit' in written


def test_missing_metrics_are_said_to_be_missing(workdir):
  written = pages.written(workdir)
  text, titles = pages.Elements(written).text, pages.titles(written)
  assert 'KL to the reference (only with algorithm.kl_loss_coef' in text
  assert 'Model FLOPs utilisation (only on GPUs whose peak is in' in text
  assert 'Gradient norm' in titles and 'KL to the reference' not in titles
  assert 'Saturated: kernels: exactly 0 at all 6 steps in all 4 dots.' in text
  assert 'Signal to noise: kernels: not recorded.' in text
  assert 'Flushed to zero: inputs' in titles


def test_turns_are_drawn_only_where_there_is_an_environment(workdir):
  assert 'Turns per episode' not in pages.written(workdir)
  with open(workdir / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 7, "num_turns/mean": 2.5}\n')
  assert 'Turns per episode' in pages.titles(pages.written(workdir))


def test_accuracy_in_another_recipe_is_a_figure_of_its_own(workdir):
  path = workdir / 'metrics.jsonl'
  core, other = 'val-core/heldout/acc/mean@1": ', 'val-bf16/heldout/acc/mean@1'
  more = rf'"{core}\1, "{other}": 0.5'
  path.write_text(re.sub(f'"{core}([0-9.]+)', more, path.read_text()))
  written = pages.written(workdir)
  assert 'Held-out accuracy: heldout' in pages.titles(written)
  said = 'Held-out accuracy: heldout, in bf16: 50% at all 3 steps.'
  assert said in pages.Elements(written).text


def test_a_run_of_one_step_is_a_page(tmp_path):
  folder = workdirs.write(tmp_path / 'run', steps=1)
  written = pages.written(folder)
  assert 'all 1 step' not in written
  assert 'exactly 0 at the only step in all 4 dots' in written
  share = pages.plot(written, 'Held-out accuracy: heldout')
  assert share['data'][1]['mode'] == 'lines+markers'
  assert share['layout']['yaxis']['maxallowed'] == 1


def test_no_metric_is_finite_and_there_is_a_page(tmp_path):
  folder = tmp_path / 'run'
  folder.mkdir()
  names = [n for n, v in workdirs.line(3).items() if not isinstance(v, dict)]
  lines = [{'step': i} | dict.fromkeys(names) for i in range(3)]
  text = '\n'.join(map(json.dumps, lines)) + '\n'
  (folder / 'metrics.jsonl').write_text(text)
  written = pages.written(folder)
  assert pages.data(written)['plots'] != 0
  assert 'nan' not in pages.Elements(written).text.lower().split()


def test_config_values_that_are_no_defaults_are_marked(workdir):
  assert default_config()['optim.betas'] == [0.9, 0.999]
  text = _text(workdir)
  assert '4 of 4 values differ from their defaults.' in text
  assert 'optim.betas[0.9, 0.98][0.9, 0.999]' in text
  written = pages.written(workdir)
  assert '<span class="changed">a/model</span>' in written
  (workdir / 'config.json').write_text('{"seed": 0, "optim": {"lr": 1e-6}}')
  written = pages.written(workdir)
  assert '0 of 2 values differ' in written and '"changed"' not in written


def test_a_comparison_overlays_runs_and_lists_what_differs(tmp_path):
  one = workdirs.write(tmp_path / 'one')
  config = {'optim': {'lr': 1e-6}}
  two = workdirs.write(tmp_path / 'two', steps=3, config=config)
  written = pages.written(one, two)
  text = pages.Elements(written).text
  assert 'optim.lr1e-051e-061e-06' in text  # Each run, and the default.
  assert '<span class="changed">1e-05</span>' in written
  assert '<span class="changed">1e-06</span>' not in written
  assert 'optim.betas[0.9, 0.98](absent)[0.9, 0.999]' in text
  assert '2 other values are equal.' in text
  assert '3 of 6 not finished' in text and '25% → 55%' in text
  assert 'Band: shortest to longest' not in text and 'last steps' in text
  reward = pages.plot(written, 'Reward')['data']
  assert [pages.array(trace['x'])[-1] for trace in reward] == [6, 3]
  assert all(
      t['type'] != 'heatmap'
      for p in pages.data(written)['plots']
      for t in p['data']
  )
  assert 'update7.5 s3.8 s' in text  # Time by phase.
  # A button per run, on top and in each figure.
  assert written.count('data-every="0"') == written.count('data-every="1"') == 1
  assert written.count('data-run="1"') == len(pages.titles(written))


def test_a_folder_of_runs_is_a_list_with_links(tmp_path):
  long = f'/{"long/" * 9}cache'
  config = {'seed': 4, 'compile_cache_dir': long}
  one = workdirs.write(tmp_path / 'one & 1', config=config)
  config = {'seed': 5, 'compile_cache_dir': ''}
  workdirs.write(tmp_path / 'deep/two', steps=3, config=config)
  bad = tmp_path / 'bad'
  bad.mkdir()
  (bad / 'metrics.jsonl').write_text('{}\n{}\n')
  report.write_report([one])
  path = report.write_report([tmp_path])
  assert path == tmp_path / 'report.html'
  written = path.read_text()
  elements = pages.Elements(written)
  links = [a['href'] for a in elements.all('a') if a['href'][0] != '#']
  assert links == ['./one%20%26%201/report.html']
  assert 'deep/two3 of 625% → 55%' in elements.text
  assert 'seed=4' in elements.text and 'seed=5' in elements.text
  # Of a long value its end, in 24 characters.
  assert f'compile_cache_dir=…{long[-23:]}' in elements.text
  assert '2 runs' in elements.text
  assert 'metrics.jsonl line 1 is no metrics line' in elements.text
  assert 'Reward' in pages.titles(written)


def test_answers_of_all_steps_are_there_to_be_looked_through(tmp_path):
  checkpoint = whole_run.ROOT / 'examples/quickstart/checkpoint'
  config = {'model': {'path': str(checkpoint)}}
  folder = workdirs.write(tmp_path / 'run', config=config)
  for step in (2, 6):
    save_rollouts(folder, step)
  written = pages.written(folder)
  assert list(pages.answers(written, 0)) == [0, 3, 6]
  assert list(pages.answers(written, 1)) == [2, 6]
  chosen = re.findall(r'<option selected>(\d+)</option>', written)
  assert chosen == ['6', '0', '6']  # Held-out, beside, training.


def test_a_long_run_of_a_large_model_is_a_page_of_a_few_megabytes():
  generator = np.random.default_rng(0)
  names = [n for n in workdirs.line(3) if not n.startswith('fp8')]
  kinds = ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')
  keys = [(o, m) for o in OPERANDS for m in MEASURES] + [('kernel', 'changed')]
  health = Health(
      dots=[f'layers_{i}/{kind}' for i in range(36) for kind in kinds],
      steps=np.arange(1, 2001),
      values={
          key: generator.lognormal(size=(144, 2000)).astype(np.float32)
          for key in keys
      },
  )
  metrics = {name: generator.standard_normal(2000) for name in names}
  long = run('long', health, **metrics)
  written = contents.run_page([long]).html()
  assert len(written) - len(plotly.offline.get_plotlyjs()) < 5_000_000


def test_the_report_is_written_whole_beside_the_metrics(workdir):
  path = report.write_report([workdir])
  assert path == workdir / 'report.html'
  assert path.read_text().endswith('</html>')
  assert not list(workdir.glob('.*.partial'))


def test_a_file_that_cannot_be_written_is_a_sentence(workdir):
  said = 'y.html cannot be written: No such .*; jetrl_jax report --out writes'
  with pytest.raises(ValueError, match=said):
    report.write_report([workdir], workdir / 'x/y.html')
  with pytest.raises(ValueError, match='cannot be written: Not a directory'):
    report.write_report([workdir], workdir / 'config.json/y.html')
  with pytest.raises(ValueError, match='name the workdir of a run'):
    report.write_report([])


def test_the_command_answers_wrong_input_in_one_line(workdir):
  process = whole_run.start(workdir, 'nowhere', module='jetrl_jax.report')
  output, errors = process.communicate(timeout=200)
  assert process.returncode == 1 and output == ''
  assert errors == 'error: nowhere: there is no such folder\n'


def test_a_watched_page_reloads_itself_until_the_run_is_finished(tmp_path):
  folder = tmp_path / 'run'
  command = [sys.executable, '-m', 'jetrl_jax.report', folder]
  process = subprocess.Popen(
      [*command, '--watch', '--interval=1'],
      stdout=subprocess.PIPE,
      text=True,
      cwd=whole_run.ROOT,
  )
  try:
    assert 'there is no such folder' in process.stdout.readline()
    workdirs.write(tmp_path / 'other', steps=3).rename(folder)
    assert 'every 1 s; Ctrl-C ends it' in process.stdout.readline()
    written = (folder / 'report.html').read_text()
    assert pages.data(written)['reload_s'] == 1 and 'id="reload"' in written
    with open(folder / 'metrics.jsonl', 'a') as file:
      file.write('{"step": 6}\n')
    output, _ = process.communicate(timeout=100)
    assert output == f'Wrote {folder}/report.html: finished\n'
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 0
  written = (folder / 'report.html').read_text()
  assert pages.data(written)['reload_s'] == 0 and 'id="reload"' not in written
