"""The dry run: what it says is true, and nothing is trained."""

import dataclasses
import math
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from configs import llama8b, quickstart, qwen0_5b, qwen3_8b, qwen7b, qwen14b
from jetrl_jax.config import build as configs
from jetrl_jax.config import presets as config_presets
from jetrl_jax.core import device_memory
from jetrl_jax.dry_run import checks as dry_run_checks
from jetrl_jax.dry_run import estimate as dry_run_estimate
from jetrl_jax.dry_run import memory as dry_run_memory
from jetrl_jax.dry_run import needs as dry_run_needs
from jetrl_jax.dry_run import precision as dry_run_precision
from jetrl_jax.models import published
from jetrl_jax.models.hf import layout as hf_layout
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout.engine import Engine
from jetrl_jax.rl.run import train_state
from jetrl_jax.rl.run.other_precision import OtherPrecision
from tests import whole_run
from tests.dry_run import parts_of

_GIB = 2**30
_LARGE = {
    qwen0_5b: 'qwen2.5-0.5b',
    qwen7b: 'qwen2.5-7b',
    qwen14b: 'qwen2.5-14b',
    qwen3_8b: 'qwen3-8b',
    llama8b: 'llama-3.1-8b',
}


def _state(spec):
  """Returns the state of a cold start."""
  return train_state.create(
      spec.policy,
      spec.initial_params(),
      spec.optimizer.build(),
      spec.mesh,
      spec.freeze,
  )


def test_the_ledger_is_what_a_real_state_takes():
  spec = parts_of.tiny()
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  state = _state(spec)

  def real(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

  assert sizes['master weights'] == real((state.trainable, state.frozen))
  assert sizes['Adam moments'] == real(state.opt_state)
  assert sizes['compute weights'] == real(state.weights)
  assert sizes['scales and histories'] == real(state.fp8_state)
  gradients = found.step.zero_gradients(state)
  assert sizes['gradients'] == real(gradients)
  slots = found.engine.init_decode_state()
  assert sizes['KV caches and slots'] == real(slots)
  assert sizes['reference policy'] == 0


def test_what_a_rollout_gathers_is_counted_while_it_is_there():
  spec = configs.build(whole_run.config(**{'mesh.fsdp': 2}))
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  state = _state(spec)
  whole = found.engine.replicate(PolicyParams(state.weights, state.fp8_state))
  name, device = 'weights of a rollout, whole', jax.devices()[0]
  assert sizes[name] == sum(
      shard.data.nbytes
      for leaf in jax.tree.leaves(whole)
      for shard in leaf.addressable_shards
      if shard.device == device
  )
  assert sizes[name] > sizes['compute weights'] + sizes['scales and histories']
  for phase, without in zip(
      dry_run_memory.estimated_phases(spec, found, sizes),
      dry_run_memory.estimated_phases(spec, found, sizes | {name: 0}),
      strict=True,
  ):
    is_there = phase.name in ('prefill', 'decode')
    assert phase.total - without.total == (sizes[name] if is_there else 0)


@pytest.mark.parametrize('fsdp', [1, 2])
def test_an_evaluation_in_another_recipe_has_weights_of_its_own(fsdp):
  # One at a time; that of bf16 is the larger one.
  recipes = ('fp8_token', 'bf16')
  spec = configs.build(
      whole_run.config(**{'mesh.fsdp': fsdp, 'trainer.val_recipes': recipes})
  )
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  state, device = _state(spec), jax.devices()[0]
  other = OtherPrecision(spec, 'bf16', state)
  params = other.params(state)
  alive = {id(leaf): leaf for leaf in jax.tree.leaves(params)}
  alive |= {
      id(leaf): leaf for leaf in jax.tree.leaves(other.engine.replicate(params))
  }
  name = 'weights of an evaluation'
  assert sizes[name] == sum(
      shard.data.nbytes
      for leaf in alive.values()
      for shard in leaf.addressable_shards
      if shard.device == device
  )
  added = sizes[name] - sizes['weights of a rollout, whole']
  for phase, without in zip(
      dry_run_memory.estimated_phases(spec, found, sizes),
      dry_run_memory.estimated_phases(spec, found, sizes | {name: 0}),
      strict=True,
  ):
    is_there = phase.name in ('prefill', 'decode')
    assert phase.total - without.total == (added if is_there else 0)
  never = dataclasses.replace(spec.run, test_freq=0)
  for changes in ({'val_set': None}, {'run': never}):
    without = dataclasses.replace(spec, **changes)
    assert dry_run_memory.ledger(without, found)[name] == 0


def test_dots_that_a_mixed_run_chose_are_the_same_on_both_sides():
  spec = parts_of.mixed().with_high_precision(('layers_0/mlp/down',))
  rows = {row.name: row for row in dry_run_precision.table(spec)}
  down, qkv = rows['layers_*/mlp/down'], rows['layers_*/attn/qkv']
  assert down.rollout == down.training == 'bf16 x bf16 -> bf16'
  assert qkv.rollout != qkv.training == 'bf16 x bf16 -> bf16'


def test_the_rollouts_own_weights_of_a_mixed_flow_are_counted():
  spec = parts_of.mixed()
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  rows = hf_layout.layout(spec.policy.model)
  kernels = [row.shape for row in rows if row.path.endswith('/kernel')]
  # A byte per weight and a float32 scale per output; all else is bfloat16.
  in_int8 = sum(out * (width + 4) for out, width in kernels)
  others = spec.policy.model.num_params - sum(map(math.prod, kernels))
  assert sizes["the rollout's weights"] == in_int8 + 2 * others
  assert sizes['compute weights'] == 2 * spec.policy.model.num_params
  # Alive in every phase: the rollout keeps them while training runs.
  alone = sizes | {"the rollout's weights": 0}
  for with_it, without in zip(
      dry_run_memory.estimated_phases(spec, found, sizes),
      dry_run_memory.estimated_phases(spec, found, alone),
      strict=True,
  ):
    added = with_it.resident - without.resident
    assert added == sizes["the rollout's weights"]


def test_a_7b_is_added_up_without_being_made():
  spec, found = parts_of.seven_b()
  sizes = dry_run_memory.ledger(spec, found)
  count = published.QWEN2_5_7B.num_params
  assert sizes['master weights'] == 4 * count
  # 128 slots x 4096 tokens x 28 layers x keys and values of 4 x 128 in bf16.
  caches = 128 * 4096 * 28 * 2 * 4 * 128 * 2
  assert caches <= sizes['KV caches and slots'] < 1.01 * caches
  # FP8 kernels, and embedding and head in bf16.
  head = 2 * 152_064 * 3_584
  blocks = count - head
  assert sizes['compute weights'] == pytest.approx(blocks + 2 * head, rel=1e-3)
  phases = dry_run_memory.estimated_phases(spec, found, sizes)
  worst = max(phase.total for phase in phases)
  assert 80 * _GIB < worst < 141e9


def test_what_an_update_of_a_7b_needs_besides_by_hand():
  spec, found = parts_of.seven_b()
  masters = found.state.trainable
  needs = dry_run_needs.accumulate_needs(spec, masters)
  # Of 4 x 4096 tokens the inputs of 28 blocks in bf16.
  inputs = 28 * 4 * 4096 * 3_584 * 2
  # Norms and residuals 4 x 3584, queries and attention's output 28 heads each,
  # keys and values 4 twice over, three times the MLP's width; gate_up's dW.
  inside = 4 * 4096 * 2 * (4 * 3_584 + 2 * 36 * 128 + 3 * 18_944)
  # 1.6 times, as compiled with 'full'.
  inside = int(1.6 * inside)
  assert [*needs.values()] == [inputs, inside, 4 * 2 * 18_944 * 3_584]
  # Of fewer tokens the logits and the head's gradient are more.
  run = dataclasses.replace(spec.run, micro_batch_size=1)
  needs = dry_run_needs.accumulate_needs(
      dataclasses.replace(spec, run=run), masters
  )
  logits = 4 * spec.policy.logit_chunk_rows * 152_064
  head = 4 * 152_064 * 3_584
  rows = 2 * 2 * 4096 * 3_584
  assert [*needs.values()] == [inputs / 4, logits, head, rows]


@pytest.mark.parametrize(
    'recipe, model, remat, rows, gib',
    [
        ('fp8_delayed', published.QWEN2_5_0_5B, 'full', 4, 2.26),
        ('fp8_delayed', published.QWEN2_5_0_5B, 'none', 4, 14.90),
        ('fp8_delayed', published.QWEN2_5_7B, 'full', 4, 7.33),
        ('fp8_delayed', published.QWEN2_5_7B, 'full', 8, 14.51),
        ('fp8_delayed', published.QWEN2_5_7B, 'selective', 1, 6.33),
        ('fp8_delayed', published.QWEN2_5_7B, 'selective', 4, 17.08),
        ('fp8_delayed', published.QWEN2_5_14B, 'full', 4, 11.37),
        ('fp8_delayed', published.QWEN3_8B, 'full', 4, 8.07),
        ('fp8_delayed', published.QWEN3_8B, 'selective', 4, 29.52),
        ('fp8_delayed', published.LLAMA_3_1_8B, 'selective', 4, 21.19),
        ('bf16', published.QWEN2_5_0_5B, 'none', 4, 17.99),
        ('bf16', published.QWEN2_5_7B, 'selective', 4, 16.87),
    ],
)
def test_an_update_needs_what_xla_says_within_a_gib(
    recipe, model, remat, rows, gib
):
  """Compiled: benchmarks/results/update_memory_deviceless_2026-11-26.md."""
  like = parts_of.shape(model)
  policy = dataclasses.replace(
      like.policy,
      recipe=dataclasses.replace(like.policy.recipe, name=recipe),
      remat=remat,
      logit_chunk_rows=2048,
  )
  run = dataclasses.replace(like.run, micro_batch_size=rows)
  # The 14B's were compiled with masters in bfloat16.
  width = jnp.bfloat16 if model is published.QWEN2_5_14B else jnp.float32
  masters = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, width), like.param_shapes
  )
  needs = dry_run_needs.accumulate_needs(
      dataclasses.replace(like, policy=policy, rollout_policy=policy, run=run),
      masters,
  )
  assert abs(sum(needs.values()) / _GIB - gib) < 1


def test_the_largest_prefill_is_of_prompts_or_of_what_waited():
  def largest(**changes):
    spec, _ = parts_of.seven_b()
    config = dataclasses.replace(spec.engine, **changes)
    engine = Engine(spec.rollout_policy, config, spec.mesh)
    return dry_run_memory.largest_prefill(engine)

  # Sixteen of the longest prompts at a time; 16384 tokens of parked ones.
  assert largest(max_prompt_length=256) == (16, 256)
  assert largest(max_prompt_length=256, kv_cache_tokens=10_000) == (16, 1024)
  long = dict(max_response_length=31_744, kv_cache_tokens=40_000)
  assert largest(**long) == (1, 32_768)


def test_what_selective_keeps_of_a_token_by_hand():
  spec, found = parts_of.seven_b()

  def kept(**changes):
    policy = dataclasses.replace(spec.policy, remat='selective', **changes)
    needs = dry_run_needs.accumulate_needs(
        dataclasses.replace(spec, policy=policy), found.state.trainable
    )
    return needs['activations: inputs and attention of 28 blocks']

  # Two rows of 3584, queries and output of 28 heads, keys and values of 4, all
  # of 128 in bf16; a float32 per head. XLA for an H200 takes 505.2e6 more with
  # each layer, and with FP8 keys and values 488.4e6.
  a_token = 2 * (2 * 3_584 + 2 * 28 * 128 + 2 * 4 * 128) + 4 * 28
  assert kept() == 28 * 4 * 4096 * a_token
  assert kept() / 28 == pytest.approx(505.2e6, rel=1e-3)
  low = kept(kv_cache_dtype='float8_e4m3fn')
  assert low / 28 == pytest.approx(488.4e6, rel=1e-3)
  # Qwen3's norms of heads read queries and keys as they were before.
  normed = dataclasses.replace(
      spec.policy.model, family='qwen3', qkv_bias=False, qk_norm=True
  )
  assert kept(model=normed) - kept() == 28 * 4 * 4096 * 2 * (28 + 4) * 128


def test_the_flops_of_an_update_are_those_of_its_remat():
  spec, found = parts_of.seven_b()

  def flops_of(remat):
    policy = dataclasses.replace(spec.policy, remat=remat)
    changed = dataclasses.replace(spec, policy=policy)
    return dry_run_estimate.cost(changed, found, 'cpu').update_flops

  tokens = dry_run_estimate.cost(spec, found, 'cpu').tokens
  none, selective, full = map(flops_of, ('none', 'selective', 'full'))
  # gate_up again; with 'full' also qkv, o and attention, 28 layers of each.
  assert selective - none == 28 * 2 * tokens * 2 * 3_584 * 18_944
  of_attention = 28 * 2 * tokens * 3_584 * (36 + 28) * 128
  assert full - selective > of_attention
  # Prompts and answers of 3090 tokens or less: scores and sums, half of them.
  assert full - selective < of_attention + 28 * 2 * tokens * 28 * 128 * 3_100


def test_fewer_and_longer_rows_take_the_same_memory_but_for_their_shape():
  spec, found = parts_of.seven_b()
  run = dataclasses.replace(spec.run, packed_rows=1)
  longer = dataclasses.replace(spec, run=run)
  assert spec.batch_shape == (4, 4096) == found.batch.tokens.shape
  assert longer.batch_shape == (1, 16384)
  needs, masters = dry_run_needs.accumulate_needs, found.state.trainable
  assert needs(longer, masters) == needs(spec, masters)


def _largest_phase(module, **changes) -> int:
  """Returns the bytes that a config's run needs, by shapes."""
  tiny, config = whole_run.config(), module.get_config()
  config.update_from_flattened_dict(
      {
          'model.init': 'random',
          'model.shape': _LARGE[module],
          'data.tokenizer': tiny.model.path,
          'data.train_files': tiny.data.train_files,
          'data.val_files': (),
          **{f'data.{k}': tiny.data[k] for k in ('prompt_key', 'answer_key')},
          'data.template': '{prompt}',
          'trainer.train_batch_size': 8,
          'trainer.mini_batch_size': 8,
          **changes,
      }
  )
  spec = configs.build(config)
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  phases = dry_run_memory.estimated_phases(spec, found, sizes)
  return max(phase.total for phase in phases)


# As `--dry_run` does it: 95% of it.
_H200 = 0.95e9 * dry_run_estimate.DEVICES['NVIDIA H200'][0]


@pytest.mark.parametrize('module', _LARGE, ids=_LARGE.values())
def test_a_large_config_fits_its_gpu_by_shapes(module):
  # Room is left, as what is free is not in one piece.
  assert _largest_phase(module) < _H200 - 10 * _GIB


@pytest.mark.slow
def test_the_14b_config_would_not_fit_in_float32():
  changes = {
      'model.master_dtype': 'float32',
      'optim.master_rounding': 'nearest',
  }
  assert _largest_phase(qwen14b, **changes) > _H200


def test_a_pool_is_not_larger_than_its_slots_can_fill():
  config = parts_of.tiny().engine
  sizes = [
      sum(
          leaf.nbytes
          for leaf in jax.tree.leaves(
              Engine(
                  parts_of.tiny().rollout_policy,
                  dataclasses.replace(config, kv_cache_tokens=tokens),
                  parts_of.tiny().mesh,
              ).init_decode_state()
          )
      )
      for tokens in (0, 10**6)
  ]
  assert sizes[0] == sizes[1]


def test_seconds_at_the_roofline_by_hand():
  spec, found = parts_of.seven_b()
  cost = dry_run_estimate.cost(spec, found, 'NVIDIA H200')
  # 4 prompts x 4 samples; one batch of 16 slots, 3072 steps, each of which
  # reads at least the 8.7e9 bytes of the weights at 4.8e12 bytes/s.
  assert cost.sequences == 16
  assert cost.rollout_s > 3072 * 8.6e9 / 4.8e12
  assert cost.rollout_s < 2 * 3072 * 8.7e9 / 4.8e12
  unknown = dry_run_estimate.cost(spec, found, 'cpu')
  assert unknown.rollout_s is None and unknown.update_s is None


def test_a_run_that_cannot_fit_is_told_why(tmp_path, capsys):
  spec = parts_of.shape(published.QWEN2_5_7B)
  problems = dry_run_checks.dry_run(spec, tmp_path / 'run', 'NVIDIA L4')
  assert 'on each device, and NVIDIA L4, 95% of its memory' in problems[0]
  assert dry_run_checks.report(problems) == 1
  said = capsys.readouterr().out
  assert 'The run cannot work as it is' in said and 'Not compiled' in said
  assert not (tmp_path / 'run').exists()
  with pytest.raises(ValueError, match="--dry_run_device='L5'; known are"):
    dry_run_checks.dry_run(spec, tmp_path / 'run', 'L5')


def test_a_run_says_what_it_needs_and_warns_where_there_is_no_room(
    monkeypatch, caplog, capsys
):
  spec = parts_of.tiny()
  dry_run_checks.say_memory(spec, 0)
  assert not caplog.records
  said = capsys.readouterr().out
  assert re.fullmatch(
      r'memory: about [\d.]+ MiB of [\d.]+ GiB \(memory of this machine\);'
      r' --dry_run says more\n',
      said,
  )
  monkeypatch.setattr(dry_run_checks.storage, 'physical_bytes', lambda: 10**6)
  dry_run_checks.say_memory(spec, 0)
  assert 'on each device, and memory of this machine has 976.6 KiB' in (
      caplog.text
  )
  assert device_memory.REMEDIES in caplog.text


def test_on_a_cpu_the_scores_of_all_layers_are_counted():
  spec, found = parts_of.seven_b()
  needs = dry_run_needs.accumulate_needs
  (rows, length), model = spec.batch_shape, spec.policy.model
  scores = 8 * model.num_heads * rows * length**2
  masters = found.state.trainable
  of_kernel = needs(spec, masters)
  one = needs(spec, masters, attention='reference')
  assert one['attention: scores of one block'] == scores
  every = needs(spec, masters, attention='cpu')
  assert every['attention: scores of 28 blocks'] == 28 * scores
  assert sum(of_kernel.values()) < sum(one.values()) < sum(every.values())


@pytest.mark.slow
def test_the_estimate_for_a_cpu_is_near_what_is_compiled():
  spec = configs.build(config_presets.resolve(quickstart.get_config()))
  found = dry_run_memory.shapes(spec)
  sizes = dry_run_memory.ledger(spec, found)
  near = dry_run_memory.estimated_phases(spec, found, sizes, attention='cpu')
  exact, _ = dry_run_memory.compiled_phases(spec, found, sizes)
  totals = [max(phase.total for phase in phases) for phases in (near, exact)]
  assert 0.7 * totals[1] < totals[0] < 1.5 * totals[1]


def test_weights_that_a_run_refuses_are_refused_by_its_dry_run(tmp_path):
  model = tmp_path / 'model'
  shutil.copytree(whole_run.config().model.path, model)
  changes = {'model.path': str(model), 'model.init': 'checkpoint'}
  spec = configs.build(whole_run.config(**changes))
  # Not before: `build` refuses what the folder's names show.
  (model / 'pytorch_model.bin').write_bytes(b'')
  with pytest.raises(ValueError, match='pickled weights alone') as of_run:
    spec.initial_params()
  with pytest.raises(ValueError) as of_dry_run:
    dry_run_checks.dry_run(spec, tmp_path / 'run')
  assert str(of_dry_run.value) == str(of_run.value)


def test_a_checkpoint_of_which_only_the_shape_is_read_is_not_read(
    tmp_path, capsys
):
  model = tmp_path / 'model'
  shutil.copytree(whole_run.config().model.path, model)
  (model / 'model.safetensors').write_bytes(b'')
  spec = configs.build(whole_run.config(**{'model.path': str(model)}))
  dry_run_checks.dry_run(spec, tmp_path / 'run')
  assert 'none read: random weights' in capsys.readouterr().out


def test_a_run_that_fits_is_compiled_and_not_started(tmp_path, capsys):
  problems = dry_run_checks.dry_run(parts_of.tiny(), tmp_path / 'run')
  assert problems == [] and dry_run_checks.report(problems) == 0
  said = capsys.readouterr().out
  for text in (
      'would start at step 0',
      'The additional memory of a phase is what XLA reports',
      "Of accumulate's temporary memory, from shapes",
      'activations: i',
      'FP8 dots are emulated on cpu',
      'unknown on this device (cpu)',
      'checkpoints/',
      'Nothing was trained or written.',
  ):
    assert text in said
  assert not (tmp_path / 'run').exists()
