"""How the command lines of tools/ and study/ say no."""

import pytest

from study import untie
from tools import (
    environment_tasks,
    math_data,
    quickstart_task,
    study_task,
)

_FEW = ['--sft=1', '--train=1', '--heldout=1']


def _refused(monkeypatch, module, *arguments) -> str:
  monkeypatch.setattr('sys.argv', ['x', *map(str, arguments)])
  with pytest.raises(SystemExit) as refused:
    module.main()
  # A text as exit code: printed on stderr, and 1.
  said = str(refused.value.code)
  assert said.startswith('error: ') and '\n' not in said
  return said


@pytest.mark.parametrize(
    'module, arguments',
    [
        (quickstart_task, _FEW),
        (study_task, _FEW),
        (environment_tasks, ['--task=portfolio']),
        (math_data, None),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_sentence(
    monkeypatch, tmp_path, module, arguments
):
  taken = tmp_path / 'taken.jsonl'
  taken.write_text('{"question": "2+2", "answer": "4"}\n')
  if arguments is None:
    other = tmp_path / 'other.jsonl'
    other.write_text('{"question": "1+1", "answer": "2"}\n')
    arguments = [f'--{name}={taken},question,answer' for name in module.SOURCES]
    arguments.append(f'--math_train={other},question,answer')
  monkeypatch.setattr(environment_tasks, 'SIZES', {'train': 1})
  output = f'--output={taken}/task'
  assert str(taken) in _refused(monkeypatch, module, *arguments, output)


@pytest.mark.parametrize(
    'flag, message',
    [
        ('--checks=1,b', '--checks=1,b must be whole numbers by comma'),
        ('--people=1', 'people is 1; allowed: 2 to '),
    ],
)
def test_a_task_that_cannot_be_made_is_one_sentence(
    monkeypatch, tmp_path, flag, message
):
  output = f'--output={tmp_path}/task'
  assert message in _refused(monkeypatch, study_task, flag, output)
  assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
  said = _refused(monkeypatch, untie, tmp_path / 'no', tmp_path / 'target')
  assert f'{tmp_path}/no' in said
