"""The quickstart's task: right answers, disjoint splits, a real tokenizer."""

import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
import tokenizers

from tools import quickstart_task

_ROOT = pathlib.Path(__file__).parents[2]
_SHIPPED = _ROOT / 'examples' / 'quickstart'
_SIZES = {'sft': 300, 'train': 200, 'heldout': 50}


def _rows(split: str) -> list[dict[str, str]]:
  text = (_SHIPPED / f'{split}.jsonl').read_text(encoding='utf-8')
  return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope='module')
def problems() -> dict[str, list[dict[str, str]]]:
  return quickstart_task.make_problems(3, _SIZES)


def test_a_chain_is_answered_by_its_running_totals():
  # 38 + 7 = 45, 45 - 9 = 36, 36 + 2 = 38.
  assert quickstart_task.solve('38+7-9+2=') == '45 36 38 #### 38'


def _totals(answer: str) -> list[int]:
  steps, final = answer.split(' #### ')
  totals = [int(step) for step in steps.split()]
  assert int(final) == totals[-1]
  return totals


@pytest.mark.parametrize('split', ['train', 'heldout'])
def test_every_shipped_answer_to_learn_by_or_be_judged_by_is_right(split):
  for row in _rows(split):
    chain = row['question'].removesuffix('=')
    # Python itself adds up ever longer beginnings of the chain.
    ends = [m.start() for m in re.finditer(r'[+-]|$', chain)][1:]
    totals = [eval(chain[:end]) for end in ends]
    assert all(0 <= total <= 99 for total in totals)
    assert _totals(row['answer']) == totals


def test_a_careless_step_is_right_or_has_the_mistake_it_is_known_for():
  # By hand, in tens and units: 38 + 7 is 3|15, without the carry 35;
  # 42 - 9 is 4|2 - 9, the smaller digit from the larger 47.
  mistakes, steps = 0, 0
  for row in _rows('sft'):
    chain = re.findall(r'[+-]?\d+', row['question'])
    before = int(chain[0])
    for operand, after in zip(chain[1:], _totals(row['answer']), strict=True):
      steps += 1
      if after != before + int(operand):
        mistakes += 1
        tens, units = str(before).zfill(2)
        if operand[0] == '+':
          wrong = tens + str(int(units) + int(operand))[-1]
        else:
          wrong = tens + str(int(operand[1:]) - int(units))
        assert after == int(wrong), row
      assert 0 <= after <= 99
      before = after
  # 45% of the steps cross a ten, and half of those go wrong.
  assert 0.2 < mistakes / steps < 0.25


def test_careless_solutions_answer_two_problems_in_five():
  rows = _rows('sft')
  right = [quickstart_task.solve(r['question']) == r['answer'] for r in rows]
  assert 0.4 < sum(right) / len(rows) < 0.45


def test_the_shipped_splits_share_no_question():
  questions = {s: {r['question'] for r in _rows(s)} for s in _SIZES}
  assert not questions['heldout'] & (questions['sft'] | questions['train'])
  assert not questions['sft'] & questions['train']
  for split, size in quickstart_task.SIZES.items():
    assert len(questions[split]) == size


@pytest.mark.parametrize('split', ['sft', 'train', 'heldout'])
def test_a_shipped_question_belongs_to_its_split_by_its_text_alone(split):
  for row in _rows(split):
    assert quickstart_task.split_of(row['question']) == split


def test_draws_of_two_seeds_never_show_a_heldout_question_to_training(problems):
  other = quickstart_task.make_problems(4, _SIZES)
  heldout = {row['question'] for row in problems['heldout']}
  shown = {row['question'] for s in ('sft', 'train') for row in other[s]}
  assert heldout and shown and not heldout & shown


def test_a_seed_names_a_draw(problems):
  assert quickstart_task.make_problems(3, _SIZES) == problems
  assert quickstart_task.make_problems(4, _SIZES) != problems


def test_excluded_questions_are_not_drawn(problems):
  exclude = {row['question'] for row in problems['heldout']}
  again = quickstart_task.make_problems(3, _SIZES, exclude)
  assert not exclude & {row['question'] for row in again['heldout']}


def test_every_length_of_chain_is_drawn():
  rng = random.Random(0)
  lengths = {
      len(re.findall(r'\d+', quickstart_task.draw_question(rng)))
      for _ in range(200)
  }
  first, last = quickstart_task.MIN_OPERANDS, quickstart_task.MAX_OPERANDS
  assert lengths == set(range(first, last + 1))


def test_an_unknown_split_is_named_with_those_allowed():
  with pytest.raises(ValueError, match=r"\['test'\] are unknown; allowed"):
    quickstart_task.make_problems(0, {'test': 1})


def test_the_shipped_tokenizer_returns_every_text_it_was_given(problems):
  path = _SHIPPED / 'model_init' / 'tokenizer.json'
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  for row in problems['sft']:
    text = row['question'] + row['answer']
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_a_character_outside_the_alphabet_becomes_one_unknown_token():
  tokenizer = quickstart_task.make_tokenizer()
  unknown = tokenizer.token_to_id(quickstart_task.UNKNOWN)
  assert tokenizer.encode('1é\n').ids[1:] == [unknown, unknown]


def test_the_shipped_configs_name_the_tokenizers_own_ids():
  folder = _SHIPPED / 'model_init'
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  for name in ('config.json', 'generation_config.json'):
    config = json.loads((folder / name).read_text(encoding='utf-8'))
    assert config['eos_token_id'] == tokenizer.token_to_id('<eos>')
    assert config['pad_token_id'] == tokenizer.token_to_id('<pad>')
  config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  assert tokenizer.get_vocab_size() <= config['vocab_size']
  assert config['vocab_size'] % 16 == 0


def test_the_longest_problem_fits_the_model(problems):
  limit = quickstart_task.MODEL_CONFIG['max_position_embeddings']
  rows = [row for split in problems.values() for row in split]
  # One more for the end token.
  assert max(len(r['question'] + r['answer']) for r in rows) + 1 <= limit


def test_the_command_writes_the_shipped_files_again(tmp_path):
  command = [sys.executable, '-m', 'tools.quickstart_task']
  subprocess.run([*command, f'--output={tmp_path}'], cwd=_ROOT, check=True)
  written = [p for p in tmp_path.rglob('*') if p.is_file()]
  assert len(written) == 7
  for path in written:
    shipped = _SHIPPED / path.relative_to(tmp_path)
    assert path.read_bytes() == shipped.read_bytes(), shipped.name


@pytest.mark.parametrize(
    'text, message',
    [
        ('', 'exclude holds no *.jsonl file; name a folder with the problems'),
        ('{"problem": "1+1="}\n', "a.jsonl:1, answer_key: no column 'quest"),
        ('{"question"\n', 'exclude/a.jsonl:1: not valid JSON'),
    ],
)
def test_a_folder_without_problems_to_exclude_is_refused(
    tmp_path, monkeypatch, text, message
):
  output, exclude = tmp_path / 'output', tmp_path / 'exclude'
  exclude.mkdir()
  if text:
    (exclude / 'a.jsonl').write_text(text)
  argv = ['x', f'--output={output}', f'--exclude={exclude}']
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit) as refused:
    quickstart_task.main()
  said = str(refused.value.code)
  assert said.startswith('error: ') and message in said
  assert not output.exists()
