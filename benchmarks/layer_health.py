"""Measures what 8 bits lose of a real checkpoint, layer by layer, dot by dot.

python -m benchmarks.layer_health --checkpoint=FOLDER \
    --data=data/gsm8k_train.jsonl \
    --output=benchmarks/results/layer_health_NAME_HARDWARE_DATE

Four parts, in one process:

* kernels: zeros, subnormals, rounding ties, SQNR; the embedding as well.
* inputs of dots, in BF16: where the amax is, what each recipe loses of them, in
  all and of the median token.
* gradients: answers are sampled in BF16 (or written ones taken), and those of a
  step get advantages of +1 and -1 in turn. Steps over them, without moving a
  master, record the amaxes that delayed scales are made of. Then, over the last
  steps, each arm's gradient is compared with BF16's of the same tokens. Arms
  differ in a recipe, or in the scales alone, which are arguments of a program,
  so that history, margin and calibration cost no compilation.
* planted: the same for copies of the masters with massive activations
  (`layer_plant.py`), and what keeping dots in high precision wins back.

`--arms=updates`, which is alone, measures how far updates of the sizes
`--updates` move log-probs (`layer_updates.py`).

The loss is sum_t -weight_t A_t log pi_t, whose gradient is that of every
policy loss on-policy, where the ratio is 1. Weights are those of a mini-batch
of `--mini_batch` answers, of which a step here takes a part.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import io
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import traverse_util

from benchmarks import common, layer_measures, layer_plant, layer_updates
from configs import base
from jetrl_jax.config import model as config_model
from jetrl_jax.core import compilation, rng, sharding
from jetrl_jax.core.collectives import Axes
from jetrl_jax.core.typing import PyTree
from jetrl_jax.data import (
    ChatFormat,
    PlainFormat,
    Prompt,
    PromptDataset,
    Tokenizer,
    load_examples,
)
from jetrl_jax.evaluate.settings import INSTRUCTION
from jetrl_jax.fp8 import Recipe, adaptive, formats, health, scaling_state
from jetrl_jax.fp8.quantization import scale_from_amax
from jetrl_jax.mismatch.taps import TappedPolicy, tapped
from jetrl_jax.models.policy import Policy, PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.optim.types import TrainState
from jetrl_jax.rl import aggregation, packing
from jetrl_jax.rl.mismatch import mismatch_metrics
from jetrl_jax.rl.objective import supervised_loss
from jetrl_jax.rl.rollout.engine import Engine, EngineConfig
from jetrl_jax.rl.rollout.scheduler import rollout
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.calibration import Calibration, likelihood_sequences
from jetrl_jax.rl.run.gradients import UpdatePrograms
from jetrl_jax.rl.settings import RunConfig
from jetrl_jax.rl.types import Completion, TrainBatch

# Arms of the gradient: a recipe each, ...
RECIPES = {
    'bf16': Recipe(name='bf16'),
    'default': Recipe(),
    'e5m2': Recipe(grad_format='e5m2'),
    'amax448': Recipe(power_of_two_scales=False),
    'fp8_token': Recipe(name='fp8_token'),
    'fp8_block': Recipe(name='fp8_block'),
    'int8': Recipe(name='int8'),
}
# ... 8-bit kernels alone, ...
KERNELS_ONLY = 'kernels_only'
# ... or other scales of output gradients in the default recipe: name ->
# (steps remembered, bits of margin). 0 steps: of the step itself.
SCALES = {
    'history_1': (1, 0),
    'history_4': (4, 0),
    'history_64': (64, 0),
    'own_amax': (0, 0),
    'margin_-1': (16, -1),
    'margin_1': (16, 1),
    'margin_2': (16, 2),
}
# ... or all scales as a calibration of so many prompts leaves them, which are
# those of a run's first update.
CALIBRATIONS = {f'calibration_{n}': n for n in (4, 16, 64)}
PLANTED = 'planted'
ARMS = (*RECIPES, KERNELS_ONLY, *SCALES, *CALIBRATIONS, PLANTED)
# Alone: its masters are spread, while ties and zeros above are the file's.
UPDATES = 'updates'
# Kernels and inputs are measured for these.
QUANTIZERS = ('default', 'amax448', 'fp8_token', 'fp8_block', 'int8')
# A run's defaults.
_HISTORY = Recipe.amax_history_length
_CALIBRATION = RunConfig.calibration_prompts
_CALIBRATION_TOKENS = RunConfig.calibration_tokens
_ANOTHER = 'bf16, other answers'

_CHECKPOINT = flags.DEFINE_string('checkpoint', None, 'Folder.')
_DATA = flags.DEFINE_string('data', None, 'JSONL with question and answer.')
_PROMPTS = flags.DEFINE_integer(
    'prompts', 196, 'Prompts; a third, at most 64, are for calibration.'
)
_TOKENS = flags.DEFINE_integer('tokens', 256, 'Most tokens of an answer.')
_PROMPT_TOKENS = flags.DEFINE_integer(
    'prompt_tokens', 256, 'Longer prompts are left out.'
)
_SAMPLES = flags.DEFINE_integer('samples', 8, 'Answers to a prompt.')
_STEP_PROMPTS = flags.DEFINE_integer('step_prompts', 2, 'Prompts of a step.')
_COMPARED = flags.DEFINE_integer('compared', 3, 'Steps that are compared.')
_MINI_BATCH = flags.DEFINE_integer(
    'mini_batch', 512, 'Answers that share the loss.'
)
_ANSWERS = flags.DEFINE_enum(
    'answers', 'sampled', ['sampled', 'written'], 'Whose answers.'
)
_ARMS = flags.DEFINE_list(
    'arms', list(ARMS), f'Of {", ".join(ARMS)}; or {UPDATES} alone.'
)
_UPDATES = flags.DEFINE_list(
    'updates', ['2e-5', '2e-6', '2e-7', '2e-8', '2e-9'], 'Their sizes.'
)
_MASSIVE = flags.DEFINE_list(
    'massive', ['300', '3000'], 'Sizes of the planted activations.'
)
_LAYER = flags.DEFINE_integer('plant_layer', 2, 'Whose MLP makes them.')
_MIN_SQNR_DB = flags.DEFINE_float('min_sqnr_db', 25.0, 'What is tried.')
_CACHE = flags.DEFINE_string(
    'compile_cache_dir', '', "Keeps compiled programs; '' for this run alone."
)
_START = time.monotonic()


def say(text: str) -> None:
  """Prints a line of progress."""
  print(f'[{time.monotonic() - _START:6.1f} s] {text}', flush=True)


def _known(arms: list[str]) -> list[str]:
  """Returns the arms that were asked for.

  Raises:
    ValueError: one is unknown.
  """
  if arms == [UPDATES]:
    return arms
  if unknown := sorted(set(arms) - set(ARMS)):
    raise ValueError(
        f'--arms has {unknown}; allowed: {list(ARMS)}, or [{UPDATES!r}] alone'
    )
  return arms


@dataclasses.dataclass(kw_only=True)
class Program:
  """A recipe's compiled update, and its state over the masters in use.

  Attributes:
    policy: of the recipe.
    step: its `accumulate` is compiled.
    state: masters, weights and slots.
  """

  policy: Policy
  step: UpdatePrograms
  state: TrainState

  def run(self, state: TrainState, batch: TrainBatch):
    """Returns (gradients, log-probs [B, T]) of one micro-batch."""
    gradients, logprobs_BT, _ = self.step.accumulate(
        state, self.step.zero_gradients(state), batch, jnp.float32(1)
    )
    return gradients, np.asarray(logprobs_BT)


class Bench:
  """The checkpoint, its answers in micro-batches, and a program per recipe."""

  def __init__(self, config: Any, arms: list[str]):
    self.policy, self.mesh, folder = config_model.build_policy(config)
    self.policy = dataclasses.replace(self.policy, remat='none')
    make, _ = config_model.parameters(config, self.policy, self.mesh, folder)
    self.params = make()
    self.where = sharding.tree_shardings(self.params, self.mesh)
    self.tokenizer = Tokenizer(folder)
    self.arms = arms
    # Of a prompt there is one written answer: twice, with advantages of +1 and
    # -1, it would have no gradient.
    self.samples = _SAMPLES.value if _ANSWERS.value == 'sampled' else 1
    self.programs: dict[str, Program] = {}
    self.rows: list[dict[str, Any]] = []
    self.summary: dict[str, Any] = {}
    self._scores: dict[tuple[str, ...], Any] = {}

  def of(self, recipe: Recipe) -> Policy:
    """Returns the policy with a recipe."""
    return dataclasses.replace(self.policy, recipe=recipe)

  def create(self, policy: Policy, params: PyTree) -> TrainState:
    """Returns a state over masters, which it shares."""
    return train_state.create(policy, params, optax.identity(), self.mesh)

  def recipe_fits(self, recipe: Recipe) -> str:
    """Returns '' or why the recipe cannot quantise this model's kernels."""
    flat = traverse_util.flatten_dict(self.params, sep='/')
    try:
      for path, leaf in flat.items():
        if path.endswith('/kernel'):
          recipe.check_kernel(path.removesuffix('/kernel'), leaf.shape)
    except ValueError as error:
      return str(error)
    return ''

  def save(self, *, quiet: bool = False) -> None:
    """Writes what was measured so far; prints it unless `quiet`."""
    peak = common.peak_gib()
    if peak is not None:
      self.summary['peak GiB'] = round(peak, 1)
    self.summary['seconds'] = round(time.monotonic() - _START, 1)
    rows = [{k: _rounded(v) for k, v in r.items()} for r in self.rows]
    with contextlib.ExitStack() as stack:
      if quiet:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
      common.write(rows, self.summary, tables(self.rows))

  # --- Answers -----------------------------------------------------------

  def load_prompts(self) -> list[Prompt]:
    """Returns the prompts of the data, as many as are asked for."""
    chat = bool(self.tokenizer.chat_template)
    dataset = PromptDataset(
        load_examples(
            (_DATA.value,), prompt_key='question', answer_key='answer'
        )[: 4 * _PROMPTS.value],
        self.tokenizer,
        prompt_format=(
            ChatFormat(instruction=INSTRUCTION)
            if chat
            else PlainFormat(template='{prompt}')
        ),
        max_prompt_length=_PROMPT_TOKENS.value,
    )
    return list(dataset)[: _PROMPTS.value]

  def answer(self, prompts: list[Prompt], fewer: int) -> list[Completion]:
    """Returns answers, sampled in BF16 or written, prompt by prompt.

    Args:
      prompts: what to answer.
      fewer: so many prompts get short answers, for calibration.
    """
    if _ANSWERS.value == 'written':
      return self._written(prompts)
    policy = self.of(RECIPES['bf16'])
    state = self.create(policy, self.params)
    slots_wanted = min(256, len(prompts) * self.samples)
    engine = Engine(
        policy,
        EngineConfig(
            num_slots=slots_wanted,
            max_prompt_length=max(len(p.tokens) for p in prompts),
            max_response_length=_TOKENS.value,
            stop_ids=tuple(self.tokenizer.eos_ids),
        ),
        self.mesh,
    )
    limits = np.full((len(prompts), self.samples), _TOKENS.value)
    limits[:fewer] = min(_TOKENS.value, _CALIBRATION_TOKENS)
    return rollout(
        engine,
        PolicyParams(state.weights, state.fp8_state),
        prompts,
        num_generations=self.samples,
        temperature=1.0,
        base_key=rng.key(0, rng.ROLLOUT, 0),
        weight_version=0,
        limits=limits,
    )

  def _written(self, prompts: list[Prompt]) -> list[Completion]:
    completions = []
    for prompt in prompts:
      tokens = np.asarray(
          self.tokenizer.encode(
              str(prompt.extra['answer']), add_special_tokens=False
          ),
          np.int32,
      )
      tokens = tokens[: _TOKENS.value]
      zeros = np.zeros(len(tokens), np.float32)
      completions.append(
          Completion(
              prompt_id=prompt.id,
              sample=0,
              prompt_tokens=prompt.tokens,
              tokens=tokens,
              sampled=np.ones(len(tokens), bool),
              log_mu=zeros,
              logprobs=zeros,
              weight_version=np.zeros(len(tokens), np.int32),
              finish_reason='stop',
          )
      )
    return completions

  def prepare(self) -> None:
    """Samples answers and packs calibration and steps."""
    prompts = self.load_prompts()
    pool = min(64, max(1, len(prompts) // 3))
    completions = self.answer(prompts, pool)
    per = self.samples
    self.pool, self.pool_answers = prompts[:pool], completions[: pool * per]
    rest = completions[pool * per :]
    size = per * _STEP_PROMPTS.value
    groups = [rest[i : i + size] for i in range(0, len(rest), size)]
    groups = [group for group in groups if len(group) == size]
    if len(groups) < 2:
      raise ValueError(
          f'--prompts={_PROMPTS.value} leave {len(groups)} steps of'
          f' --step_prompts={_STEP_PROMPTS.value} beside {pool} for'
          ' calibration; at least 2 are needed: raise --prompts'
      )
    longest = max(len(c.prompt_tokens) + len(c.tokens) for c in completions)
    self.shape = packing.batch_shape(
        longest,
        micro_batch_size=size,
        packed_rows=1,
        tile=self.policy.tile,
        devices=1,
    )
    self.steps = []
    for group in groups:
      (batch,) = self.pack(self._sequences(group))
      self.steps.append(batch)
    lengths = [len(c.tokens) for c in rest]
    self.summary |= {
        'prompts for calibration': pool,
        'steps': len(self.steps),
        'answers a step': size,
        'tokens an answer, mean': round(float(np.mean(lengths)), 1),
        'answers that share the loss': _MINI_BATCH.value,
    }
    say(f'{len(completions)} answers; {len(self.steps)} steps of {self.shape}')

  def _sequences(self, group: list[Completion]) -> list[packing.Sequence]:
    weights = aggregation.loss_weights(
        [len(c.tokens) for c in group], 'token-mean', loss_scale_factor=None
    )
    share = len(group) / _MINI_BATCH.value
    made = []
    for i, (completion, weight) in enumerate(zip(group, weights, strict=True)):
      advantage = 1.0 if i % 2 == 0 else -1.0
      made.append(
          packing.sequence_from_completion(
              completion,
              advantage=advantage,
              # What the loss multiplies log pi by, see the module.
              loss_weight=float(weight) * share * advantage,
              mask_truncated=False,
              origin=i,
          )
      )
    return made

  def pack(self, sequences: list[packing.Sequence]) -> list[TrainBatch]:
    """Returns micro-batches of the one shape."""
    rows, row_length = self.shape
    return packing.pack(
        sequences,
        row_length=row_length,
        rows_per_micro_batch=rows,
        tile=self.policy.tile,
    ).batches

  # --- Programs ----------------------------------------------------------

  def compile(self) -> None:
    """Compiles every recipe that an arm needs, at the same time."""
    wanted = [name for name in RECIPES if name in self.arms or name == 'bf16']
    delayed = {*SCALES, *CALIBRATIONS, KERNELS_ONLY, PLANTED, UPDATES}
    delayed |= {'e5m2', 'amax448'}
    if delayed & set(self.arms) and 'default' not in wanted:
      wanted.append('default')
    jobs = []
    pool = concurrent.futures.ThreadPoolExecutor()
    for name in wanted:
      if reason := self.recipe_fits(RECIPES[name]):
        self.summary[f'{name} left out'] = reason
        say(f'{name} left out: {reason}')
        continue
      policy = self.of(RECIPES[name])
      state = self.create(policy, self.params)
      made = {name: policy}
      if name == 'default':
        self.calibration = Calibration(policy, self.mesh, state)
        calibrating = dataclasses.replace(RECIPES[name], calibrating=True)
        made[KERNELS_ONLY] = self.of(calibrating)
      for key, policy in made.items():
        step = UpdatePrograms(
            policy,
            supervised_loss,
            optax.identity(),
            OptimizerConfig(),
            self.mesh,
            state,
        )
        self.programs[key] = Program(policy=policy, step=step, state=state)
        jobs.append((step, pool.submit(self._lowered(step, state).compile)))
      say(f'{name} traced')
    for step, job in jobs:
      # In the place of what would compile at its first call.
      step.accumulate = job.result()
    pool.shutdown()
    say(f'{len(jobs)} programs compiled')

  def _lowered(self, step: UpdatePrograms, state: TrainState):
    gradients = step.zero_gradients(state)
    return step.accumulate.lower(
        state, gradients, self.steps[0], jnp.float32(1)
    )

  # --- Calibration and the recorded steps ---------------------------------

  def calibrated(self, state: TrainState, count: int) -> TrainState:
    """Returns the state calibrated on so many prompts and their answers."""
    prompts = self.pool[:count]
    sequences = likelihood_sequences(
        [p.tokens for p in prompts], [1] * len(prompts)
    )
    state = self.calibration.fill(state, self.pack(sequences), 1.0)
    answers = self.pool_answers[: len(prompts) * self.samples]
    sequences = likelihood_sequences(
        [
            np.concatenate([c.prompt_tokens, c.tokens[:_CALIBRATION_TOKENS]])
            for c in answers
        ],
        [len(c.prompt_tokens) for c in answers],
    )
    return self.calibration.fill(state, self.pack(sequences), 1.0)

  def record(self) -> None:
    """Takes the steps in the default recipe and keeps the amaxes seen."""
    program = self.programs['default']
    state = self.calibrated(program.state, _CALIBRATION)
    self.paths = scaling_state.dot_paths(state.fp8_state)
    first = _entries(state.fp8_state, self.paths, 'input', 'amax_history')
    # The newest is entry 1; the oldest comes first here.
    self.amaxes = {
        'input': [amax for amax in first.T[:0:-1] if amax.any()],
        'output_grad': [],
    }
    self.recorded_from = len(self.amaxes['input'])
    flushed = []
    for t, batch in enumerate(self.steps):
      gradients, _ = program.run(state, batch)
      # Entry 0 of a history is empty until now.
      observed = scaling_state.observe(state.fp8_state, gradients.fp8)
      seen = jax.device_get(observed)
      for operand, series in self.amaxes.items():
        found = _entries(seen, self.paths, operand, 'amax_history')
        series.append(found[:, 0])
      sums = _entries(seen, self.paths, 'output_grad', 'health')
      flushed.append(float(np.median(sums[:, 2] / np.maximum(sums[:, 0], 1))))
      state = dataclasses.replace(
          state,
          fp8_state=scaling_state.roll(
              observed,
              program.policy.recipe,
              operands=('input', 'output_grad'),
          ),
      )
      if t % 16 == 0:
        say(f'step {t}: {flushed[-1]:.1%} of output gradients flushed (median)')
    self.summary['flushed in the first steps, median dot'] = [
        round(x, 4) for x in flushed[:4]
    ]

  def replay(self) -> list[dict[str, Any]]:
    """Returns how often the recorded amaxes exceed replayed scales."""
    series_TD = np.stack(self.amaxes['output_grad'])
    rows = []
    for name, (history, margin) in {'default': (_HISTORY, 0), **SCALES}.items():
      if not 0 < history < len(series_TD):
        continue
      bits = []
      for t in range(history, len(series_TD)):
        largest_D = series_TD[t - history : t].max(axis=0)
        scale_D = _scales(largest_D, formats.E4M3, margin, True)
        bits.append(np.log2(series_TD[t] / (448 * scale_D)))
      bits = np.stack(bits)
      rows.append(
          {
              'part': 'replay',
              'arm': name,
              'steps': len(bits),
              'saturated_dots': float((bits > 0).mean()),
              'worst_bits_over': float(max(bits.max(), 0)),
              'mean_bits_unused': float(-bits.mean()),
          }
      )
    return rows

  def with_scales(
      self, name: str, t: int, history: int = _HISTORY, margin: int = 0
  ) -> TrainState:
    """Returns a delayed recipe's state as it would be before step t.

    Args:
      name: of the recipe.
      t: step.
      history: steps that the output gradients' scales remember; 0 takes the
        step's own amax.
      margin: of those scales.
    """
    program = self.programs[name]
    recipe = program.policy.recipe
    at = self.recorded_from + t
    seen_input = self.amaxes['input'][max(0, at - _HISTORY) : at]
    series = self.amaxes['output_grad']
    seen_grad = series[max(0, t - history) : t] if history else [series[t]]
    power = recipe.power_of_two_scales
    scales = {
        'input': _scales(np.max(seen_input, 0), formats.E4M3, 0, power),
        'output_grad': _scales(
            np.max(seen_grad, 0), recipe.grad_dtype, margin, power
        ),
    }
    fp8_state = program.state.fp8_state
    for operand, scale_D in scales.items():
      fp8_state = _put(fp8_state, self.paths, operand, scale_D)
    return dataclasses.replace(program.state, fp8_state=fp8_state)

  # --- Parts ---------------------------------------------------------------

  def measure_kernels(self) -> None:
    """Part (a)."""
    recipes = {name: RECIPES[name] for name in QUANTIZERS}
    flat = traverse_util.flatten_dict(self.params, sep='/')
    for path in sorted(flat, key=_numerical):
      if path.endswith(('/kernel', '/embedding')):
        dot = path.removesuffix('/kernel')
        self.rows += layer_measures.kernel_rows(dot, flat[path], recipes)
    say('kernels measured')

  def taps(self, params: PyTree) -> dict[str, jax.Array]:
    """Returns what the dots read, and the residual stream, in BF16."""
    layers = range(self.policy.model.num_layers)
    if not hasattr(self, '_tapped'):
      names = [f'layers_{i}/{name}' for i in layers for name in _PLACES]
      policy = tapped(
          self.of(RECIPES['bf16']), ('embed/out', *names, 'final_norm/out')
      )
      self._tapped = policy.jit(functools.partial(_show, policy))
    state = self.create(self.of(RECIPES['bf16']), params)
    weights = PolicyParams(state.weights, state.fp8_state)
    return self._tapped(weights, self.steps[-1])

  def measure_inputs(self, shown: dict[str, jax.Array], label: str) -> None:
    """Part (b)."""
    recipes = {name: RECIPES[name] for name in QUANTIZERS}
    batch = self.steps[-1]
    where = {
        'mask_M': (batch.segment_ids > 0).astype(np.float32).reshape(-1),
        'positions_M': batch.positions.reshape(-1),
        'tokens_M': batch.tokens.reshape(-1),
    }
    for path in sorted(shown, key=_numerical):
      place = _READ_BY.get(re.sub(r'^layers_\d+/', '', path))
      dot = f'{path.split("/")[0]}/{place}' if place else path
      if path == 'final_norm/out':
        dot = 'lm_head'
      used = recipes if place or dot == 'lm_head' else {}
      rows = layer_measures.input_rows(dot, shown[path], used, **where)
      self.rows += [row | {'model': label} for row in rows]
    say(f'inputs measured ({label})')

  def _states(self, t: int) -> Iterable[tuple[str, str, TrainState]]:
    """Yields (arm, program, state) of what is compared at step t."""
    for name in RECIPES:
      if name in self.arms and name in self.programs and name != 'bf16':
        program = self.programs[name]
        delayed = program.policy.recipe.is_delayed
        yield name, name, self.with_scales(
            name, t
        ) if delayed else program.state
    if KERNELS_ONLY in self.arms:
      yield KERNELS_ONLY, KERNELS_ONLY, self.with_scales('default', t)
    for name, (history, margin) in SCALES.items():
      if name in self.arms:
        yield name, 'default', self.with_scales('default', t, history, margin)
    for name, state in self.cold.items():
      yield name, 'default', state

  def measure_gradients(self) -> None:
    """Part (c)."""
    base_state = self.programs['default'].state
    self.cold, used = {}, set()
    for name, count in CALIBRATIONS.items():
      count = min(count, len(self.pool))
      if name in self.arms and count not in used:
        used.add(count)
        self.cold[name] = self.calibrated(base_state, count)
        self.summary[f'{name}, prompts'] = count
    totals: dict[str, dict] = {}
    others = None
    chosen = range(max(1, len(self.steps) - _COMPARED.value), len(self.steps))
    for t in chosen:
      batch = self.steps[t]
      reference = self.programs['bf16']
      wanted, wanted_logprobs = reference.run(reference.state, batch)
      if others is not None:
        total = totals.setdefault(_ANOTHER, _empty())
        _add(total, layer_measures.moments(others, wanted.trainable))
      for arm, name, state in self._states(t):
        program = self.programs[name]
        gradients, logprobs = program.run(state, batch)
        total = totals.setdefault(arm, _empty())
        _add(
            total, layer_measures.moments(gradients.trainable, wanted.trainable)
        )
        total['logprobs'].append(_compare(batch, wanted_logprobs, logprobs))
        if name != 'bf16':
          total['health'].append(self.health(state, gradients.fp8))
        del gradients
      others = wanted.trainable
      say(f'gradients of step {t} compared')
    for arm, total in totals.items():
      self.rows += _gradient_rows(arm, total)
    self.rows += self.replay()

  def measure_updates(self) -> None:
    """What `--arms=updates` asks for."""
    batch = self.steps[0]
    mask = batch.loss_mask > 0
    reference = self.programs['bf16']
    gradients, _ = reference.run(reference.state, batch)
    signs = jax.tree.map(
        lambda g: jnp.sign(g).astype(jnp.int8), gradients.trainable
    )
    default = self.programs['default'].state
    calibrated = self.calibrated(default, _CALIBRATION).fp8_state
    # A 0.5B of float32 fits into 16 GB once these are gone.
    del gradients, reference, default
    for program in self.programs.values():
      del program.state

    def shown(policy: Policy, params: PolicyParams, batch: TrainBatch):
      logprobs_BT, _, logits_MV, sum_M = policy.target_logprobs(
          params, batch, jnp.float32(1), None, show=True
      )
      return logprobs_BT, logits_MV - sum_M[:, None]

    # Of the row whose token comes next.
    before = np.roll(mask, -1, axis=1).reshape(-1)
    compiled = {
        name: program.policy.jit(functools.partial(shown, program.policy))
        for name, program in self.programs.items()
    }

    def score(name: str, params: PyTree) -> layer_updates.Scored:
      state = self.create(self.programs[name].policy, params)
      slots = state.fp8_state if name == 'bf16' else calibrated
      logprobs_BT, next_MV = compiled[name](
          PolicyParams(state.weights, slots), batch
      )
      leaves = jax.tree.leaves(state.weights)
      return layer_updates.Scored(
          logprobs_N=np.asarray(logprobs_BT)[mask],
          weights=[leaf for leaf in leaves if leaf.dtype.itemsize == 1],
          next_NV=np.asarray(next_MV)[before],
      )

    arms = {
        'BF16': 'bf16',
        '8-bit weights': KERNELS_ONLY,
        '8-bit weights and inputs': 'default',
    }
    scores = {arm: functools.partial(score, name) for arm, name in arms.items()}
    sizes = [float(size) for size in _UPDATES.value]
    self.rows += layer_updates.rows(scores, self.params, signs, sizes)
    say('updates measured')

  def health(self, state: TrainState, seen: PyTree) -> dict:
    """Returns `health.summarize` of one micro-batch's observations."""
    observed = jax.device_get(scaling_state.observe(state.fp8_state, seen))
    return health.summarize(observed, scaling_state.dot_paths(observed))

  def measure_planted(self, label: str, params: PyTree, plant) -> None:
    """Part (d), for one copy of the masters.

    Args:
      label: of the copy.
      params: masters.
      plant: where massive activations were planted; in `label` 'as it is' the
        masters are the checkpoint's.
    """
    steps = self.steps[-_COMPARED.value :]
    reference = self.programs['bf16']
    state = self.create(reference.policy, params)
    wanted = [reference.run(state, batch) for batch in steps]
    if label != _AS_IS:
      lost = [
          _compare(batch, old, found)
          for batch, old, (_, found) in zip(
              steps, self.original, wanted, strict=True
          )
      ]
      self.rows.append(
          {'part': 'planted', 'model': label, 'arm': 'bf16, beside the model'}
          | _mean(lost)
      )
    else:
      self.original = [logprobs for _, logprobs in wanted]
    for name in ('default', 'fp8_token', 'fp8_block', 'int8'):
      if name not in self.programs:
        continue
      program = self.programs[name]
      state = self.create(program.policy, params)
      if program.policy.recipe.is_delayed:
        state = self.calibrated(state, _CALIBRATION)
        calibrated = state
      total = _empty()
      for batch, (gradients, logprobs) in zip(steps, wanted, strict=True):
        found, found_logprobs = program.run(state, batch)
        _add(
            total,
            layer_measures.moments(found.trainable, gradients.trainable),
        )
        total['logprobs'].append(_compare(batch, logprobs, found_logprobs))
        total['health'].append(self.health(state, found.fp8))
        del found
      rows = _gradient_rows(name, total)
      if name == 'default':
        later = {r['dot']: r.get('input_sqnr_db', math.nan) for r in rows[1:]}
      for row in rows:
        row['part'] = 'planted' if row['dot'] == 'all' else 'planted_dot'
      self.rows += [row | {'model': label} for row in rows]
    del wanted, gradients
    say(f'{label}: recipes compared')
    self._keep(label, params, calibrated, plant, later)

  def _keep(self, label, params, state: TrainState, plant, later) -> None:
    """Tries which dots to keep in high precision, by the default recipe.

    Args:
      label: of the masters.
      params: masters.
      state: calibrated; min_sqnr_db chooses by the health in it.
      plant: see `measure_planted`.
      later: dot -> dB of its input in the steps, with the scales that the
        calibration left.
    """
    recipe = self.programs['default'].policy.recipe
    measure = self.policy.jit(
        lambda s, p, w: scaling_state.measure_kernels(s, p, w, Axes())
    )
    measured = measure(state.fp8_state, params, state.weights)
    summary = health.summarize(jax.device_get(measured), self.paths)
    choices: dict[str, dict[str, float]] = {}
    for threshold in sorted({20.0, 28.0, _MIN_SQNR_DB.value}):
      try:
        chosen = adaptive.choose({recipe.name: summary}, threshold)
      except ValueError:
        chosen = dict.fromkeys(self.paths, math.nan)
      choices[f'min_sqnr_db={threshold:g}'] = chosen
    choices[f'median token < {_MIN_SQNR_DB.value:g} dB'] = {
        row['dot']: row['median_token_db']
        for row in _select(self.rows, part='input', arm='default', model=label)
        if row['median_token_db'] < _MIN_SQNR_DB.value
        and row['dot'] in self.paths
    }
    choices[f'high_precision_layers={plant.dot}'] = {plant.dot: math.nan}
    choices['high_precision_layers=.*/mlp/down'] = {
        path: math.nan for path in self.paths if path.endswith('/mlp/down')
    }
    sets = {tuple(dots) for dots in choices.values()}
    found = self._kept(
        state, [dots for dots in sets if 0 < len(dots) < len(self.paths)]
    )
    for name, chosen in choices.items():
      dots = tuple(chosen)
      row = {
          'part': 'planted',
          'model': label,
          'arm': f'default, {name}',
          'kept': len(dots),
          'kept_dots': list(dots),
          'chosen_by_db': list(chosen.values()),
          'later_db': [later.get(dot, math.nan) for dot in dots],
      }
      self.rows.append(row | found.get(dots, {}))
    say(f'{label}: {len(found)} choices of dots tried')

  def _kept(
      self, state: TrainState, choices: list[tuple[str, ...]]
  ) -> dict[tuple[str, ...], dict[str, float]]:
    """Returns how far log-probs are from BF16's, for dots that are kept."""
    reference = self.programs['bf16'].policy
    sides: dict[tuple[str, ...], TrainState] = {
        (): self.create(reference, state.trainable)
    }
    jobs = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
      for dots in ((), *choices):
        policy = reference
        if dots:
          policy = self.of(
              self.programs['default'].policy.recipe.with_high_precision(dots)
          )
          fp8_state = scaling_state.restrict(state.fp8_state, policy.recipe)
          sides[dots] = train_state.with_weights(
              policy,
              dataclasses.replace(state, fp8_state=fp8_state),
              self.mesh,
              record=False,
          )
        if dots not in self._scores:
          side = sides[dots]
          lowered = policy.jit(policy.logprobs).lower(
              PolicyParams(side.weights, side.fp8_state),
              self.steps[0],
              jnp.float32(1),
          )
          jobs[dots] = pool.submit(lowered.compile)
      # One program serves all copies of the masters.
      self._scores |= {dots: job.result() for dots, job in jobs.items()}
    found: dict[tuple[str, ...], list] = {dots: [] for dots in choices}
    for batch in self.steps[-_COMPARED.value :]:
      logprobs = {
          dots: np.asarray(
              self._scores[dots](
                  PolicyParams(side.weights, side.fp8_state),
                  batch,
                  jnp.float32(1),
              )[0]
          )
          for dots, side in sides.items()
      }
      for dots in choices:
        found[dots].append(_compare(batch, logprobs[()], logprobs[dots]))
    return {dots: _mean(of_steps) for dots, of_steps in found.items()}


_AS_IS = 'as it is'
# Taps of a block, and which dot reads them.
_READ_BY = {
    'attn_norm/out': 'attn/qkv',
    'attn/attention': 'attn/o',
    'mlp_norm/out': 'mlp/gate_up',
    'mlp/swiglu': 'mlp/down',
}
_PLACES = (*_READ_BY, 'attn_sum', 'mlp_sum')


def _show(policy: TappedPolicy, params: PolicyParams, batch: TrainBatch):
  policy.hidden(params, batch)
  return policy.take()


def _numerical(path: str) -> list:
  return [int(s) if s.isdigit() else s for s in re.split(r'(\d+)', path)]


def _scales(amax_D, dtype, margin: int, power_of_two: bool) -> np.ndarray:
  made = scale_from_amax(
      jnp.asarray(amax_D), dtype, margin=margin, power_of_two=power_of_two
  )
  return np.asarray(made)


def _entries(state: PyTree, paths, operand: str, name: str) -> np.ndarray:
  """Returns an entry of all slots, stacked in the order of the paths."""
  flat = traverse_util.flatten_dict(jax.device_get(state), sep='/')
  return np.stack([flat[f'{path}/{operand}/{name}'] for path in paths])


def _put(state: PyTree, paths, operand: str, scale_D: np.ndarray) -> PyTree:
  """Returns the slots with an operand's scales in use."""
  flat = traverse_util.flatten_dict(state, sep='/')
  for path, scale in zip(paths, scale_D, strict=True):
    old = flat[f'{path}/{operand}/scale']
    flat[f'{path}/{operand}/scale'] = jax.device_put(scale, old.sharding)
  return traverse_util.unflatten_dict(flat, sep='/')


def _empty() -> dict[str, Any]:
  return {'moments': {}, 'logprobs': [], 'health': []}


def _add(total: dict, moments: dict[str, np.ndarray]) -> None:
  for path, sums in moments.items():
    total['moments'][path] = total['moments'].get(path, 0) + sums


def _compare(batch: TrainBatch, wanted, found) -> dict[str, float]:
  """Returns how far log-probs are from those that sampled, over answers."""
  mask = batch.loss_mask > 0
  metrics = mismatch_metrics(
      rollout_logprobs=wanted[mask],
      train_logprobs=found[mask],
      log_mu=wanted[mask],
      log_pi_old=found[mask],
      advantages=batch.advantages[mask],
  )
  return {
      'k3': metrics['rollout_corr/k3_kl'],
      'kl': metrics['rollout_corr/kl'],
      'logprob_diff': metrics['training/rollout_logprob_diff_mean'],
      'logprob_diff_max': metrics['training/rollout_logprob_diff_max'],
  }


def _mean(found: list[dict[str, float]]) -> dict[str, float]:
  return {k: float(np.mean([f[k] for f in found])) for k in found[0]}


def _of_dot(healths: list[dict], dot: str) -> dict[str, float]:
  """Returns the mean health of a dot's operands over steps."""
  row = {}
  for operand in ('input', 'output_grad'):
    for name in ('flushed_frac', 'saturated_frac', 'sqnr_db'):
      found = [
          h[dot][operand][name] for h in healths if name in h[dot][operand]
      ]
      if found:
        short = name.removesuffix('_frac')
        row[f'{operand}_{short}'] = float(np.mean(found))
  return row


def _gradient_rows(arm: str, total: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns a record of an arm, and one for each of its dots."""
  sums = total['moments']
  whole = np.sum(list(sums.values()), axis=0)
  kernels = {
      path.removesuffix('/kernel'): found
      for path, found in sums.items()
      if path.endswith('/kernel')
  }
  dots = []
  for dot in sorted(kernels, key=_numerical):
    row = {
        'part': 'gradient',
        'arm': arm,
        'dot': dot,
        'cosine': layer_measures.cosine(kernels[dot]),
        'norm_ratio': layer_measures.norm_ratio(kernels[dot]),
    }
    if total['health'] and dot in total['health'][0]:
      row |= _of_dot(total['health'], dot)
    dots.append(row)
  worst = min(dots, key=lambda row: row['cosine'])
  record = {
      'part': 'gradient',
      'arm': arm,
      'dot': 'all',
      'cosine': layer_measures.cosine(whole),
      'norm_ratio': layer_measures.norm_ratio(whole),
      'cosine_median': float(np.median([r['cosine'] for r in dots])),
      'cosine_worst': worst['cosine'],
      'worst_dot': worst['dot'],
  }
  for name, pick in (
      ('output_grad_flushed', max),
      ('output_grad_saturated', max),
      ('output_grad_sqnr_db', min),
      ('input_flushed', max),
      ('input_saturated', max),
      ('input_sqnr_db', min),
  ):
    found = [row[name] for row in dots if name in row]
    if found:
      record[name] = float(np.median(found))
      record[f'{name}_worst'] = float(pick(found))
  if total['logprobs']:
    record |= _mean(total['logprobs'])
  return [record, *dots]


# --- The pages -------------------------------------------------------------


def _select(rows, **wanted) -> list[dict]:
  return [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]


def _by_kind(rows: list[dict], names: tuple[str, ...]) -> list[dict]:
  """Returns medians over layers of each (arm, kind of dot), and the worst."""
  kinds: dict[tuple, list[dict]] = {}
  for row in rows:
    kind = re.sub(r'^layers_\d+/', '', row['dot'])
    kinds.setdefault((row['arm'], kind), []).append(row)
  table = []
  for (arm, kind), members in kinds.items():
    entry: dict[str, Any] = {'arm': arm, 'dot': kind}
    for name in names:
      found = [m[name] for m in members if name in m]
      found = [x for x in found if not math.isnan(x)]
      if found:
        entry[name] = float(np.median(found))
        pick = min if name.endswith('_db') else max
        entry[f'{name}_worst'] = float(pick(found))
    table.append(entry)
  return table


def tables(rows: list[dict[str, Any]]) -> str:
  """Returns the page, without its head."""
  parts = []

  def add(title: str, note: str, members: list[dict], columns) -> None:
    if members:
      table = common.table(members, columns)
      parts.append(f'## {title}\n\n{note}\n\n{table}')

  kernels = _by_kind(
      _select(rows, part='kernel'),
      ('zeros', 'subnormal', 'ties', 'flushed', 'sqnr_db', 'amax_over_rms'),
  )
  add(
      'Kernels',
      'Median over layers (worst in the last columns). A tie lies halfway'
      ' between two values of the grid.',
      kernels,
      (
          ('dot', 'dot', ''),
          ('arm', 'recipe', ''),
          ('zeros', 'zeros', '.2%'),
          ('ties', 'ties', '.2%'),
          ('subnormal', 'subnormal', '.2%'),
          ('flushed', 'flushed', '.2%'),
          ('sqnr_db', 'SQNR dB', '.1f'),
          ('amax_over_rms', 'amax / rms', '.0f'),
          ('sqnr_db_worst', 'SQNR worst', '.1f'),
          ('flushed_worst', 'flushed worst', '.2%'),
      ),
  )
  for label in dict.fromkeys(r['model'] for r in rows if 'model' in r):
    losses = [
        r
        for r in _select(rows, part='input', model=label)
        if r['arm'] != 'bf16'
    ]
    add(
        f'Inputs of dots, {label}',
        'One step in BF16; scales of its own amax. Median over layers, then'
        ' the worst layer. The median token is that of the rows.',
        _by_kind(losses, ('flushed', 'sqnr_db', 'median_token_db')),
        (
            ('dot', 'dot', ''),
            ('arm', 'recipe', ''),
            ('flushed', 'flushed', '.2%'),
            ('sqnr_db', 'SQNR dB', '.1f'),
            ('median_token_db', 'median token dB', '.1f'),
            ('flushed_worst', 'flushed worst', '.2%'),
            ('sqnr_db_worst', 'SQNR worst', '.1f'),
            ('median_token_db_worst', 'median token worst', '.1f'),
        ),
    )
    facts = [
        r
        for r in rows
        if r['part'] in ('input', 'stream')
        and r.get('model') == label
        and r['arm'] == 'bf16'
    ]
    facts.sort(key=lambda r: -r['amax_over_median'])
    add(
        f'Largest activations, {label}',
        'The 12 places with the largest amax over median.',
        facts[:12],
        (
            ('dot', 'read by, or place', ''),
            ('amax', 'amax', '.4g'),
            ('amax_over_median', 'amax / median', '.0f'),
            ('amax_first_token', 'at first tokens', '.4g'),
            ('amax_other_tokens', 'at others', '.4g'),
            ('position', 'position', ''),
            ('token', 'token', ''),
            ('channels', 'channels', ''),
        ),
    )
  add(
      "Gradients, beside BF16's of the same tokens",
      'Cosine of all masters, of the median and the worst kernel; flushed and'
      ' SQNR of output gradients, median and worst dot; k3 of log-probs.',
      _select(rows, part='gradient', dot='all'),
      (
          ('arm', 'arm', ''),
          ('cosine', 'cosine', '.4f'),
          ('norm_ratio', 'norm', '.3f'),
          ('cosine_median', 'median', '.4f'),
          ('cosine_worst', 'worst', '.4f'),
          ('worst_dot', 'where', ''),
          ('output_grad_flushed', 'flushed', '.1%'),
          ('output_grad_flushed_worst', 'worst', '.1%'),
          ('output_grad_saturated_worst', 'saturated, worst', '.3%'),
          ('output_grad_sqnr_db', 'SQNR dB', '.1f'),
          ('output_grad_sqnr_db_worst', 'worst', '.1f'),
          ('input_sqnr_db_worst', 'input SQNR, worst', '.1f'),
          ('k3', 'k3', '.2e'),
          ('logprob_diff', '|log-prob off|', '.4f'),
      ),
  )
  add(
      'Gradients by dot',
      'Median over layers, and the worst layer.',
      _by_kind(
          [
              r
              for r in _select(rows, part='gradient')
              if r['dot'] != 'all' and 'output_grad_flushed' in r
          ],
          ('output_grad_flushed', 'output_grad_sqnr_db'),
      ),
      (
          ('arm', 'arm', ''),
          ('dot', 'dot', ''),
          ('output_grad_flushed', 'flushed', '.1%'),
          ('output_grad_flushed_worst', 'worst', '.1%'),
          ('output_grad_sqnr_db', 'SQNR dB', '.1f'),
          ('output_grad_sqnr_db_worst', 'worst', '.1f'),
      ),
  )
  add(
      "The default's worst dots",
      'By the cosine of their gradient.',
      sorted(
          [
              r
              for r in _select(rows, part='gradient', arm='default')
              if r['dot'] != 'all'
          ],
          key=lambda r: r['cosine'],
      )[:12],
      (
          ('dot', 'dot', ''),
          ('cosine', 'cosine', '.4f'),
          ('output_grad_flushed', 'flushed', '.1%'),
          ('output_grad_saturated', 'saturated', '.3%'),
          ('output_grad_sqnr_db', 'SQNR dB', '.1f'),
          ('input_sqnr_db', 'input SQNR', '.1f'),
      ),
  )
  add(
      'Scales of output gradients, replayed',
      'Over the recorded amaxes: share of (dot, step) above what the scale'
      ' holds.',
      _select(rows, part='replay'),
      (
          ('arm', 'arm', ''),
          ('steps', 'steps', ''),
          ('saturated_dots', 'saturated', '.1%'),
          ('worst_bits_over', 'worst, bits over', '.2f'),
          ('mean_bits_unused', 'bits unused', '.2f'),
      ),
  )
  add(
      'Massive activations, planted',
      "Beside BF16 of the same masters. 'beside the model': what planting"
      ' itself changed. Kept: dots in high precision.',
      _select(rows, part='planted'),
      (
          ('model', 'model', ''),
          ('arm', 'arm', ''),
          ('kept', 'kept', ''),
          ('k3', 'k3', '.2e'),
          ('kl', 'KL', '.4f'),
          ('logprob_diff', '|log-prob off|', '.4f'),
          ('cosine', 'cosine', '.4f'),
          ('cosine_worst', 'worst', '.4f'),
          ('input_flushed_worst', 'input flushed, worst', '.1%'),
          ('input_sqnr_db_worst', 'input SQNR, worst', '.1f'),
      ),
  )
  add(
      'Updates',
      'How far log-probs of answers move, in nats a token: half of the mean'
      ' square is k3 to second order.',
      _select(rows, part='updates'),
      (
          ('arm', 'in 8 bits', ''),
          ('size', 'update', '.0e'),
          ('half_mean_square', 'half mean square', '.2e'),
          ('mean_absolute', 'mean', '.2e'),
          ('clipped', 'ratio outside 0.8 to 1.2', '.1%'),
          ('weights_changed', '8-bit weights that changed', '.4%'),
      ),
  )
  add(
      "What PPO's clip drops",
      'Shares of the gradient, in expectation over the next token, where the'
      ' advantage is positive and negative; rare: below 1% before the update.',
      _select(rows, part='updates'),
      (
          ('arm', 'in 8 bits', ''),
          ('size', 'update', '.0e'),
          ('clipped_positive_all', 'A > 0', '.1%'),
          ('clipped_negative_all', 'A < 0', '.1%'),
          ('clipped_positive_rare', 'A > 0, rare', '.1%'),
          ('clipped_negative_rare', 'A < 0, rare', '.1%'),
      ),
  )
  return '\n\n'.join(parts)


def _rounded(value):
  if isinstance(value, float):
    return float(f'{value:.5g}') if math.isfinite(value) else None
  if isinstance(value, list):
    return [_rounded(x) for x in value]
  return value


def config_of() -> Any:
  """Returns the config that the policy and its masters are made by."""
  config = base.get_config()
  config.model.path = _CHECKPOINT.value
  # Ties and zeros are those of the file, unless updates are measured.
  config.model.spread_masters = _ARMS.value == [UPDATES]
  if common.TINY.value:
    config.model.attention_tile = 16
  return config


def main(argv: list[str]) -> None:
  """Measures all parts and writes the record."""
  del argv
  with tempfile.TemporaryDirectory() as folder:
    # Weights are made by the same programs for every copy of the masters.
    compilation.keep_compiled(_CACHE.value or folder)
    _measure()


def _measure() -> None:
  bench = Bench(config_of(), _known(_ARMS.value))
  say(f'{pathlib.Path(_CHECKPOINT.value).name} loaded')
  bench.prepare()
  if bench.arms == [UPDATES]:
    bench.compile()
    bench.measure_updates()
    bench.save()
    return
  bench.measure_kernels()
  shown = bench.taps(bench.params)
  bench.measure_inputs(shown, _AS_IS)
  bench.save(quiet=True)
  bench.compile()
  if 'default' in bench.programs:
    bench.record()
    bench.measure_gradients()
    bench.save(quiet=True)
  if PLANTED in bench.arms:
    layer = min(_LAYER.value, bench.policy.model.num_layers - 1)
    batch = bench.steps[-1]
    valid = (batch.segment_ids > 0).reshape(-1)
    read = [
        np.asarray(shown[f'layers_{layer}/mlp{name}'].astype(jnp.float32))
        for name in ('_norm/out', '/swiglu')
    ]
    plant = layer_plant.find(
        bench.params,
        layer,
        *(rows[valid] for rows in read),
        (batch.positions.reshape(-1) == 0)[valid],
    )
    bench.summary['planted neurons'] = list(plant.neurons)
    bench.summary['planted channels'] = list(plant.channels)
    del shown
    bench.measure_planted(_AS_IS, bench.params, plant)
    for size in _MASSIVE.value:
      label = f'{plant.dot} {size}'
      params = layer_plant.planted(bench.params, plant, float(size))
      params = jax.device_put(params, bench.where)
      kernel = params[f'layers_{layer}']['mlp']['down']['kernel']
      recipes = {name: RECIPES[name] for name in QUANTIZERS}
      bench.rows += layer_measures.kernel_rows(label, kernel, recipes)
      bench.measure_inputs(bench.taps(params), label)
      bench.measure_planted(label, params, plant)
      bench.save(quiet=True)
  bench.save()


if __name__ == '__main__':
  flags.mark_flags_as_required(['checkpoint', 'data'])
  common.run(main)
