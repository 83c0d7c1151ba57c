"""How GSM8K is asked and judged beside other systems: as configs/qwen0_5b.py.

Used by `export_in_vllm.py`, `grpo_in_trl.py` and `grpo_in_verl.py`, so it
imports no JAX program.
"""

import json
import pathlib

from jetrl_jax.rewards import functions
from jetrl_jax.rewards.types import RewardRequest

# The question as a chat turn, then this: boxed answers.
INSTRUCTION = (
    '\nPlease reason step by step, and put your final answer within \\boxed{}.'
)
# Of a step: prompts, answers for each, and their longest.
PROMPTS, ANSWERS, TOKENS = 64, 8, 512


def read(file: str) -> list[dict]:
  """Returns prompts as chat turns, with the answers after '####'."""
  lines = pathlib.Path(file).read_text(encoding='utf-8').splitlines()
  rows = [json.loads(line) for line in lines]
  return [
      {
          'prompt': [
              {
                  'role': 'user',
                  'content': row['question'] + INSTRUCTION,
              }
          ],
          'gold': row['answer'].split('####')[-1].strip(),
      }
      for row in rows
  ]


def score(text: str, reference: str) -> float:
  """Returns 1 if our reward `math` calls the answer right, else 0."""
  request = RewardRequest(
      prompt_text='',
      response_text=text,
      answer=reference,
      source='gsm8k',
      extra={},
  )
  return functions.math(request).value


def score_in_verl(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict | None = None,
) -> float:
  """The same, with the signature that verl asks for."""
  del data_source, extra_info
  return score(solution_str, ground_truth)
