"""Holds what `evaluate` says of GSM8K against what lm-evaluation-harness says.

The same prompts, greedy, in three steps:

python -m jetrl_jax.evaluate --checkpoint=FOLDER --data=gsm8k_test.jsonl \
    --reward=gsm8k --output=OUT/ours
python -m benchmarks.beside_lm_eval --part=task --folder=OUT
jetrl_jax serve --checkpoint=FOLDER  # and, from an environment with lm_eval:
lm_eval run --tasks gsm8k_same_prompts --include_path OUT --log_samples \
    --output_path OUT/theirs --model local-completions --model_args \
    base_url=http://127.0.0.1:8000/v1/completions,model=NAME,tokenizer=FOLDER
python -m benchmarks.beside_lm_eval --part=compare --folder=OUT --output=RESULT

`task` writes lm-eval's own gsm8k (filters, metric) over the prompts of OUT/ours
as they were read, chat template included. `compare` wants a line for each
problem in both and counts: answers equal as texts; problems judged alike by
lm-eval's strict-match and our `gsm8k`, and by its flexible-extract and our
`last_number`, each on its own answers; and answers of which both read the same
number, right or wrong.
"""

import fractions
import json
import pathlib

from absl import app, flags

from benchmarks import common
from jetrl_jax import rewards
from jetrl_jax.core.files import user_path

TASK = 'gsm8k_same_prompts'
# lm-eval's filter, and our reward that reads the same form.
PAIRS = {'strict-match': 'gsm8k', 'flexible-extract': 'last_number'}
# lm_eval/tasks/gsm8k/gsm8k.yaml of 0.4.13, but for the prompts and where an
# answer ends: the template's end token, which the server leaves out.
_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
output_type: generate_until
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore:
      - ","
      - "\\\\$"
      - "(?s).*#### "
      - "\\\\.$"
generation_kwargs:
  until: ["<|im_end|>"]
  max_gen_toks: {tokens}
  do_sample: false
  temperature: 0.0
repeats: 1
num_fewshot: 0
filter_list:
  - name: "strict-match"
    filter:
      - function: "regex"
        regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"
      - function: "take_first"
  - name: "flexible-extract"
    filter:
      - function: "regex"
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"
      - function: "take_first"
metadata:
  version: 3.0
"""

_PART = flags.DEFINE_enum('part', None, ['task', 'compare'], 'Which step.')
_FOLDER = flags.DEFINE_string('folder', None, 'OUT, see above.')


def _lines(path: pathlib.Path) -> list[dict]:
  return [json.loads(line) for line in path.read_text('utf-8').splitlines()]


def write_task(folder: pathlib.Path) -> None:
  """Writes the rows and the YAML of the task."""
  problems = _lines(folder / 'ours' / 'problems.jsonl')
  rows = [{'prompt': p['prompt'], 'answer': p['answer']} for p in problems]
  path = folder / 'rows.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows), 'utf-8')
  settings = json.loads((folder / 'ours' / 'summary.json').read_text('utf-8'))
  tokens = settings['max_response_length']
  text = _YAML.format(task=TASK, rows=path.resolve(), tokens=tokens)
  (folder / f'{TASK}.yaml').write_text(text, 'utf-8')


def _number(read: str) -> fractions.Fraction | str:
  """Returns the value of what was read, else its text; '' is nothing."""
  text = read.replace('[invalid]', '').replace(',', '').replace('$', '')
  try:
    return fractions.Fraction(text.removesuffix('.'))
  except ValueError:
    return text


def compare(ours: list[dict], theirs: list[dict]) -> list[dict]:
  """Returns a row per filter of lm-eval.

  Args:
    ours: the lines of problems.jsonl, one sample each.
    theirs: the lines of lm-eval's samples file: one per problem and filter.

  Raises:
    ValueError: a problem is missing in either.
  """
  answers = {p['prompt']: p['samples'][0]['response'] for p in ours}
  references = {p['prompt']: p['answer'] for p in ours}
  found = []
  for name, reward in PAIRS.items():
    judged = {s['doc']['prompt']: s for s in theirs if s['filter'] == name}
    if set(judged) != set(answers):
      raise ValueError(
          f'{name}: lm-eval has {len(judged)} prompts, ours {len(answers)};'
          ' run both on the same OUT'
      )
    prompts = list(answers)
    asked = [
        rewards.RewardRequest(
            prompt_text=prompt,
            response_text=answers[prompt],
            answer=references[prompt],
            source='gsm8k',
            extra={},
        )
        for prompt in prompts
    ]
    spec = rewards.RewardSpec(function=reward)
    with rewards.RewardPool(
        [spec], num_workers=1, timeout_s=20.0, memory_limit_mb=1024
    ) as pool:
      scored = list(pool.score(asked))
    reads = [judged[prompt]['filtered_resps'][0] for prompt in prompts]
    right = [judged[prompt]['exact_match'] for prompt in prompts]
    texts = [judged[prompt]['resps'][0][0] for prompt in prompts]
    found.append(
        {
            'lm_eval': name,
            'ours': reward,
            'problems': len(prompts),
            'equal_texts': sum(
                text.strip() == answers[prompt].strip()
                for prompt, text in zip(prompts, texts, strict=True)
            ),
            'lm_eval_right': int(sum(right)),
            'ours_right': int(sum(result.score for result in scored)),
            'judged_alike': sum(
                a == b.score for a, b in zip(right, scored, strict=True)
            ),
            'read_alike': sum(
                _number(a) == _number(b.prediction)
                for a, b in zip(reads, scored, strict=True)
            ),
            'otherwise': [
                {
                    'answer': answers[prompt],
                    'reference': references[prompt],
                    'lm_eval': [a, read],
                    'ours': [b.score, b.prediction],
                }
                for prompt, a, read, b in zip(
                    prompts, right, reads, scored, strict=True
                )
                if a != b.score or _number(read) != _number(b.prediction)
            ],
        }
    )
  return found


def main(_) -> None:
  """Runs one step."""
  folder = user_path(_FOLDER.value)
  if _PART.value == 'task':
    write_task(folder)
    return
  ours = _lines(folder / 'ours' / 'problems.jsonl')
  (samples,) = (folder / 'theirs').rglob(f'samples_{TASK}_*.jsonl')
  rows = compare(ours, _lines(samples))
  columns = [
      ('lm_eval', 'lm-eval', ''),
      ('ours', 'ours', ''),
      ('problems', 'problems', 'd'),
      ('equal_texts', 'answers equal as texts', 'd'),
      ('lm_eval_right', "right by lm-eval's", 'd'),
      ('ours_right', 'right by ours', 'd'),
      ('judged_alike', 'judged alike', 'd'),
      ('read_alike', 'the same number read', 'd'),
  ]
  common.write(rows, _summary(folder), common.table(rows, columns))


def _summary(folder: pathlib.Path) -> dict:
  """Returns what lm-eval says of itself, and our settings."""
  (results,) = (folder / 'theirs').rglob('results_*.json')
  said = json.loads(results.read_text('utf-8'))
  ours = json.loads((folder / 'ours' / 'summary.json').read_text('utf-8'))
  kept = ('checkpoint', 'recipe', 'temperature', 'max_response_length')
  return {
      'lm_eval': said['lm_eval_version'],
      'transformers': said['transformers_version'],
      'lm_eval model_args': said['config']['model_args'],
      'ours': {name: ours[name] for name in kept},
  }


if __name__ == '__main__':
  flags.declare_key_flag('output')
  flags.declare_key_flag('commit')
  app.run(main)
