"""Answers are scored as they end, while others are still being sampled."""

import contextlib
from collections.abc import Iterator

from jetrl_jax.data import Prompt, Tokenizer
from jetrl_jax.rewards import RewardPool, RewardRequest, RewardResult, Scoring
from jetrl_jax.rl.rollout.scheduler import StopCheck, never_stop
from jetrl_jax.rl.scoring.experience import response_text
from jetrl_jax.rl.types import Completion


class Scorer:
  """The scores of one rollout's answers; `scorer` makes it.

  Args:
    prompts: what is answered.
    tokenizer: of the answers.
    scoring: of a pool; None for episodes, which have been scored already.
    should_stop: called at `visit` and while results are waited for; raises to
      give up.
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
    # By (prompt id, sample), in the order in which they ended.
    self._ended: list[tuple[int, int]] = []

  def add(self, completion: Completion) -> None:
    """Takes an answer that has ended; a worker may begin with it at once."""
    if self._scoring is None:
      return
    prompt = self._prompts[completion.prompt_id]
    request = RewardRequest(
        prompt_text=prompt.text,
        response_text=response_text(completion, self._tokenizer),
        answer=prompt.answer,
        source=prompt.source,
        extra=prompt.extra,
    )
    self._scoring.add([request])
    self._scoring.poll()
    self._ended.append((completion.prompt_id, completion.sample))

  def visit(self) -> None:
    """Keeps the pool's workers busy: the rollout's stop check."""
    self._should_stop()
    if self._scoring is not None:
      self._scoring.poll()

  def results(self, completions: list[Completion]) -> list[RewardResult]:
    """Returns the scores in the completions' order, when all are there.

    Raises:
      RewardFunctionError: see `RewardPool.score`.
    """
    if self._scoring is None:
      return [_of_episode(completion) for completion in completions]
    results = self._scoring.results(self._should_stop)
    found = dict(zip(self._ended, results, strict=True))
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


@contextlib.contextmanager
def scorer(
    prompts: list[Prompt],
    pool: RewardPool | None,
    tokenizer: Tokenizer,
    should_stop: StopCheck = never_stop,
) -> Iterator[Scorer]:
  """Scores one rollout; leaving early gives up what is under way.

  Args:
    prompts: what is answered.
    pool: scores; None for episodes.
    tokenizer: of the answers.
    should_stop: see `Scorer`.
  """
  if pool is None:
    yield Scorer(prompts, tokenizer, None, should_stop)
    return
  with pool.scoring() as scoring:
    yield Scorer(prompts, tokenizer, scoring, should_stop)
