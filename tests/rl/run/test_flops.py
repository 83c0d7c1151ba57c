"""Model FLOPs and their share of the peak."""

import itertools
import time

import jax
import numpy as np
import pytest

from jetrl_jax.fp8 import Recipe
from jetrl_jax.metrics.timer import Timer
from jetrl_jax.models import published
from jetrl_jax.rl.run import flops
from jetrl_jax.rl.types import Completion
from tests.rl import tiny_run

# D 32, N 2, K 1, H 16, F 64, V 64, one layer:
#   q and o: 2 * 32 * 32, k and v: 2 * 32 * 16, gate, up and down: 3 * 32 * 64.
_BLOCKS = 2048 + 1024 + 6144
_HEAD = 32 * 64


def _model():
  return tiny_run.model()


def test_the_kernels_of_a_tiny_model_add_up():
  assert flops.matmul_params(_model()) == (_BLOCKS, _HEAD)


def test_the_kernels_of_a_7b_are_its_parameters_without_table_and_gains():
  model = published.QWEN2_5_7B
  table = model.vocab_size * model.model_dim
  rows = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
  gains = model.num_layers * (2 * model.model_dim + rows) + model.model_dim
  assert sum(flops.matmul_params(model)) == model.num_params - table - gains


def test_attention_counts_the_keys_that_a_query_may_see():
  # Positions 1 and 2 see 2 and 3 keys: 5 pairs, 4 * 16 FLOPs in each of the
  # two heads.
  assert flops.attention_flops(_model(), 1, 3) == 5 * 4 * 16 * 2


def test_a_rollout_prefills_once_per_prompt_and_decodes_every_answer():
  # A prompt of 3, answers of 2 and 1 tokens. Prefill: tokens 0 and 1, which
  # see 1 and 2 keys. Decode: positions 2, 3 (3 and 4 keys), and 2 (3 keys).
  expected = 2 * 2 * _BLOCKS + 2 * 3 * (_BLOCKS + _HEAD)
  expected += (1 + 2 + 3 + 4 + 3) * 4 * 16 * 2
  assert flops.rollout_flops(_model(), [3], [(3, 2), (3, 1)]) == expected


def test_an_update_is_three_forwards_of_every_sequence():
  # One of 3 + 1 tokens: 1 + 2 + 3 + 4 pairs.
  expected = 3 * (2 * 4 * (_BLOCKS + _HEAD) + 10 * 4 * 16 * 2)
  assert flops.update_flops(_model(), [(3, 1)]) == expected


def test_one_pass_over_a_sequence_costs_the_same_however_it_is_cut():
  model = published.QWEN3_8B
  whole = flops.attention_flops(model, 0, 100)
  cuts = [0, 1, 17, 64, 100]
  parts = [flops.attention_flops(model, *c) for c in itertools.pairwise(cuts)]
  assert sum(parts) == whole


def test_eight_bits_double_the_peak_where_there_are_dots_of_them():
  for kind, (bfloat16, float8, int8) in flops.PEAK_TFLOPS.items():
    assert flops.peak_flops(kind, 'bfloat16') == bfloat16 * 1e12
    assert flops.peak_flops(kind, 'int8') == int8 * 1e12
    assert int8 == pytest.approx(2 * bfloat16, rel=0.02)
    if float8 is None:
      assert flops.peak_flops(kind, 'float8') is None
    else:
      assert flops.peak_flops(kind, 'float8') == int8 * 1e12


def test_nothing_is_said_of_a_device_or_dtype_that_the_table_lacks():
  assert flops.peak_flops('cpu', 'bfloat16') is None
  assert flops.peak_flops('NVIDIA H200', 'float32') is None


def _metrics(recipe=tiny_run.FP8, rollout=tiny_run.FP8, ppo_epochs=1):
  prompt = tiny_run.prompts()[0]
  tokens = np.zeros(4, np.int32)
  logprobs = np.zeros(4, np.float32)
  completion = Completion(
      prompt_id=prompt.id,
      sample=0,
      prompt_tokens=prompt.tokens,
      tokens=tokens,
      log_mu=logprobs,
      logprobs=logprobs,
      weight_version=tokens,
      finish_reason='length',
      sampled=np.ones(4, bool),
  )
  timer = Timer()
  for phase in ('gen', 'update_actor'):
    with timer(phase):
      time.sleep(0.001)
  found = flops.mfu_metrics(
      tiny_run.policy(recipe),
      rollout,
      [prompt] * 2,
      [completion] * 2,
      timer,
      trained=[completion],
      ppo_epochs=ppo_epochs,
  )
  return found, timer, (len(prompt.tokens), 4)


def test_a_cpu_run_has_no_mfu():
  assert _metrics()[0] == {}


@pytest.fixture
def known(monkeypatch):
  """A device of 1, 2 and 4 MFLOP/s in bfloat16, FP8 and INT8."""
  kind = jax.local_devices()[0].device_kind
  peaks = flops.PEAK_TFLOPS | {kind: (1e-6, 2e-6, 4e-6)}
  monkeypatch.setattr(flops, 'PEAK_TFLOPS', peaks)


def test_each_direction_has_the_peak_of_its_precision(known):
  # A bf16 rollout; an update whose forward is INT8 and backward bfloat16.
  int8 = Recipe(name='int8')
  found, timer, lengths = _metrics(int8, tiny_run.BF16)
  rollout = 2 * flops.rollout_flops(_model(), lengths[:1], [lengths])
  forward = flops.update_flops(_model(), [lengths]) / 3
  assert found['perf/mfu/rollout'] == pytest.approx(
      rollout / timer.seconds('gen') / 1e6
  )
  assert found['perf/mfu/actor'] == pytest.approx(
      (forward / 4e6 + 2 * forward / 1e6) / timer.seconds('update_actor')
  )


def test_a_phase_in_a_precision_without_a_peak_is_left_out(known):
  recipe = Recipe(name='int8', compute_dtype='float32')
  assert list(_metrics(recipe, recipe)[0]) == ['perf/mfu/rollout']


def test_mfu_is_flops_over_seconds_and_peak(known):
  found, timer, lengths = _metrics(ppo_epochs=3)
  # Two answers were sampled, one was learnt from.
  rollout = 2 * flops.rollout_flops(_model(), lengths[:1], [lengths])
  assert found == {
      'perf/mfu/rollout': pytest.approx(rollout / timer.seconds('gen') / 2e6),
      'perf/mfu/actor': pytest.approx(
          3
          * flops.update_flops(_model(), [lengths])
          / timer.seconds('update_actor')
          / 2e6
      ),
  }
