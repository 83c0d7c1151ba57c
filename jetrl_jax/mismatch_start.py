"""Where a run stands before its next step; nothing of the run is changed."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jetrl_jax import checkpoint
from jetrl_jax.rl import run_precision, startup
from jetrl_jax.rl import state as states
from jetrl_jax.rl.collector import Collector
from jetrl_jax.rl.engine import Engine
from jetrl_jax.rl.experience import Experience
from jetrl_jax.rl.learner import Learner
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.parts import Parts
from jetrl_jax.rl.policy import PolicyParams
from jetrl_jax.rl.rollout import never_stop
from jetrl_jax.rl.timer import Timer
from jetrl_jax.rl.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """What the next step would be taken with.

  Attributes:
    parts: with the precision that the run settled on.
    engine: of the rollout.
    collector: samples and scores.
    learner: updates.
    state: before the step.
    step: training steps done.
    origin: where the state came from, in words.
  """

  parts: Parts
  engine: Engine
  collector: Collector
  learner: Learner
  state: TrainState
  step: int
  origin: str

  def rollout(self) -> Experience:
    """Samples and scores the next step's prompts.

    Raises:
      ValueError: no token was sampled, so there is nothing to compare.
    """
    found = self.collector.collect(self.step, self.state).experience
    if not any(c.sampled.any() for c in found.completions):
      raise ValueError(
          'the policy sampled no token in this step: the environment failed, or'
          ' its first observation left no room, in every episode. See the'
          ' warning above, or raise rollout.max_response_length'
      )
    return found


@contextlib.contextmanager
def start(parts: Parts, workdir: pathlib.Path | None) -> Iterator[Start]:
  """Starts as `main` would, with the reward workers alive inside.

  Args:
    parts: what the run is made of.
    workdir: of a run, whose newest checkpoint is gone on from; None for a cold
      start.

  Raises:
    ValueError: the workdir holds no checkpoint, or one of another config.
  """
  sampler = parts.prompt_sampler()
  if workdir is None:
    parts, engine, state = _cold(parts)
    step, origin = 0, 'a cold start'
  else:
    parts, resumed = _resumed(parts, workdir)
    state, step = resumed.state, resumed.step
    sampler.restore(resumed.host_state['sampler'])
    engine = Engine(parts.rollout_policy, parts.engine, parts.mesh)
    origin = f'step {step} of {workdir}'
  timer = Timer()
  with parts.make_rewards() as pool:
    yield Start(
        parts=parts,
        engine=engine,
        collector=Collector(parts, engine, sampler, pool, never_stop, timer),
        learner=Learner(
            parts,
            functools.partial(policy_loss, parts.loss),
            state,
            reference_of(parts, state, workdir),
            timer,
        ),
        state=state,
        step=step,
        origin=origin,
    )


def reference_of(
    parts: Parts, state: TrainState, workdir: pathlib.Path | None
) -> PolicyParams | None:
  """Returns what a KL term holds the next update to; None without one.

  Args:
    parts: what the run is made of.
    state: of a cold start, or of the checkpoint.
    workdir: of the run, which keeps its reference; None for a cold start.
  """
  if not parts.needs_reference:
    return None
  if workdir is not None:
    return states.reference(workdir / 'reference', state, cold=False)
  # A copy: the step donates the state.
  weights, fp8_state = jax.tree.map(jnp.copy, (state.weights, state.fp8_state))
  return PolicyParams(weights, fp8_state)


def _cold(parts: Parts) -> tuple[Parts, Engine, TrainState]:
  engine = Engine(parts.rollout_policy, parts.engine, parts.mesh)
  state = startup.cold_start(parts, engine, never_stop)
  with tempfile.TemporaryDirectory() as folder:  # Keeps what was settled.
    chosen, state = startup.settle_precision(parts, state, pathlib.Path(folder))
  if chosen is not parts:
    engine = Engine(chosen.rollout_policy, chosen.engine, chosen.mesh)
  return chosen, engine, state


def _resumed(
    parts: Parts, workdir: pathlib.Path
) -> tuple[Parts, startup.Resumed]:
  if not checkpoint.all_steps(workdir / 'checkpoints'):
    raise ValueError(
        f'--workdir={workdir}: there is no checkpoint of a run; name the'
        ' workdir of one that has saved a step, or leave it out for a cold'
        ' start'
    )
  policy = run_precision.resolve(workdir, parts.policy, parts.invariant_scale)
  parts = parts.with_policy(policy)
  resumed = startup.read(parts, workdir)
  assert resumed is not None  # There are steps.
  return resumed.parts, resumed
