"""Holds the greedy answers of vLLM to a checkpoint or export against ours.

Two commands, so that the two systems share no process:

python -m benchmarks.export_in_vllm --part=ours --checkpoint=FOLDER \
    --recipe=bf16 --data=gsm8k_test.jsonl --folder=OUT
python -m benchmarks.export_in_vllm --part=vllm --checkpoint=FOLDER --folder=OUT

`ours` writes OUT/ours.json: each prompt's tokens, reference and our greedy
answer. `vllm` asks vLLM the same tokens and writes OUT/vllm.json. Then
`--part=compare` grades both with the reward `math` and prints, and writes to
OUT/compare.json, the accuracy of each and how far their tokens agree.

An answer that differs in one token differs in all that follow, so two shares
are given: of answers equal as a whole, and of tokens before the first that
differs.
"""

import json
import pathlib
import time

import numpy as np
from absl import app, flags

from benchmarks import gsm8k

_PART = flags.DEFINE_enum('part', None, ['ours', 'vllm', 'compare'], 'Which.')
_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_RECIPE = flags.DEFINE_string('recipe', None, 'Ours: default as stored.')
_DATA = flags.DEFINE_string('data', None, 'JSONL with question and answer.')
_FOLDER = flags.DEFINE_string('folder', None, 'Where the answers go.')
_PROBLEMS = flags.DEFINE_integer('problems', 200, 'The first so many; 0: all.')
_TOKENS = flags.DEFINE_integer('tokens', 512, 'Most tokens of an answer.')
_MEMORY = flags.DEFINE_float('memory', 0.5, "vLLM's share of the GPU.")


def ours(folder: pathlib.Path) -> dict:
  """Answers with our engine; returns what `ours.json` holds."""
  from jetrl_jax.core import rng
  from jetrl_jax.evaluate import settings as evaluate_settings
  from jetrl_jax.models.policy import PolicyParams
  from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
  from jetrl_jax.rl.rollout.scheduler import rollout
  from jetrl_jax.rl.run import calibration

  names = (name for name, *_ in evaluate_settings.FLAGS)
  defaults = {row[0]: row[2] for row in evaluate_settings.FLAGS}
  settings = evaluate_settings.resolve(
      dict.fromkeys(names)
      | defaults
      | {
          'checkpoint': _CHECKPOINT.value,
          'recipe': _RECIPE.value,
          'data': 'gsm8k',
          'data_file': _DATA.value,
          'instruction': gsm8k.INSTRUCTION,
          'max_samples': _PROBLEMS.value,
          'max_prompt_length': 512,
          'max_response_length': _TOKENS.value,
          'num_slots': 512,
          'output': str(folder / 'evaluate'),
      }
  )
  found, prompts = settings.found, settings.prompts
  engine = Engine(
      found.policy,
      EngineConfig(
          num_slots=min(512, len(prompts)),
          max_prompt_length=512,
          max_response_length=_TOKENS.value,
          stop_ids=tuple(settings.tokenizer.eos_ids),
      ),
      found.mesh,
  )
  state = found.state
  if not found.calibrated:
    state = calibration.calibrate_checkpoint(
        engine, state, prompts, origin=found.origin
    )
  started = time.monotonic()
  completions = rollout(
      engine,
      PolicyParams(state.weights, state.fp8_state),
      prompts,
      num_generations=1,
      temperature=0.0,
      base_key=rng.key(0, rng.EVALUATION, 0),
      weight_version=0,
  )
  return {
      'recipe': found.policy.recipe.name,
      'seconds': time.monotonic() - started,
      'stop_ids': list(settings.tokenizer.eos_ids),
      'rows': [
          {
              'prompt': np.asarray(prompt.tokens).tolist(),
              'reference': str(prompt.answer),
              'tokens': np.asarray(completion.tokens).tolist(),
              'logprobs': [round(float(x), 5) for x in completion.logprobs],
          }
          for prompt, completion in zip(prompts, completions, strict=True)
      ],
  }


def theirs(asked: dict) -> dict:
  """Answers with vLLM; returns what `vllm.json` holds."""
  import vllm

  engine = vllm.LLM(
      model=_CHECKPOINT.value,
      dtype='bfloat16',
      max_model_len=512 + _TOKENS.value,
      max_num_seqs=512,
      gpu_memory_utilization=_MEMORY.value,
  )
  sampling = vllm.SamplingParams(
      temperature=0.0,
      max_tokens=_TOKENS.value,
      stop_token_ids=asked['stop_ids'],
      logprobs=0,
      detokenize=False,
  )
  started = time.monotonic()
  outputs = engine.generate(
      [{'prompt_token_ids': row['prompt']} for row in asked['rows']],
      sampling,
      use_tqdm=False,
  )
  rows = []
  for output in outputs:
    (answer,) = output.outputs
    tokens = list(answer.token_ids)
    logprobs = [
        round(float(at[token].logprob), 5)
        for token, at in zip(tokens, answer.logprobs, strict=True)
    ]
    rows.append({'tokens': tokens, 'logprobs': logprobs})
  return {
      'version': vllm.__version__,
      'quantization': str(engine.llm_engine.model_config.quantization),
      'seconds': time.monotonic() - started,
      'rows': rows,
  }


def compare(one: dict, other: dict) -> dict:
  """Returns accuracies, and how far the tokens agree."""
  from jetrl_jax.data import Tokenizer

  tokenizer = Tokenizer(_CHECKPOINT.value)

  def right(tokens: list[int], reference: str) -> float:
    text = tokenizer.decode(np.asarray(tokens), skip_special_tokens=True)
    return gsm8k.score(text, reference)

  equal = before = total = 0
  scores, gaps = [], []
  for mine, their in zip(one['rows'], other['rows'], strict=True):
    pair = mine['tokens'], their['tokens']
    same = 0
    while same < min(map(len, pair)) and pair[0][same] == pair[1][same]:
      same += 1
    equal += pair[0] == pair[1]
    before += same
    total += max(map(len, pair))
    gap = np.subtract(mine['logprobs'][:same], their['logprobs'][:same])
    gaps.append(np.abs(gap))
    scores.append([right(tokens, mine['reference']) for tokens in pair])
  gaps = np.concatenate(gaps)
  scores = np.asarray(scores)
  count = len(scores)
  return {
      'checkpoint': pathlib.Path(_CHECKPOINT.value).name,
      'recipe': one['recipe'],
      'vllm': other['version'],
      'vllm quantization': other['quantization'],
      'problems': count,
      'accuracy, ours': float(scores[:, 0].mean()),
      'accuracy, vLLM': float(scores[:, 1].mean()),
      'problems judged alike': float((scores[:, 0] == scores[:, 1]).mean()),
      'answers equal to the last token': equal / count,
      'tokens before the first difference': before / total,
      'their log-probs differ by, mean nats': float(gaps.mean()),
      'their log-probs differ by, at most': float(gaps.max()),
      'tokens, ours': sum(len(r['tokens']) for r in one['rows']),
      'tokens, vLLM': sum(len(r['tokens']) for r in other['rows']),
      'seconds, ours (compilation too)': round(one['seconds'], 1),
      'seconds, vLLM': round(other['seconds'], 1),
  }


def main(_):
  """Runs one part."""
  folder = pathlib.Path(_FOLDER.value)
  folder.mkdir(parents=True, exist_ok=True)

  def read(name: str) -> dict:
    return json.loads((folder / name).read_text())

  def write(name: str, value: dict) -> None:
    (folder / name).write_text(json.dumps(value))

  if _PART.value == 'ours':
    write('ours.json', ours(folder))
  elif _PART.value == 'vllm':
    write('vllm.json', theirs(read('ours.json')))
  else:
    found = compare(read('ours.json'), read('vllm.json'))
    write('compare.json', found)
    print(json.dumps(found, indent=2))


if __name__ == '__main__':
  flags.mark_flags_as_required(['part', 'checkpoint', 'folder'])
  app.run(main)
