"""Curves, areas and heat maps: what they keep, and what they say."""

import base64
import re
import struct
import zlib

import numpy as np
import pytest

from jetrl_jax.report import axes, charts
from jetrl_jax.report import heat as report_heat
from jetrl_jax.report.charts import Line, area_chart, line_chart, thinned
from tests.report.report_run import steps_and


def _line(values, **more) -> Line:
  return Line(label='a', color=0, **steps_and(values), **more)


def test_thinning_keeps_every_spike_both_ends_and_the_gap():
  values = np.sin(np.arange(5000.0))
  values[1234], values[4000], values[77] = 50.0, -60.0, np.nan
  thin = thinned(_line(values))
  assert len(thin.steps) < 1000
  assert {1, 78, 1235, 4001, 5000} <= set(thin.steps.tolist())
  assert np.nanmax(thin.values) == 50.0 and np.nanmin(thin.values) == -60.0
  np.testing.assert_array_equal(thin.values, values[thin.steps - 1])


def test_a_short_series_is_not_thinned():
  line = _line(np.arange(400.0))
  assert thinned(line) is line


def test_a_gap_breaks_the_curve_and_is_said():
  chart = line_chart('t', [_line([1.0, 2.0, np.nan, 3.0, 4.0])])
  path = re.search(r'class="line c0" d="([^"]*)"', chart.html)[1]
  assert path.count('M') == 2
  assert '1 values were not finite' in chart.html
  assert chart.data['lines'][0]['y'] == [1.0, 2.0, None, 3.0, 4.0]


def test_a_single_value_is_still_seen():
  chart = line_chart('t', [_line([3.0])])
  assert re.search(r'd="M[0-9.]+ [0-9.]+h.1"', chart.html)


@pytest.mark.parametrize(
    ('values', 'unit', 'said'),
    [
        ([0.0] * 60, '%', 'exactly 0 at all 60 steps'),
        ([5e-5] * 7, '', '5e-5 at all 7 steps'),
        ([1.0] * 7, '%', '100% at all 7 steps'),
        ([0.0] * 59 + [1e-6], '', ''),
        ([2.0, np.nan, 2.0], '', ''),
        ([2.0], '', ''),
    ],
)
def test_what_never_moves_is_a_sentence(values, unit, said):
  assert charts.still([_line(values)], unit) == said


def test_a_level_curve_inside_a_band_is_drawn():
  values = np.full(50, 576.0)
  band = np.stack([np.full(50, 400.0), np.arange(600.0, 650.0)])
  lines = [_line(values, band=band)]
  assert not charts.still(lines, 'tokens')
  path = re.search(r'class="line c0" d="M([^"]*)"', line_chart('t', lines).html)
  assert len({point.split()[1] for point in path[1].split('L')}) == 1


def test_curves_at_different_levels_are_drawn():
  assert not charts.still([_line([1.0] * 5), _line([2.0] * 5)], '')
  lines = [_line([1.0] * 5), _line([1.0] * 4)]
  assert charts.still(lines, 'nats') == '1 nats at all steps'


def test_a_long_number_at_the_right_edge_is_not_cut():
  labels = axes.step_labels(0, 200000)
  places = re.findall(r'mid" x="([0-9.]+)" y="\d+">(\d+)<', labels)
  assert places[-1][1] == '200000'
  half = 3.3 * 6
  assert float(places[-1][0]) + half <= axes.WIDTH + 0.1


def test_the_axis_is_logarithmic_only_where_that_is_needed_and_possible():
  def log(values):
    return line_chart('t', [_line(values)], log=True).data['log']

  assert log([1e-4, 1.0])
  assert not log([0.5, 1.0])
  assert not log([0.0, 1.0])
  assert not log([-1.0, 100.0])


@pytest.mark.parametrize(
    ('low', 'high', 'log', 'expected'),
    [
        (0, 100, False, [0, 25, 50, 75, 100]),
        (0.1, 0.9, False, [0.2, 0.4, 0.6, 0.8]),
        (-3, 3, False, [-2, 0, 2]),
        (0.05, 200, True, [0.1, 1, 10, 100]),
    ],
)
def test_ticks_are_round_and_inside(low, high, log, expected):
  np.testing.assert_allclose(axes.ticks(low, high, log), expected, atol=1e-12)


def test_a_moving_average_is_centred_and_leaves_gaps_out():
  # At the ends over two values; beside the gap over what is there.
  average = charts.moving_average(_line([1, 2, 6, np.nan, 4]), 3)
  np.testing.assert_allclose(average.values, [1.5, 3, 4, 5, 4])
  # A short run beside a long one, whose window is wider than the run.
  average = charts.moving_average(_line([1, 2, 6]), 7)
  np.testing.assert_allclose(average.values, [3, 3, 3])


def test_areas_add_up_and_a_step_that_compiles_is_cut_off():
  layers = [_line([90.0] + [3.0] * 9), _line([10.0] + [1.0] * 9)]
  chart = area_chart('t', layers, unit='s')
  assert 'Cut off: step 1: 100 s.' in chart.html
  # 1.3 times the tallest that is kept, 4.
  assert chart.data['y'] == [0.0, pytest.approx(5.2)]
  assert [line['y'][1] for line in chart.data['lines']] == [3.0, 1.0]


def test_areas_without_an_outlier_keep_all():
  chart = area_chart('t', [_line([3.0, 4.0, 5.0])], unit='s')
  assert 'Cut off' not in chart.html
  assert chart.data['y'][1] == pytest.approx(5.25)


def _decoded(png: bytes) -> tuple[np.ndarray, bytes]:
  """The palette indices and the palette of a PNG."""
  chunks, at = {}, 8
  while at < len(png):
    size, kind = struct.unpack('>I4s', png[at : at + 8])
    content = png[at + 8 : at + 8 + size]
    check = struct.unpack('>I', png[at + 8 + size : at + 12 + size])[0]
    assert check == zlib.crc32(kind + content)
    chunks[kind] = content
    at += 12 + size
  width, height = struct.unpack('>2I', chunks[b'IHDR'][:8])
  rows = np.frombuffer(zlib.decompress(chunks[b'IDAT']), np.uint8)
  rows = rows.reshape(height, width + 1)
  assert not rows[:, 0].any()  # No filter.
  return rows[:, 1:], chunks[b'PLTE']


def test_the_picture_holds_the_levels():
  pixels = np.arange(200, dtype=np.uint8).reshape(4, 50)
  found, palette = _decoded(report_heat.png(pixels))
  np.testing.assert_array_equal(found, pixels)
  assert palette[6:] == bytes(c for color in report_heat.ramp() for c in color)


def test_no_two_levels_have_one_colour():
  assert len(set(report_heat.ramp())) == report_heat.LEVELS


@pytest.mark.parametrize('log', [False, True])
def test_a_level_is_a_value_to_half_a_step_of_the_scale(log):
  values = np.random.default_rng(0).uniform(0.001, 10.0, (5, 40))
  low, high = 0.001, 10.0
  level = report_heat.levels(values, low, high, log).astype(np.float64)
  share = (level - report_heat.FIRST) / (report_heat.LEVELS - 1)
  half = 0.5 / (report_heat.LEVELS - 1)
  if log:
    wanted = np.log(values / low) / np.log(high / low)
  else:
    wanted = (values - low) / (high - low)
  assert np.abs(share - wanted).max() <= half * (1 + 1e-9)


def test_absent_and_zero_are_no_levels_of_the_scale():
  values = np.asarray([[np.nan, 0.0, 0.5]])
  found = report_heat.levels(values, 0.5, 1.0, True)
  expected = [report_heat.ABSENT, report_heat.ZERO, report_heat.FIRST]
  assert found.tolist() == [expected]


def _map(dots, values, **changes):
  options = {'unit': '%', 'log': True, 'worst': 'max'} | changes
  return report_heat.heat_map(
      't', dots, np.arange(1, values.shape[1] + 1), values, **options
  )


def test_the_head_is_no_layer():
  dots = ['lm_head', 'layers_0/attn/o', 'layers_1/attn/o']
  heat = _map(dots, np.full((3, 4), 0.1))
  assert 'In each block layer 0 on top, 1 below.' in heat.html


def _picture(heat) -> bytes:
  return base64.b64decode(re.search(r'base64,([^"]*)"', heat.html)[1])


def test_dots_are_grouped_by_kind_in_the_order_of_the_forward():
  dots = ['layers_0/mlp/down', 'layers_10/attn/qkv', 'layers_9/attn/qkv', 'x']
  values = np.asarray([[0.4], [0.2], [0.1], [0.3]], np.float32)
  heat = _map(dots, values)
  assert heat.data['dots'] == [dots[2], dots[1], dots[0], 'x']
  found, _ = _decoded(_picture(heat))
  assert np.all(np.diff(found[[0, 1, 3, 2], 0].astype(int)) > 0)


def test_a_column_of_many_steps_shows_the_worst_of_them():
  values = np.full((2, 1000), 0.01, np.float32)
  values[1, 503] = 0.5
  heat = _map(['layers_0/attn/o', 'layers_1/attn/o'], values)
  assert 'A column is the max of 5 steps.' in heat.html
  found, _ = _decoded(_picture(heat))
  assert found.shape == (2, 200) and len(heat.data['steps']) == 200
  assert (found == found.max()).sum() == 1 and found[1, 100] == found.max()
  lowest = _map(['a', 'b'], -values, worst='min', log=False)
  found, _ = _decoded(_picture(lowest))
  assert (found == found.min()).sum() == 1 and found[1, 100] == found.min()


def test_curves_of_a_chart_are_smoothed_over_one_window():
  lines = [_line(np.arange(100.0)), _line(np.arange(60.0)), _line([1.0, 2.0])]
  chart = line_chart('t', lines, smooth=True)
  assert chart.html.count('Bold: mean of 11 steps.') == 1
  assert chart.html.count('class="line c0"') == 3  # Two means, one short.
  assert chart.html.count('class="line c0 faint"') == 2


def test_the_ends_of_a_narrow_scale_have_the_digits_that_differ():
  values = np.asarray([[31.501], [31.549]])
  heat = _map(['a', 'b'], values, unit='dB', log=False)
  assert '>31.5 dB<' in heat.html and '>31.55 dB<' in heat.html


def test_a_long_run_of_a_large_model_is_a_small_picture():
  values = np.random.default_rng(0).lognormal(-7, 1, (36 * 4, 2000))
  dots = [f'layers_{i}/{kind}' for i in range(36) for kind in 'abcd']
  assert len(_map(dots, values).html) < 60_000
