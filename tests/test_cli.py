"""One command for all: its names, its help, and the wheel that brings it."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from jetrl_jax import cli

_ROOT = pathlib.Path(__file__).parent.parent


def _run(*arguments: str, cwd=_ROOT) -> subprocess.CompletedProcess:
  return subprocess.run(
      [sys.executable, '-m', 'jetrl_jax', *arguments],
      cwd=cwd,
      env=os.environ | {'PYTHONPATH': str(_ROOT), 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      timeout=200,
  )


def test_help_says_one_sentence_of_each_command(monkeypatch, capsys):
  for arguments in ([], ['--help'], ['help']):
    monkeypatch.setattr(sys, 'argv', ['jetrl_jax', *arguments])
    cli.main()
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:
      assert re.search(rf'^  {name} +[A-Z].*\.$', shown, re.MULTILINE), name


@pytest.mark.parametrize(
    ('command', 'hint'),
    [
        ('trian', " Did you mean 'train'?"),
        ('main', " Did you mean 'train'?"),
        ('eval', " Did you mean 'evaluate'?"),
        ('xyzzy', ''),
    ],
)
def test_an_unknown_command_gets_the_nearest_one(monkeypatch, command, hint):
  monkeypatch.setattr(sys, 'argv', ['jetrl_jax', command])
  with pytest.raises(SystemExit) as ended:
    cli.main()
  said = f'error: there is no command {command!r}.{hint} Known: train, sft, '
  assert ended.value.code.startswith(said)


@pytest.mark.parametrize('command', cli.COMMANDS)
def test_a_command_is_a_module_that_runs_and_says_what_it_is(command):
  path = _ROOT / 'jetrl_jax' / cli.COMMANDS[command][0].replace('.', '/')
  file = path / '__main__.py' if path.is_dir() else path.with_suffix('.py')
  text = file.read_text()
  assert "\nif __name__ == '__main__':\n" in text
  assert text.startswith(('"""', 'r"""'))


def test_a_command_takes_its_flags_from_any_folder(tmp_path):
  done = _run('train', '--config=quickstart', '--config.nope=1', cwd=tmp_path)
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.startswith('error: --config.nope=1: unknown config name')
  done = _run('evaluate', '--help', cwd=tmp_path)
  assert done.returncode == 0 and '--checkpoint: ' in done.stdout


def test_the_wheel_has_the_command_the_configs_and_their_data():
  project = tomllib.loads((_ROOT / 'pyproject.toml').read_text())
  assert project['project']['scripts'] == {'jetrl_jax': 'jetrl_jax.cli:main'}
  targets = project['tool']['hatch']['build']['targets']
  wheel, sdist = targets['wheel'], targets['sdist']
  assert wheel['only-include'] == ['jetrl_jax', 'configs', 'examples']
  # Where jetrl_jax/config/examples.py looks for them.
  assert wheel['sources'] == {
      'configs': 'jetrl_jax/configs',
      'examples': 'jetrl_jax/examples',
  }
  assert set(wheel['only-include']) <= set(sdist['only-include'])
