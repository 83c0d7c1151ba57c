"""Files that are replaced whole or not at all, and paths with a ~."""

import pathlib

import pytest

from jetrl_jax.core.files import replace_text, user_path


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
  path = tmp_path / 'config.json'
  replace_text(path, 'old')
  with pytest.raises(UnicodeEncodeError):
    replace_text(path, 'new ' * 10_000 + '\ud800')
  assert [file.name for file in tmp_path.iterdir()] == ['config.json']
  assert path.read_text() == 'old'
  assert [file.name for file in tmp_path.iterdir()] == ['config.json']
  replace_text(path, 'new')
  assert path.read_text() == 'new'
  assert [file.name for file in tmp_path.iterdir()] == ['config.json']


def test_a_path_that_a_shell_left_as_it_is_begins_in_the_home_folder():
  assert user_path('~/runs') == pathlib.Path.home() / 'runs'
  assert user_path('runs') == pathlib.Path('runs')
  with pytest.raises(ValueError, match='^~runs/x: there is no such home'):
    user_path('~runs/x')
