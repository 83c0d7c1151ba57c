"""Raw metrics in compact form, and the figures drawn of them."""

import json

import matplotlib.pyplot as plt
import pytest

from study import cell_figures, figures, results, tables
from study.arms import ARMS
from study.run import has_failed, is_finished, is_over, steps_done


def _workdir(folder, accuracies, mismatch):
  """A finished run with an evaluation at every step."""
  (folder / 'export').mkdir(parents=True)
  config = {
      'trainer': {
          'total_training_steps': len(accuracies) - 1,
          'test_freq': 1,
          'max_skipped_updates': 3,
      }
  }
  (folder / 'config.json').write_text(json.dumps(config))
  start = {'device': 'cpu', 'versions': {}, 'commit': None, 'command': ['x']}
  (folder / 'starts.jsonl').write_text(json.dumps(start) + '\n')
  with open(folder / 'metrics.jsonl', 'w') as file:
    for step, accuracy in enumerate(accuracies):
      row = {
          'step': step,
          'val-core/heldout/acc/mean@1': accuracy,
          'val-core/heldout/acc/mean@1/ci95': 0.05,
          'val-bf16/heldout/acc/mean@1': accuracy,
          'perf/throughput': 1.0,
      }
      if step:
        row |= {
            'actor/grad_norm': 0.5,
            'training/rollout_logprob_diff_mean': mismatch,
            'rollout_corr/k3_kl': mismatch**2,
            'rollout_corr/rollout_is_eff_sample_size': 1 - mismatch * step,
            'training/mismatch_token_frac': float(mismatch > 0),
            'actor/pg_clipfrac': 0.001 * step,
        }
      file.write(json.dumps(row) + '\n')


@pytest.fixture(name='written')
def _written(tmp_path):
  for arm, accuracy, mismatch in (
      ('bf16', 0.8, 0.0),
      ('jetrl', 0.8, 0.0),
      ('fp8_rollout', 0.2, 0.01),
  ):
    for seed in (1, 2):
      values = [0.4, 0.6, accuracy, accuracy, accuracy]
      workdir = tmp_path / 'runs' / arm / f'seed{seed}'
      _workdir(workdir, values, mismatch)
      lines = results.compact(workdir, ARMS[arm], seed)
      (tmp_path / 'out').mkdir(exist_ok=True)
      results.write(tmp_path / 'out' / f'{arm}_seed{seed}.jsonl.gz', lines)
  return tmp_path


def test_a_run_is_read_as_it_was_written_without_what_is_not_kept(written):
  runs = results.read(written / 'out')
  assert [(r.arm.name, r.seed) for r in runs] == [
      ('bf16', 1),
      ('bf16', 2),
      ('fp8_rollout', 1),
      ('fp8_rollout', 2),
      ('jetrl', 1),
      ('jetrl', 2),
  ]
  mixed = runs[2]
  assert mixed.accuracy('core')[0] == (0, 0.4)
  assert mixed.series('actor/grad_norm')[0] == (1, 0.5)
  kept = {name for row in mixed.rows for name in row}
  assert not {'perf/throughput', 'val-core/heldout/acc/mean@1/ci95'} & kept
  assert mixed.about['finished'] and 'command' not in mixed.about


def test_the_same_lines_give_the_same_bytes(written):
  for name in ('a', 'b'):
    results.write(written / name, [{'step': 1}])
  assert (written / 'a').read_bytes() == (written / 'b').read_bytes()


def test_a_run_is_finished_with_its_last_step_and_its_export(tmp_path):
  assert steps_done(tmp_path) == -1 and not is_finished(tmp_path)
  _workdir(tmp_path, [0.1, 0.2, 0.3], 0.0)
  assert steps_done(tmp_path) == 2 and is_finished(tmp_path)
  (tmp_path / 'export').rmdir()
  assert not is_finished(tmp_path)


def test_a_run_without_its_starts_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match='no starts.jsonl, which names device'):
    results.compact(tmp_path, ARMS['jetrl'], seed=0)


def test_a_run_without_its_starts_keeps_no_other_from_being_written(
    written, monkeypatch
):
  (written / 'runs/bf16/seed1/starts.jsonl').unlink()
  output = written / 'again'
  argv = ['x', f'--folder={written}', f'--output={output}']
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit, match='1 of 6 runs are left out: .*seed1 has'):
    results.main()
  assert len(results.read(output)) == 5


def test_a_run_with_other_settings_is_none_of_the_design(tmp_path):
  arm = ARMS['math_jetrl']
  places = {'model.path': 'folder', 'data.val_files': "('a.jsonl',)"}
  _workdir(tmp_path, [0.1, 0.2, 0.3], 0.0)
  for more, expected in (
      (places, True),
      (places | {'algorithm.policy_loss': 'cispo'}, False),
  ):
    (tmp_path / 'set.json').write_text(json.dumps(more))
    about, *rows = results.compact(tmp_path, arm, seed=1)
    assert about['set'] == dict(more.items() - places.items())
    run = results.Run(arm=arm, seed=1, about=about, rows=rows)
    assert run.is_of_design == expected


def test_a_line_that_is_being_written_is_left_out(tmp_path):
  _workdir(tmp_path, [0.1, 0.2, 0.3], 0.0)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 3, "fp8_health": {"layers_0/attn/qkv": {}')
  assert steps_done(tmp_path) == 2
  assert len(results.compact(tmp_path, ARMS['jetrl'], seed=0)) == 1 + 3


def test_a_folder_that_is_no_run_of_the_study_is_named(written, monkeypatch):
  runs, output = written / 'runs', written / 'again'
  (runs / 'jetrl').rename(runs / 'mine')
  argv = ['x', f'--folder={written}', f'--output={output}']
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit, match='runs/mine/seed1 is no run of st'):
    results.main()


def test_a_run_that_was_not_evaluated_in_a_precision_says_so(written):
  run = results.read(written / 'out')[0]
  with pytest.raises(ValueError, match="bf16 seed 1 has 0 .* in 'int8'.*needs"):
    run.accuracy('int8')


def test_an_empty_folder_is_answered_with_what_it_lacks(tmp_path):
  with pytest.raises(ValueError, match='holds no .* of study.results'):
    results.read(tmp_path)


def test_folders_add_up_but_not_the_same_run_twice(written, tmp_path):
  both = written / 'out', tmp_path / 'more'
  both[1].mkdir()
  for path in both[0].glob('*seed2*'):
    path.rename(both[1] / path.name)
  runs = results.read(*both)
  assert [r.seed for r in runs] == [r.seed for r in results.read(*both[::-1])]
  assert {run.seed for run in runs} == {1, 2}
  with pytest.raises(ValueError, match='a second run of'):
    results.read(both[0], both[0])


def test_every_figure_is_drawn_and_the_table_says_what_is_known(
    written, capsys
):
  runs = results.read(written / 'out')
  for draw in (figures.curves, figures.pairs, figures.control):
    draw(runs, written / f'{draw.__name__}.png')
    assert (written / f'{draw.__name__}.png').stat().st_size > 10_000
  figures.print_arms(runs)
  table = capsys.readouterr().out
  # Two pairs of the same difference: too few for a verdict.
  assert "| fp8_rollout | bf16 | rollout's | -60.0 |" in table
  assert '| -60.0 to -60.0 | inconclusive |' in table
  # Of four steps: the least of 1 - 0.01 step, and the mean of 0.001 step.
  row = '| `fp8_rollout` | 40.0% | 20.0, 20.0 | 20.0, 20.0 | 100% |'
  assert f'{row} 1.0e-04 (1.0e-04) | 0.96 | 0.25% |' in table


def _runs(accuracies):
  """Runs of a real cell: (arm, seed) -> accuracy at steps 0, 60 and 80."""
  return [
      results.Run(
          arm=ARMS[arm],
          seed=seed,
          about={'device': 'H100', 'finished': True},
          rows=[
              {
                  'step': step,
                  'val-core/test/acc/mean@1': value,
                  'val-bf16/test/acc/mean@1': value,
                  'rollout_corr/k3_kl': 1e-3,
                  'timing_s/step': 30.0 + step,
              }
              for step, value in zip((0, 60, 80), values, strict=True)
          ],
      )
      for (arm, seed), values in accuracies.items()
  ]


def _of_seeds(arm, *ends):
  return {(arm, i): (0.2, x, x + 0.1) for i, x in enumerate(ends, start=1)}


def _table(runs, folder, capsys):
  cell_figures.endpoints(runs, folder / 'e.png', 'x')
  lines = capsys.readouterr().out.splitlines()
  return [line for line in lines if line.startswith('| ')][1:]


def test_the_tables_of_a_cell_answer_the_questions(tmp_path, capsys):
  runs = _runs(
      {
          **_of_seeds('gsm8k_jetrl', 0.30, 0.31, 0.32, 0.30, 0.31),
          **_of_seeds('gsm8k_bf16', 0.30, 0.31, 0.322, 0.30, 0.31),
          **_of_seeds('gsm8k_qurl', 0.10, 0.11, 0.1215),
      }
  )
  lines = _table(runs, tmp_path, capsys)
  assert [line.split(' | ')[:2] for line in lines] == [
      ['| gsm8k_jetrl', 'gsm8k_bf16'],
      ['| gsm8k_qurl', 'gsm8k_bf16'],
  ]
  assert 'as good: yes |' in lines[0] and '| -20.0 |' in lines[1]
  assert lines[1].endswith('| different |')
  for draw in (cell_figures.means, cell_figures.held_out, cell_figures.k3):
    draw(runs, tmp_path / f'{draw.__name__}.png', 'x')
  assert len(list(tmp_path.glob('*.png'))) == 4
  steps, mean_S, half_S = cell_figures.mean_by_step(
      [[(s, 100 * x) for s, x in run.accuracy('core')] for run in runs[:2]]
  )
  assert steps.tolist() == [0, 60, 80]
  assert mean_S == pytest.approx([20, 30.5, 40.5])
  # t(1) = 12.706, std of two values 1 apart is 1 / sqrt(2).
  assert half_S == pytest.approx([0, 12.706 * 0.5, 12.706 * 0.5], rel=1e-4)


def test_a_figure_of_few_seeds_promises_no_interval(tmp_path, monkeypatch):
  titles = []
  monkeypatch.setattr(
      cell_figures.figure_style,
      'save',
      lambda figure, path: titles.append(figure.get_suptitle()),
  )
  for ends in ([0.3], [0.3, 0.31], [0.3, 0.31, 0.32, 0.33, 0.34]):
    runs = _runs(_of_seeds('gsm8k_jetrl', *ends))
    cell_figures.means(runs, tmp_path / 'x.png', 'x')
  one, two, five = titles
  assert 'one seed' in one and 'interval' not in one
  assert 'range of 2 seeds' in two and '95%' not in two
  assert '95% interval, else' in five


def test_curves_of_few_seeds_have_their_range_and_promise_no_interval(
    tmp_path, monkeypatch
):
  drawn, titles = [], []

  def draw_mean(panel, runs, style, scale, *, band):
    drawn.append((scale, len(runs), band))

  monkeypatch.setattr(cell_figures, 'draw_mean', draw_mean)
  monkeypatch.setattr(
      figures.figure_style,
      'save',
      lambda figure, path: titles.append(figure.get_suptitle()),
  )
  few = _of_seeds('gsm8k_jetrl', 0.3, 0.31, 0.32, 0.33)
  many = _of_seeds('gsm8k_bf16', 0.3, 0.31, 0.32, 0.33, 0.34)
  for runs in (few, many, few | many):
    figures.curves(_runs(runs), tmp_path / 'x.png')
  # Two of nine panels are held-out accuracy; the third is linear as well.
  assert drawn[:3] == [('linear', 4, 'range')] * 3
  assert drawn[9:12] == [
      ('linear', 5, b) for b in ('interval',) * 2 + ('range',)
  ]
  first, second, both = titles
  assert '95%' not in first and 'with their range; held out with the' in first
  assert 'held out with its 95% interval and the seeds' in second
  assert '95% interval\n(of fewer than 5 seeds: range) and the seeds' in both


@pytest.mark.parametrize('scale, line', [('log', 2.0), ('linear', 37.0)])
def test_a_range_is_that_of_the_seeds_and_no_peak_carries_a_log_axis(
    scale, line
):
  figure, panel = plt.subplots()
  runs = [[(10, 1.0)], [(10, 2.0)], [(10, 108.0)]]
  cell_figures.draw_mean(panel, runs, {'color': 'black'}, scale, band='range')
  (drawn,), (band,) = panel.lines, panel.collections
  assert drawn.get_ydata() == [line]
  heights = band.get_paths()[0].vertices[:, 1]
  assert (heights.min(), heights.max()) == (1.0, 108.0)
  plt.close(figure)


@pytest.mark.parametrize('scale', ['log', 'symlog'])
def test_an_interval_that_reaches_below_0_ends_with_a_logarithmic_axis(scale):
  figure, panel = plt.subplots()
  runs = [[(10, 1.0), (20, 1.0)], [(10, 2.0), (20, 9.0)]]
  cell_figures.draw_mean(panel, runs, {'color': 'black'}, scale)
  panel.set_yscale(scale)
  figure.draw_without_rendering()
  assert panel.lines[0].get_ydata().tolist() == [1.5, 5.0]
  bottom, top = panel.get_ylim()
  assert bottom > 0 or scale == 'symlog'
  # t(1) = 12.706, half of two values 8 apart.
  assert top >= 5 + 12.7 * 4
  plt.close(figure)


def _is_whole(figure) -> bool:
  """Says whether all that a figure draws lies in it, to a pixel."""
  figure.draw_without_rendering()
  drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
  edge = 1 / figure.dpi
  return (
      min(drawn.x0, drawn.y0) > -edge
      and drawn.x1 < width + edge
      and drawn.y1 < height + edge
  )


def test_no_text_of_a_figure_is_cut_off(tmp_path, monkeypatch):
  found = []
  monkeypatch.setattr(
      cell_figures.figure_style,
      'save',
      lambda figure, path: found.append(figure),
  )
  origin = '50 runs of up to 200 steps on NVIDIA H100 80GB HBM3, NVIDIA H200'
  cell = _of_seeds('sums_stress_fp8_rollout', 0.3, 0.31, 0.32, 0.33, 0.34)
  cell |= _of_seeds('sums_stress_bf16', 0.3, 0.31, 0.32)
  toy = _of_seeds('mixed_int4_icepop_long', 0.3, 0.31, 0.32)
  toy |= _of_seeds('unified_int4_long', 0.3, 0.32, 0.34)
  with plt.rc_context():
    cell_figures.figure_style.use()
    for draw in (
        cell_figures.means,
        cell_figures.held_out,
        cell_figures.by_time,
        cell_figures.endpoints,
        cell_figures.k3,
    ):
      draw(_runs(cell), tmp_path, origin)
    for draw in (figures.curves, figures.pairs, figures.control):
      draw(_runs(toy), tmp_path)
    whole = [_is_whole(figure) for figure in found]
  plt.close('all')
  assert whole == [True] * 8


def test_a_curve_has_the_means_of_ten_steps():
  points = [(step, float(step)) for step in range(1, 26)]
  assert cell_figures.binned(points) == [(10, 5.5), (20, 15.5)]


def test_accuracy_by_time_has_all_that_came_before_it_but_tests(tmp_path):
  runs = _runs(_of_seeds('gsm8k_jetrl', 0.30, 0.31))
  # 30, 90 and 110 seconds a step.
  assert cell_figures.minutes(runs[0]) == {0: 0.5, 60: 2.0, 80: 230 / 60}
  runs[0].rows[-1]['timing_s/testing'] = 50.0
  assert cell_figures.minutes(runs[0]) == {0: 0.5, 60: 2.0, 80: 3.0}
  # One failed early.
  del runs[1].rows[-1]
  cell_figures.by_time(runs, tmp_path / 't.png', 'x')
  assert (tmp_path / 't.png').stat().st_size > 10_000


def test_a_look_before_the_end_decides_nothing(tmp_path, capsys):
  runs = _runs(
      {
          **_of_seeds('gsm8k_jetrl', 0.30, 0.31, 0.32),
          **_of_seeds('gsm8k_bf16', 0.30, 0.31, 0.322),
          **_of_seeds('gsm8k_qurl', 0.10, 0.11),
      }
  )
  primary, secondary = _table(runs, tmp_path, capsys)
  assert primary.endswith('| as good: not decided (3 of 5 pairs) |')
  assert secondary.endswith('| not decided (2 of 3 pairs) |')


def test_p_values_are_corrected_for_questions_without_runs_too(
    tmp_path, capsys
):
  runs = _runs(
      {
          **_of_seeds('gsm8k_bf16', 0.30, 0.31, 0.32),
          **_of_seeds('gsm8k_qurl', 0.26, 0.28, 0.28),
      }
  )
  (line,) = _table(runs, tmp_path, capsys)
  # d = -4, -3, -4: mean -11/3, std 1/sqrt(3), t = 11, p = 1 - 11/sqrt(123),
  # and there are seven questions.
  p = 7 * (1 - 11 / 123**0.5)
  assert f'| {p:.2g} | not shown to differ |' in line


def test_one_pair_has_no_interval(tmp_path, capsys):
  runs = _runs(
      {**_of_seeds('math_bf16', 0.30), **_of_seeds('math_jetrl', 0.28)}
  )
  (line,) = _table(runs, tmp_path, capsys)
  # Final accuracy, over three evaluations.
  assert '| math_jetrl | math_bf16 | 1 | -1.3 | one pair, no interval |' in line


def test_seeds_beyond_the_design_are_left_out(tmp_path, capsys):
  runs = _runs(
      {
          **_of_seeds('gsm8k_bf16', *[0.30, 0.31, 0.32, 0.31, 0.30, 0.30]),
          **_of_seeds('gsm8k_jetrl', *[0.29, 0.31, 0.33, 0.31, 0.30, 0.9]),
      }
  )
  cell_figures.endpoints(runs, tmp_path / 'e.png', 'x')
  out = capsys.readouterr().out
  assert 'left out, exploratory: gsm8k_jetrl seed 6' in out
  assert '| gsm8k_jetrl | gsm8k_bf16 | 5 | +0.0 |' in out
  # Asked for, they count, and decide nothing.
  cell_figures.endpoints(runs, tmp_path / 'e.png', 'x', exploratory=True)
  (line,) = capsys.readouterr().out.splitlines()[2:]
  assert line.startswith('| gsm8k_jetrl | gsm8k_bf16 | 6 | +10.0 |')
  assert line.endswith('|  | decides nothing |')


def test_the_other_cells_are_described_and_decide_nothing(tmp_path, capsys):
  runs = _runs(
      {
          **_of_seeds('sums_jetrl', 0.1, 0.2, 0.3),
          **_of_seeds('sums_bf16', 0.2, 0.3, 0.5),
          **_of_seeds('stress_fp8_rollout', 0.1, 0.2, 0.3),
          **_of_seeds('stress_bf16', 0.2, 0.3, 0.5),
      }
  )
  stress, sums = _table(runs, tmp_path, capsys)
  assert stress.startswith('| stress_fp8_rollout | stress_bf16 | 3 | -13.3 |')
  # Of sums the last three evaluations, here all: steps 0, 60 and 80.
  assert sums.startswith('| sums_jetrl | sums_bf16 | 3 | -8.9 |')
  for line in (stress, sums):
    assert line.endswith('|  | decides nothing |')


def _failed(folder, accuracies, steps):
  """A run whose updates were not finite any more, without an export."""
  _workdir(folder, accuracies, 0.0)
  (folder / 'export').rmdir()
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines][: steps + 1]
  for row in rows[1:]:
    good = row['step'] <= steps - 3
    row |= {
        'training/updates': int(good),
        'training/skipped_updates': int(not good),
    }
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (folder / 'metrics.jsonl').write_text(text)


def test_a_run_that_failed_counts_with_its_last_evaluation(
    tmp_path, monkeypatch, capsys
):
  _failed(tmp_path, [0.4, 0.6, 0.5, 0.3, 0.1, 0.9, 0.9], steps=4)
  assert has_failed(tmp_path) and is_over(tmp_path)
  lines = results.compact(tmp_path, ARMS['bf16'], seed=1)
  (tmp_path / 'out').mkdir()
  results.write(tmp_path / 'out' / 'bf16_seed1.jsonl.gz', lines)
  (run,) = results.read(tmp_path / 'out')
  assert run.is_over and not run.about['finished']
  assert run.judged() == [*run.accuracy(), (5, 0.1), (6, 0.1)]
  assert figures.finals([run], 'bf16', 'core') == {1: pytest.approx(0.1)}
  flags = [f'--results={tmp_path / "out"}', f'--output={tmp_path / "k.png"}']
  monkeypatch.setattr('sys.argv', ['x', 'control', *flags])
  figures.main()
  assert 'failed at step 4: bf16 seed 1' in capsys.readouterr().out


def test_a_run_that_was_stopped_from_outside_has_not_failed(tmp_path):
  _failed(tmp_path, [0.4, 0.6, 0.5, 0.3, 0.1], steps=4)
  lines = (tmp_path / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (tmp_path / 'metrics.jsonl').write_text(''.join(lines[:-1]))
  # Two updates in a row were not finite, of three.
  assert not has_failed(tmp_path) and not is_over(tmp_path)
  assert not has_failed(tmp_path / 'nothing')


def test_a_run_is_evaluated_every_few_steps_and_at_its_last():
  config = {'trainer': {'total_training_steps': 50, 'test_freq': 20}}
  assert results.evaluations(config) == [0, 20, 40, 50]


def test_tables_of_runs_of_which_none_is_over_are_refused(
    tmp_path, monkeypatch
):
  _workdir(tmp_path / 'run', [0.1, 0.2], 0.0)
  (tmp_path / 'run/export').rmdir()
  assert not is_over(tmp_path / 'run')
  (tmp_path / 'out').mkdir()
  results.write(
      tmp_path / 'out/bf16_seed1.jsonl.gz',
      results.compact(tmp_path / 'run', ARMS['bf16'], seed=1),
  )
  monkeypatch.setattr('sys.argv', ['x', '--results', str(tmp_path / 'out')])
  with pytest.raises(SystemExit) as ended:
    tables.main()
  assert ended.value.code == (
      'error: --results has no run that is over; python -m study.run goes on'
      ' with unfinished ones'
  )


def test_the_tables_have_every_seed_their_mean_and_what_is_compared():
  run, other = _runs(_of_seeds('gsm8k_jetrl', 0.30, 0.40))
  for row in run.rows:
    row['timing_s/step'] = 2.0
  printed = tables.lines([run, other])
  assert printed[0] == '`gsm8k_jetrl`'
  accuracy = [value for _, value in run.judged()]
  cells = [f'{100 * value:.1f}' for value in accuracy]
  assert f'| seed 1, as it samples | {" | ".join(cells)} |' in printed
  ends = [cell_figures.endpoint(one) for one in (run, other)]
  ends = [f'{100 * value:.1f}' for value in (*ends, sum(ends) / 2)]
  assert f'| endpoint | {" | ".join(ends)} |' in printed
  assert ends[0] != ends[1]
  assert any(
      line.startswith('| seconds a step, median from step 40 on | 2.00 |')
      for line in printed
  )
