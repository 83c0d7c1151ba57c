"""Answers by step: what is shown of them, and in how much room."""

import json
import re

import numpy as np
import pytest

from jetrl_jax.data import Tokenizer
from jetrl_jax.report import answers
from jetrl_jax.report.run import read_run
from jetrl_jax.rl.scoring import store
from jetrl_jax.rl.types import Completion
from tests import whole_run
from tests.report import workdirs

_CHECKPOINT = whole_run.ROOT / 'examples/quickstart/checkpoint'


@pytest.fixture
def workdir(tmp_path):
  return workdirs.write(
      tmp_path / 'run',
      config={
          'model': {'path': str(_CHECKPOINT)},
          'reward': {'functions': ['gsm8k']},
      },
  )


def _heldout(folder, budget=10**6):
  return answers.heldout(read_run(folder, 'run'), budget)


def _training(folder, budget=10**6):
  return answers.training(read_run(folder, 'run'), budget)


def _completion(prompt: int, sample: int, text: str) -> Completion:
  tokenizer = Tokenizer(_CHECKPOINT)
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
      finish_reason='length' if sample == 2 else 'stop',
      sampled=np.ones(len(tokens), bool),
  )


def save_rollouts(folder, step: int) -> None:
  """Two prompts, 3+1 and 5+1, with two answers each; the first one's agree."""
  made = [_completion(p, s, f'#### {p + s}') for p in (3, 5) for s in (1, 2)]
  score = np.asarray([0.0, 0, 1, 0])
  extra = {'score': score, 'accuracy': score, 'advantage': np.arange(4) / 2.0}
  store.save_rollouts(folder / f'rollouts/{step:06d}.npz', made, extra)


def _read(found: answers.Answers, step: int) -> list[dict]:
  import base64
  import zlib

  return json.loads(zlib.decompress(base64.b64decode(found.blocks[step])))


def test_held_out_answers_of_every_evaluation_are_there(workdir):
  found = _heldout(workdir)
  assert list(found.blocks) == [0, 3, 6]
  assert found.lead == [
      'Of 4 problems, from step 0 to step 6: 1 became right, 1 stayed wrong,'
      ' 1 became wrong, 1 stayed right.'
  ]
  first, *_, cut = _read(found, 6)
  assert first['prompt'] == 'problem 0' and first['expected'] == '0'
  (one,) = first['answers']
  assert one['text'] == 'an answer 0 of step 6' and one['right'] is True
  assert (one['end'], cut['answers'][0]['end']) == ('stop', 'length')


def test_a_problem_that_occurs_twice_is_counted_twice(workdir):
  for step, right in ((0, [0, 0]), (6, [0, 1])):
    lines = [{'prompt': 'same', 'response': '', 'accuracy': r} for r in right]
    text = '\n'.join(map(json.dumps, lines))
    (workdir / f'samples/{step:06d}.jsonl').write_text(text)
  (lead,) = _heldout(workdir).lead
  assert 'Of 2 problems' in lead and '1 became right, 1 stayed wrong' in lead


def test_steps_that_a_resumed_run_will_write_again_are_left_out(workdir):
  (workdir / 'samples/000009.jsonl').write_text('{}\n')
  assert list(_heldout(workdir).blocks) == [0, 3, 6]


def test_damaged_samples_are_said(workdir):
  (workdir / 'samples/000006.jsonl').write_text('{"prompt": "x"}\n{"prom\n')
  found = _heldout(workdir)
  assert '1 damaged lines of 000006.jsonl are left out.' in found.lead
  (problem,) = _read(found, 6)
  assert problem['prompt'] == 'x' and problem['answers'][0]['right'] is None


def test_without_samples_the_page_says_so(tmp_path, workdir):
  for path in (workdir / 'samples').iterdir():
    path.unlink()
  found = _heldout(workdir)
  assert found.blocks == {} and found.unanswered is None
  assert found.lead == ['The workdir holds no samples of an evaluation.']


def test_training_groups_are_ordered_by_how_much_their_scores_differ(workdir):
  save_rollouts(workdir, 6)
  found = _training(workdir)
  five, three = _read(found, 6)
  assert (five['prompt'], three['prompt']) == ('5+1=', '3+1=')
  assert [a['text'] for a in five['answers']] == ['#### 6', '#### 7']
  right = {
      'right': True,
      'score': 1.0,
      'advantage': 1.0,
      'tokens': 6,
      'end': 'stop',
      'found': True,
  }
  assert five['answers'][0] == {'text': '#### 6'} | right
  assert five['answers'][1]['end'] == 'length'
  assert found.unanswered == 0


def test_answers_in_which_the_reward_finds_none_are_counted(workdir):
  assert _heldout(workdir).unanswered == 1  # 'an answer 0 of step 6'.
  path = workdir / 'samples/000006.jsonl'
  path.write_text(path.read_text().replace('an answer 0', '#### 7'))
  found = _heldout(workdir)
  assert found.unanswered == 0.75
  known = [p['answers'][0]['found'] for p in _read(found, 6)]
  assert known == [True, False, False, False]


def test_whether_another_reward_finds_an_answer_is_not_known(tmp_path):
  config = {'reward': {'functions': ['my_reward.py:score']}}
  folder = workdirs.write(tmp_path / 'run', config=config)
  found = _heldout(folder)
  assert found.unanswered is None
  assert _read(found, 6)[0]['answers'][0]['found'] is None


def test_a_budget_keeps_the_ends_and_spreads_the_rest(workdir):
  path = workdir / 'metrics.jsonl'
  path.write_text(path.read_text() + '{"step": 100}\n')
  for step in range(101):
    text = json.dumps({'prompt': 'x', 'response': f'{step}', 'accuracy': 1})
    (workdir / f'samples/{step:06d}.jsonl').write_text(text)
  assert len(_heldout(workdir).blocks) == 101
  size = max(map(len, _heldout(workdir).blocks.values()))
  found = _heldout(workdir, 5 * size)
  assert list(found.blocks) == [0, 25, 50, 75, 100]
  assert 'holds the answers of 5 of 101 steps' in found.lead[-1]
  assert list(_heldout(workdir, 0).blocks) == [0, 100]


def test_without_rollouts_or_tokenizer_the_page_says_why(tmp_path, workdir):
  assert _training(workdir).lead == [
      'No training answers: no rollouts were saved (trainer.save_rollouts).'
  ]
  save_rollouts(workdir, 5)
  (workdir / 'rollouts/000006.npz').write_bytes(b'torn')
  found = _training(workdir)
  assert re.match(r'Left out: .*000006.npz cannot be read', found.lead[0])
  assert _read(found, 6) == [] and len(_read(found, 5)) == 2
  made = [_completion(3, 1, '4')]
  extra = {n: np.zeros((1, 2)) for n in ('score', 'accuracy', 'advantage')}
  path = workdir / 'rollouts/000006.npz'
  store.save_rollouts(path, made, extra)
  assert _training(workdir).lead[0].startswith('Left out: ')
  other = workdirs.write(tmp_path / 'other')
  save_rollouts(other, 6)
  assert 'the tokenizer is not in export/' in _training(other).lead[0]


@pytest.mark.parametrize('setting', ['model.path', 'data.tokenizer'])
def test_a_relative_tokenizer_is_found_from_where_the_run_was_started(
    tmp_path, monkeypatch, setting
):
  section, _, key = setting.partition('.')
  folder = workdirs.write(
      tmp_path / 'run',
      config={section: {key: 'examples/quickstart/checkpoint'}},
  )
  save_rollouts(folder, 6)
  monkeypatch.chdir(tmp_path)
  assert 'the tokenizer is not in export/' in _training(folder).lead[0]
  start = json.dumps({'folder': str(whole_run.ROOT)})
  (folder / 'starts.jsonl').write_text(f'{start}\n')
  assert [p['prompt'] for p in _read(_training(folder), 6)] == ['5+1=', '3+1=']
  # Without such a note, or where that folder is gone, the current one counts.
  (folder / 'starts.jsonl').write_text('{"folder": "/nowhere"}\n')
  assert 'the tokenizer is not in export/' in _training(folder).lead[0]
  monkeypatch.chdir(whole_run.ROOT)
  assert len(_read(_training(folder), 6)) == 2


def test_a_long_answer_keeps_its_beginning_and_its_end():
  shown = answers.clipped('a' * 6000 + 'b' * 5000 + 'c' * 2000)
  head, said, tail = shown.split('\n')
  assert head == 'a' * 6000 and tail == 'c' * 2000
  assert said == '[... 5000 characters are left out ...]'
  assert answers.clipped('a' * 8000) == 'a' * 8000


def test_what_hides_is_written_out():
  hostile = 'a\u202eb\x00\ud800\u2028 \xa0\n\t\u00e9'
  assert answers.visible(hostile) == (
      'a\\u202eb\\x00\\ud800\\u2028 \xa0\n\t\u00e9'
  )
