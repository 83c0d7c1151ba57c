"""Rewards responses as they end, while others are still being sampled."""

import array
import contextlib
from collections.abc import Iterator

from jetrl_jax.core import processes
from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.rewards import RewardPool, RewardRequest, RewardResult, Scoring
from jetrl_jax.rl.rollout.scheduler import StopCheck, never_stop
from jetrl_jax.rl.scoring.experience import response_text
from jetrl_jax.rl.types import Completion


class Scorer:
  """Rewards the completions of one rollout; make it with `scorer`.

  Args:
    prompts: the rollout's prompts.
    tokenizer: the policy's tokenizer.
    scoring: the pool's queue; None for episodes, which have rewards already.
    should_stop: called at `visit` and while waiting for results; raises to
      stop.
  """

  def __init__(
      self,
      prompts: list[Prompt],
      tokenizer: Tokenizer,
      scoring: Scoring | None,
      should_stop: StopCheck = never_stop,
  ):
    self._prompts = {prompt.id: prompt for prompt in prompts}
    self._tokenizer = tokenizer
    self._scoring = scoring
    self._should_stop = should_stop
    # (prompt id, sample) of completions, in the order in which they ended.
    self._ended: list[tuple[int, int]] = []

  def add(self, completion: Completion) -> None:
    """Adds a completion that has ended; a worker may start on it at once."""
    if self._scoring is None:
      return
    prompt = self._prompts[completion.prompt_id]
    request = RewardRequest(
        prompt_text=prompt.text,
        response_text=response_text(completion, self._tokenizer),
        answer=prompt.answer,
        source=prompt.source,
        extra=prompt.extra,
        # Four bytes per id in a message, and no NumPy in the workers.
        response_ids=array.array('i', completion.tokens.tobytes()),
    )
    self._scoring.add([request])
    self._scoring.poll()
    self._ended.append((completion.prompt_id, completion.sample))

  def visit(self) -> None:
    """Keeps the pool's workers busy; serves as the rollout's stop check."""
    self._should_stop()
    if self._scoring is not None:
      self._scoring.poll()

  def so_far(self) -> tuple[int, list[float]]:
    """Returns (completions that have ended, accuracies that are known)."""
    replies = self._scoring.replies.values() if self._scoring else ()
    found = (reply.get('accuracy') for reply in list(replies))
    return len(self._ended), [value for value in found if value is not None]

  def results(self, completions: list[Completion]) -> list[RewardResult]:
    """Waits for all rewards and returns them in the completions' order.

    Each process rewards what it has sampled; all get all rewards.

    Raises:
      RewardFunctionError: see `RewardPool.score`.
      StopRequested: `should_stop` raised it in any process.
    """
    scoring = self._scoring
    if scoring is None:
      return [_of_episode(completion) for completion in completions]

    def mine() -> dict[tuple[int, int], RewardResult]:
      # The pool ends what takes too long.
      with processes.slow('the rewards'):
        results = scoring.results(self._should_stop)
      return dict(zip(self._ended, results, strict=True))

    parts = processes.together('the rewards', mine)
    found = {key: result for part in parts for key, result in part.items()}
    return [found[c.prompt_id, c.sample] for c in completions]


def _of_episode(completion: Completion) -> RewardResult:
  episode = completion.episode
  assert episode is not None, 'without an environment there is a pool'
  return RewardResult(
      score=episode.reward,
      accuracy=episode.accuracy,
      parts={},
      prediction='',
      error=episode.error,
  )


def without_answer(
    results: list[RewardResult], pool: RewardPool | None
) -> list[RewardResult]:
  """Returns the results whose reward looked for a final answer in vain.

  Args:
    results: rewards of some responses.
    pool: what made them; None for episodes, which have no final answer.
  """
  if pool is None or not (
      pool.reads_answers or any(r.prediction for r in results)
  ):
    return []
  return [r for r in results if not r.prediction and r.error is None]


@contextlib.contextmanager
def scorer(
    prompts: list[Prompt],
    pool: RewardPool | None,
    tokenizer: Tokenizer,
    should_stop: StopCheck = never_stop,
) -> Iterator[Scorer]:
  """Rewards one rollout; leaving the context early cancels pending work.

  Args:
    prompts: the rollout's prompts.
    pool: the reward workers; None for episodes.
    tokenizer: the policy's tokenizer.
    should_stop: see `Scorer`.
  """
  if pool is None:
    yield Scorer(prompts, tokenizer, None, should_stop)
    return
  with pool.scoring() as scoring:
    yield Scorer(prompts, tokenizer, scoring, should_stop)
