"""What a workdir says of the starts before this one."""

from jetrl_jax.rl.run_folder import changed_settings


def test_settings_that_differ_from_an_earlier_start_are_named():
  before = '{"optim": {"lr": 1e-6, "old": 1}, "seed": 1, "flow": ""}'
  after = '{"optim": {"lr": 2e-6, "new": 1}, "seed": 1, "flow": "bf16"}'
  assert changed_settings(before, after) == [
      'optim.lr: 1e-06 -> 2e-06',
      "flow: '' -> 'bf16'",
  ]
  assert changed_settings(after, after) == []
  assert changed_settings('{"optim": ', after) == []
