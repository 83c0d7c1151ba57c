"""Tests of the rollout files."""

import dataclasses
import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.rl.scoring.store import load_rollouts, save_rollouts
from jetrl_jax.rl.types import Completion


def _completion(generator, prompt_id, sample, length, truncated):
  logprobs = -generator.exponential(size=length).astype(np.float32)
  return Completion(
      prompt_id=prompt_id,
      sample=sample,
      prompt_tokens=np.arange(prompt_id % 7 + 1, dtype=np.int32),
      tokens=generator.integers(0, 151_936, length, dtype=np.int32),
      log_mu=logprobs + np.float32(0.25) * truncated,
      logprobs=logprobs,
      weight_version=np.full(length, sample, np.int32),
      finish_reason='stop' if length % 2 else 'length',
      sampled=np.arange(length) % 3 < 2,
  )


def _assert_same(found, expected):
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    for name, value in vars(other).items():
      have = vars(one)[name]
      assert type(have) is type(value), name
      if isinstance(value, np.ndarray):
        assert have.dtype == value.dtype, name
        assert have.shape == value.shape, name
        assert have.tobytes() == value.tobytes(), name
      else:
        assert have == value, name


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 40), max_size=9),
    first_id=st.integers(0, 2**40),
    truncated=st.booleans(),
)
def test_loading_is_the_exact_inverse_of_saving(
    tmp_path_factory, seed, lengths, first_id, truncated
):
  path = tmp_path_factory.mktemp('rollouts') / '3.npz'
  generator = np.random.default_rng(seed)
  completions = [
      _completion(generator, first_id + i, i, length, truncated)
      for i, length in enumerate(lengths)
  ]
  extra = {
      'rewards': generator.normal(size=len(lengths)).astype(np.float32),
      'parts': generator.normal(size=(len(lengths), 3)),
      'correct': generator.integers(0, 2, len(lengths)).astype(bool),
  }
  save_rollouts(path, completions, extra)
  found, found_extra = load_rollouts(path)
  _assert_same(found, completions)
  assert list(found_extra) == list(extra)
  for name, array in extra.items():
    assert found_extra[name].dtype == array.dtype
    assert found_extra[name].shape == array.shape
    assert found_extra[name].tobytes() == array.tobytes()


def test_special_floats_keep_their_bits(tmp_path):
  bits = np.array(
      [0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFA00000, 1],
      np.uint32,
  )
  one = Completion(
      prompt_id=0,
      sample=0,
      prompt_tokens=np.array([5], np.int32),
      tokens=np.array([0, -1, 2**31 - 1, -(2**31), 4, 5], np.int32),
      log_mu=bits.view(np.float32),
      logprobs=bits[::-1].copy().view(np.float32),
      weight_version=np.zeros(6, np.int32),
      finish_reason='stop',
      sampled=np.ones(6, bool),
  )
  save_rollouts(tmp_path / '0.npz', [one], {})
  _assert_same(load_rollouts(tmp_path / '0.npz')[0], [one])


def test_a_token_costs_little_more_than_its_log_prob_and_its_id(tmp_path):
  # 4 bytes of log-prob, 18 bits of token id stored in at most 4 bytes; equal
  # mu and pi and constant versions must cost next to nothing.
  generator = np.random.default_rng(0)
  completions = [
      _completion(generator, 3, sample, 2000, False) for sample in range(8)
  ]
  save_rollouts(tmp_path / '0.npz', completions, {})
  assert (tmp_path / '0.npz').stat().st_size < 8 * 2000 * (4 + 3.2)


def test_the_same_rollouts_give_the_same_bytes(tmp_path):
  one = _completion(np.random.default_rng(0), 3, 0, 20, True)
  for name in ('a', 'b'):
    save_rollouts(tmp_path / name, [one], {'rewards': np.ones(1)})
  assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()
  # And no temporary stays beside them.
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a', 'b']


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
  fsync, synced, path = os.fsync, [], tmp_path / 'rollouts' / '3.npz'

  def watched(descriptor):
    assert not path.exists()
    fsync(descriptor)
    synced.append(os.fstat(descriptor).st_size)

  monkeypatch.setattr(os, 'fsync', watched)
  one = _completion(np.random.default_rng(0), 0, 0, 3, truncated=False)
  save_rollouts(path, [one], {})
  assert synced == [path.stat().st_size]
  assert list(path.parent.iterdir()) == [path]


def test_arrays_that_would_change_are_refused(tmp_path):
  one = _completion(np.random.default_rng(0), 3, 1, 4, False)
  path = tmp_path / '0.npz'
  for name, array, message in (
      ('logprobs', np.zeros(4), r'float64\[4\]; allowed: float32\[4\]'),
      ('log_mu', one.log_mu[:3], r'float32\[3\]; allowed: float32\[4\]'),
      ('tokens', one.tokens[None], r'int32\[1, 4\]; allowed: int32\[1\]'),
  ):
    bad = dataclasses.replace(one, **{name: array})
    with pytest.raises(ValueError, match=f'{name} of prompt 3, sample 1.*'):
      save_rollouts(path, [bad], {})
    with pytest.raises(ValueError, match=message):
      save_rollouts(path, [bad], {})
  for array in (np.ones(2), np.float32(1), np.array(['a'])):
    with pytest.raises(ValueError, match='extra array rewards is .* length 1'):
      save_rollouts(path, [one], {'rewards': array})
  assert not path.exists()


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path):
  generator = np.random.default_rng(0)
  path = tmp_path / '1.npz'
  save_rollouts(path, [_completion(generator, 1, 0, 9, False)], {})
  old = path.read_bytes()
  longer = [_completion(generator, i, 0, 1000, False) for i in range(9)]
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  # What a full disk looks like.
  resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
  try:
    with pytest.raises(OSError, match='File too large'):
      save_rollouts(path, longer, {})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  assert [file.name for file in tmp_path.iterdir()] == ['1.npz']
  assert path.read_bytes() == old


def test_a_damaged_or_absent_file_is_said_to_be_so(tmp_path):
  path = tmp_path / '0.npz'
  with pytest.raises(ValueError, match='0.npz cannot be read as rollouts'):
    load_rollouts(path)
  one = _completion(np.random.default_rng(0), 3, 1, 400, False)
  save_rollouts(path, [one], {'rewards': np.ones(1)})
  whole = path.read_bytes()
  for end in (0, 10, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:end])
    with pytest.raises(ValueError, match='0.npz cannot be read as rollouts'):
      load_rollouts(path)
  generator = np.random.default_rng(1)
  for _ in range(300):
    damaged = bytearray(whole)
    damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
    path.write_bytes(damaged)
    try:
      found, extra = load_rollouts(path)
    except ValueError:
      continue
    # A flip in the archive's dates and flags: the content is the same.
    _assert_same(found, [one])
    assert extra['rewards'].tolist() == [1.0]


def test_a_file_with_objects_in_it_is_refused_and_runs_nothing(tmp_path):
  class Hostile:

    def __reduce__(self):
      return os.mkdir, (str(tmp_path / 'ran'),)

  path = tmp_path / '0.npz'
  np.savez(path, extra=np.array([Hostile()], object))
  with pytest.raises(ValueError, match='allow_pickle=False'):
    load_rollouts(path)
  assert not (tmp_path / 'ran').exists()


def test_a_member_is_compared_with_its_crc_before_it_is_read(tmp_path):
  path = tmp_path / '0.npz'
  np.savez(path, extra=np.zeros(3))
  # An array's header without its end: not all that raises is an OSError.
  content = path.read_bytes()
  assert content.count(b"'shape': (3,), }") == 1
  path.write_bytes(content.replace(b'(3,), }', b'(3,(, }'))
  with pytest.raises(ValueError, match='extra.npy differs from its CRC'):
    load_rollouts(path)
