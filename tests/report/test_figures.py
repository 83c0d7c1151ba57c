"""The figures: what they keep of a run, and what becomes a sentence."""

import pathlib
import re

import numpy as np
import plotly.graph_objects as go
import pytest

from jetrl_jax.report import figures
from jetrl_jax.report.facts import Fact
from jetrl_jax.report.figures import Figure, Panel
from jetrl_jax.report.run import Health, Run, Series
from tests.report.pages import array

_DOCS = pathlib.Path(__file__).parents[2] / 'docs'


def run(name='run', health=None, **metrics) -> Run:
  """A run of steps 1, 2, ... with these metrics."""
  series = {
      metric: Series(np.arange(1, len(v) + 1), np.asarray(v, np.float64))
      for metric, v in metrics.items()
  }
  return Run(
      name=name,
      folder=pathlib.Path(name),
      steps=np.arange(1, 1 + max([len(v) for v in metrics.values()] or [1])),
      series=series,
      health=health,
      config={},
      starts=[],
      nonfinite={},
      notes=[],
      chosen={},
  )


def _draw(*values, **panel) -> Figure | Fact | None:
  """Draws a metric of runs of these values."""
  runs = [run(f'run{i}', a=v) for i, v in enumerate(values)]
  return figures.draw(Panel('t', {'a': 'a'}, **panel), runs)


def _traces(figure: Figure, role: str) -> list:
  return [t for t in figure.plot.data if t.meta and t.meta['role'] == role]


@pytest.mark.parametrize(
    'panel',
    [panel for panels in figures.PANELS.values() for panel in panels],
    ids=lambda panel: panel.title,
)
def test_every_metric_of_a_panel_is_in_the_docs(panel):
  names = re.findall(
      r'`([a-z_\d<>]+/[^`]*)`', (_DOCS / 'metrics.md').read_text()
  )
  documented = set()
  for name in names:
    start, brace, rest = name.partition('{')
    inner, _, end = rest.partition('}')
    documented |= (
        {start + i + end for i in inner.split(',')} if brace else {name}
    )
  of_rollout = {f'rollout_{name}' for name in documented}
  wanted = {*panel.curves.values(), *panel.band, *panel.same_as[:1]}
  assert wanted <= documented | of_rollout


def test_thinning_keeps_every_spike_both_ends_and_the_gap():
  values = np.sin(np.arange(9000.0))
  values[1234], values[4000], values[77] = 50.0, -60.0, np.nan
  places = figures.thinned(values)
  assert len(places) < 2000
  assert {0, 77, 1234, 4000, 8999} <= set(places.tolist())
  short = np.arange(800.0)
  np.testing.assert_array_equal(figures.thinned(short), np.arange(800))


def test_a_gap_stays_a_gap_and_is_said():
  figure = _draw([1.0, 2.0, np.nan, 3.0, 4.0])
  np.testing.assert_array_equal(figure.plot.data[0].y, [1, 2, np.nan, 3, 4])
  assert '1 value not finite, left out.' in figure.notes


def test_a_single_value_is_a_dot():
  assert _draw([3.0]).plot.data[0].mode == 'lines+markers'
  long = np.arange(100.0)
  assert _draw(long).plot.data[0].mode == 'lines'
  long[[49, 51]] = np.nan  # Alone between two gaps.
  assert _draw(long).plot.data[0].mode == 'lines+markers'


@pytest.mark.parametrize('values', [[0.5], [1.0], [0.0, 1.0], [0.98, 0.99]])
def test_the_axis_of_a_share_ends_at_0_and_100_percent(values):
  axis = _draw(values, unit='%').plot.layout.yaxis
  assert (axis.minallowed, axis.maxallowed) == (0, 1)
  # What is larger than 100% is shown all the same.
  assert _draw([0.5, 1.5], unit='%').plot.layout.yaxis.maxallowed is None


def test_what_is_never_negative_has_no_negative_axis():
  assert _draw([3.0]).plot.layout.yaxis.rangemode == 'nonnegative'
  assert _draw([0.1, 3.0]).plot.layout.yaxis.rangemode == 'tozero'
  assert _draw([-1.0, 3.0]).plot.layout.yaxis.rangemode is None


def test_few_steps_have_whole_ticks():
  assert _draw([3.0, 4.0]).plot.layout.xaxis.dtick == 1
  assert _draw(np.arange(100.0)).plot.layout.xaxis.dtick is None


@pytest.mark.parametrize(
    ('values', 'unit', 'said'),
    [
        ([0.0] * 60, '%', 'exactly 0 at all 60 steps'),
        ([5e-5] * 7, '', '5e-5 at all 7 steps'),
        ([1.0] * 7, '%', '100% at all 7 steps'),
    ],
)
def test_what_never_moves_is_a_sentence(values, unit, said):
  assert _draw(values, unit=unit) == Fact('t', said)


@pytest.mark.parametrize(
    'values', [[0.0] * 59 + [1e-6], [2.0, np.nan, 2.0], [2.0]]
)
def test_what_moves_or_is_alone_is_drawn(values):
  assert isinstance(_draw(values), Figure)


def test_curves_at_different_levels_are_drawn():
  assert isinstance(_draw([1.0] * 5, [2.0] * 5), Figure)
  assert _draw([1.0] * 5, [1.0] * 4).value == '1 at all steps'


def test_nothing_finite_is_nothing():
  assert _draw([np.nan, np.nan]) is None


def test_a_level_curve_inside_a_band_is_drawn():
  panel = Panel('t', {'a': 'a'}, band=('low', 'high'))
  band = {'low': [400.0] * 5, 'high': [600.0, 601, 602, 603, 604]}
  figure = figures.draw(panel, [run(a=[576.0] * 5, **band)])
  (edge,) = _traces(figure, 'band')
  np.testing.assert_array_equal(edge.y, [*band['high'], *band['low']])
  assert figure.at == 'step 5, 400 to 604'


def test_an_interval_is_a_band_within_0_and_100_percent():
  metrics = {'a': [0.1, 0.95], 'a/ci95': [0.2, 0.2]}
  figure = figures.draw(Panel('t', {'a': 'a'}, '%'), [run(**metrics)])
  (edge,) = _traces(figure, 'band')
  np.testing.assert_allclose(edge.y, [0.3, 1.0, 0.75, 0.0], atol=1e-12)


def test_the_axis_is_logarithmic_only_where_that_is_needed_and_possible():
  def kind(values):
    return _draw(values, log=True).plot.layout.yaxis.type

  assert kind([1e-4, 1.0]) == 'log'
  assert kind([0.5, 1.0]) is None
  assert kind([0.0, 1.0]) is None
  assert kind([-1.0, 100.0]) is None


def test_a_trailing_mean_leaves_gaps_out():
  mean = figures.trailing_mean(np.asarray([1, 2, 6, np.nan, 4, np.nan]), 2)
  np.testing.assert_allclose(mean, [1, 1.5, 4, 6, 4, 4])
  # Wider than the run.
  mean = figures.trailing_mean(np.asarray([1.0, 2, 6]), 7)
  np.testing.assert_allclose(mean, [1, 1.5, 3])


def test_runs_that_are_equal_look_equal_however_long_they_are():
  values = np.random.default_rng(0).standard_normal(60)
  figure = _draw(values, values[:24], smooth=True)
  assert figure.notes.count('Bold: mean of the last 6 steps.') == 1
  long, short = _traces(figure, 'line')
  np.testing.assert_array_equal(long.y[:24], short.y)
  raw = _traces(figure, 'faint')
  np.testing.assert_array_equal(raw[0].y[:24], raw[1].y)


def test_the_window_of_a_long_run_is_no_tenth_of_it():
  figure = _draw(np.sin(np.arange(5000.0)), smooth=True)
  assert 'Bold: mean of the last 100 steps.' in figure.notes


def test_the_key_of_a_curve_holds_all_its_traces():
  figure = _draw(np.arange(60.0), np.arange(50.0), smooth=True)
  assert [key[3] for key in figure.keys] == [[0, 1], [2, 3]]
  assert [key[4] for key in figure.keys] == [0, 1]
  assert [key[1] for key in figure.keys] == ['59', '49']


def test_a_run_without_a_metric_is_named_and_the_others_keep_their_colour():
  runs = [run('one', b=[1.0, 2.0]), run('two', a=[1.0, 2.0])]
  figure = figures.draw(Panel('t', {'a': 'a'}), runs)
  assert 'Not in one.' in figure.notes
  assert figure.plot.data[0].meta['color'] == 1


def test_an_accuracy_that_is_the_reward_is_not_drawn_twice():
  panel = Panel('t', {'a': 'a'}, same_as=('b', 'the reward'))
  found = figures.draw(panel, [run(a=[0.1, 0.2], b=[0.1, 0.2])])
  assert found == Fact('t', 'equal to the reward')
  found = figures.draw(panel, [run(a=[0.1, 0.2], b=[0.1, 0.3])])
  assert isinstance(found, Figure)


def _times(**phases):
  values = {f'timing_s/{name}': v for name, v in phases.items()}
  return figures.time_figure(run(**values))


def test_phases_add_up_and_a_step_that_compiles_is_cut_off():
  figure = _times(step=[100.0] + [4.0] * 9, gen=[90.0] + [3.0] * 9)
  rollout, rest = figure.plot.data
  np.testing.assert_allclose(np.add(rollout.y, rest.y), [100.0] + [4.0] * 9)
  assert 'Cut off: step 1: 100 s.' in figure.notes
  # 1.3 times the tallest that is kept, 4.
  assert figure.plot.layout.yaxis.range == (0, pytest.approx(5.2))


def test_phases_without_an_outlier_keep_all():
  figure = _times(step=[3.0, 4.0, 5.0], gen=[1.0, 1.0, 1.0])
  assert figure.notes == [] and figure.plot.layout.yaxis.range is None


def test_a_long_run_has_bars_of_many_steps():
  figure = _times(step=np.full(1000, 4.0), gen=np.full(1000, 1.0))
  assert 'A bar is the mean of 5 steps.' in figure.notes
  assert len(figure.plot.data[0].x) == 200


def heat(dots, values, **changes) -> Figure:
  """A heat map of steps 1, 2, ..."""
  options = {'unit': '%', 'log': True, 'worst': 'max'} | changes
  values = np.asarray(values, np.float32)
  steps = np.arange(1, values.shape[1] + 1)
  health = Health(dots=dots, steps=steps, values={})
  return figures.heat_figure('t', health, values, **options)


def test_dots_are_grouped_by_kind_in_the_order_of_the_forward():
  dots = ['layers_0/mlp/down', 'layers_10/attn/qkv', 'layers_9/attn/qkv', 'x']
  (trace,) = heat(dots, [[0.4], [0.2], [0.1], [0.3]]).plot.data
  assert trace.y == (dots[2], dots[1], dots[0], 'x')
  np.testing.assert_allclose(trace.customdata[:, 0], [0.1, 0.2, 0.4, 0.3])


def test_the_head_is_no_layer():
  dots = ['lm_head', 'layers_0/attn/o', 'layers_1/attn/o']
  figure = heat(dots, np.full((3, 4), 0.1))
  assert 'In each block layer 0 on top, 1 below.' in figure.notes


def test_zero_is_below_the_scale_and_absent_is_empty():
  figure = heat(['a'], [[np.nan, 0.0, 0.01, 1.0]])
  (trace,) = figure.plot.data
  np.testing.assert_allclose(trace.z[0, 2:], [-2, 0], rtol=1e-6)
  assert np.isnan(trace.z[0, 0])
  # Grey below the first colour.
  share = (trace.z[0] - trace.zmin) / (trace.zmax - trace.zmin)
  grey = [at for at, color in trace.colorscale if color == '#8a8f99']
  assert share[1] == 0 and grey[0] == 0 and share[1] < grey[1] < share[2]
  assert {'Grey: exactly 0.', 'Empty: not recorded.'} <= set(figure.notes)
  assert 'Grey: exactly 0.' not in heat(['a'], [[0.1, 0.2]]).notes


def test_a_column_of_many_steps_shows_the_worst_of_them():
  values = np.full((2, 1000), 0.01, np.float32)
  values[1, 503] = 0.5
  values[0, 20:25] = np.nan
  figure = heat(['layers_0/attn/o', 'layers_1/attn/o'], values)
  assert 'A column is the max of 5 steps.' in figure.notes
  shown = figure.plot.data[0].customdata
  assert shown.shape == (2, 200) and shown[1, 100] == 0.5
  assert (shown == 0.5).sum() == 1
  assert np.isnan(shown[0, 4]) and np.isnan(shown).sum() == 1
  lowest = heat(['a', 'b'], -values, worst='min', log=False)
  assert lowest.plot.data[0].customdata[1, 100] == -0.5


def test_the_worst_of_the_last_step_is_named():
  figure = heat(['a', 'b'], [[0.5, 0.001], [0.5, 0.02]])
  assert figure.at == 'last step, max: 2%, b'
  figure = heat(
      ['a', 'b'], [[30.0, 31.5], [30.0, 31.4]], unit='dB', worst='min'
  )
  assert figure.at == 'last step, min: 31.4 dB, b'


def test_text_is_not_markup_for_plotly():
  figure = figures.draw(
      Panel('t', {'a': 'a'}), [run('<b>&%{x}\u202e', a=[1, 2]), run(a=[1, 3])]
  )
  assert figure.plot.data[0].name == '&lt;b&gt;&amp;%{x}\\u202e'
  assert figure.plot.data[0].hovertemplate == '%{y:.4~g} '
  assert heat(['<a>', 'b'], [[1, 2], [3, 4]]).plot.data[0].y[0] == '&lt;a&gt;'


def test_a_long_run_of_a_large_model_is_a_small_figure():
  values = np.random.default_rng(0).lognormal(-7, 1, (36 * 4, 2000))
  dots = [f'layers_{i}/{kind}' for i in range(36) for kind in 'abcd']
  figure = heat(dots, values)
  assert len(figure.plot.to_json()) < 500_000


def test_arrays_are_written_as_plotly_reads_them():
  found = go.Figure(go.Scatter(y=np.asarray([1.0, np.nan]))).to_plotly_json()
  np.testing.assert_array_equal(array(found['data'][0]['y']), [1, np.nan])


def test_several_reward_functions_have_a_panel():
  values = {'rewards/math/mean': [0.1, 0.2], 'rewards/length/mean': [3.0, 4.0]}
  (panel,) = figures.reward_panels(run(**values, **{'critic/acc/mean': [0, 1]}))
  assert panel.curves == {
      'math': 'rewards/math/mean',
      'length': 'rewards/length/mean',
  }
  assert not figures.reward_panels(run(**{'rewards/math/mean': [0.1, 0.2]}))


def test_a_reward_in_the_place_of_an_accuracy_is_no_share():
  name = 'val-core/train/acc/mean@1'
  for values, unit in (([0.0, 0.5, 1.0], '%'), ([0.5, 16.5], '')):
    (panel,) = figures.heldout_panels([run(**{name: values})])
    assert panel.unit == unit
