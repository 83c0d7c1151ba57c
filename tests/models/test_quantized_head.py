"""The language-model head as one of the recipe's dots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import sharding
from jetrl_jax.core.compilation import exact_jit
from jetrl_jax.fp8 import QTensor, Recipe, formats, scaling_state
from jetrl_jax.fp8.quantization import quantize, scale_from_amax
from jetrl_jax.kernels.quantized_dot import linear
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.run.calibration import Calibration
from tests.rl import tiny_run, tiny_updates

HEAD = Recipe(quantize_lm_head=True)


@functools.cache
def _run(name: str, devices: tuple[int, int] = (1, 1)) -> tiny_run.Run:
  """A run with an untied FP8 head, calibrated where there are scales."""
  mesh = sharding.make_mesh(data=devices[0], fsdp=devices[1])
  recipe = dataclasses.replace(HEAD, name=name)
  policy = tiny_run.policy(recipe, mesh, family='llama')
  run = tiny_run.build(
      policy, mesh, loss=LossConfig(), config=OptimizerConfig(lr=1e-3)
  )
  if not recipe.is_delayed:
    return run
  start = Calibration(policy, mesh, run.start).fill(
      run.start,
      tiny_run.calibration_batches(run.rollout()),
      tiny_run.TEMPERATURE,
  )
  return dataclasses.replace(run, start=start)


@pytest.mark.parametrize(
    ('name', 'devices'),
    [
        ('fp8_delayed', (1, 1)),
        pytest.param('fp8_token', (2, 2), marks=pytest.mark.slow),
    ],
)
def test_training_computes_the_log_probs_of_the_rollout_to_the_bit(
    name, devices
):
  run = _run(name, devices)
  before = run.start
  assert isinstance(before.weights['lm_head']['kernel'], QTensor)
  for i in range(2):
    samples = run.rollout(before, i)
    packed = tiny_updates.batches(samples)
    gradients, found = run.accumulate(before, packed)
    differ, tokens = tiny_updates.mismatched(packed, found)
    assert (differ, tokens > 100) == (0, True)
    before, _ = run.apply(before, gradients)


@pytest.mark.slow
def test_chunks_of_rows_show_what_one_piece_shows():
  run = _run('fp8_delayed')
  batch = jax.tree.map(jnp.asarray, tiny_updates.batches(run.rollout())[0])
  one_piece = dataclasses.replace(run.policy, logit_chunk_rows=1024)
  assert batch.tokens.size > run.policy.logit_chunk_rows

  def seen(policy):
    def loss(fp8_state):
      logprobs, _ = policy.logprobs(
          PolicyParams(run.start.weights, fp8_state),
          batch,
          jnp.float32(tiny_run.TEMPERATURE),
          masters=run.start.trainable,
      )
      return jnp.sum(jnp.where(batch.loss_mask > 0, logprobs, 0.0))

    return exact_jit(jax.grad(loss))(run.start.fp8_state)['lm_head']

  chunks, whole = seen(run.policy), seen(one_piece)
  for operand in ('input', 'output_grad'):
    amax = chunks[operand]['amax_history']
    assert amax[0] > 0
    np.testing.assert_array_equal(amax, whole[operand]['amax_history'])
    np.testing.assert_allclose(
        chunks[operand]['health'], whole[operand]['health'], rtol=1e-5
    )


def test_spread_dot_states_join_amaxes_by_max_and_sums_by_sum():
  entry = scaling_state.init_dot_state(4)

  def loss(entry):
    uses = scaling_state.spread(entry, 3)
    return sum(
        jnp.sum(uses[o]['amax_history'][:, 0] * jnp.arange(3.0))
        + jnp.sum(uses[o]['health'][:, 1] * jnp.arange(3.0))
        for o in scaling_state.OPERANDS
    )

  found = jax.grad(loss)(entry)
  assert found['input']['amax_history'][0] == 2
  assert found['input']['health'][1] == 3


@pytest.mark.slow
def test_fp8_gradients_of_peaked_rows_of_152064_tokens_keep_their_direction():
  # Logits of a language model: a few tokens hold nearly everything, so that
  # most of the row's gradient is below E4M3's smallest value on one scale.
  rows, vocab, width = 16, 152064, 16
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
  kernel = jnp.asarray(rng.normal(size=(vocab, width)), jnp.bfloat16)
  targets = jnp.argmax(hidden @ kernel.T, axis=1)

  def entry(x):
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return scale_from_amax(amax, formats.E4M3, margin=0, power_of_two=True)

  def gradients(recipe, weight, dot_state):
    def loss(hidden, master):
      logits = linear.dot(
          recipe,
          hidden,
          master,
          weight,
          dot_state,
          jnp.ones(rows),
          out_dtype=jnp.float32,
      )
      picked = jnp.take_along_axis(logits, targets[:, None], axis=1)
      return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked[:, 0])

    return exact_jit(jax.grad(loss, argnums=(0, 1)))(hidden, kernel)

  dot_state = scaling_state.init_dot_state(4)
  for operand, scale in (
      ('input', entry(hidden)),
      ('kernel', entry(kernel)),
      ('output_grad', entry(jnp.float32(1 / rows))),
  ):
    dot_state[operand] = dot_state[operand] | {'scale': scale}
  scale = dot_state['kernel']['scale']
  weight = QTensor(values=quantize(kernel, scale, formats.E4M3), scale=scale)
  found = gradients(Recipe(), weight, dot_state)
  expected = gradients(Recipe(name='bf16'), kernel, None)
  for ours, theirs in zip(found, expected, strict=True):
    ours, theirs = (np.asarray(x, np.float32).ravel() for x in (ours, theirs))
    cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert cosine > 0.99, cosine
