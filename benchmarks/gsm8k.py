"""How GSM8K is asked and judged beside other systems: as configs/qwen0_5b.py.

Used by `export_in_vllm.py` and `grpo_in_trl.py`, so it imports no JAX program.
"""

from jetrl_jax.rewards import functions
from jetrl_jax.rewards.types import RewardRequest

# The question as a chat turn, then this: boxed answers.
INSTRUCTION = (
    '\nPlease reason step by step, and put your final answer within \\boxed{}.'
)


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
