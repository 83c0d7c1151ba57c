"""A run that leaves its bits to XLA (`precision.exact=False`)."""

import dataclasses
import json
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from jetrl_jax.config import model as config_model
from jetrl_jax.core import compilation
from jetrl_jax.report.facts import headline
from jetrl_jax.report.run import read_run
from tests import whole_run


def _sum(one, small):
  return (one + small).astype(jnp.float32)


def test_a_policy_compiles_as_its_run_claims():
  one = jnp.ones((8,), jnp.bfloat16)
  small = jnp.full((8,), 2.0**-8, jnp.bfloat16)
  policy, _, _ = config_model.build_policy(whole_run.config())
  # A tie, which the rounding to bfloat16 takes down to 1.
  assert policy.jit(_sum)(one, small)[0] == 1
  policy = dataclasses.replace(policy, exact=False)
  assert policy.jit(_sum)(one, small)[0] == 1 + 2.0**-8


@pytest.mark.slow
def test_an_inexact_run_trains_and_says_that_it_claims_nothing(
    tmp_path, caplog
):
  config = {
      'flow': 'bf16_inexact',
      'data.val_files': (),
      'trainer.total_training_steps': 1,
  }
  with caplog.at_level(logging.WARNING):
    whole_run.trainer(tmp_path, config).train()
  assert compilation.NOT_CLAIMED in caplog.text
  records = whole_run.records(tmp_path)
  # Whether its bits agree is XLA's affair; its numbers must be close.
  assert np.isfinite(records[-1]['training/rollout_logprob_diff_max'])
  assert records[-1]['training/rollout_logprob_diff_max'] < 0.5
  assert records[-1]['training/updates'] == 1
  kept = json.loads((tmp_path / 'config.json').read_text())
  assert kept['precision']['exact'] is False
  facts = headline(read_run(tmp_path, ''))
  (fact,) = [fact for fact in facts if fact.label == 'Mismatch']
  assert fact.detail.endswith(compilation.NOT_CLAIMED)
  assert fact.tone != 'good'
