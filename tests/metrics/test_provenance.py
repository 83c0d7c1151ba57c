"""What a start leaves behind."""

import contextlib
import json
import pathlib
import subprocess

import jax

from jetrl_jax.metrics import provenance


def test_each_start_appends_a_line(tmp_path):
  first = provenance.record_start(tmp_path, 2, train_prompts=3)
  provenance.record_start(tmp_path, 2, train_prompts=4)
  lines = (tmp_path / 'starts.jsonl').read_text().splitlines()
  assert [json.loads(line)['train_prompts'] for line in lines] == [3, 4]
  assert json.loads(lines[0]) == first
  assert first['versions']['jax'] == jax.__version__
  assert first['device'] == jax.devices()[0].device_kind
  assert first['num_devices'] == 2


def test_the_folder_of_the_last_start_is_found_again(tmp_path):
  assert provenance.start_folder(tmp_path) is None
  file = tmp_path / 'starts.jsonl'
  file.write_text('{"time": "x"}\n')
  assert provenance.start_folder(tmp_path) is None
  provenance.record_start(tmp_path, 1)
  file.write_text(f'{file.read_text()}{{"fold')
  assert provenance.start_folder(tmp_path) == pathlib.Path.cwd()


def test_a_relative_path_of_a_run_starts_from_the_folder_of_its_start(
    tmp_path, monkeypatch
):
  workdir, here = tmp_path / 'run', tmp_path / 'here'
  for folder in (workdir, here, tmp_path / 'a/model'):
    folder.mkdir(parents=True)

  def found(text):
    return provenance.path_of_run(workdir, text)

  monkeypatch.chdir(here)
  assert found('a/model') == 'a/model'  # No start says where it was.
  with contextlib.chdir(tmp_path):
    provenance.record_start(workdir, 1)
    assert found('a/model') == 'a/model'
  assert found('a/model') == f'{tmp_path}/a/model'
  # Not there, so the current folder may have it; an id; none; whole already.
  for text in ('b/model', 'Qwen/Qwen3-0.6B', '', f'{tmp_path}/a'):
    assert found(text) == text


def test_the_command_of_a_start_can_be_typed_again(tmp_path, monkeypatch):
  module = pathlib.Path(provenance.__file__).parents[1] / 'main.py'
  monkeypatch.setattr('sys.argv', [str(module), '--config=quickstart'])
  command = provenance.record_start(tmp_path, 1)['command']
  assert command == 'python -m jetrl_jax.main --config=quickstart'.split()
  monkeypatch.setattr('sys.argv', ['/elsewhere/mine.py'])
  assert provenance.record_start(tmp_path, 1)['command'] == ['mine.py']


def test_a_line_that_a_kill_tore_is_not_continued(tmp_path):
  (tmp_path / 'starts.jsonl').write_text('{"time": "20')
  provenance.record_start(tmp_path, 1)
  lines = (tmp_path / 'starts.jsonl').read_text().splitlines()
  assert len(lines) == 2 and 'versions' in json.loads(lines[1])


def _git(root, *arguments):
  identity = ['-c', 'user.name=a', '-c', 'user.email=a@b.c']
  return subprocess.run(
      ['git', '-C', root, *identity, *arguments],
      check=True,
      capture_output=True,
      text=True,
  ).stdout.strip()


def test_the_commit_is_that_of_the_clone_and_marked_when_files_differ(tmp_path):
  package = tmp_path / 'package'
  package.mkdir()
  assert provenance.commit(package) is None
  (package / 'a.py').write_text('x = 1\n')
  _git(tmp_path, 'init', '-q')
  _git(tmp_path, 'add', '.')
  _git(tmp_path, 'commit', '-qm', 'a')
  head = _git(tmp_path, 'rev-parse', 'HEAD')
  assert provenance.commit(package) == head
  (package / 'a.py').write_text('x = 2\n')
  assert provenance.commit(package) == head + '+'


def test_an_environment_inside_a_clone_has_no_commit_of_its_own(tmp_path):
  _git(tmp_path, 'init', '-q')
  (tmp_path / 'env/package').mkdir(parents=True)
  assert provenance.commit(tmp_path / 'env/package') is None
