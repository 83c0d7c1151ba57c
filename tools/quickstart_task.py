"""Writes the quickstart's task: its problems, its tokenizer, its model shape.

A problem is a chain of sums, and its answer writes every running total:

    question  38+7-9+2=      answer  45 36 38 #### 38

The warm start imitates careless solutions: where a step crosses a ten, a
carry is forgotten (38+7=35) and a borrow avoided by taking the smaller digit
from the larger (42-9=47), each with probability `CARELESS`. A decoder that has
learnt this gets such a step right half of the time and answers about 40% of
the problems; longer chains are harder, and the samples of one problem differ
in reward. GRPO sees only whether the last number is right: nothing tells it
which step to mend.

What a problem may be used for is a property of the problem, not of the draw:
a hash of its text says 'sft' (the supervised warm start), 'train' (GRPO) or
'heldout' (evaluation). Two draws with any seeds can therefore never show a
held-out problem to training.

The files of the repository:

    python -m tools.quickstart_task --output=examples/quickstart

Other held-out problems, none of which the repository holds:

    python -m tools.quickstart_task --output=/tmp/fresh --seed=7 \
        --exclude=examples/quickstart
"""

import argparse
import hashlib
import itertools
import json
import pathlib
import random
import re
from collections.abc import Collection

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetrl_jax.core.files import user_path
from jetrl_jax.data import load_examples
from tools import command

PAD, EOS, UNKNOWN = '<pad>', '<eos>', '<unk>'
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN)
ALPHABET = ' #+-0123456789='
# Ten equal parts of all problems: five, four, and one.
SPLITS = ('sft',) * 5 + ('train',) * 4 + ('heldout',)
SIZES = {'sft': 8000, 'train': 4000, 'heldout': 256}
MIN_OPERANDS, MAX_OPERANDS = 3, 6
# Totals stay in [0, 99], so that none has a sign.
MAX_TOTAL = 99
# One digit: 1,700 sums to learn instead of 9,900.
MAX_OPERAND = 9
# A step crosses a ten in 45% of the cases, so a step is right with probability
# 0.55 + 0.45 / 2, and a chain of 2 to 5 steps in 43% of the cases.
CARELESS = 0.5

# Qwen2 with vocabulary and widths that are multiples of 16, as FP8 dots want.
MODEL_CONFIG = {
    'architectures': ['Qwen2ForCausalLM'],
    'model_type': 'qwen2',
    'vocab_size': 32,
    'hidden_size': 128,
    'intermediate_size': 384,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 32,
    'hidden_act': 'silu',
    'max_position_embeddings': 128,
    'rope_theta': 10000.0,
    'rms_norm_eps': 1e-6,
    # 1 / sqrt(hidden_size); the 0.02 of large models learns nothing at first in
    # a width of 128.
    'initializer_range': 0.088,
    'tie_word_embeddings': True,
    'torch_dtype': 'float32',
    'bos_token_id': None,
    'eos_token_id': 1,
    'pad_token_id': 0,
}


def draw_question(rng: random.Random) -> str:
  """Draws one chain of additions and subtractions within [0, MAX_TOTAL].

  Args:
    rng: the source of all choices; advanced.

  Returns:
    For example '38+7-9+2='.
  """
  total = rng.randint(1, MAX_TOTAL)
  question = str(total)
  for _ in range(rng.randint(MIN_OPERANDS, MAX_OPERANDS) - 1):
    low = max(0, total - MAX_OPERAND)
    high = min(MAX_TOTAL, total + MAX_OPERAND)
    following = rng.choice([t for t in range(low, high + 1) if t != total])
    sign = '+' if following > total else '-'
    question += f'{sign}{abs(following - total)}'
    total = following
  return question + '='


def solve(question: str) -> str:
  """Writes the right answer to a question.

  Args:
    question: what `draw_question` returns.

  Returns:
    The running totals after each operation, then '#### ' and the last one.
  """
  first, operands = _parse(question)
  return _format(list(itertools.accumulate(operands, initial=first))[1:])


def solve_carelessly(question: str, rng: random.Random) -> str:
  """Writes an answer with a schoolchild's mistakes in carries and borrows.

  Args:
    question: what `draw_question` returns.
    rng: decides for each carry and borrow; advanced.

  Returns:
    As `solve`; a wrong total is what the next step continues from.
  """
  first, operands = _parse(question)
  while True:
    totals = [first]
    for operand in operands:
      following = totals[-1] + operand
      crosses_ten = following // 10 != totals[-1] // 10
      if crosses_ten and rng.random() < CARELESS:
        following = misadd(totals[-1], operand)
      totals.append(following)
    # A wrong total may lead the rest of the chain out of the range.
    if all(0 <= total <= MAX_TOTAL for total in totals):
      return _format(totals[1:])


def misadd(total: int, operand: int) -> int:
  """Adds as one who forgets a carry, and borrows by swapping digits."""
  tens, unit = divmod(total, 10)
  if operand > 0:
    return 10 * tens + (unit + operand) % 10
  return 10 * tens + abs(unit + operand)


def _parse(question: str) -> tuple[int, list[int]]:
  first, *operands = re.findall(r'[+-]?\d+', question)
  return int(first), [int(operand) for operand in operands]


def _format(totals: list[int]) -> str:
  return ' '.join([*map(str, totals), '####', str(totals[-1])])


def split_of(question: str) -> str:
  """Says what a question may be used for.

  Args:
    question: what `draw_question` returns.

  Returns:
    'sft', 'train' or 'heldout'; a pure function of the text.
  """
  digest = hashlib.sha256(question.encode()).digest()
  return SPLITS[int.from_bytes(digest[:8]) % len(SPLITS)]


def make_problems(
    seed: int, sizes: dict[str, int], exclude: Collection[str] = ()
) -> dict[str, list[dict[str, str]]]:
  """Draws distinct problems until every split is full.

  Args:
    seed: names the draw.
    sizes: number of problems by split; splits left out get none.
    exclude: questions that are not to be drawn.

  Returns:
    By split, rows with the keys 'question' and 'answer'. The answers of 'sft'
    are careless, all others are right.

  Raises:
    ValueError: a split's name is unknown.
  """
  if unknown := sorted(set(sizes) - set(SPLITS)):
    allowed = sorted(set(SPLITS))
    raise ValueError(f'splits {unknown} are unknown; allowed: {allowed}')
  rng = random.Random(seed)
  seen = set(exclude)
  problems = {split: [] for split in sizes}
  while any(len(problems[split]) < sizes[split] for split in sizes):
    question = draw_question(rng)
    split = split_of(question)
    if question in seen or len(problems.get(split, ())) >= sizes.get(split, 0):
      continue
    seen.add(question)
    careless = split == 'sft'
    answer = solve_carelessly(question, rng) if careless else solve(question)
    problems[split].append({'question': question, 'answer': answer})
  return problems


def make_tokenizer(alphabet: str = ALPHABET) -> tokenizers.Tokenizer:
  """Builds a tokenizer with one token per character.

  Args:
    alphabet: the characters; any other becomes unknown.

  Returns:
    Ids 0 to 2 are padding, end and unknown; the alphabet follows. No token
    is added to a text: a prompt ends where the answer starts.
  """
  vocabulary = {t: i for i, t in enumerate((*SPECIAL_TOKENS, *alphabet))}
  tokenizer = tokenizers.Tokenizer(
      models.WordLevel(vocabulary, unk_token=UNKNOWN)
  )
  tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
  every_character = tokenizers.Regex(r'[\s\S]')
  tokenizer.pre_tokenizer = pre_tokenizers.Split(every_character, 'isolated')
  tokenizer.decoder = decoders.Fuse()
  return tokenizer


def write_model_folder(
    folder: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
    model_config: dict = MODEL_CONFIG,
) -> None:
  """Writes what a Hugging Face checkpoint has besides its weights.

  Args:
    folder: created if missing; its files of the same names are replaced.
    tokenizer: of the model.
    model_config: what config.json holds.
  """
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  tokenizer_config = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'clean_up_tokenization_spaces': False,
      'eos_token': EOS,
      'pad_token': PAD,
      'unk_token': UNKNOWN,
      'model_max_length': model_config['max_position_embeddings'],
  }
  generation_config = {
      'do_sample': True,
      'temperature': 1.0,
      'eos_token_id': model_config['eos_token_id'],
      'pad_token_id': model_config['pad_token_id'],
  }
  _write_json(folder / 'config.json', model_config)
  _write_json(folder / 'tokenizer_config.json', tokenizer_config)
  _write_json(folder / 'generation_config.json', generation_config)


def write_problems(
    folder: pathlib.Path, problems: dict[str, list[dict[str, str]]]
) -> None:
  """Writes one JSONL file per split.

  Args:
    folder: created if missing; its files of the same names are replaced.
    problems: what `make_problems` returns.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for split, rows in problems.items():
    lines = [json.dumps(row) + '\n' for row in rows]
    (folder / f'{split}.jsonl').write_text(''.join(lines), encoding='utf-8')


def read_questions(folder: pathlib.Path) -> set[str]:
  """Reads the questions of every JSONL file in a folder.

  Raises:
    ValueError: there is no such file, so that nothing would be left out; or
      one has other rows.
  """
  paths = sorted(folder.glob('*.jsonl'))
  if not paths:
    raise ValueError(
        f'{folder} holds no *.jsonl file; name a folder with the problems to'
        ' leave out, for example examples/quickstart'
    )
  # Their answers are not looked at: no row may be left out for one.
  key = 'question'
  rows = load_examples(list(map(str, paths)), prompt_key=key, answer_key=key)
  return {str(row.prompt) for row in rows}


def _write_json(path: pathlib.Path, value: dict) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


@command.in_one_sentence
def main() -> None:
  """Runs the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--output', type=user_path, required=True)
  parser.add_argument('--seed', type=int, default=0)
  for split, size in SIZES.items():
    parser.add_argument(f'--{split}', type=int, default=size, metavar='ROWS')
  parser.add_argument(
      '--exclude',
      type=user_path,
      help='a folder of JSONL files whose questions are not drawn',
  )
  flags = parser.parse_args()
  sizes = {split: vars(flags)[split] for split in SIZES}
  exclude = read_questions(flags.exclude) if flags.exclude else set()
  write_problems(flags.output, make_problems(flags.seed, sizes, exclude))
  write_model_folder(flags.output / 'model_init', make_tokenizer())


if __name__ == '__main__':
  main()
