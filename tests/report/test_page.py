"""The page: whole, inert, and honest about what is missing."""

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from jetrl_jax.data import Tokenizer
from jetrl_jax.report import __main__ as report
from jetrl_jax.report import answers as report_answers
from jetrl_jax.report import data as report_data
from jetrl_jax.report import page as report_page
from jetrl_jax.report import text as report_text
from jetrl_jax.report.data import Health, Run, Series
from jetrl_jax.report.script import JS
from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.types import Completion
from tests import whole_run
from tests.report import report_run

_HOSTILE = (
    '</script><script>alert(1)</script><img src=x onerror=alert(2)>'
    '"\'><svg onload=alert(3)>&lt;b&gt;<!-- \u202egnp.\x00 \ud800 -->'
)


class _Elements(html.parser.HTMLParser):
  """Collects the tags and attributes of a page."""

  def __init__(self, page: str):
    super().__init__()
    self.tags: list[tuple[str, dict]] = []
    self.text = ''
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))

  def handle_data(self, data):
    self.text += data

  def all(self, tag: str) -> list[dict]:
    return [attributes for name, attributes in self.tags if name == tag]


def _page(*folders) -> str:
  folders = list(folders)
  names = report_data.names(folders)
  runs = [
      report_data.read_run(f, n) for f, n in zip(folders, names, strict=True)
  ]
  return report_page.render(runs)


@pytest.fixture
def workdir(tmp_path):
  return report_run.write(tmp_path / 'run')


def test_a_hostile_text_is_inert_wherever_it_stands(tmp_path):
  folder = report_run.write(
      tmp_path / '<img src=x onerror=alert(4)>',
      answer=_HOSTILE,
      config={'data': {_HOSTILE: _HOSTILE}},
  )
  (folder / 'starts.jsonl').write_text(json.dumps({'command': [_HOSTILE]}))
  with open(folder / 'metrics.jsonl', 'a') as file:
    name = f'val-core/{_HOSTILE}/acc/mean@1'
    line = {'step': 7, name: 0.5, f'reward/{_HOSTILE}': 1}
    line['fp8_health'] = {_HOSTILE: {'input': {'flushed_frac': 0.5}}}
    file.write(json.dumps(line) + '\n')
  page = _page(folder)
  page.encode()  # No lone surrogate is left.
  elements = _Elements(page)
  tags = {tag for tag, _ in elements.tags}
  # What the report itself is made of: nothing loads, runs or submits.
  assert not tags & {'img', 'iframe', 'object', 'embed', 'link', 'form', 'base'}
  assert len(elements.all('script')) == 2
  attributes = {name for _, found in elements.tags for name in found}
  assert not any(name.startswith('on') for name in attributes)
  assert '<!--' not in page and '\u202e' not in page and '\x00' not in page
  # It is all there to be read.
  assert '</script><script>alert(1)</script><img src=x' in elements.text
  assert '\\u202egnp.\\x00 \\ud800' in elements.text
  json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_needs_no_network_and_runs_no_other_script(workdir):
  page = _page(workdir)
  elements = _Elements(page)
  for _, attributes in elements.tags:
    for name in ('src', 'href', 'action'):
      value = attributes.get(name, '#')
      assert value.startswith(('#', 'data:image/png;base64,'))
  assert 'url(' not in page and '@import' not in page
  policy = elements.all('meta')[1]['content']
  assert policy.startswith("default-src 'none'; img-src data:;")
  script = re.findall(r'<script>(.*?)</script>', page, re.S)
  digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest())
  assert script == [JS] and f"script-src 'sha256-{digest.decode()}'" in policy


@pytest.mark.skipif(not shutil.which('node'), reason='needs node')
def test_the_script_is_javascript(tmp_path):
  (tmp_path / 'hover.js').write_text(JS)
  subprocess.run(['node', '--check', tmp_path / 'hover.js'], check=True)


def test_the_headline_says_before_and_after(workdir):
  text = _Elements(_page(workdir)).text.replace('\xa0', ' ')
  assert '25% → 85%' in text and '± 5%; best 85% at step 6' in text
  assert 'no token of 6 steps differed in any bit' in text
  assert '6 of 6finished in 1 start; 1 of 13 updates skipped' in text
  # 12 + 6 * 2 seconds.
  assert '24 s' in text and '2 s per step (median)' in text


def test_the_headline_claims_what_was_compared(tmp_path):
  sizes = {'train_batch_size': 6, 'mini_batch_size': 3}
  config = {'trainer': sizes | {'measure_mismatch': 'first'}}
  report_run.write(tmp_path / 'run', config=config)
  text = _Elements(_page(tmp_path / 'run')).text.replace('\xa0', ' ')
  assert 'no token of the first mini-batch of 6 steps differed' in text


def test_a_run_that_differs_says_so_in_the_headline(workdir):
  with open(workdir / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 7, "training/mismatch_token_frac": 0.25}\n')
  text = _Elements(_page(workdir)).text
  assert '25%of the tokens of the worst step differ' in text
  assert '1 of 7 steps have some' in text
  assert 'no token of' not in text


def test_a_mismatch_that_the_flow_is_made_of_is_no_alarm(tmp_path):
  for recipe, tone in (('', 'bad'), ('int8', '')):
    folder = tmp_path / f'run{recipe}'
    config = {'precision': {'recipe': 'bf16', 'rollout_recipe': recipe}}
    report_run.write(folder, config=config)
    with open(folder / 'metrics.jsonl', 'a') as file:
      file.write('{"step": 7, "training/mismatch_token_frac": 0.25}\n')
    page = _page(folder)
    assert f'<div class="tile {tone}"><div class="label">Mismatch' in page
    assert ('meant to be mixed' in page) == bool(recipe)


def test_what_was_skipped_or_guarded_is_counted(workdir):
  text = _Elements(_page(workdir)).text
  assert 'Updates skipped1 (steps 4)' in text
  assert 'Answers that got 0 by an error18 timeout' in text
  assert 'Training prompts left out10 of 100' in text
  assert '12.5% (last step 12.5%)They are in the loss' in text


def test_the_dots_that_a_cold_start_chose_are_named(tmp_path):
  folder = tmp_path / 'run'
  report_run.write(folder, config={'precision': {'min_sqnr_db': 30.0}})
  assert 'Dots kept in high precision0On' in _Elements(_page(folder)).text
  settled = {'high_precision': {'layers_0/mlp/down': 12.34}}
  (folder / 'precision.json').write_text(json.dumps(settled))
  text = _Elements(_page(folder)).text
  assert 'Dots kept in high precisionlayers_0/mlp/down (12.3 dB)On' in text
  for chosen in ('', '3', '{"lm_head": ""}'):
    damaged = f'{{"high_precision": {chosen}}}'
    (folder / 'precision.json').write_text(damaged)
    assert 'precision.json is damaged' in _page(folder)


def test_what_the_guard_saw_and_did_is_told_where_there_was_one(workdir):
  assert 'of the guard' not in _page(workdir)
  with open(workdir / 'metrics.jsonl', 'a') as file:
    for step, more in ((7, {'guard/high_precision': 3}), (8, {})):
      line = {'step': step, 'guard/over': 8 - step} | more
      file.write(json.dumps(line) + '\n')
  text = _Elements(_page(workdir)).text
  assert 'Steps over a bound of the guard1 (steps 7)' in text
  assert 'Actions of the guardhigh_precision 3 (steps 7)' in text


def test_missing_metrics_are_said_to_be_missing(workdir):
  page = _page(workdir)
  assert 'KL to the reference (only with algorithm.kl_loss_coef' in page
  assert 'Model FLOPs utilisation (only on GPUs whose peak is in' in page
  titles = re.findall(r'<h3>(.*?)</h3>', page)
  assert 'Gradient norm' in titles and 'KL to the reference' not in titles
  text = _Elements(page).text
  assert 'Saturated: kernels: exactly 0 at all 6 steps in all 4 dots.' in text
  assert 'Signal to noise: kernels: not recorded.' in text
  assert 'Flushed to zero: inputs' in titles


def test_turns_are_drawn_only_where_there_is_an_environment(workdir):
  assert 'Turns per episode' not in _page(workdir)
  with open(workdir / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 7, "num_turns/mean": 2.5}\n')
  assert '<h3>Turns per episode</h3>' in _page(workdir)


def test_accuracy_in_another_recipe_is_a_chart_of_its_own(workdir):
  path = workdir / 'metrics.jsonl'
  text = re.sub(
      r'"val-core/heldout/acc/mean@1": ([0-9.]+)',
      r'"val-core/heldout/acc/mean@1": \1, "val-bf16/heldout/acc/mean@1": 0.5',
      path.read_text(),
  )
  path.write_text(text)
  page = _page(workdir)
  assert '<h3>Held-out accuracy: heldout</h3>' in page
  assert 'Held-out accuracy: heldout, in bf16: 50% at all 3 steps.' in (
      _Elements(page).text
  )


def test_an_accuracy_that_is_the_reward_is_not_drawn_twice(workdir):
  path = workdir / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for line in lines[1:]:
    line['critic/acc/mean'] = line['critic/rewards/mean']
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  page = _page(workdir)
  assert 'Training accuracy: equal to the reward.' in _Elements(page).text
  lines[2]['critic/acc/mean'] = 0.5
  path.write_text('\n'.join(map(json.dumps, lines)) + '\n')
  assert '<h3>Training accuracy</h3>' in _page(workdir)


def test_samples_are_paired_before_and_after(workdir):
  text = _Elements(_page(workdir)).text
  assert (
      'Of 4 problems, from step 0 to step 6: 1 became right, 1 stayed wrong,'
      ' 1 became wrong, 1 stayed right.' in text
  )
  assert 'step 0 wrong, 0an answer 0 of step 0step 6 right, 1' in text


def test_a_sample_without_a_reference_expects_nothing():
  sample = {'prompt': 'x', 'response': 'y', 'accuracy': 1.0, 'answer': '7'}
  shown = report_answers._sample(sample, [(6, sample)])
  assert '<p class="note">expected: 7</p>' in shown
  sample['answer'] = ''
  assert 'expected' not in report_answers._sample(sample, [(6, sample)])


def test_a_long_answer_is_cut_with_a_sentence():
  assert report_text.clipped('x' * 4100).endswith(
      f'{"x" * 10}<i> ... 100 more characters</i>'
  )


def test_versions_and_config_are_there(workdir):
  text = _Elements(_page(workdir)).text
  assert 'jax 9.9.9' in text and 'abc123' in text and 'main.py --config' in text
  assert 'optim.betas[0.9, 0.98]' in text
  assert 'Checkpoints in the workdir, by step: none.' in text
  for step in (40, 5):
    (workdir / f'checkpoints/{step}').mkdir(parents=True)
  assert 'by step: 5, 40.' in _page(workdir)


def test_a_comparison_overlays_runs_and_lists_what_differs(tmp_path):
  one = report_run.write(tmp_path / 'one')
  two = report_run.write(
      tmp_path / 'two', steps=3, config={'optim': {'lr': 2e-5}}
  )
  page = _page(one, two)
  text = _Elements(page).text.replace('\xa0', ' ')
  assert 'optim.lr1e-052e-05' in text
  assert 'optim.betas[0.9, 0.98](absent)' in text
  assert '2 other values are equal.' in text
  assert '3 of 6\nnot finished' in text and '25% → 55%' in text
  data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
  titles = re.findall(r'class="card chart"><figcaption><h3>(.*?)</h3>', page)
  assert 'Band: shortest to longest' not in text and 'last steps' in text
  reward = data['charts'][titles.index('Reward')]
  assert [line['x'][-1] for line in reward['lines']] == [6, 3]
  assert data['maps'] == []


def test_a_run_without_a_metric_is_named_and_keeps_its_colour(tmp_path):
  one = report_run.write(tmp_path / 'one')
  two = report_run.write(tmp_path / 'two')
  path = one / 'metrics.jsonl'
  path.write_text(path.read_text().replace('actor/grad_norm', 'other'))
  page = _page(one, two)
  card = re.search(r'<h3>Gradient norm</h3>.*?</figure>', page, re.S)[0]
  assert 'Not in one.' in card and 'class="line c1"' in card


def _completion(prompt: int, sample: int, text: str, tokenizer) -> Completion:
  tokens = tokenizer.encode(text, add_special_tokens=False).astype(np.int32)
  zeros = np.zeros(len(tokens), np.float32)
  return Completion(
      prompt_id=prompt,
      sample=sample,
      prompt_tokens=tokenizer.encode(f'{prompt}+1=', add_special_tokens=False),
      tokens=tokens,
      log_mu=zeros,
      logprobs=zeros,
      weight_version=np.zeros(len(tokens), np.int32),
      finish_reason='length',
      sampled=np.ones(len(tokens), bool),
  )


def test_the_training_group_is_the_one_whose_scores_differ(tmp_path):
  checkpoint = whole_run.ROOT / 'examples/quickstart/checkpoint'
  tokenizer = Tokenizer(checkpoint)
  folder = report_run.write(
      tmp_path / 'run', config={'model': {'path': str(checkpoint)}}
  )
  store.save_rollouts(
      folder / 'rollouts/000006.npz',
      [
          _completion(p, s, f'{p + s}', tokenizer)
          for p in (3, 5)
          for s in (1, 2)
      ],
      {'score': np.asarray([0.0, 0, 1, 0]), 'advantage': np.arange(4) / 2.0},
  )
  text = _Elements(_page(folder)).text
  assert 'The answers to one prompt of step 6' in text
  assert '5+1=rewardadvantage' in text
  assert '1+1.001length6' in text and '0+1.501length7' in text


def test_without_rollouts_the_page_says_why_there_is_no_group(workdir):
  assert 'No training answers: no rollouts were saved' in _page(workdir)
  (workdir / 'rollouts').mkdir()
  (workdir / 'rollouts/000006.npz').write_bytes(b'torn')
  assert 'No training answers: ' in _page(workdir)


def test_a_long_run_of_a_large_model_is_a_page_of_a_few_megabytes():
  steps = np.arange(1, 2001)
  generator = np.random.default_rng(0)

  def series():
    return Series(steps=steps, values=generator.standard_normal(2000))

  names = [name for name in report_run.line(3) if not name.startswith('fp8')]
  dots = [
      f'layers_{i}/{kind}'
      for i in range(36)
      for kind in ('attn/qkv', 'attn/o', 'mlp/gate_up', 'mlp/down')
  ]
  keys = [(o, m) for o in report_data.OPERANDS for m in report_data.MEASURES]
  health = Health(
      dots=dots,
      steps=steps,
      values={
          key: generator.lognormal(size=(144, 2000)).astype(np.float32)
          for key in [*keys, ('kernel', 'changed')]
      },
  )
  run = Run(
      name='long',
      folder=report.pathlib.Path('long'),
      steps=steps,
      series={name: series() for name in names},
      health=health,
      config={},
      starts=[],
      samples={},
      checkpoints=[],
      nonfinite={},
      notes=[],
  )
  assert len(report_page.render([run])) < 2_000_000


def test_the_report_is_written_whole_beside_the_metrics(workdir):
  path = report.write_report([workdir])
  assert path == workdir / 'report.html'
  assert path.read_text().endswith('</html>\n')
  assert not list(workdir.glob('.*.partial'))


def test_a_file_that_cannot_be_written_is_a_sentence(workdir):
  with pytest.raises(ValueError, match='x/y.html cannot be written: No such'):
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


@pytest.mark.parametrize(
    ('value', 'unit', 'text'),
    [
        (0.0, '%', '0%'),
        (0.8633, '%', '86.3%'),
        (1234.5, '', '1234'),
        (5e-5, '', '5e-5'),
        (1.25e7, 'tokens', '1.25e7 tokens'),
        (-0.0123, 'nats', '-0.0123 nats'),
        (float('nan'), '', '–'),
        (None, '%', '–'),
    ],
)
def test_a_number_has_three_digits_and_its_unit(value, unit, text):
  assert report_text.number(value, unit) == text


@pytest.mark.parametrize(
    ('values', 'unit', 'texts'),
    [
        ([0.0, 0.25, 0.5], '%', ['0%', '25%', '50%']),
        # Steps of 0.025 would read 1.05, 1.07, 1.1, 1.12 with three digits.
        ([1.05, 1.075, 1.1], '', ['1.05', '1.075', '1.1']),
        ([31.40, 31.44, 31.48], 'dB', ['31.4 dB', '31.44 dB', '31.48 dB']),
        ([100000.5, 100001.0], '', ['100000.5', '100001']),
        ([3.0], '', ['3']),
    ],
)
def test_the_labels_of_a_scale_tell_its_values_apart(values, unit, texts):
  assert report_text.scale(values, unit) == texts


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0.25, '0.2 s'),
        (59.4, '59.4 s'),
        (417, '6 min 57 s'),
        (3599.9, '1 h 00 min'),
        (11100, '3 h 05 min'),
        (187200, '2 d 04 h'),
    ],
)
def test_a_duration_has_two_parts(seconds, text):
  assert report_text.duration(seconds) == text
