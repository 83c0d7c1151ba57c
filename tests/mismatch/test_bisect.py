"""The first layer and op in which rollout and training differ."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.core import sharding
from jetrl_jax.kernels import dispatch
from jetrl_jax.mismatch.bisect import Bisector
from jetrl_jax.mismatch.compare import (
    Placed,
    compare_op,
    made_by,
    ops,
    windows,
)
from jetrl_jax.mismatch.forced_decode import forced_logprobs
from jetrl_jax.mismatch.taps import tapped
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.optim.adamw import OptimizerConfig
from jetrl_jax.rl import packing
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.types import Completion, TrainBatch
from tests import kernels_in_use
from tests.rl import tiny_run, tiny_updates


@functools.cache
def _run(head_dim: int = 16):
  """Two layers, or one with heads of another size."""
  if head_dim == 16:
    return tiny_run.two_layer_run('qwen2', 'bf16')
  mesh = sharding.make_mesh()
  of = tiny_run.policy(tiny_run.BF16, mesh)
  model = dataclasses.replace(of.model, head_dim=head_dim)
  return tiny_run.build(
      dataclasses.replace(of, model=model),
      mesh,
      loss=LossConfig(),
      config=OptimizerConfig(lr=1e-3),
  )


@functools.cache
def _case(head_dim: int):
  """(bisector, completions, first micro-batch, placements, trained)."""
  run = _run(head_dim)
  completions = run.rollout()
  packed = packing.pack(
      tiny_updates.sequences(completions),
      row_length=tiny_run.LENGTH,
      rows_per_micro_batch=tiny_run.ROWS,
      tile=tiny_run.TILE,
  )
  _, logprobs = run.accumulate(run.start, packed.batches)
  trained = packing.unpack(logprobs, packed)
  bisector = Bisector(
      run.policy,
      run.policy,
      run.engine.config,
      run.loss,
      run.mesh,
      run.start,
  )
  return bisector, completions, packed, trained


def _find(
    weights=None, engine=None, bisector=None, moved_logprobs=0.0, head_dim=16
):
  """Bisects with other weights, or another engine, on the rollout's side."""
  run = _run(head_dim)
  own, completions, packed, trained = _case(head_dim)
  params = PolicyParams(weights or run.start.weights, run.start.fp8_state)
  if weights or engine:
    forced = forced_logprobs(
        engine or run.engine,
        params,
        completions,
        temperature=tiny_run.TEMPERATURE,
    )
    completions = [
        dataclasses.replace(c, logprobs=logprobs)
        for c, logprobs in zip(completions, forced, strict=True)
    ]
  placed = [
      Placed(
          completion=completions[p.origin],
          place=p,
          trained=values + np.float32(moved_logprobs),
      )
      for p, values in zip(packed.placements, trained, strict=True)
      if p.batch == 0
  ]
  return (bisector or own).find(
      run.start, params, packed.batches[0], placed, tiny_run.TEMPERATURE
  )


def _planted(path: str, head_dim: int = 16):
  """The weights with one other value in one leaf."""
  names, weights = path.split('/'), dict(_run(head_dim).start.weights)
  node = weights
  for name in names[:-1]:
    node[name] = dict(node[name])
    node = node[name]
  leaf = node[names[-1]]
  first = (0,) * leaf.ndim
  node[names[-1]] = leaf.at[first].multiply(jnp.asarray(1.5, leaf.dtype))
  return weights


def test_the_ops_are_those_of_the_forward_in_its_order():
  found = ops(tiny_run.model('qwen3', layers=2))
  assert found[:6] == [
      'embed/out',
      'layers_0/attn_norm/in',
      'layers_0/attn_norm/out',
      'layers_0/attn_norm/out_fp8',
      'layers_0/attn/qkv/out',
      'layers_0/attn/q_norm/out',
  ]
  assert found[-4:] == ['final_norm/out', 'logits', 'logsumexp', 'logprob']
  assert len(found) == 1 + 2 * 17 + 5
  assert len(ops(tiny_run.model('qwen2', layers=2))) == 1 + 2 * 15 + 5


def test_windows_hold_every_op_once_and_few_layers_each():
  model = tiny_run.model('qwen2', layers=6)
  found = windows(model)
  assert [op for window in found for op in window] == ops(model)
  # Four layers, then two with the head.
  assert [len(window) for window in found] == [1 + 4 * 15, 2 * 15 + 5]


def _by_hand(prompt: int, response: int) -> Placed:
  zeros = np.zeros(response, np.float32)
  completion = Completion(
      prompt_id=7,
      sample=2,
      prompt_tokens=np.zeros(prompt, np.int32),
      tokens=np.zeros(response, np.int32),
      log_mu=zeros,
      logprobs=zeros,
      weight_version=np.zeros(response, np.int32),
      finish_reason='stop',
      sampled=zeros == 0,
  )
  length = prompt + response
  place = packing.Placement(batch=0, row=0, start=0, length=length, origin=0)
  trained = np.zeros(length, np.float32)
  return Placed(completion=completion, place=place, trained=trained)


def test_elements_are_compared_by_their_bits():
  # Three prompt tokens and three sampled ones: five are fed, two in prefill.
  ours = np.zeros((5, 4), np.float32)
  theirs = ours.copy()
  theirs[1, 2], theirs[3, 0], theirs[4, 1] = -0.0, 0.5, -2
  theirs[4, 3] = ours[4, 3] = np.nan
  found = compare_op(
      'layers_3/mlp/down/out', [ours], [theirs], [_by_hand(3, 3)]
  )
  assert (found.op, found.unequal, found.elements) == (
      'layers_3/mlp/down',
      3,
      20,
  )
  assert found.largest == 2
  assert found.where == 'prompt 7, sample 2, position 1 (prefill)'


def test_the_head_is_that_of_the_decode_step():
  # Its first row is the last prompt token's, at position 2.
  ours, theirs = np.zeros((2, 3, 8), np.float32)
  theirs[1, 5] = 1
  found = compare_op('logits', [ours], [theirs], [_by_hand(3, 3)])
  assert found.where == 'prompt 7, sample 2, position 3 (decode)'
  assert compare_op('logits', [ours], [ours], [_by_hand(3, 3)]).where == ''


def test_a_response_knows_its_first_token_that_differs():
  same = _by_hand(3, 4)
  assert same.agrees
  trained = same.trained.copy()
  trained[3 + 2 :] = 1e-30
  other = dataclasses.replace(same, trained=trained)
  assert not other.agrees and other.first_unequal == 2


@pytest.mark.slow
def test_an_exact_run_agrees_in_every_op_and_the_taps_disturb_nothing():
  found = _find()
  assert found.first is None
  assert [row.op for row in found.rows] == [
      op.removesuffix('/out')
      for op in ops(_run().policy.model)
      if not op.endswith('_fp8')  # Of a recipe in BF16 there are none.
  ]
  assert not found.unseen
  assert all(row.elements for row in found.rows)
  assert found.disturbed == (0, 0) and not found.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize(
    'leaf, op',
    [
        ('layers_0/attn/qkv/kernel', 'layers_0/attn/qkv'),
        ('layers_0/attn/o/kernel', 'layers_0/attn/o'),
        ('layers_1/attn_norm/scale', 'layers_1/attn_norm'),
        ('layers_1/mlp_norm/scale', 'layers_1/mlp_norm'),
        ('layers_1/mlp/gate_up/kernel', 'layers_1/mlp/gate_up'),
        ('layers_1/mlp/down/kernel', 'layers_1/mlp/down'),
        ('final_norm/scale', 'final_norm'),
    ],
)
def test_one_other_weight_is_named_by_its_layer_and_op(leaf, op):
  found = _find(_planted(leaf))
  assert found.first is not None and found.first.op == op
  # One number of one channel: at most one element per token.
  tokens = found.rows[0].elements // _run().policy.model.model_dim
  assert 0 < found.first.unequal
  assert found.first.unequal <= tokens
  assert found.first.largest > 0
  assert 'sample ' in found.first.where
  assert found.disturbed == (0, 0)


@pytest.mark.slow
def test_another_order_of_keys_is_named_as_attention():
  run = _run()
  policy = dataclasses.replace(run.policy, tile=32)
  engine = Engine(policy, run.engine.config, run.mesh)
  bisector = Bisector(
      run.policy,
      policy,
      run.engine.config,
      run.loss,
      run.mesh,
      run.start,
  )
  found = _find(engine=engine, bisector=bisector)
  assert found.first is not None
  assert found.first.op.endswith('/attn/attention')


@pytest.mark.soak
@pytest.mark.timeout(900)  # Two programs per op.
def test_programs_that_the_taps_changed_are_looked_at_one_by_one():
  # As if the run's own program had had other log-probs. The fourth op differs,
  # so that the others need not be compiled.
  found = _find(_planted('layers_0/attn/qkv/kernel'), moved_logprobs=0.5)
  assert found.one_by_one
  assert found.first is not None and found.first.op == 'layers_0/attn/qkv'
  named = [
      'embed',
      'layers_0/attn_norm/in',
      'layers_0/attn_norm',
      'layers_0/attn/qkv',
  ]
  assert [row.op for row in found.rows] == named
  rollout, training = found.disturbed
  assert rollout == 0 and training == found.tokens


def test_what_made_an_op_is_named_by_its_implementation():
  kernels = dispatch.select(hardware=kernels_in_use.HOPPER)
  reference = dispatch.select('reference')
  made = made_by('layers_1/attn/attention_fp8', kernels, reference)
  assert made == (
      'rollout: decode_attention by mosaic_sm90, training: attention by'
      ' reference'
  )
  made = made_by('layers_1/attn_norm', kernels, kernels)
  assert made.count('mosaic_sm90') == 2
  assert made_by('layers_1/attn/o', kernels, kernels) == ''
  assert made_by('embed', kernels, kernels) == ''


@kernels_in_use.needs_mosaic
def test_what_decode_shows_on_a_gpu_training_shows_as_well(monkeypatch):
  kernels_in_use.as_on_hopper(monkeypatch)
  run = tiny_run.policy(family='qwen2', layers=2)
  sizes = dict(model_dim=128, head_dim=64, ffn_dim=256)
  model = dataclasses.replace(run.model, **sizes)
  policy = tapped(dataclasses.replace(run, model=model), tuple(ops(model)))
  state = tiny_run.state_shapes(policy)
  params = PolicyParams(state.weights, state.fp8_state)
  rows, caches = jax.ShapeDtypeStruct((16,), 'i4'), policy.page_shapes(16, 64)

  def decode(*args):
    policy.decode(*args)
    return policy.take()

  def train(params, batch):
    policy.hidden(params, batch)
    return policy.take()

  table = jax.ShapeDtypeStruct((16, 2), 'i4')
  ours = jax.eval_shape(
      policy.bound(decode), params, rows, rows, table, [caches] * 2
  )
  batch = TrainBatch.of_shapes(1, policy.tile)
  theirs = jax.eval_shape(policy.bound(train), params, batch)
  assert {'layers_1/mlp_norm/in', 'layers_1/attn/attention_fp8'} <= {*ours}
  # Within a kernel: the dots whose scales and sums it applies.
  assert 'layers_1/attn/o/out' in {*theirs} - {*ours}
  for op in {*ours} & {*theirs}:
    assert ours[op].dtype == theirs[op].dtype, op
    assert ours[op].shape[1:] == theirs[op].shape[1:], op
  assert {*ours} <= {*theirs}


@kernels_in_use.needs_mosaic
@pytest.mark.slow
def test_a_decode_step_is_looked_at_with_its_kernels(monkeypatch):
  kernels_in_use.interpret(monkeypatch)
  run = _run(head_dim=64)  # 64: a kernel takes such heads.
  rollout = dataclasses.replace(
      run.policy, kernels=kernels_in_use.choose('rope_append')
  )
  engine = Engine(rollout, run.engine.config, run.mesh)
  bisector = Bisector(
      run.policy, rollout, run.engine.config, run.loss, run.mesh, run.start
  )
  planted = _planted('layers_0/mlp_norm/scale', head_dim=64)
  found = _find(planted, engine=engine, bisector=bisector, head_dim=64)
  assert found.first is not None and found.first.op == 'layers_0/mlp_norm'
  assert found.unseen == ('layers_0/attn/rope_k',)
