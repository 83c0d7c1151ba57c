"""The scripts that numbers come from run, in small, on a CPU."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import pytest

from benchmarks import (
    beside_lm_eval,
    common,
    exactness,
    gsm8k,
    plot_one_flow,
    plot_race,
    race,
    verl_settings,
)
from configs import qwen0_5b
from jetrl_jax import fp8
from tests import whole_run

_DOCS = pathlib.Path(__file__).parents[1] / 'docs'
_SCRIPTS = {
    'exactness': (
        '--prompts=4',
        '--tokens=24',
        # Neither is a number of slots that an engine has: they are rounded up.
        '--slots=3,20',
        '--packings=2x3',
        '--variants=fp8_delayed+kv8',
    ),
    'train_step': (
        '--workloads=1x128',
        '--segment=64',
        '--variants=fp8_delayed',
    ),
    # What donates an argument, and what has one kernel inside another.
    'kernels': ('--only=adamw,rope_append,requantize,sample_token',),
    'rollout': ('--workloads=8x4x2x16', '--variants=fp8_delayed'),
    'grpo_step': (
        '--workload=2x2x16x1',
        '--steps=2',
        '--variants=fp8_delayed+kv8',
    ),
    'gather': (
        '--slots=32',
        '--arrays=float32:256:norm,float8_e4m3fn:256',
        '--gathers=3',
        '--repeats=2',
        '--checks=2',
    ),
    'scaling': (
        '--devices=2',
        '--limit_s=1500',
        '--patience=6',
        '--parts=step,collectives,kill',
    ),
}


def _rows(script: str, folder: pathlib.Path, *more: str) -> list[dict]:
  """Returns the rows that a script writes."""
  arguments = *_SCRIPTS.get(script, ()), *more
  return whole_run.benchmark(script, folder / script, *arguments)


def test_a_packing_of_long_answers_has_fewer_tokens_than_was_asked_for():
  # 8 rows of 2 x 16640 tokens are four times what an update has room for.
  asked = ['1x1', '8x2', '4x4']
  assert exactness.layouts(asked, 768) == [(1, 1), (8, 2), (4, 4)]
  assert exactness.layouts(asked, 16640) == [(1, 1), (1, 2), (1, 3)]
  assert exactness.layouts(asked, 10**5) == [(1, 1)]


@pytest.mark.slow
def test_every_operation_is_run_by_every_implementation_at_hand(tmp_path):
  rows = _rows('kernels', tmp_path)
  assert len(rows) == 4 and not [row for row in rows if 'error' in row]
  assert {row['implementation'] for row in rows} == {'reference'}


@pytest.mark.slow
def test_exactness_compares_odd_slots_parked_sequences_and_the_update(tmp_path):
  rows = {row['check']: row for row in _rows('exactness', tmp_path)}
  assert set(rows) == {
      '20 slots',
      'few pages',
      'score 2x3',
      'accumulate 2x3',
  }
  assert all(row['unequal'] == 0 for row in rows.values())
  assert rows['few pages']['parked'] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ('script', 'measured'),
    [
        ('rollout', 'ms_per_step'),
        pytest.param('train_step', 'update_ms', marks=pytest.mark.soak),
        pytest.param('grpo_step', 'timing_s/step', marks=pytest.mark.soak),
    ],
)
def test_a_benchmark_times_each_of_its_rows(script, measured, tmp_path):
  rows = _rows(script, tmp_path)
  assert len(rows) >= 1
  assert all(row[measured] > 0 for row in rows)
  # Of whole steps the bits are compared as well.
  assert not any(row.get('training/mismatch_token_frac') for row in rows)


_RESULTS = pathlib.Path(__file__).parent.parent / 'benchmarks/results'


@pytest.mark.parametrize('arm', race.OURS)
def test_a_race_counts_the_seconds_that_were_seen(arm):
  # When a line of metrics.jsonl was seen, looked for twice a second.
  file = _RESULTS / 'race_beside_trl_qwen0_5b_h200_2026-11-27.json'
  seen = json.loads(file.read_text())[arm]
  folder = _RESULTS / 'study/gsm8k_seed3_h200_2026-11-27'
  found = race.ours(folder / f'gsm8k_{arm}_seed3.jsonl.gz')
  assert len(found) == len(seen) == 201
  for one, other in zip(found, seen, strict=True):
    assert abs(one.pop('wall_s') - other.pop('wall_s')) < 0.9
    assert one == {k: v for k, v in other.items() if v is not None}


def test_a_race_is_written_as_the_figure_reads_it(tmp_path, monkeypatch):
  accuracy = 'val-core/held/acc/mean@1'
  for arm in race.OURS:
    (tmp_path / arm).mkdir()
    (tmp_path / arm / 'starts.jsonl').write_text('{}\n')
    lines = [
        {'step': 0, accuracy: 0.25, 'timing_s/step': 60.0},
        {'step': 1, 'response_length/mean': 9.0, 'timing_s/step': 2.5},
        {'step': 2, accuracy: 0.5, 'timing_s/step': 4.0},
    ]
    written = ''.join(json.dumps(line) + '\n' for line in lines)
    # The last line is not whole.
    (tmp_path / arm / 'metrics.jsonl').write_text(written + '{"step"')
  trl = {'wall_s': 9.0, 'step': 0, 'accuracy': 0.5}
  (tmp_path / 'trl.jsonl').write_text(json.dumps(trl) + '\n')
  flags = [f'--{arm}={tmp_path / arm}' for arm in race.OURS]
  output = tmp_path / 'race.json'
  flags += [f'--trl={tmp_path}/trl.jsonl', f'--output={output}']
  monkeypatch.setattr(sys, 'argv', ['race', *flags, '--start_s=5'])
  race.main()
  found = plot_race.read(output)
  assert list(found) == [*race.OURS, 'trl'] and found['trl'] == [trl]
  for arm in race.OURS:
    assert plot_race.evaluations(found[arm]) == [(0, 65, 25), (2, 71.5, 50)]
    assert plot_race.seconds_a_step(found[arm], 2) == 2.5

  # A run that was resumed lost seconds that its metrics do not have.
  (tmp_path / 'bf16' / 'starts.jsonl').write_text('{}\n{}\n')
  with pytest.raises(SystemExit, match='was started 2 times'):
    race.main()


def _their_sample(prompt, name, right, read):
  return {
      'doc': {'prompt': prompt},
      'filter': name,
      'exact_match': right,
      'resps': [['So 6.\n#### 6 apples']],
      'filtered_resps': [read],
  }


def test_a_scale_holds_the_amaxes_before_it_and_follows_a_jump():
  amaxes = np.array([300.0, 300, 5000, 300, 300])
  held = plot_one_flow.largest_held(amaxes, fp8.Recipe(amax_history_length=2))
  assert held.shape == amaxes.shape
  assert all(held[[0, 1]] >= 300) and held[2] < 5000
  # Two steps remember the jump, then it is forgotten.
  assert all(held[3:] >= 5000)
  later = plot_one_flow.largest_held(
      np.append(amaxes, 300), fp8.Recipe(amax_history_length=2)
  )
  assert 300 <= later[-1] < 5000


def test_the_pictures_of_one_flow_are_drawn_as_large_as_the_pages_have_them(
    tmp_path,
):
  with plt.rc_context():
    plot_one_flow.draw(tmp_path)
  for name in ('eight_bits.png', 'one_flow_tokens.png'):
    drawn, shown = (plt.imread(f / name) for f in (tmp_path, _DOCS))
    assert drawn.shape == shown.shape, name


def test_verl_is_given_what_the_main_cell_has(tmp_path):
  found = verl_settings.settings(
      *('model', 'train', 'test'), steps=3, every=1, memory=0.2, micro_tokens=64
  )
  config = qwen0_5b.get_config()
  actor, rollout = 'actor_rollout_ref.actor', 'actor_rollout_ref.rollout'
  for theirs, ours in (
      ('data.train_batch_size', config.trainer.train_batch_size),
      (f'{actor}.ppo_mini_batch_size', config.trainer.mini_batch_size),
      ('data.max_response_length', config.rollout.max_response_length),
      (f'{rollout}.n', config.rollout.num_generations),
      (f'{actor}.optim.lr', config.optim.lr),
      (f'{actor}.optim.weight_decay', config.optim.weight_decay),
      (f'{actor}.grad_clip', config.optim.grad_clip),
  ):
    assert found[theirs] == ours, theirs
  # The function by its file and name, as verl looks for it.
  reward = 'reward.custom_reward_function'
  assert found[f'{reward}.path'] == gsm8k.__file__
  judge = getattr(gsm8k, str(found[f'{reward}.name']))
  for answer, expected in (('\\boxed{18}', 1), ('\\boxed{81}', 0)):
    score = judge(data_source='gsm8k', solution_str=answer, ground_truth='18')
    assert score == expected

  problems = tmp_path / 'problems.jsonl'
  problems.write_text('{"question": "9 + 9?", "answer": "18\\n#### 18"}\n')
  table = pytest.importorskip('pyarrow.parquet')
  file = verl_settings.parquet(str(problems), tmp_path / 'problems.parquet')
  (row,) = table.read_table(file).to_pylist()
  assert row['reward_model'] == {'style': 'rule', 'ground_truth': '18'}
  assert row['prompt'][0]['content'] == '9 + 9?' + gsm8k.INSTRUCTION


@pytest.mark.slow
def test_fp8_keys_cost_what_smooth_keys_cost_where_every_channel_turns(
    tmp_path,
):
  folder = whole_run.ROOT / 'examples/quickstart'
  arguments = (
      f'--checkpoint={folder}/checkpoint',
      f'--data={folder}/train.jsonl',
  )
  rows = _rows('fp8_keys', tmp_path, *arguments, '--problems=4')
  plain, smooth, *layers = rows
  # The answers of the four problems, a token a character.
  assert plain['tokens'] == smooth['tokens'] == 70
  # Its angles are large: at 10^4 tokens the slowest channels turn.
  assert 0 < plain['kl'] == smooth['kl']
  assert [row['layer'] for row in layers] == [0, 1, 2, 3]
  for row in layers:
    assert (row['slow'], row['rest']) == (0.0, row['bias'])


def test_problems_are_joined_to_sequences_of_one_length():
  texts = [np.arange(5), np.arange(5, 9)]
  found = common.joined(texts, 4)
  assert [line.tolist() for line in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
  with pytest.raises(
      ValueError, match='--length is 10, but 2 problems have 9 tokens together'
  ):
    common.joined(texts, 10)


@pytest.mark.slow
def test_an_update_of_nothing_leaves_later_gradients_as_they_were(tmp_path):
  rows = _rows(
      'later_gradients',
      tmp_path,
      '--config=configs/quickstart.py',
      '--config.trainer.train_batch_size=8',
      '--config.trainer.mini_batch_size=4',
      '--config.trainer.micro_batch_size=32',
      '--config.optim.lr=1e-30',
      '--config.optim.lr_warmup_steps=0',
      '--rollouts=1',
      '--variants=fp8_delayed',
  )
  (row,) = rows
  assert row['answers'] == 32
  assert row['k3'] == row['ppo_drift'] == 0
  assert row['ppo_cosine'] == row['one_cosine']
  for name in ('ppo_cosine', 'cispo_cosine', 'ppo_length'):
    # Scales of output gradients have moved with what they saw.
    assert row[name] == pytest.approx(1, abs=0.02)


def test_two_graders_are_compared_answer_by_answer():
  ours = [
      {
          'prompt': 'p',
          'answer': '6',
          'samples': [{'response': 'So 6.\n#### 6 apples'}],
      }
  ]
  theirs = [
      _their_sample('p', 'strict-match', 1.0, '6'),
      _their_sample('p', 'flexible-extract', 1.0, '6'),
  ]
  # After the marks our strict reward wants the number and nothing else.
  strict, flexible = beside_lm_eval.compare(ours, theirs)
  assert (strict['lm_eval_right'], strict['ours_right']) == (1, 0)
  assert strict['judged_alike'] == 0 and strict['equal_texts'] == 1
  assert strict['otherwise'][0]['lm_eval'] == [1.0, '6']
  assert flexible['judged_alike'] == flexible['read_alike'] == 1
  assert not flexible['otherwise']
  with pytest.raises(ValueError, match='lm-eval has 1 prompts, ours 0'):
    beside_lm_eval.compare([], theirs)


@pytest.mark.slow
def test_gathers_by_xla_have_the_bits_that_numpy_makes(tmp_path):
  rows = _rows('gather', tmp_path)
  assert [(row['dtype'], row['variant']) for row in rows] == [
      ('float32', 'nothing'),
      ('float32', 'xla'),
      ('float8_e4m3fn', 'nothing'),
      ('float8_e4m3fn', 'xla'),
  ]
  assert not any('error' in row or row.get('unlike') for row in rows)
  assert rows[3]['right']


@pytest.mark.slow
def test_the_sums_of_a_host_have_one_order_by_one_process_and_by_two(tmp_path):
  rows = _rows('scaling', tmp_path, '--parts=collectives')
  assert not [row['error'] for row in rows if 'error' in row]
  sums = [row for row in rows if row['unit'].endswith('sum, float32')]
  assert len(sums) == 4 and len({row['hash'] for row in sums}) == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_host_of_two_devices_is_measured_compared_and_broken(tmp_path):
  rows = _rows('scaling', tmp_path)
  assert not [row['error'] for row in rows if 'error' in row]
  steps = [row for row in rows if row['part'] == 'step']
  one, *others = steps
  assert [row['unit'] for row in steps] == [
      'one GPU, 1x1',
      'data=2, 1x2',
      'data=2, 2x1',
      'fsdp=2, 1x2',
      'fsdp=2, 2x1',
      'tensor=2, 1x2',
  ]
  # What all meshes have sampled first, and what two layouts of one have left.
  assert {row['first'] for row in steps} == {one['first']}
  assert not any(row['differ'] or row['mismatch'] for row in steps)
  assert one['weak'] == 1 and all(row['weak'] > 0 for row in others)
  assert others[0]['tokens'] > 1.5 * one['tokens']
  (killed,) = [row for row in rows if row['part'] == 'kill']
  assert killed['state'] == killed['restored']
  assert killed['ended_s'] < 60 and killed['resumed_to'] == 8
  assert killed.get('next_equal', 'True') == 'True'
  # A second call finds all done.
  assert _rows('scaling', tmp_path) == rows


def test_no_packing_has_fewer_micro_batches_than_the_tokens_fill(tmp_path):
  rows = _rows('packing', tmp_path, '--steps=1', '--devices=2', '--sizes=0,2')
  assert len(rows) == 4
  for full, smaller in zip(rows[::2], rows[1::2], strict=True):
    assert full['least'] <= smaller['micro_batches'] <= full['micro_batches']
    assert full['micro_batches'] <= full['first_fit']


def test_a_benchmark_that_is_ended_ends_the_runs_that_it_started(tmp_path):
  waits = """
import pathlib, sys, time
from benchmarks import launch

launch.leave_gpus()
(one,) = launch.start(['http.server', '0'], (1, 1), pathlib.Path(sys.argv[1]))
print(one.pid, flush=True)
time.sleep(60)
"""
  with subprocess.Popen(
      [sys.executable, '-c', waits, str(tmp_path)],
      cwd=pathlib.Path(__file__).parents[1],
      stdout=subprocess.PIPE,
      text=True,
  ) as started:
    assert started.stdout is not None
    pid = int(started.stdout.readline())
    os.kill(pid, 0)
    started.terminate()
    assert started.wait(30) == 128 + signal.SIGTERM
  for _ in range(100):
    # It may be there as a zombie, until whoever has inherited it looks.
    status = pathlib.Path(f'/proc/{pid}/stat')
    if (
        not status.exists()
        or status.read_text().rsplit(')')[1].split()[0] == 'Z'
    ):
      return
    time.sleep(0.1)
  pytest.fail(f'{pid} goes on')
