"""The rollout engine as a server runs it."""

from jetrl_jax.config.saved_policy import SavedPolicy
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.serve.requests import Limits


def make_engine(saved: SavedPolicy, limits: Limits, num_slots: int) -> Engine:
  """Returns the engine of a server, with the policy's parameters.

  Args:
    saved: the policy.
    limits: bound prompts and responses.
    num_slots: requests decoded at once; rounded up to 16 per device.

  Raises:
    ValueError: prompts and responses of these lengths do not fit the model.
  """
  longest = limits.max_prompt_length + limits.max_tokens
  if longest > saved.policy.model.max_position:
    raise ValueError(
        f'max_prompt_length + max_tokens is {longest}; the model has'
        f' {saved.policy.model.max_position} positions'
    )
  engine = Engine(
      saved.policy,
      EngineConfig(
          num_slots=num_slots,
          max_prompt_length=limits.max_prompt_length,
          max_response_length=limits.max_tokens,
          stop_ids=saved.tokenizer.eos_ids,
      ),
      saved.mesh,
  )
  engine.set_params(saved.params)
  return engine
