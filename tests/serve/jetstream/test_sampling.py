"""How a JetStream request is sampled, without JetStream."""

import pytest

from jetrl_jax.serve.jetstream.sampling import from_text, sampling_of, to_text
from jetrl_jax.serve.requests import Limits, Sampling

_LIMITS = Limits(max_prompt_length=4, max_tokens=8)


def test_without_metadata_decoding_is_greedy():
  assert sampling_of(8, (), _LIMITS) == Sampling(max_tokens=8)
  assert Sampling(max_tokens=8).temperature == 0


def test_temperature_and_seed_come_from_the_metadata():
  metadata = (('seed', '4294967295'), ('user-agent', 'x'), ('temperature', '1'))
  expected = Sampling(max_tokens=1, temperature=1.0, seed=2**32 - 1)
  assert sampling_of(1, metadata, _LIMITS) == expected


def test_sampling_survives_its_text():
  sampling = Sampling(max_tokens=3, temperature=0.1, seed=7)
  assert from_text(to_text(sampling)) == sampling


@pytest.mark.parametrize(
    ('max_tokens', 'metadata', 'message'),
    [
        (0, {}, 'max_tokens is 0; allowed: 1 to 8'),
        (9, {}, 'max_tokens is 9; allowed: 1 to 8'),
        (1, {'temperature': 'warm'}, "temperature is 'warm', which is no"),
        (1, {'temperature': '-1'}, 'temperature is -1.0; allowed: 0.001 to'),
        (1, {'temperature': 'nan'}, 'temperature is nan; allowed: 0.001 to'),
        (1, {'temperature': '1e39'}, 'temperature is 1e[+]39; allowed: 0.001'),
        (1, {'temperature': 'inf'}, 'temperature is inf; allowed: 0.001 to'),
        (1, {'seed': '1.5'}, "seed is '1.5', which is no number"),
        (1, {'seed': '-1'}, r'seed is -1; allowed: 0 to 2\^32 - 1'),
        (1, {'seed': str(2**32)}, r'allowed: 0 to 2\^32 - 1'),
    ],
)
def test_a_wrong_setting_is_refused(max_tokens, metadata, message):
  with pytest.raises(ValueError, match=message):
    sampling_of(max_tokens, tuple(metadata.items()), _LIMITS)
