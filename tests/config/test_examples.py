"""The example configs: by name, and with the data that they start from."""

import importlib
import pathlib
import shutil
import sys

import pytest

from jetrl_jax.config import examples, flags

_ROOT = pathlib.Path(__file__).parents[2]


def test_every_config_but_the_defaults_has_a_name():
  files = {file.stem for file in (_ROOT / 'configs').glob('[!_]*.py')}
  assert set(examples.names()) == files - {'base'}
  assert examples.config_file('qwen7b') == _ROOT / 'configs/qwen7b.py'


@pytest.mark.parametrize(
    'arguments',
    [['--config=qwen7b'], ['-config=qwen7b'], ['--config', 'qwen7b']],
)
def test_a_name_stands_for_its_file(arguments, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  found = flags._with_file(['main', *arguments, '--workdir=qwen7b'])
  assert flags._config_file(found) == examples.config_file('qwen7b')
  assert found[-1] == '--workdir=qwen7b'
  # A file of the user's own comes first.
  (tmp_path / 'qwen7b').touch()
  assert flags._with_file(['main', *arguments]) == ['main', *arguments]


def test_data_is_named_from_the_clone_there_and_by_its_place_elsewhere(
    tmp_path, monkeypatch
):
  monkeypatch.chdir(_ROOT)
  assert examples.folder('quickstart') == 'examples/quickstart'
  monkeypatch.chdir(tmp_path)
  assert examples.folder('quickstart') == f'{_ROOT}/examples/quickstart'


@pytest.mark.parametrize('name', ['calculator', 'portfolio'])
def test_an_example_s_environment_is_a_module(name):
  made = importlib.import_module(f'configs.{name}').get_config()
  module, _, kind = made.environment.name.partition(':')
  assert hasattr(importlib.import_module(module), kind)


@pytest.fixture(name='installed')
def _installed(tmp_path, monkeypatch):
  """As in a wheel: configs/ is in the package, and nowhere else."""
  package = tmp_path / 'site/jetrl_jax'
  shutil.copytree(_ROOT / 'configs', package / 'configs')
  monkeypatch.setattr(examples, '_INSTALLED', True)
  monkeypatch.setattr(examples, '_HOME', package)
  monkeypatch.setattr(sys, 'path', [str(tmp_path / 'user')])
  jetrl_jax = importlib.import_module('jetrl_jax')
  monkeypatch.setattr(
      jetrl_jax, '__path__', [*jetrl_jax.__path__, str(package)]
  )
  for name in list(sys.modules):
    if name.partition('.')[0] == 'configs':
      monkeypatch.delitem(sys.modules, name)
  yield package
  for name in list(sys.modules):
    if name.startswith(('configs', 'jetrl_jax.configs')):
      del sys.modules[name]


def test_an_installed_package_lets_any_file_import_its_configs(
    installed, tmp_path
):
  examples.let_import_configs(tmp_path / 'user/mine.py')
  found = importlib.import_module('configs')
  assert pathlib.Path(found.__file__).parent == installed / 'configs'
  assert examples.module('x') == 'jetrl_jax.examples.x'


def test_a_folder_of_the_user_s_own_with_a_base_comes_first(
    installed, tmp_path
):
  own = tmp_path / 'user/configs'
  own.mkdir(parents=True)
  (own / 'base.py').touch()
  examples.let_import_configs(own / 'mine.py')
  assert 'configs' not in sys.modules
  # But not for one of the package's files.
  examples.let_import_configs(installed / 'configs/quickstart.py')
  found = sys.modules['configs']
  assert pathlib.Path(found.__file__).parent == installed / 'configs'
