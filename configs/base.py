"""Every default of a run. Other configs start from here and set differences.

Names are those of verl and TRL where these have one. A misspelt name is
refused, in a config file and on the command line
(`--config.optim.lr=1e-6`).
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  """Returns the defaults, locked against unknown names."""
  config = ml_collections.ConfigDict()
  config.seed = 0
  # Folder for compiled programs: a second start with the same config compiles
  # nothing and has the same bits. Several runs may share one. What a kill or a
  # full disk tore there is compiled at each start, with a warning, until the
  # folder is deleted. '' is off.
  config.compile_cache_dir = ''
  # A published flow by name, which sets the precision of both sides and the
  # correction: 'jetrl', 'bf16', 'fp8_rollout', 'flashrl', 'qurl',
  # 'jetrl_inexact' or 'bf16_inexact' (docs/flows.md); '' leaves them to the
  # settings below.
  config.flow = ''

  config.model = ml_collections.ConfigDict()
  # A Hugging Face checkpoint: a folder, or a repo id when online.
  config.model.path = ''
  # 'checkpoint', or 'random' for benchmarks (config.json or `shape` suffices).
  config.model.init = 'checkpoint'
  # For init='random' without config.json: 'qwen2.5-0.5b', 'qwen2.5-7b',
  # 'qwen2.5-14b', 'qwen3-8b' or 'llama-3.1-8b'.
  config.model.shape = ''
  # dtype of the master weights.
  config.model.master_dtype = 'float32'
  # Place each float32 master of an 8-bit dot at random within the rounding cell
  # of the 16-bit checkpoint that it comes from. Without it the first update
  # moves the policy about fifteen times too far (docs/numerics.md). An export
  # without training gives the checkpoint's bytes back. 'bf16' never does it.
  config.model.spread_masters = True
  # Regular expressions (full match) of masters that do not train, for example
  # ('embed/.*',).
  config.model.freeze = ()
  # Attention tile in tokens, part of the arithmetic: a multiple of 16, on a GPU
  # a power of two.
  config.model.attention_tile = 64
  # Most rows whose [rows, vocabulary] logits are in memory at once. With fewer
  # the gradient of lm_head is read and written more often.
  config.model.logit_chunk_rows = 1024
  # What of a block the backward pass computes again: 'none', 'selective' (its
  # norms and MLP; what attention made stays in memory) or 'full' (all of it).
  config.model.remat = 'full'

  config.precision = ml_collections.ConfigDict()
  # 'fp8_delayed', 'fp8_token', 'fp8_block', 'int8': one 8-bit flow, scales per
  # tensor, per row and channel, per 128 x 128 block, per row and channel;
  # 'bf16': the same code with another dot. For experiments, rounded to a grid
  # and multiplied in compute_dtype: 'fake_e4m3', 'fake_e5m2', 'fake_int6',
  # 'fake_int5', 'fake_int4', 'fake_int3'.
  config.precision.recipe = 'fp8_delayed'
  # Recipe of a rollout that is not training's (a mixed flow, docs/flows.md);
  # '' is the same: one unified flow.
  config.precision.rollout_recipe = ''
  # Compile with the options that equality to the bit rests on. False leaves
  # them to XLA (skipped roundings, kernels chosen by timing), as other systems
  # do, and claims nothing; for comparisons.
  config.precision.exact = True
  config.precision.compute_dtype = 'bfloat16'
  # Output gradients in the backward dots: 'e4m3' or 'e5m2'.
  config.precision.grad_format = 'e4m3'
  # Rollouts (inputs) or optimiser steps (kernels, gradients) remembered, by
  # 'fp8_delayed'.
  config.precision.amax_history_length = 16
  # Head-room of the scales, in bits.
  config.precision.margin = 0
  config.precision.power_of_two_scales = True
  # Regular expressions of dots kept in compute_dtype on both sides, besides
  # embedding, norms and attention: ('layers_0/.*', '.*/mlp/down').
  config.precision.high_precision_layers = ()
  # Whether lm_head is quantised like the dots of the blocks, on both sides and
  # in its gradients (docs/tuning.md). Not for tied embeddings.
  config.precision.quantize_lm_head = False
  # Dots whose input or kernel keeps less than this many dB of signal over
  # quantisation noise at the cold start join those; 0 chooses none. In a mixed
  # flow a side that quantises is enough to choose, and both sides keep.
  config.precision.min_sqnr_db = 0.0
  # Kernels behind norms (qkv, gate_up) are divided by this once, the norms'
  # gains multiplied by it; undone on export. 1 is off; QuRL uses 1.5.
  config.precision.invariant_scale = 1.0

  # What keys and values are rounded to, in rollout and training: 'compute' or
  # 'float8_e4m3fn', which halves the KV cache.
  config.precision.kv_cache_dtype = 'compute'

  config.data = ml_collections.ConfigDict()
  # JSONL, JSON, Parquet, or 'hf:<repo>[:<config>]:<split>'.
  config.data.train_files = ()
  # Held-out prompts, in the same formats; () is no evaluation.
  config.data.val_files = ()
  config.data.prompt_key = 'question'
  config.data.answer_key = 'answer'
  # Column with the data set's name; by default the file's name.
  config.data.source_key = ''
  # Folder with tokenizer.json; by default model.path.
  config.data.tokenizer = ''
  # 'chat' (the tokenizer's own template) or a text with '{prompt}'.
  config.data.template = 'chat'
  # For 'chat': appended to the last message.
  config.data.instruction = ''
  config.data.system = ''
  config.data.max_prompt_length = 512
  # Held-out prompts used; 0 is all.
  config.data.val_max_samples = 0

  config.reward = ml_collections.ConfigDict()
  # Terms of the score: 'math', 'gsm8k', 'last_number', 'format', or
  # 'package.module.function' / 'file.py:function' with verl's or TRL's
  # signature.
  config.reward.functions = ('math',)
  # Factor of each term in the sum that is the score.
  config.reward.weights = (1.0,)
  # Keyword arguments by term, as JSON: ('', '{"pattern": "..."}').
  config.reward.kwargs = ('',)
  config.reward.num_workers = 2
  # Wall seconds per answer; the worker is killed past it.
  config.reward.timeout_s = 5.0
  config.reward.memory_limit_mb = 2048

  # Overlong shaping (DAPO): added to the score of long answers, 0 up to
  # max_response_length - len, then falling to -penalty_factor at the limit.
  config.reward.overlong_buffer = ml_collections.ConfigDict()
  config.reward.overlong_buffer.enable = False
  # Tokens over which the penalty grows.
  config.reward.overlong_buffer.len = 4096
  config.reward.overlong_buffer.penalty_factor = 1.0

  # Turns inside a rollout, see docs/environments.md. The score is then the
  # environment's own; of reward.* only overlong_buffer is read.
  config.environment = ml_collections.ConfigDict()
  # 'package.module:Class'; '' is one turn, scored by reward.*.
  config.environment.name = ''
  # Keyword arguments of the class, as JSON.
  config.environment.kwargs = ''
  # Turns of the policy after which an episode is over.
  config.environment.max_turns = 8
  # Wall seconds per call; past it the episode counts 0.
  config.environment.timeout_s = 10.0
  # What becomes of an observation; a chat template's turn marks go here.
  config.environment.observation_template = '{observation}'

  config.rollout = ml_collections.ConfigDict()
  config.rollout.num_generations = 8
  config.rollout.temperature = 1.0
  config.rollout.top_p = 1.0
  config.rollout.top_k = 0
  config.rollout.min_p = 0.0
  config.rollout.max_response_length = 1024
  # Sequences decoded at once; rounded up to a multiple of 16 per device.
  config.rollout.num_slots = 128
  # Tokens that the KV cache holds, all devices together; 0 for every slot at
  # full length. With fewer, sequences that started last wait for room and are
  # computed again, to the same bits.
  config.rollout.kv_cache_tokens = 0
  # Most decode steps per host visit; a multiple of 8 is faster on a GPU.
  config.rollout.decode_block = 64

  config.algorithm = ml_collections.ConfigDict()
  # 'grpo', 'dr_grpo', 'rloo' or 'reinforce_plus_plus_baseline'; see
  # docs/algorithms.md for this and all names below.
  config.algorithm.adv_estimator = 'grpo'
  # For 'grpo': divide by the group's sample standard deviation.
  config.algorithm.norm_adv_by_std = True
  # 'ppo' (token ratios, clipped), 'gspo' (sequence ratios, clipped; wants
  # loss_agg_mode 'seq-mean-token-mean') or 'cispo' (capped weights).
  config.algorithm.policy_loss = 'ppo'
  # Distances of the clip range from 1; None is 0.2 and 0.2 for 'ppo' (DAPO:
  # 0.2 and 0.28), 3e-4 and 4e-4 for 'gspo'.
  config.algorithm.clip_ratio_low = config_dict.placeholder(float)
  config.algorithm.clip_ratio_high = config_dict.placeholder(float)
  # Dual clip of 'ppo': most loss of a token with a negative advantage, in
  # units of that advantage.
  config.algorithm.clip_ratio_c = 3.0
  # Largest weight of 'cispo' (the bound itself, as TRL's epsilon_high).
  config.algorithm.cispo_cap = 5.0
  # 'token-mean', 'seq-mean-token-mean', 'seq-mean-token-sum',
  # 'seq-mean-token-sum-norm'; denominators span the mini-batch.
  config.algorithm.loss_agg_mode = 'token-mean'
  # For '...-norm'; None is max_response_length.
  config.algorithm.loss_scale_factor = config_dict.placeholder(float)
  # Weight of the KL loss; if this and kl_reward_coef are 0, no reference copy
  # is kept.
  config.algorithm.kl_loss_coef = 0.0
  # 'k2' or 'k3' (also 'low_var_kl'); k1 is kl_reward_coef's.
  config.algorithm.kl_loss_type = 'k3'
  # The reward of an answer less this times its KL to the reference: k1, summed
  # over the answer's tokens, before advantages are computed.
  config.algorithm.kl_reward_coef = 0.0
  config.algorithm.entropy_coeff = 0.0
  config.algorithm.mask_truncated_completions = False
  config.algorithm.ppo_epochs = 1
  # 'rollout': its log-probs are the training forward's own bits in a unified
  # flow. 'recompute': by the training forward.
  config.algorithm.old_logprobs = 'rollout'
  # Importance weights rho = pi_old / mu against the sampled distribution:
  # 'none', 'token' (TIS), 'sequence' (TIS of whole answers), 'icepop', 'mis'
  # (whole answers, dropped above the cap) or 'acr' (TIS and QuRL's clip range).
  config.algorithm.rollout_is = 'none'
  # Cap C of rho; None is 2 for 'token', 'sequence' and 'acr', 3 for 'mis', 5
  # for 'icepop'.
  config.algorithm.rollout_is_threshold = config_dict.placeholder(float)
  # Lower end of the band that 'icepop' keeps.
  config.algorithm.rollout_is_threshold_low = 0.5
  # Rejection of whole answers, beside any rollout_is: 'none' or 'geometric'
  # (the geometric mean of rho must lie in the band below).
  config.algorithm.rollout_rs = 'none'
  config.algorithm.rollout_rs_threshold_low = 0.999
  config.algorithm.rollout_rs_threshold_high = 1.001

  # Dynamic sampling (DAPO): draw prompts until train_batch_size groups have
  # answers of different accuracy; the others teach nothing.
  config.algorithm.filter_groups = ml_collections.ConfigDict()
  config.algorithm.filter_groups.enable = False
  # Generation batches (of train_batch_size prompts) after which a step that is
  # not full ends the run; 0 goes on until every prompt was met.
  config.algorithm.filter_groups.max_num_gen_batches = 10

  config.optim = ml_collections.ConfigDict()
  config.optim.lr = 1e-6
  config.optim.betas = (0.9, 0.999)
  config.optim.eps = 1e-8
  config.optim.weight_decay = 0.01
  config.optim.grad_clip = 1.0
  config.optim.lr_warmup_steps = 0
  # 'constant', 'cosine' or 'linear', over all optimiser steps of the run.
  config.optim.lr_decay = 'constant'
  # Adam's moments: 'fp8' or 'float32'.
  config.optim.moments = 'fp8'
  # How bfloat16 masters (model.master_dtype) are rounded: 'nearest', which
  # loses small updates, or 'stochastic', which keeps their mean.
  config.optim.master_rounding = 'nearest'

  config.trainer = ml_collections.ConfigDict()
  # Prompts per step.
  config.trainer.train_batch_size = 32
  config.trainer.mini_batch_size = 32
  config.trainer.micro_batch_size = 8
  # Rows of a micro-batch; 0 is micro_batch_size. The tokens of micro_batch_size
  # sequences of full length in fewer, longer rows pack closer. On a CPU
  # attention costs more in longer rows. Rows are made up to a multiple of the
  # devices, each as long: fewer rows than devices give more tokens.
  config.trainer.packed_rows = 0
  config.trainer.total_training_steps = 100
  # Steps between evaluations (0 never) and checkpoints (0 only at the end).
  config.trainer.test_freq = 10
  config.trainer.val_num_generations = 1
  config.trainer.val_temperature = 0.0
  # Recipes in which held-out accuracy is measured besides the rollout's own,
  # such as ('bf16',); a copy of the compute weights while it is.
  config.trainer.val_recipes = ()
  config.trainer.save_freq = 20
  config.trainer.keep_latest = 2
  config.trainer.keep_best = 1
  config.trainer.save_rollouts = True
  # Non-finite updates in a row after which the run stops.
  config.trainer.max_skipped_updates = 5
  # The cold start's calibration: prompts, and tokens of its short rollout.
  config.trainer.calibration_prompts = 16
  config.trainer.calibration_tokens = 64
  # Tokens whose rollout log-probs are compared with the training forward's:
  # 'all' takes a forward pass over the later mini-batches, 'first' is the
  # step's first mini-batch alone, whose update computes them anyway.
  config.trainer.measure_mismatch = 'all'
  # Seeded scores and lengths, for speed runs with random weights.
  config.trainer.synthetic = False
  # Of the lengths: 'uniform' between half of the longest and the longest, or
  # 'long_tail', an eighth of the longest on average and a few of all lengths.
  config.trainer.synthetic_lengths = 'uniform'

  # What to do when numbers leave their bounds (docs/guard.md).
  config.guard = ml_collections.ConfigDict()
  config.guard.enable = False
  # Bounds. Share of tokens whose log-prob differs in any bit between rollout
  # and training: 0 holds a unified flow to its promise, 1 is no bound.
  config.guard.max_mismatch_token_frac = 1.0
  # Largest difference of two such log-probs, in nats; None is no bound.
  config.guard.max_logprob_diff = config_dict.placeholder(float)
  # Estimate (k3) of the KL divergence between the sampled policy and the
  # trained one, in nats; exactly 0 in a unified flow without top-p or top-k.
  config.guard.max_k3 = 0.01
  # Largest share of the elements of any operand of any 8-bit dot that saturate;
  # 1 is no bound.
  config.guard.max_saturated_frac = 0.01
  # Largest share of them that are flushed to zero; 1 is no bound.
  config.guard.max_flushed_frac = 0.5
  # Steps in a row over a bound before an action; those before only warn.
  config.guard.patience = 2
  # Tried in this order, where they can help; () only warns.
  config.guard.actions = ('recalibrate', 'high_precision', 'rollback')
  # Rollbacks of one run; where another would be due, the run ends.
  config.guard.max_rollbacks = 3

  config.logger = ml_collections.ConfigDict()
  # Weights & Biases, besides metrics.jsonl and TensorBoard; '' is off. Needs
  # the extra `wandb`; WANDB_MODE=offline works.
  config.logger.wandb_project = ''
  # Team or user; '' is the account's own.
  config.logger.wandb_entity = ''

  config.mesh = ml_collections.ConfigDict()
  config.mesh.data = 1
  config.mesh.fsdp = 1
  # Dots split over devices; only 1 is supported: a split contraction adds in
  # another order.
  config.mesh.tensor = 1

  # Supervised warm start (python -m jetrl_jax.sft); unread by main.
  config.sft = ml_collections.ConfigDict()
  # Optimiser steps; the learning rate decays over them.
  config.sft.total_training_steps = 1000
  # Sequences per optimiser step.
  config.sft.batch_size = 64
  # Folder of the exported checkpoint.
  config.sft.output = ''
  return config.lock()
