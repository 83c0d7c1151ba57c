"""Configs: what they build, and what is refused in which words."""

import json
import pathlib
import re
import runpy
import shutil

import ml_collections
import pytest

from configs import base
from jetrl_jax.config import build as configs
from jetrl_jax.config import schema as config_schema
from jetrl_jax.config import sections
from jetrl_jax.rewards import RewardSpec
from jetrl_jax.rewards.types import RewardConfig
from jetrl_jax.rl.objective import LossConfig
from jetrl_jax.rl.settings import GUARD_MAX_K3
from tests import whole_run

_CONFIGS = sorted((whole_run.ROOT / 'configs').glob('[!_]*.py'))


def _refused(message: str, **changes) -> None:
  """Building the tiny config with these changes raises this sentence."""
  with pytest.raises(ValueError, match=re.escape(message)):
    configs.build(whole_run.config(**changes))


@pytest.mark.parametrize('path', _CONFIGS, ids=lambda p: p.stem)
def test_a_config_has_the_names_of_base_and_no_others(path):
  made = runpy.run_path(str(path))['get_config']()
  config_schema.check(made, base.get_config())
  assert made.is_locked


@pytest.mark.parametrize('path', _CONFIGS, ids=lambda p: p.stem)
def test_a_config_builds_its_parts(path, monkeypatch):
  monkeypatch.chdir(whole_run.ROOT)
  made = runpy.run_path(str(path))['get_config']()
  if path.stem == 'base':
    with pytest.raises(ValueError, match='model.path is empty'):
      configs.build(made)
    return
  if not made.model.path:
    # Its checkpoint is from elsewhere; this one has no chat template.
    made.model.path = 'examples/quickstart/checkpoint'
    made.data.template = '{prompt}'
  files = [made.model.path, made.data.tokenizer]
  files += [*made.data.train_files, *made.data.val_files]
  absent = [f for f in files if f and not pathlib.Path(f).exists()]
  if absent:
    pytest.skip(f'needs {absent[0]}')
  spec = configs.build(made)
  assert spec.run.total_training_steps == made.trainer.total_training_steps
  assert spec.optimizer.lr == made.optim.lr
  assert spec.loss.policy_loss == made.algorithm.policy_loss
  assert spec.engine.num_slots == made.rollout.num_slots


@pytest.mark.parametrize(
    ('changes', 'bound'),
    [
        ({}, GUARD_MAX_K3),
        ({'flow': 'fp8_rollout'}, GUARD_MAX_K3),
        ({'flow': 'flashrl'}, None),
        # What the warning of a mixed flow advises.
        ({'flow': 'flashrl', 'precision.rollout_recipe': 'fp8_token'}, None),
        ({'flow': 'flashrl', 'guard.max_k3': 0.02}, 0.02),
        ({'guard.max_k3': 0.0}, 0.0),
    ],
)
def test_k3_is_bounded_where_nothing_corrects_it(changes, bound):
  assert configs.build(whole_run.config(**changes)).guard.max_k3 == bound


def test_every_setting_reaches_its_part():
  spec = configs.build(
      whole_run.config(
          **{
              'seed': 7,
              'model.freeze': ('embed/.*',),
              'model.remat': 'selective',
              'precision.margin': 1,
              'precision.high_precision_layers': ('.*/mlp/down',),
              'rollout.temperature': 0.5,
              'rollout.top_k': 5,
              'algorithm.kl_loss_coef': 0.25,
              'algorithm.ppo_epochs': 3,
              'algorithm.adv_estimator': 'rloo',
              'algorithm.policy_loss': 'gspo',
              'algorithm.loss_agg_mode': 'seq-mean-token-mean',
              'optim.lr_decay': 'linear',
              'trainer.mini_batch_size': 2,
              'data.val_max_samples': 2,
          }
      )
  )
  assert spec.run.seed == 7 and spec.run.temperature == 0.5
  assert spec.freeze == ('embed/.*',) and spec.policy.remat == 'selective'
  assert spec.policy.recipe.margin == 1
  assert spec.policy.recipe.high_precision_layers == ('.*/mlp/down',)
  assert spec.engine.top_k == 5 and spec.engine.stop_ids == (1,)
  assert spec.loss.kl_loss_coef == 0.25 and spec.loss.policy_loss == 'gspo'
  assert spec.algorithm.adv_estimator == 'rloo'
  # 6 steps, 3 epochs, 2 mini-batches.
  assert spec.optimizer.lr_decay_steps == 36
  assert len(spec.val_set) == 2 and len(spec.train_set) == 10


def test_what_is_none_takes_the_default_of_the_method():
  def built(**changes):
    config = base.get_config()
    config.algorithm.update(changes)
    return sections.take(LossConfig, config)

  assert built().clip_range == (0.2, 0.2)
  made = built(policy_loss='gspo', rollout_is='mis')
  assert made.clip_range == (3e-4, 4e-4) and made.rho_cap == 3.0
  made = built(rollout_is='icepop', clip_ratio_high=0.28)
  assert made.clip_range == (0.2, 0.28) and made.rho_cap == 5.0
  for name in ('token', 'sequence', 'acr'):
    assert built(rollout_is=name).rho_cap == 2.0
    assert built(rollout_is=name, rollout_is_threshold=1.5).rho_cap == 1.5
  with pytest.raises(ValueError, match="policy_loss is 'dpo'"):
    built(policy_loss='dpo')
  with pytest.raises(ValueError, match="rollout_is is 'tis'; allowed"):
    built(rollout_is='tis')


def test_a_run_with_seeded_lengths_has_no_stop_tokens():
  spec = configs.build(whole_run.config(**{'trainer.synthetic': True}))
  assert spec.engine.stop_ids == ()


@pytest.mark.parametrize(
    'shifted, message',
    [
        ('7', 'gives the data the id 114; allowed: 0 to 31, the rows'),
        ('<eos>', 'gives a stop token the id 101; allowed: 0 to 31'),
        ('<pad>', 'gives the padding token the id 100; allowed: 0 to 31'),
    ],
)
def test_an_id_in_use_that_the_embedding_lacks_is_refused(
    tmp_path, shifted, message
):
  whole_run.shift_ids(tmp_path, shifted)
  _refused(
      f'the tokenizer of {tmp_path} {message}',
      **{'data.tokenizer': str(tmp_path)},
  )


def test_an_id_that_nothing_uses_may_be_beyond_the_embedding(tmp_path):
  whole_run.shift_ids(tmp_path, '<unk>')
  spec = configs.build(whole_run.config(**{'data.tokenizer': str(tmp_path)}))
  assert spec.tokenizer.vocab_size == 103 > spec.policy.model.vocab_size


def test_paths_with_a_tilde_are_in_the_home_folder(monkeypatch):
  made = whole_run.config(
      **{
          'data.tokenizer': '~/tiny/model',
          'data.train_files': ('~/tiny/train.jsonl',),
          'reward.functions': ('~/tiny/rewards.py:digits',),
      }
  )
  monkeypatch.setenv('HOME', str(whole_run.home()))
  spec = configs.build(made)
  assert len(spec.train_set) == 10
  with spec.make_rewards():
    pass  # Its workers find the function.


def test_an_unknown_name_is_answered_with_the_nearest():
  made = base.get_config()
  with made.unlocked():
    made.rollout.top_pp = 0.5
  with pytest.raises(
      ValueError,
      match="unknown config name 'rollout.top_pp'; did you mean"
      " 'rollout.top_p'",
  ):
    config_schema.check(made, base.get_config())


def test_a_name_near_to_nothing_is_answered_with_its_section():
  known = ['mesh.data', 'mesh.fsdp', 'optim.lr']
  assert config_schema.unknown_name('mesh.zzzzzzzzzzzzzzzz', known) == (
      "unknown config name 'mesh.zzzzzzzzzzzzzzzz'; mesh.* are data, fsdp"
  )


def test_a_config_that_does_not_start_from_base_is_told_what_it_lacks():
  made = ml_collections.ConfigDict({'seed': 1})
  with pytest.raises(ValueError, match='the config lacks .* start from'):
    config_schema.check(made, base.get_config())


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'model.init': 'zero'}, "model.init is 'zero'; allowed: checkpoint"),
        (
            {'model.master_dtype': 'float16'},
            "model.master_dtype is 'float16'; allowed: float32, bfloat16",
        ),
        (
            {'model.shape': 'qwen2.5-7b'},
            'model.shape is for model.init=random without model.path',
        ),
        (
            {'model.shape': 'gpt-2', 'model.path': ''},
            "model.shape is 'gpt-2'; allowed: ['llama-3.1-70b', 'llama-",
        ),
        ({'model.path': ''}, 'model.path is empty; give a Hugging Face'),
        (
            {'model.path': '', 'model.shape': 'qwen2.5-0.5b'},
            'data.tokenizer is empty and there is no checkpoint; name a folder',
        ),
        ({'mesh.tensor': 4}, 'mesh.tensor is 4; the model has 2 query heads'),
        ({'precision.recipe': 'fp4'}, "'fp4'"),
        ({'precision.grad_format': 'e3m4'}, "'e3m4'"),
        ({'data.train_files': ()}, 'files is empty; name at least one file'),
        (
            {'data.train_files': ('nowhere.jsonl',)},
            'nowhere.jsonl: there is no such file in /',
        ),
        ({'data.prompt_key': 'quest'}, "Did you mean 'question'?"),
        (
            {'data.max_prompt_length': 2},
            'none of 10 prompts has at most 2 tokens',
        ),
        (
            {'data.max_prompt_length': 120},
            'data.max_prompt_length 120 + rollout.max_response_length 12 is'
            ' 132; the model has 128 positions: shorten one of the two',
        ),
        (
            {'reward.weights': (1.0, 2.0)},
            'reward.functions, reward.weights and reward.kwargs have [1, 2, 1]'
            ' entries; they need the same number, at least one',
        ),
        (
            {
                'reward.functions': (),
                'reward.weights': (),
                'reward.kwargs': (),
            },
            'have [0, 0, 0] entries',
        ),
        ({'reward.kwargs': ('{x',)}, 'is no JSON object'),
        ({'reward.kwargs': ('3',)}, "is '3'; allowed: a JSON object, such as"),
        ({'reward.kwargs': ('null',)}, "is 'null'; allowed: a JSON object"),
        ({'rollout.kv_cache_tokens': 1}, 'Raise rollout.kv_cache_tokens to'),
        (
            {'guard.enable': True, 'algorithm.kl_loss_coef': 0.1},
            'algorithm.kl_loss_coef is 0.1 and algorithm.kl_reward_coef is 0.0',
        ),
        (
            {'trainer.val_recipes': ('fp8_block',)},
            'trainer.val_recipes: recipe fp8_block quantises in blocks',
        ),
        (
            {'precision.recipe': 'fp8'},
            "precision.recipe is 'fp8'; allowed: fp8_delayed, fp8_token,",
        ),
        (
            {'precision.rollout_recipe': 'fp8'},
            "precision.rollout_recipe: recipe is 'fp8'; allowed: fp8_delayed,",
        ),
        ({'rollout.num_slots': 0}, 'rollout.num_slots is 0; it must be >= 1'),
        ({'rollout.top_p': 1.5}, 'top_p is 1.5'),
        (
            {'rollout.num_generations': 1},
            'num_generations is 1; a group advantage needs at least 2',
        ),
        (
            {'rollout.temperature': 0.0},
            'temperature is 0.0; the rollout samples, so it must be > 0',
        ),
        (
            {'algorithm.loss_agg_mode': 'mean'},
            "loss_agg_mode is 'mean'; allowed: ['token-mean',",
        ),
        (
            {'algorithm.old_logprobs': 'guess'},
            "old_logprobs is 'guess'; allowed: rollout, recompute",
        ),
        ({'algorithm.ppo_epochs': 0}, 'ppo_epochs is 0; it must be >= 1'),
        (
            {'algorithm.clip_ratio_low': 1.0},
            'clip_ratio_low is 1.0; allowed: [0, 1)',
        ),
        (
            {'algorithm.clip_ratio_high': -0.1},
            'clip_ratio_high is -0.1; allowed: >= 0',
        ),
        ({'algorithm.clip_ratio_c': 1.0}, 'clip_ratio_c is 1.0; allowed: > 1'),
        (
            {'algorithm.kl_loss_coef': -1.0},
            'kl_loss_coef is -1.0; allowed: >= 0',
        ),
        ({'algorithm.entropy_coeff': -1.0}, 'entropy_coeff is -1.0'),
        ({'algorithm.kl_loss_type': 'k9'}, "'k9'"),
        ({'algorithm.rollout_is': 'word'}, "'word'"),
        ({'algorithm.adv_estimator': 'gae'}, "'gae'; allowed: grpo, dr_grpo"),
        (
            {'algorithm.policy_loss': 'gspo'},
            "algorithm.policy_loss is 'gspo' and algorithm.loss_agg_mode is"
            " 'token-mean': GSPO averages",
        ),
        (
            {'algorithm.rollout_rs': 'geometric', 'rollout.top_p': 0.9},
            "algorithm.rollout_rs 'geometric' and the sampler is cut"
            ' (rollout.top_p=0.9)',
        ),
        (
            {'algorithm.filter_groups.max_num_gen_batches': -1},
            'max_num_gen_batches is -1; it must be >= 0',
        ),
        (
            {'reward.overlong_buffer.enable': True},
            'overlong_buffer.len is 4096; the penalty grows over the last'
            ' tokens before rollout.max_response_length=12',
        ),
        (
            {
                'reward.overlong_buffer.enable': True,
                'reward.overlong_buffer.len': 4,
                'reward.overlong_buffer.penalty_factor': 0.0,
            },
            'overlong_buffer.penalty_factor is 0.0; it must be > 0',
        ),
        ({'optim.lr': 0.0}, 'optim.lr is 0.0; it must be > 0'),
        ({'optim.lr': 1e10}, 'optim.lr is 1e+10; allowed: above 0, up to 1.'),
        ({'optim.betas': (0.9, 1.0)}, 'betas are (0.9, 1.0); allowed: two in'),
        ({'optim.moments': 'int8'}, "moments is 'int8'; allowed: fp8, float32"),
        ({'optim.lr_decay': 'exp'}, "lr_decay is 'exp'; allowed: constant"),
        (
            {'optim.master_rounding': 'stochastic'},
            "optim.master_rounding is 'stochastic' and model.master_dtype"
            ' float32, which is never rounded; set',
        ),
        (
            {'optim.lr_decay': 'cosine', 'optim.lr_warmup_steps': 6},
            "the run has 6 optimiser steps, and optim.lr_decay is 'cosine',"
            ' which needs more than optim.lr_warmup_steps (6): lower it',
        ),
        (
            {'trainer.mini_batch_size': 3},
            'trainer.train_batch_size (4 prompts) is not a multiple of'
            ' trainer.mini_batch_size (3 prompts)',
        ),
        (
            {'trainer.packed_rows': 3},
            'trainer.packed_rows is 3; allowed: 0 for trainer.micro_batch_size,'
            ' or a divisor of trainer.micro_batch_size (16), such as 1',
        ),
        ({'trainer.packed_rows': -1}, 'packed_rows is -1; allowed: 0 for'),
        ({'trainer.packed_rows': 32}, 'packed_rows is 32; allowed: 0 for'),
        (
            {'trainer.measure_mismatch': 'none'},
            "measure_mismatch is 'none'; allowed: 'all', or 'first'",
        ),
        (
            {'trainer.synthetic_lengths': 'normal'},
            "synthetic_lengths is 'normal'; allowed: uniform, long_tail",
        ),
        (
            {'trainer.train_batch_size': 11, 'trainer.mini_batch_size': 11},
            'train_batch_size is 11; the training data has 10 prompts; lower',
        ),
        ({'trainer.val_temperature': -1.0}, 'val_temperature is -1.0'),
        ({'trainer.save_freq': -1}, 'save_freq is -1; it must be >= 0'),
        ({'trainer.keep_latest': 0}, 'keep_latest is 0; it must be >= 1'),
        (
            {'trainer.calibration_tokens': 0},
            'calibration_tokens is 0; it must be >= 1',
        ),
        ({'seed': -1}, 'seed is -1; it must be >= 0'),
        (
            {'model.freeze': ('lm_head/.*',)},
            "['lm_head/.*'] match no parameter",
        ),
        ({'model.freeze': ('.*',)}, 'matches every parameter'),
        (
            {'precision.high_precision_layers': ('layer_0/.*',)},
            "'layer_0/.*' matches no dot; they are ['layers_0/attn/qkv',",
        ),
        (
            {'trainer.val_recipes': ('fp8_block',)},
            'recipe fp8_block quantises in blocks of 128 x 128, but',
        ),
        (
            {'precision.quantize_lm_head': True},
            'quantize_lm_head is True, but the model has tied embeddings',
        ),
        (
            {'model.attention_tile': 0},
            'attention_tile is 0; it must be a multiple of 16',
        ),
        (
            {'model.attention_tile': 24},
            'attention_tile is 24; it must be a multiple of 16',
        ),
        ({'model.logit_chunk_rows': 0}, 'logit_chunk_rows is 0'),
        (
            {'model.remat': 'True'},
            "remat is 'True'; allowed: none, selective, full",
        ),
        ({'reward.functions': ('mathh',)}, "'mathh'"),
        ({'data.template': 'no place'}, '{prompt}'),
        ({'mesh.data': 1000}, 'mesh data=1000 x fsdp=1 needs 1000 devices'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, dict) else '',
)
def test_a_setting_that_cannot_work_is_refused_before_any_compute(
    changes, message
):
  _refused(message, **changes)


def test_a_batch_that_lacks_prompts_as_they_are_too_long_says_so(tmp_path):
  rows = [{'question': '1+1=', 'answer': '2'}] * 3
  rows += [{'question': 20 * '1+' + '1=', 'answer': '21'}] * 5
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  _refused(
      'has 3 prompts (5 more are left out, as longer than'
      ' data.max_prompt_length; raise it to keep them); lower it',
      **{'data.train_files': (str(tmp_path / 'rows.jsonl'),)},
  )


def test_a_missing_model_folder_is_named():
  _refused('nowhere', **{'model.path': str(whole_run.home() / 'nowhere')})


def test_a_workdir_in_the_place_of_a_checkpoint_is_led_to_its_export(tmp_path):
  (tmp_path / 'checkpoints').mkdir()
  (tmp_path / 'metrics.jsonl').touch()
  (tmp_path / 'config.json').write_text('{"seed": 0}')
  _refused(
      f'model.path: {tmp_path} is the workdir of a run; its policy is'
      f' {tmp_path}/export, or what python -m jetrl_jax.export writes',
      **{'model.path': str(tmp_path)},
  )


def test_an_adapter_beside_the_model_is_refused_before_a_workdir_is_begun(
    tmp_path,
):
  model = shutil.copytree(whole_run.home() / 'tiny/model', tmp_path / 'model')
  for name in ('model.safetensors', 'adapter_config.json'):
    (model / name).touch()
  changes = {'model.path': str(model), 'model.init': 'checkpoint'}
  _refused(
      f'model.path: {model} holds an adapter (adapter_config.json) beside the',
      **changes,
  )
  # Random weights read no such file.
  configs.build(whole_run.config(**changes | {'model.init': 'random'}))


def test_a_tokenizer_that_the_last_export_cannot_copy_is_refused(tmp_path):
  own = shutil.copytree(whole_run.home() / 'tiny/model', tmp_path / 'own')
  (own / 'tokenizer.json').rename(tmp_path / 'tokenizer.json')
  (own / 'tokenizer.json').symlink_to(tmp_path / 'tokenizer.json')
  _refused(
      'own/tokenizer.json: the link leads outside of the folder; put the file',
      **{'data.tokenizer': str(own)},
  )


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path, caplog):
  made = whole_run.config()
  configs.build(made)
  assert not caplog.text
  mixed = tmp_path / 'mixed.jsonl'
  (train,), (heldout,) = made.data.train_files, made.data.val_files
  lines = [pathlib.Path(f).read_text().splitlines() for f in (train, heldout)]
  mixed.write_text('\n'.join(lines[0][4:6] + lines[1][:6]))
  configs.build(whole_run.config(**{'data.val_files': (str(mixed),)}))
  assert (
      '2 of 8 held-out prompts (25.0%) are among the training prompts, the'
      ' first is prompt 0 of mixed' in caplog.text
  )
  configs.build(whole_run.config(**{'data.val_files': (train,)}))
  assert '10 of 10 held-out prompts (100.0%)' in caplog.text


def test_a_reference_that_gsm8k_cannot_compare_is_refused(tmp_path):
  path = tmp_path / 'd.jsonl'
  path.write_text('{"question": "1+1=", "answer": "two"}\n')
  change = {'data.val_files': (str(path),), 'reward.functions': ('gsm8k',)}
  _refused("of a prompt of 'd' is 'two'; use 'math' for it.", **change)
  change['reward.functions'] = ('math',)
  configs.build(whole_run.config(**change))


def test_without_weights_each_reward_weighs_1():
  found = configs.reward_specs(RewardConfig(functions=('math', 'gsm8k')))
  assert found == [RewardSpec(function='math'), RewardSpec(function='gsm8k')]


def test_a_reward_that_compares_wants_references(tmp_path):
  path = tmp_path / 'd.jsonl'
  path.write_text('{"question": "1+1="}\n')
  change = {'data.train_files': (str(path),), 'data.answer_key': ''}
  change |= {'trainer.train_batch_size': 1, 'trainer.mini_batch_size': 1}
  change['reward.functions'] = ('math',)
  _refused("reward 'math' compares with a reference answer, and", **change)
  change['reward.functions'] = ('format',)
  change['reward.kwargs'] = ('{"pattern": "2"}',)
  spec = configs.build(whole_run.config(**change))
  assert [prompt.answer for prompt in spec.train_set] == ['']


def test_a_column_that_held_out_rows_lack_ends_the_start_and_no_later_step(
    tmp_path,
):
  reward = tmp_path / 'own.py'
  reward.write_text(
      'def hard(completions, difficulty, **columns):\n  return [0.0]\n'
  )
  rows = {'train': {'difficulty': 3}, 'val': {'level': 3}}
  changes = {'reward.functions': (f'{reward}:hard',)}
  for name, more in rows.items():
    path = tmp_path / f'{name}.jsonl'
    row = {'question': '1+1=', 'answer': '2'} | more
    path.write_text(json.dumps(row) + '\n')
    changes[f'data.{name}_files'] = (str(path),)
  changes |= {'trainer.train_batch_size': 1, 'trainer.mini_batch_size': 1}
  spec = configs.build(whole_run.config(**changes))
  # The message of a step that meets such a row, before there is one.
  with pytest.raises(ValueError, match=r"\['difficulty'\], and a row of 'val'"):
    spec.make_rewards()
  # Seeded scores call no reward.
  changes['trainer.synthetic'] = True
  with configs.build(whole_run.config(**changes)).make_rewards():
    pass
