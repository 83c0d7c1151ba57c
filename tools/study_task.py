"""Writes the study's task: word problems, their tokenizer, the model's shape.

A few people have things, and events change who has how many. The worked answer
writes every sum, and after each sum goes through everybody's things as often
as the question asks for:

    question  Ann has 34 pens, Bob has 8 pens, Eve has 61 pens. 1. Bob finds 5
              pens. 2. Ann loses 6 pens. How many pens has Ann? Check 1 times.
    answer    1. Bob 8 + 5 = 13. check 1: Ann 34, Bob 13, Eve 61.
              2. Ann 34 - 6 = 28. check 1: Ann 28, Bob 13, Eve 61.
              #### 28

Two knobs that do not touch each other:

    difficulty   `steps` sums decide the answer; `others` sums, of people who
                 are not asked for, do not
    length       `checks`: a check copies numbers and decides nothing

Five people and eight sums make about 270 tokens with one check and about 1900
with ten. The number of checks stands in the question, so one model answers the
same problem at any length.

The warm start imitates careless solutions, as in `quickstart_task.py`: where a
sum crosses a ten (45% of them do) a carry or a borrow is got wrong with
probability `careless`. With 4 steps and 0.5 that leaves

    (1 - 0.45 * 0.5)^4 = 36%

of the answers right, whatever their length. GRPO sees only the last number.

What a problem may be used for is a hash of its text without the number of
checks: 'sft', 'train' or 'heldout', so a held-out problem is held out at all
lengths and from all seeds.

    python -m tools.study_task --output=runs/study/task

writes sft.jsonl (three short answers to a long one), train_1, train_10,
heldout_1, heldout_10, and model_init: what a checkpoint has besides weights.
"""

import argparse
import dataclasses
import random
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetrl_jax.core.files import user_path
from tools import command, quickstart_task
from tools.quickstart_task import MAX_TOTAL, SPECIAL_TOKENS, UNKNOWN

NAMES = (
    'Ann Bob Cleo Dan Eve Fay Gus Hal Ida Jon Kim Leo Mia Ned Oli Pam Quin Ray'
    ' Sam Tom Uma Vic Wes Xia Yan Zoe'
).split()
THINGS = (
    'pens cups hats keys nuts eggs pins maps toys bags caps jars mugs rugs'
    ' bells coins cards books boxes balls'
).split()
VERBS = {
    1: 'finds buys wins gets makes picks'.split(),
    -1: 'loses sells drops spends breaks lends'.split(),
}
_WORDS = 'has How many Check check times'.split()
_SIGNS = ',.:?\n'
SIZES = {'sft': 24000, 'train': 8000, 'heldout': 256}

# Qwen2 with 17M parameters. Every dot's dims are multiples of 128, as blocks of
# FP8 scales want, and heads have 64 numbers, as the attention kernel does.
MODEL_CONFIG = quickstart_task.MODEL_CONFIG | {
    'vocab_size': 128,
    'hidden_size': 512,
    'intermediate_size': 1408,
    'num_hidden_layers': 6,
    'num_attention_heads': 8,
    'num_key_value_heads': 2,
    'head_dim': 64,
    'max_position_embeddings': 2304,
    # 1 / sqrt(hidden_size).
    'initializer_range': 0.044,
}
# The same task on a CPU: 0.2M parameters.
TINY_MODEL_CONFIG = MODEL_CONFIG | {
    'hidden_size': 96,
    'intermediate_size': 256,
    'num_hidden_layers': 2,
    'num_attention_heads': 3,
    'num_key_value_heads': 1,
    'head_dim': 32,
    'initializer_range': 0.1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difficulty:
  """How hard a problem is; nothing here changes how an answer is written.

  Attributes:
    people: who have things.
    steps: sums that decide the answer.
    others: sums of people who are not asked for.
    careless: probability that the warm start gets a carry or a borrow wrong.
  """

  people: int = 5
  steps: int = 4
  others: int = 4
  careless: float = 0.5

  def __post_init__(self):
    if not 2 <= self.people <= len(NAMES):
      raise ValueError(
          f'people is {self.people}; allowed: 2 to {len(NAMES)}, of whom one is'
          ' asked for'
      )
    if self.steps < 1 or self.others < 0:
      raise ValueError(
          f'steps is {self.steps} and others {self.others}; allowed: steps >= 1'
          ' and others >= 0'
      )
    if not 0 <= self.careless <= 1:
      raise ValueError(f'careless is {self.careless}; allowed: 0 to 1')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One problem, without its length.

  Attributes:
    things: what is counted.
    start: by name, how many there are at first.
    events: (name, verb, signed number), in order.
    asked: whose things the question asks for.
  """

  things: str
  start: dict[str, int]
  events: tuple[tuple[str, str, int], ...]
  asked: str


def draw_problem(rng: random.Random, difficulty: Difficulty) -> Problem:
  """Draws a problem whose totals all lie in [0, MAX_TOTAL].

  Args:
    rng: the source of all choices; advanced.
    difficulty: how many people and sums.
  """
  names = sorted(rng.sample(NAMES, difficulty.people))
  asked = rng.choice(names)
  start = {name: rng.randint(1, MAX_TOTAL) for name in names}
  rest = [name for name in names if name != asked]
  subjects = [asked] * difficulty.steps
  subjects += [rng.choice(rest) for _ in range(difficulty.others)]
  rng.shuffle(subjects)
  totals, events = dict(start), []
  for name in subjects:
    low = max(0, totals[name] - quickstart_task.MAX_OPERAND)
    high = min(MAX_TOTAL, totals[name] + quickstart_task.MAX_OPERAND)
    allowed = [t for t in range(low, high + 1) if t != totals[name]]
    change = rng.choice(allowed) - totals[name]
    verb = rng.choice(VERBS[1 if change > 0 else -1])
    events.append((name, verb, change))
    totals[name] += change
  return Problem(
      things=rng.choice(THINGS), start=start, events=tuple(events), asked=asked
  )


def story(problem: Problem) -> str:
  """Writes the problem without its length: what its split depends on."""
  things = problem.things
  have = [f'{name} has {n} {things}' for name, n in problem.start.items()]
  events = [
      f'{i}. {name} {verb} {abs(n)} {things}.'
      for i, (name, verb, n) in enumerate(problem.events, 1)
  ]
  return (
      f'{", ".join(have)}. {" ".join(events)} How many {things} has'
      f' {problem.asked}?'
  )


def question(problem: Problem, checks: int) -> str:
  """Writes the question; the answer starts on a new line."""
  return f'{story(problem)} Check {checks} times.\n'


def solve(
    problem: Problem,
    checks: int,
    careless: float = 0.0,
    rng: random.Random | None = None,
) -> str:
  """Writes a worked answer.

  Args:
    problem: what to solve.
    checks: how often all numbers are written after each sum.
    careless: probability of a wrong carry or borrow where a ten is crossed.
    rng: decides; advanced. Unread when careless is 0.

  Returns:
    The sums and checks, then '#### ' and the number asked for. A wrong total is
    what later sums of that person start from.
  """
  while True:
    sums = list(_sums(problem, careless, rng))
    # A wrong total may lead the rest out of the range.
    if all(0 <= after <= MAX_TOTAL for _, _, _, after in sums):
      break
  lines, totals = [], dict(problem.start)
  for i, (name, before, change, after) in enumerate(sums, 1):
    totals[name] = after
    sign = '+' if change > 0 else '-'
    lines.append(f'{i}. {name} {before} {sign} {abs(change)} = {after}.')
    lines += [_check(totals, j) for j in range(checks)]
  return ' '.join([*lines, '####', str(totals[problem.asked])])


def _sums(problem: Problem, careless: float, rng: random.Random | None):
  """Yields (name, total before, change, total written after it)."""
  totals = dict(problem.start)
  for name, _, change in problem.events:
    before = totals[name]
    after = before + change
    crosses_ten = after // 10 != before // 10
    if rng and crosses_ten and rng.random() < careless:
      after = quickstart_task.misadd(before, change)
    totals[name] = after
    yield name, before, change, after


def _check(totals: dict[str, int], index: int) -> str:
  """Writes everybody's number, from another person on each time.

  So that a check has to find the numbers, instead of repeating the last one.
  """
  names = list(totals)
  turn = index % len(names)
  turned = names[turn:] + names[:turn]
  everybody = ', '.join(f'{name} {totals[name]}' for name in turned)
  return f'check {index + 1}: {everybody}.'


def split_of(problem: Problem) -> str:
  """Says what a problem may be used for, at any length."""
  return quickstart_task.split_of(story(problem))


def problems_of(
    split: str, seed: int, difficulty: Difficulty
) -> Iterator[tuple[Problem, random.Random]]:
  """Yields distinct problems of one split, without end.

  Args:
    split: 'sft', 'train' or 'heldout'.
    seed: names the draw.
    difficulty: of all of them. The same problems come at every length.

  Yields:
    (problem, a generator for its careless solution).
  """
  rng, seen = random.Random(f'study {split} {seed}'), set()
  while True:
    problem = draw_problem(rng, difficulty)
    text = story(problem)
    if split_of(problem) == split and text not in seen:
      seen.add(text)
      yield problem, random.Random(f'{seed} {text}')


def make_rows(
    split: str,
    seed: int,
    size: int,
    difficulty: Difficulty,
    checks: tuple[int, ...],
) -> list[dict[str, str]]:
  """Makes the rows of one split.

  Args:
    split: 'sft', 'train' or 'heldout'.
    seed: names the draw.
    size: rows.
    difficulty: of the problems.
    checks: lengths, one problem each, in turn.

  Returns:
    Rows with 'question' and 'answer'. The answers of 'sft' are worked, and
    careless; the others hold the number alone.

  Raises:
    ValueError: an unknown split, or no length.
  """
  if split not in quickstart_task.SPLITS or not checks or min(checks) < 0:
    raise ValueError(
        f'split {split!r} with checks {checks}; allowed: one of'
        f' {sorted(set(quickstart_task.SPLITS))} and numbers >= 0'
    )
  rows = []
  for problem, rng in problems_of(split, seed, difficulty):
    if len(rows) >= size:
      return rows
    count = checks[len(rows) % len(checks)]
    if split == 'sft':
      answer = solve(problem, count, difficulty.careless, rng)
    else:
      answer = '####' + solve(problem, 0).rpartition('####')[2]
    rows.append({'question': question(problem, count), 'answer': answer})
  raise AssertionError('problems_of has no end')


_PIECE = r' ?[A-Za-z]+| ?\d| ?#+| ?[+=-]|[\s\S]'


def make_tokenizer() -> tokenizers.Tokenizer:
  """Builds the tokenizer: a token per word, digit and sign.

  Returns:
    Ids 0 to 2 are padding, end and unknown. A word or digit after a space is
    a token of its own, so joining the tokens gives the text back.
  """
  verbs = [verb for group in VERBS.values() for verb in group]
  spaced = [*NAMES, *THINGS, *verbs, *_WORDS, *'0123456789', '####', *'+-=']
  bare = [*NAMES, *'0123456789', *_SIGNS, ' ']
  pieces = [f' {word}' for word in spaced] + bare
  vocabulary = {t: i for i, t in enumerate((*SPECIAL_TOKENS, *pieces))}
  tokenizer = tokenizers.Tokenizer(
      models.WordLevel(vocabulary, unk_token=UNKNOWN)
  )
  tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
  tokenizer.pre_tokenizer = pre_tokenizers.Split(
      tokenizers.Regex(_PIECE), 'isolated'
  )
  tokenizer.decoder = decoders.Fuse()
  return tokenizer


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--output', type=user_path, required=True)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
      '--checks',
      default='1,1,1,10',
      help='lengths, in turn; train and held-out files are written for each',
  )
  for field in dataclasses.fields(Difficulty):
    parser.add_argument(
        f'--{field.name}', type=type(field.default), default=field.default
    )
  for split, size in SIZES.items():
    parser.add_argument(f'--{split}', type=int, default=size, metavar='ROWS')
  parser.add_argument('--tiny', action='store_true', help='a model for a CPU')
  flags = vars(parser.parse_args())
  difficulty = Difficulty(
      **{f.name: flags[f.name] for f in dataclasses.fields(Difficulty)}
  )
  checks = command.whole_numbers('checks', flags['checks'])
  files = {'sft': ('sft', checks)}
  for split in ('train', 'heldout'):
    for count in sorted(set(checks)):
      files[f'{split}_{count}'] = (split, (count,))
  quickstart_task.write_problems(
      flags['output'],
      {
          name: make_rows(
              split, flags['seed'], flags[split], difficulty, counts
          )
          for name, (split, counts) in files.items()
      },
  )
  quickstart_task.write_model_folder(
      flags['output'] / 'model_init',
      make_tokenizer(),
      TINY_MODEL_CONFIG if flags['tiny'] else MODEL_CONFIG,
  )


if __name__ == '__main__':
  main()
