"""Reading a workdir: forgiving where a run may be killed, else strict."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_jax.report import contents
from jetrl_jax.report import run as workdirs_of
from tests.report import pages, workdirs


@pytest.fixture
def workdir(tmp_path):
  return workdirs.write(tmp_path / 'run')


def _read(folder):
  return workdirs_of.read_run(folder, 'run')


def _append(folder, text):
  with open(folder / 'metrics.jsonl', 'a') as file:
    file.write(text)


def test_a_metric_is_read_with_the_steps_that_have_it(workdir):
  run = _read(workdir)
  accuracy = run.series['val-core/heldout/acc/mean@1']
  assert accuracy.steps.tolist() == [0, 3, 6]
  np.testing.assert_allclose(accuracy.values, [0.25, 0.55, 0.85])
  assert run.steps.tolist() == list(range(7))
  assert run.last('critic/rewards/mean') == pytest.approx(0.6)
  assert 'actor/kl_loss' not in run.series
  assert run.last('actor/kl_loss') is None


def test_health_is_an_array_of_dots_by_steps(workdir):
  health = _read(workdir).health
  assert health.dots == sorted(workdirs.DOTS)
  assert health.steps.tolist() == [1, 2, 3, 4, 5, 6]
  flushed = health.values['input', 'flushed_frac']
  np.testing.assert_allclose(flushed[:, 0], [0, 0.001, 0.002, 0.003])
  saturated = health.values['output_grad', 'saturated_frac']
  np.testing.assert_allclose(saturated[0], [0, 1e-5, 0, 0, 0, 0])
  # Absent where nothing was lost.
  assert np.isnan(health.values['kernel', 'sqnr_db']).all()
  np.testing.assert_allclose(health.values['kernel', 'changed'], 0.02)


def test_a_half_written_last_line_is_left_out_and_said(workdir):
  _append(workdir, '{"step": 7, "critic/rew')
  run = _read(workdir)
  assert run.steps[-1] == 6
  assert any('half-written' in note for note in run.notes)


def test_a_damaged_line_elsewhere_is_refused_with_its_number(workdir):
  _append(workdir, '{"step": 7, "critic/rew\n{"step": 8}\n')
  with pytest.raises(ValueError, match='line 8 is no metrics line: .*critic'):
    _read(workdir)


def test_lines_of_two_runs_are_refused(workdir):
  _append(workdir, '{"step": 3}\n')
  with pytest.raises(ValueError, match='line 8: step 3 does not follow step 6'):
    _read(workdir)


def test_a_value_that_is_not_finite_is_a_gap_and_counted(workdir):
  _append(
      workdir,
      '{"step": 7, "a": null, "b": NaN, "c": 1e999, "d": 1, "nonfinite":'
      ' ["a"]}\n',
  )
  run = _read(workdir)
  assert all(np.isnan(run.series[name].values).all() for name in 'abc')
  assert run.finite('a').size == 0 and run.last('d') == 1
  assert run.nonfinite == {'a': 1}


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda path: None, 'there is no such folder'),
        (lambda path: path.mkdir(), 'holds no metrics.jsonl .but nothing.'),
        (
            lambda path: workdirs.write(path)
            .joinpath('metrics.jsonl')
            .unlink(),
            r"holds no metrics.jsonl \(but \['config.json', 'samples'",
        ),
        (
            lambda path: workdirs.write(path)
            .joinpath('metrics.jsonl')
            .write_text(''),
            'is empty: the run has not logged a step yet',
        ),
        (
            lambda path: workdirs.write(path)
            .joinpath('metrics.jsonl')
            .write_text('{"loss": 1}'),
            'has no metrics line: the run has not logged a step yet',
        ),
        (lambda path: path.write_text(''), 'is a file; name the folder of a'),
    ],
    ids=['absent', 'empty folder', 'no metrics', 'no step', 'torn', 'a file'],
)
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, make, message):
  make(tmp_path / 'run')
  with pytest.raises(ValueError, match=message):
    _read(tmp_path / 'run')


def test_a_link_to_nowhere_or_a_folder_in_its_place_is_a_missing_file(workdir):
  (workdir / 'config.json').unlink()
  (workdir / 'config.json').symlink_to('config.json')  # It ends nowhere.
  assert 'No config.json.' in _read(workdir).notes
  (workdir / 'metrics.jsonl').unlink()
  (workdir / 'metrics.jsonl').mkdir()
  with pytest.raises(ValueError, match='holds no metrics.jsonl'):
    _read(workdir)


def test_what_else_is_missing_or_damaged_is_a_note(workdir):
  (workdir / 'config.json').write_text('{')
  (workdir / 'starts.jsonl').unlink()
  run = _read(workdir)
  assert run.config == {} and run.starts == []
  notes = ' '.join(run.notes)
  assert 'config.json is damaged' in notes
  assert 'No starts.jsonl' in notes
  (workdir / 'starts.jsonl').write_text('{"time": "x"}\n{"tim\n')
  run = _read(workdir)
  assert run.starts == [{'time': 'x'}]
  assert '1 damaged lines of starts.jsonl are left out.' in run.notes


def test_lines_that_are_lost_are_said(workdir):
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[4:]))
  assert any('begins at step 4' in note for note in _read(workdir).notes)
  path.write_text(''.join([*lines[:2], *lines[4:]]))
  notes = _read(workdir).notes
  assert 'metrics.jsonl has no lines between step 1 and step 4.' in notes
  path.write_text(''.join(lines[1:]))  # Nothing was evaluated before.
  assert _read(workdir).notes == []


def test_a_run_is_finished_when_its_last_step_is_there(tmp_path):
  assert _read(workdirs.write(tmp_path / 'a')).is_finished
  assert not _read(workdirs.write(tmp_path / 'b', steps=3)).is_finished


def test_runs_are_found_below_a_folder_and_not_below_a_run(tmp_path):
  for name in ('b', 'deep/er/a', 'b/samples/c'):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / 'metrics.jsonl').write_text('{}')
  found = [
      p.relative_to(tmp_path).as_posix()
      for p in workdirs_of.find_runs(tmp_path)
  ]
  assert found == ['b', 'deep/er/a']
  assert workdirs_of.find_runs(tmp_path / 'b') == []
  assert workdirs_of.find_runs(tmp_path / 'nowhere') == []


def test_the_config_is_flat(workdir):
  config = _read(workdir).config
  assert config['optim.betas'] == [0.9, 0.98]
  assert config['trainer.total_training_steps'] == 6


def test_runs_are_named_by_the_shortest_ends_that_differ(tmp_path):
  folders = [tmp_path / 'a/run', tmp_path / 'b/run']
  assert workdirs_of.names(folders) == ['a/run', 'b/run']
  assert workdirs_of.names(folders[:1]) == ['run']
  with pytest.raises(ValueError, match='is given twice'):
    workdirs_of.names([folders[0], tmp_path / 'a/../a/run'])


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    [*workdirs.line(3), 'nonfinite', 'val-core/<b>/acc/mean@x', 'sft/loss']
)


@settings(max_examples=20)
@given(lines=st.lists(st.dictionaries(_NAMES, _VALUES, max_size=6), max_size=4))
def test_any_json_is_a_report_or_a_sentence(tmp_path_factory, lines):
  folder = tmp_path_factory.mktemp('run')
  text = ''.join(
      json.dumps({'step': i} | line) + '\n' for i, line in enumerate(lines)
  )
  (folder / 'metrics.jsonl').write_text(text)
  (folder / 'config.json').write_text(json.dumps(lines[0] if lines else 0))
  (folder / 'starts.jsonl').write_text(text)
  (folder / 'samples').mkdir()
  (folder / 'samples/0.jsonl').write_text(text)
  if lines:
    text = contents.run_page([_read(folder)]).html()
    assert text.endswith('</html>') and pages.data(text)['plots'] is not None
  else:
    with pytest.raises(ValueError, match='has not logged a step yet'):
      _read(folder)


@given(content=st.binary(max_size=60))
def test_any_bytes_are_a_report_or_a_sentence(tmp_path_factory, content):
  folder = tmp_path_factory.mktemp('run')
  (folder / 'metrics.jsonl').write_bytes(content)
  with pytest.raises(ValueError, match='metrics.jsonl'):
    _read(folder)
