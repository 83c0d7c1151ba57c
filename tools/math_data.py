"""Writes the four files that the configs of real models read.

    python -m tools.math_data --output=data

GSM8K, and MATH less the 500 problems of MATH-500, which are held out: from the
Hugging Face hub (the extra `data`, online). All become rows of `question` and
`answer`, since one pair of keys serves all files of a run; of a GSM8K solution
the answer is what follows `####`. Other copies, files too:

    python -m tools.math_data --output=data \
        --math_train=math.jsonl,problem,answer
"""

import argparse
import json
import pathlib

from jetrl_jax.core.files import user_path
from jetrl_jax.data import load_examples
from tools import command

# Name -> source, column of the question, column of the answer.
SOURCES = {
    'gsm8k_train': 'hf:openai/gsm8k:main:train,question,answer',
    'gsm8k_test': 'hf:openai/gsm8k:main:test,question,answer',
    'math_train': 'hf:nlile/hendrycks-MATH-benchmark:train,problem,answer',
    'math500': 'hf:HuggingFaceH4/MATH-500:test,problem,answer',
}


def rows(source: str) -> list[dict[str, str]]:
  """Returns a source's problems in the layout of the configs.

  Args:
    source: 'FILE,QUESTION,ANSWER': what `data.train_files` may name, and its
      columns.

  Raises:
    ValueError: the source is not of that form, or cannot be read.
  """
  parts = source.rsplit(',', 2)
  if len(parts) != 3 or not all(parts):
    raise ValueError(
        f'a source is {source!r}; write FILE,QUESTION,ANSWER, for example'
        ' math.jsonl,problem,answer'
    )
  file, question, answer = parts
  examples = load_examples([file], prompt_key=question, answer_key=answer)
  problems = []
  for example in examples:
    if not isinstance(example.prompt, str):
      raise ValueError(
          f'{file}: column {question!r} holds messages; allowed here: a text'
      )
    problems.append({'question': example.prompt, 'answer': example.answer})
  return problems


def gather(sources: dict[str, str]) -> dict[str, list[dict[str, str]]]:
  """Reads all four; MATH without the problems that are held out.

  Args:
    sources: what `rows` takes, by the names of `SOURCES`.

  Raises:
    ValueError: a source cannot be read, or nothing is left of MATH.
  """
  found = {name: rows(source) for name, source in sources.items()}
  held_out = {row['question'] for row in found['math500']}
  math = found['math_train']
  found['math_train'] = [r for r in math if r['question'] not in held_out]
  if not found['math_train']:
    raise ValueError(
        f'math_train: all {len(math)} problems of {sources["math_train"]!r} are'
        f' held out, in math500, {sources["math500"]!r}; at least one must be'
        ' left to train on: give --math_train or --math500 another file'
    )
  return found


def write(path: pathlib.Path, problems: list[dict[str, str]]) -> None:
  """Writes a JSON object per line."""
  lines = [json.dumps(row, ensure_ascii=False) + '\n' for row in problems]
  path.write_text(''.join(lines), encoding='utf-8')


@command.in_one_sentence
def main() -> None:
  """Reads all four, then writes them."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--output', type=user_path, required=True)
  for name, source in SOURCES.items():
    parser.add_argument(f'--{name}', default=source, help=f'default: {source}')
  arguments = vars(parser.parse_args())
  output = arguments.pop('output')
  found = gather(arguments)
  output.mkdir(parents=True, exist_ok=True)
  for name, problems in found.items():
    write(output / f'{name}.jsonl', problems)
    print(f'{output / name}.jsonl: {len(problems)} problems')


if __name__ == '__main__':
  main()
