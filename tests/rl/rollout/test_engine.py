"""Tests of the engine: single steps, settings, slots that go on."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jetrl_jax.core import rng, sharding
from jetrl_jax.core.compile_ahead import CompileAhead
from jetrl_jax.data import Prompt
from jetrl_jax.models.policy import PolicyParams
from jetrl_jax.rl.rollout import buckets
from jetrl_jax.rl.rollout.engine import Engine
from tests import compilations
from tests.rl import tiny_run

TOKENS = np.asarray([7, 30, 12, 9, 55], np.int32)


def _params(run) -> PolicyParams:
  return PolicyParams(run.start.weights, run.start.fp8_state)


@functools.cache
def _expected(samples=6):
  """The same six samples by `rollout`: prompt id 0, sample = slot."""
  prompt = Prompt(id=0, tokens=TOKENS, text='', answer='', source='', extra={})
  return tiny_run.fp8_run().rollout(
      prompts=[prompt],
      num_generations=samples,
      temperature=1.0,
      base_key=rng.key(0, rng.ROLLOUT, 0),
  )


def _prefix(engine, params):
  return engine.prefill_batch(params, [TOKENS])


class _Client:
  """An orchestrator that starts, steps and frees slots by itself."""

  def __init__(self, run):
    self.engine, self.params = run.engine, _params(run)
    self.prefix = _prefix(self.engine, self.params)
    self.state = self.engine.init_decode_state()
    self.tokens = {s: [] for s in range(self.engine.num_slots)}
    self.logprobs = {s: [] for s in self.tokens}

  def generate(self, steps):
    for _ in range(steps):
      self.state, result = self.engine.generate(self.params, self.state)
      for slot, tokens in self.tokens.items():
        token, valid, length = map(int, result[slot])
        if valid:
          tokens.append(token)
          logprob = np.asarray(self.state.logprobs)[slot, length - 1]
          self.logprobs[slot].append(logprob)
          assert length == len(tokens)
          assert self.state.log_mu[slot, length - 1] == logprob


def test_single_steps_give_the_tokens_of_the_rollout():
  client = _Client(tiny_run.fp8_run())
  client.state = client.engine.bulk_insert(
      client.prefix, client.state, [0, 1, 2]
  )
  client.generate(2)
  # One later, by itself, two steps behind the others.
  client.state = client.engine.bulk_insert(client.prefix, client.state, [5])
  client.generate(12)
  for slot in (0, 1, 2, 5):
    assert client.tokens[slot] == _expected()[slot].tokens.tolist()
    assert np.array_equal(client.logprobs[slot], _expected()[slot].logprobs)
  assert not client.tokens[3] and not client.tokens[4]


def test_a_freed_slot_stops_and_leaves_the_others_alone():
  client = _Client(tiny_run.fp8_run())
  client.state = client.engine.bulk_insert(client.prefix, client.state, [0, 1])
  client.generate(2)
  client.state = client.engine.free_resource(0, client.state)
  client.generate(12)
  assert client.tokens[0] == _expected()[0].tokens[:2].tolist()
  assert client.tokens[1] == _expected()[1].tokens.tolist()
  assert len(_expected()[0].tokens) > 2


def test_a_freed_slot_gives_its_pages_to_the_sequence_that_waits():
  # One page: slot 1 waits for slot 0.
  engine = tiny_run.small_engine(32)
  client = _Client(dataclasses.replace(tiny_run.fp8_run(), engine=engine))
  client.state = engine.bulk_insert(client.prefix, client.state, [0])
  client.state = engine.bulk_insert(client.prefix, client.state, [1])
  client.generate(2)
  assert not client.tokens[1]
  client.state = engine.free_resource(0, client.state)
  client.generate(12)
  assert client.tokens[0] == _expected()[0].tokens[:2].tolist()
  assert client.tokens[1] == _expected()[1].tokens.tolist()


def test_a_new_state_has_all_pages_whatever_an_abandoned_one_held():
  engine = tiny_run.small_engine(32)
  client = _Client(dataclasses.replace(tiny_run.fp8_run(), engine=engine))
  client.state = engine.bulk_insert(client.prefix, client.state, [0])
  client.state = engine.bulk_insert(client.prefix, client.state, [1])
  assert engine.pages.times_preempted == 1
  # As after a rollout that was stopped.
  client.state = engine.init_decode_state()
  assert engine.pages.times_preempted == 0
  client.state = engine.bulk_insert(client.prefix, client.state, [2])
  client.generate(12)
  assert client.tokens[2] == _expected()[2].tokens.tolist()


def test_a_slot_used_again_starts_afresh():
  client = _Client(tiny_run.fp8_run())
  for _ in range(2):
    client.state = client.engine.bulk_insert(client.prefix, client.state, [1])
    client.generate(12)
    assert client.tokens[1] == _expected()[1].tokens.tolist()
    client.tokens[1] = []


def test_an_update_of_the_parameters_is_an_assignment():
  run = tiny_run.fp8_run()
  engine = Engine(run.policy, tiny_run.engine_config(), run.mesh)
  with pytest.raises(ValueError, match='no parameters; call set_params first'):
    engine.load_params()
  params = _params(run)
  engine.set_params(params)
  assert engine.load_params() is params


def test_the_engine_says_its_sizes():
  engine = tiny_run.fp8_run().engine
  assert engine.num_slots == 16
  assert engine.buckets == [16, 32]
  # 20 + 12 tokens in pages of two tiles.
  assert engine.page_size == 32
  assert engine.cache_length == 32


def test_parked_sequences_come_back_as_many_at_once_as_16384_tokens_are():
  engine = tiny_run.fp8_run().engine
  # Never more than prompts are, and a sequence that is longer by itself.
  lengths = [16, 1024, 4096, 16384, 32768]
  assert [engine.reprefill_rows(n) for n in lengths] == [16, 16, 4, 1, 1]


@pytest.mark.parametrize(('slots', 'rounded'), [(1, 16), (16, 16), (17, 32)])
def test_slots_are_rounded_up_to_a_dot_s_rows(slots, rounded):
  config = tiny_run.engine_config(num_slots=slots)
  of = tiny_run.policy()
  engine = Engine(of, config, sharding.make_mesh())
  assert engine.num_slots == rounded


def test_slots_are_rounded_up_per_device():
  mesh = sharding.make_mesh(data=2, fsdp=4)
  engine = Engine(
      tiny_run.policy(mesh=mesh), tiny_run.engine_config(num_slots=130), mesh
  )
  assert engine.num_slots == 2 * 16 * 8


@pytest.mark.parametrize('devices', [1, 2])
def test_the_responses_of_any_slots_come_to_the_host_as_they_are(devices):
  mesh = sharding.make_mesh(data=devices)
  engine = Engine(
      tiny_run.policy(mesh=mesh), tiny_run.engine_config(num_slots=64), mesh
  )
  state = engine.init_decode_state()
  bits = np.random.default_rng(0).integers(
      -(2**31), 2**31, (3, *state.tokens.shape), np.int32
  )
  tokens, log_mu, logprobs = bits[0], *bits[1:].view(np.float32)
  state = dataclasses.replace(
      state,
      tokens=jax.device_put(tokens, state.tokens.sharding),
      log_mu=jax.device_put(log_mu, state.log_mu.sharding),
      logprobs=jax.device_put(logprobs, state.logprobs.sharding),
  )
  # More of one device than go at once.
  for slots in ([3], [63, 0], [*range(40, 60), 1]):
    found = engine.responses(state, slots)
    assert sorted(found) == sorted(slots)
    for slot, arrays in found.items():
      for array, row in zip(arrays, bits[:, slot], strict=True):
        np.testing.assert_array_equal(array.view(np.int32), row)


def _with_positions(of, count):
  model = dataclasses.replace(of.model, max_position=count)
  return dataclasses.replace(of, model=model)


@pytest.mark.parametrize(
    ('longest', 'buckets'),
    [
        (1, [16, 32]),
        (16, [16, 32]),
        (17, [16, 32]),
        (80, [16, 64, 80, 96]),
    ],
)
def test_prompts_have_few_buckets_up_to_the_longest_and_sequences_more(
    longest, buckets
):
  config = tiny_run.engine_config(max_prompt_length=longest)
  of = _with_positions(tiny_run.policy(), 128)
  engine = Engine(of, config, sharding.make_mesh())
  assert engine.buckets == buckets


def test_an_engine_longer_than_the_model_has_positions_is_refused():
  of, mesh = tiny_run.policy(), sharding.make_mesh()
  full = tiny_run.engine_config(max_response_length=44)
  assert Engine(of, full, mesh).cache_length == 64
  longer = tiny_run.engine_config(max_response_length=45)
  with pytest.raises(
      ValueError,
      match='^max_prompt_length 20 . max_response_length 45 is 65; the model'
      ' has 64 positions: shorten one of the two$',
  ):
    Engine(of, longer, mesh)


@pytest.mark.parametrize(
    ('lengths', 'sizes'),
    [
        ([70], [256]),
        ([60] * 900 + [200] * 100, [256, 64]),
        ([60] * 990 + [200] * 10, [64, 256]),
        # Of 1000 batches 16 have the long prompt.
        ([60] * 999 + [200], [64]),
        ([60] * 250 + [200] * 750, [256]),
    ],
)
def test_prefills_are_compiled_for_sizes_that_batches_of_prompts_need(
    lengths, sizes
):
  assert buckets.likely(lengths, [64, 256, 512]) == sizes


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_slots': 0}, 'num_slots is 0; it must be >= 1'),
        ({'max_prompt_length': 0}, 'max_prompt_length is 0'),
        ({'max_response_length': 0}, 'max_response_length is 0'),
        ({'decode_block': 0}, 'decode_block is 0'),
        ({'top_k': -2}, 'top_k is -2'),
        ({'top_p': 0.0}, r'top_p is 0\.0'),
        ({'min_p': 1.5}, r'min_p is 1\.5'),
    ],
)
def test_sizes_and_samplers_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    tiny_run.engine_config(**changes)


def test_generate_block_stops_by_itself_when_all_slots_are_done():
  run = tiny_run.fp8_run()
  params = _params(run)
  state = run.engine.bulk_insert(
      _prefix(run.engine, params),
      run.engine.init_decode_state(),
      [0, 3],
      limits=[2, 4],
  )
  key = rng.key(0, rng.ROLLOUT, 0)
  state = run.engine.generate_block(params, state, key, 1000)
  assert not np.asarray(state.active).any()
  emitted = np.asarray(state.emitted)
  assert emitted[0] <= 2 and emitted[3] <= 4 and emitted.sum() > 0
  # Idle slots were fed too, and left no trace.
  idle = [s for s in range(16) if s not in (0, 3)]
  assert not np.asarray(state.position)[idle].any()
  used = np.asarray(state.table)[[0, 3]].ravel()
  for keys, values in state.caches:
    assert not np.delete(np.asarray(keys), used, 0).any()
    assert not np.delete(np.asarray(values), used, 0).any()


def test_steps_in_a_row_sample_what_single_ones_do(monkeypatch):
  run = tiny_run.fp8_run()
  monkeypatch.setattr(buckets, 'on_gpu', lambda: True)
  # Of a block of 12 every step is asked for, of one of 16 every eighth.
  for block, steps_per_sync in ((12, 1), (16, buckets.STEPS_PER_SYNC)):
    config = tiny_run.engine_config(decode_block=block)
    engine = Engine(run.policy, config, run.mesh)
    found = run.rollout(engine=engine)
    (found_sync,) = [n for name, n in engine._programs if name == 'generate']
    assert found_sync == steps_per_sync
    for a, b in zip(found, tiny_run.completions(), strict=True):
      assert a.tokens.tolist() == b.tokens.tolist()
      np.testing.assert_array_equal(a.logprobs, b.logprobs)
      np.testing.assert_array_equal(a.log_mu, b.log_mu)


@pytest.mark.parametrize('length', [0, 21])
def test_a_prompt_that_is_empty_or_too_long_is_named(length):
  run = tiny_run.fp8_run()
  prompts = [TOKENS, np.zeros((length,), np.int32)]
  with pytest.raises(
      ValueError,
      match=f'prompt 1 of the batch has {length} tokens; allowed: 1 to 20',
  ):
    run.engine.prefill_batch(_params(run), prompts)


def test_prefill_leaves_the_last_token_to_the_first_step():
  run = tiny_run.fp8_run()
  params = _params(run)
  one = run.engine.prefill_batch(params, [TOKENS])
  other = run.engine.prefill_batch(
      params, [np.concatenate([TOKENS[:-1], [50]]).astype(np.int32)]
  )
  tiny_run.assert_same_bits(one.caches, other.caches)
  assert (int(one.last_token[0]), int(other.last_token[0])) == (55, 50)
  assert int(one.length[0]) == 5


@pytest.mark.slow
@pytest.mark.parametrize('slots, block', [(48, 1), (64, 3), (128, 64)])
def test_any_number_of_slots_and_steps_gives_the_same_bits(slots, block):
  run = tiny_run.fp8_run()
  config = tiny_run.engine_config(num_slots=slots, decode_block=block)
  found = run.rollout(engine=Engine(run.policy, config, run.mesh))
  for a, b in zip(found, tiny_run.completions(), strict=True):
    for name in ('tokens', 'log_mu', 'logprobs'):
      tiny_run.assert_same_bits(getattr(a, name), getattr(b, name))


def _one_slot(run, slot=3):
  """Sample 0 of `_expected` in a slot, before its first step."""
  engine, params = run.engine, _params(run)
  state = engine.bulk_insert(
      _prefix(engine, params),
      engine.init_decode_state(),
      [slot],
      address=np.asarray([[0, 0]], np.uint32),
  )
  return engine, params, state


def _holds(state, slot, completion):
  """Whether a slot holds a completion to the bit and has ended like it."""
  length = len(completion.tokens)
  return (
      int(state.emitted[slot]) == length
      and not bool(state.active[slot])
      and bool(state.stopped[slot]) == (completion.finish_reason == 'stop')
      and all(
          np.asarray(getattr(state, name))[slot, :length].tobytes()
          == getattr(completion, name).tobytes()
          for name in ('tokens', 'log_mu', 'logprobs')
      )
  )


@pytest.mark.parametrize('kept', [1, 3])
def test_a_slot_that_goes_on_from_an_earlier_token_samples_the_same(kept):
  engine, params, state = _one_slot(tiny_run.fp8_run())
  key = rng.key(0, rng.ROLLOUT, 0)
  state = engine.generate_block(params, state, key, 5)
  state = engine.resume(state, {3: kept}, {3: np.zeros(0, np.int32)})
  assert int(state.emitted[3]) == kept
  state = engine.generate_block(params, state, key, 12)
  assert _holds(state, 3, _expected()[0])


def test_given_tokens_get_the_log_probs_that_sampled_ones_had():
  expected = _expected()[0]
  engine, params, state = _one_slot(tiny_run.fp8_run())
  key = rng.key(0, rng.ROLLOUT, 0)
  # Two sampled, two given, the rest sampled.
  state = engine.generate_block(params, state, key, 2)
  state = engine.resume(state, {3: 2}, {3: expected.tokens[2:4]})
  state = engine.generate_block(params, state, key, 12)
  assert len(expected.tokens) > 5
  assert _holds(state, 3, expected)


def test_other_given_tokens_lead_elsewhere_and_a_given_stop_does_not_stop():
  engine, params, state = _one_slot(tiny_run.fp8_run())
  given = np.asarray([1, 40, 2], np.int32)  # 1 and 2 are stop ids.
  state = engine.resume(state, {3: 0}, {3: given})
  state = engine.generate_block(params, state, rng.key(0, rng.ROLLOUT, 0), 5)
  assert int(state.emitted[3]) >= 4
  assert np.asarray(state.tokens)[3, :3].tolist() == given.tolist()
  np.testing.assert_array_equal(
      np.asarray(state.log_mu)[3, :3], np.asarray(state.logprobs)[3, :3]
  )
  assert np.asarray(state.tokens)[3, 3] != _expected()[0].tokens[3]
  # Another sequence in the slot is given none of them.
  state = engine.bulk_insert(
      _prefix(engine, params), state, [3], address=np.zeros((1, 2), np.uint32)
  )
  state = engine.generate_block(params, state, rng.key(0, rng.ROLLOUT, 0), 12)
  assert _holds(state, 3, _expected()[0])


@pytest.mark.parametrize('count', [0, 64, 65, 150])
def test_any_number_of_given_tokens_is_written_after_the_kept_ones(count):
  run = tiny_run.fp8_run()
  config = tiny_run.engine_config(max_response_length=200)
  engine = Engine(_with_positions(run.policy, 256), config, run.mesh)
  given = np.arange(1, count + 1, dtype=np.int32)
  state = engine.resume(engine.init_decode_state(), {3: 40}, {3: given})
  expected = np.zeros(200, np.int32)
  expected[40 : 40 + count] = given
  np.testing.assert_array_equal(np.asarray(state.tokens)[3], expected)
  assert (int(state.emitted[3]), int(state.given[3])) == (40, 40 + count)
  assert not np.asarray(state.tokens)[4].any()


def test_a_paused_slot_waits_and_goes_on_where_it_was():
  engine, params, state = _one_slot(tiny_run.fp8_run())
  key = rng.key(0, rng.ROLLOUT, 0)
  state = engine.generate_block(params, state, key, 2)
  state = engine.pause(state, [3])
  state = engine.generate_block(params, state, key, 4)
  assert int(state.emitted[3]) == 2
  state = engine.resume(state, {3: 2}, {3: np.zeros(0, np.int32)})
  state = engine.generate_block(params, state, key, 12)
  assert _holds(state, 3, _expected()[0])


@pytest.mark.parametrize(
    ('running', 'devices', 'expected'),
    [
        # 16 of 64 slots: the running ones, and the first idle ones.
        ([40, 3], 1, [3, 40, *range(3), *range(4, 15)]),
        (range(16), 1, list(range(16))),
        (range(17), 1, None),
        # Two devices with 32 slots each, by their numbers there; one is full.
        ([33], 2, [*range(16), 1, 0, *range(2, 16)]),
        (range(17), 2, None),
    ],
)
def test_a_quarter_of_the_slots_has_all_that_run(running, devices, expected):
  running_B = np.isin(np.arange(64), list(running))
  found = buckets.few_slots(running_B, devices, 1024)
  assert expected == (None if found is None else found.tolist())
  assert buckets.few_slots(running_B, devices, 1023) is None


def test_a_sixteenth_of_the_slots_has_the_last_of_long_answers():
  running_B = np.isin(np.arange(512), [7, 500])
  found = [
      len(buckets.few_slots(running_B, 1, longest)) for longest in (8191, 8192)
  ]
  assert found == [128, 32]


@pytest.mark.parametrize(
    'axes',
    [{}, pytest.param({'fsdp': 2, 'tensor': 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_rollout_compiles_nothing_that_was_compiled_ahead(axes, monkeypatch):
  monkeypatch.setattr(buckets, 'TAILS', ((4, 1),))
  mesh = sharding.make_mesh(**axes)
  policy = tiny_run.policy(mesh=mesh)
  config = tiny_run.engine_config(num_slots=64, decode_block=2)
  engine = Engine(policy, config, mesh)
  params = PolicyParams(
      (start := tiny_run.cold_state(policy, mesh)).weights, start.fp8_state
  )
  with compilations.noted() as compiled:
    with contextlib.closing(CompileAhead(1)) as ahead:
      engine.compile_ahead(ahead, params, [len(TOKENS)])
      ahead.wait()
    before, ready = len(compiled), engine.replicate(params)
    prefix = engine.prefill_batch(ready, [TOKENS], buckets.PREFILL_ROWS)
    state = engine.init_decode_state()
    state = engine.bulk_insert(prefix, state, list(range(64)))
    key = rng.key(0, rng.ROLLOUT, 0)
    state = engine.generate_block(ready, state, key)
    engine.release(range(1, 64))
    active = np.arange(64) == 0
    state = dataclasses.replace(state, active=engine._put(active))
    engine.generate_block(ready, state, key)
  names = {'jit(prefill)', 'jit(generate)', 'jit(generate_compacted)'}
  programs = [one.program for one in compiled]
  assert names <= set(programs[:before])
  assert not names & set(programs[before:])


def test_the_tail_of_a_rollout_goes_on_in_a_quarter_of_the_slots(monkeypatch):
  monkeypatch.setattr(buckets, 'TAILS', ((4, 1),))
  run = tiny_run.fp8_run()
  config = tiny_run.engine_config(num_slots=64, decode_block=2)
  engine = Engine(run.policy, config, run.mesh)
  # Of 24 sequences 20 end with their second token at the latest.
  limits = np.full((6, tiny_run.SAMPLES), 2)
  limits[[0, 1, 3, 5], [0, 3, 1, 2]] = 12
  found = run.rollout(engine=engine, limits=limits)
  assert 'generate_compacted' in {name for name, _ in engine._programs}
  for a, b in zip(found, tiny_run.completions(), strict=True):
    length = len(a.tokens)
    assert a.tokens.tolist() == b.tokens[:length].tolist()
    np.testing.assert_array_equal(a.logprobs, b.logprobs[:length])
    np.testing.assert_array_equal(a.log_mu, b.log_mu[:length])
