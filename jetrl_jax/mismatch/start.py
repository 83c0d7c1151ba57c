"""Builds everything for a run's next step, without changing the run."""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jetrl_jax.checkpoint import restore
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl.objective import policy_loss
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.rollout.scheduler import never_stop
from jetrl_jax.rl.run import calibration, train_state
from jetrl_jax.rl.run import precision as run_precision
from jetrl_jax.rl.run.spec import RunSpec
from jetrl_jax.rl.scoring.experience import Experience
from jetrl_jax.rl.training import initialize
from jetrl_jax.rl.training.collector import Collector
from jetrl_jax.rl.training.learner import Learner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """Everything that the next step needs.

  Attributes:
    spec: the specification in the precision that the run settled.
    engine: the rollout engine.
    collector: samples and rewards.
    learner: updates.
    state: the state before the step.
    step: training steps done.
    origin: where the state came from, as text.
  """

  spec: RunSpec
  engine: Engine
  collector: Collector
  learner: Learner
  state: TrainState
  step: int
  origin: str

  def rollout(self) -> Experience:
    """Samples and rewards the next step's prompts.

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
def start(spec: RunSpec, workdir: pathlib.Path | None) -> Iterator[Start]:
  """Starts as `main` would; the reward workers live inside the context.

  Args:
    spec: the run's specification.
    workdir: a run's workdir, to start from its newest checkpoint; None for a
      cold start.

  Raises:
    ValueError: the workdir has no checkpoint, or one of another config.
  """
  sampler = spec.prompt_sampler()
  if workdir is None:
    spec, engine, state = _cold(spec)
    step, origin = 0, 'a cold start'
  else:
    spec, resumed = _resumed(spec, workdir)
    state, step = resumed.state, resumed.step
    sampler.restore(resumed.host_state['sampler'])
    engine = Engine(spec.rollout_policy, spec.engine, spec.mesh)
    origin = f'step {step} of {workdir}'
  timer = Timer()
  with spec.make_rewards() as pool:
    yield Start(
        spec=spec,
        engine=engine,
        collector=Collector(spec, engine, sampler, pool, never_stop, timer),
        learner=Learner(
            spec,
            functools.partial(policy_loss, spec.loss),
            state,
            timer,
            reference_of(spec, state, workdir),
        ),
        state=state,
        step=step,
        origin=origin,
    )


def reference_of(
    spec: RunSpec, state: TrainState, workdir: pathlib.Path | None
) -> PolicyParams | None:
  """Returns the reference policy of a KL term; None without one.

  Args:
    spec: the run's specification.
    state: the state of a cold start or of the checkpoint.
    workdir: the run's workdir, which holds the reference; None for a cold
      start.
  """
  if not spec.needs_reference:
    return None
  if workdir is not None:
    return train_state.reference(workdir / 'reference', state, cold=False)
  # A copy, because the step donates the state.
  weights, fp8_state = jax.tree.map(jnp.copy, (state.weights, state.fp8_state))
  return PolicyParams(weights, fp8_state)


def _cold(spec: RunSpec) -> tuple[RunSpec, Engine, TrainState]:
  engine = Engine(spec.rollout_policy, spec.engine, spec.mesh)
  state = initialize.create(spec)
  state = calibration.calibrate_run(spec, engine, state, never_stop)
  # The settled precision is written to a folder that is not kept.
  with tempfile.TemporaryDirectory() as folder:
    chosen, state = initialize.settle_precision(
        spec, state, pathlib.Path(folder)
    )
  if chosen is not spec:
    engine = Engine(chosen.rollout_policy, chosen.engine, chosen.mesh)
  return chosen, engine, state


def _resumed(
    spec: RunSpec, workdir: pathlib.Path
) -> tuple[RunSpec, initialize.Resumed]:
  if not restore.all_steps(workdir / 'checkpoints'):
    raise ValueError(
        f'--workdir={workdir} holds no checkpoint of a run; choose the workdir'
        ' of a run that has saved a step, or leave the flag out for a cold'
        ' start'
    )
  policy = run_precision.resolve(workdir, spec.policy, spec.invariant_scale)
  spec = spec.with_policy(policy)
  resumed = initialize.read(spec, workdir)
  assert resumed is not None  # There are steps.
  return resumed.spec, resumed
