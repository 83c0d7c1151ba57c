"""The report's script: a cursor over all charts, and the values under it.

It reads one JSON element, writes text only through textContent and makes SVG
elements only from numbers, so that nothing that a model wrote is ever markup.
"""

JS = """
'use strict';
{
const data = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';
const {left, right, top, bottom, width} = data.frame;

function digits(v) {
  const size = Math.abs(v);
  if (v === 0) return '0';
  if (size >= 1e6 || size < 1e-3) {
    return v.toExponential(2).replace(/\\.?0+e/, 'e').replace('+', '');
  }
  return String(size >= 100 ? Math.round(v) : Number(v.toPrecision(3)));
}
function number(v, unit) {
  if (v === null || v === undefined) return '–';
  if (unit === '%') return digits(100 * v) + '%';
  return digits(v) + (unit ? ' ' + unit : '');
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
function element(parent, name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  parent.appendChild(made);
}
function place(event, svg) {
  const box = svg.getBoundingClientRect();
  const scale = width / box.width;
  return [(event.clientX - box.left) * scale,
          (event.clientY - box.top) * scale];
}

const all = selector => [...document.querySelectorAll(selector)];
const charts = all('figure.chart').map((figure, i) => {
  const values = [...figure.querySelectorAll('li b')];
  return {figure, values, plain: values.map(b => b.textContent),
          at: figure.querySelector('.at'),
          plainAt: figure.querySelector('.at').textContent,
          svg: figure.querySelector('svg'),
          cursor: figure.querySelector('.cursor'), ...data.charts[i]};
});
function yPlace(chart, v) {
  const [low, high] = chart.y;
  const share = chart.log ? Math.log(v / low) / Math.log(high / low)
                          : (v - low) / (high - low);
  return bottom + Math.min(Math.max(share, 0), 1) * (top - bottom);
}
function show(chart, step) {
  chart.cursor.replaceChildren();
  if (step === null) {
    chart.at.textContent = chart.plainAt;
    chart.values.forEach((b, i) => { b.textContent = chart.plain[i]; });
    return;
  }
  const [x0, x1] = chart.x;
  const across = s => left + (s - x0) / (x1 - x0) * (right - left);
  let shown = null, band = '';
  chart.lines.forEach((line, i) => {
    const j = nearest(line.x, step), v = line.y[j];
    if (shown === null || Math.abs(line.x[j] - step) < Math.abs(shown - step)) {
      shown = line.x[j];
    }
    if (line.low && chart.lines.length === 1) {
      band = ', ' + number(line.low[j], chart.unit) + ' to ' +
             number(line.high[j], chart.unit);
    }
    chart.values[i].textContent = number(v, chart.unit);
    if (v !== null && !chart.stacked) {
      element(chart.cursor, 'circle', {
        cx: across(line.x[j]), cy: yPlace(chart, v), r: 3.5,
        class: chart.values[i].parentNode.querySelector('i').className,
      });
    }
  });
  const x = across(shown);
  element(chart.cursor, 'line', {x1: x, x2: x, y1: top, y2: bottom});
  chart.at.textContent = 'step ' + shown + band;
}
let due = 0, current = null;
function showAll(step) {
  current = step;
  cancelAnimationFrame(due);
  due = requestAnimationFrame(() => charts.forEach(c => show(c, step)));
}
for (const chart of charts) {
  const move = event => {
    const [x0, x1] = chart.x;
    const share = (place(event, chart.svg)[0] - left) / (right - left);
    showAll(x0 + Math.min(Math.max(share, 0), 1) * (x1 - x0));
  };
  chart.svg.addEventListener('pointermove', move);
  chart.svg.addEventListener('pointerdown', move);
  chart.svg.addEventListener('pointerleave', () => showAll(null));
  chart.svg.addEventListener('blur', () => showAll(null));
  chart.svg.addEventListener('keydown', event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!by) return;
    event.preventDefault();
    const xs = chart.lines[0].x, last = xs.length - 1;
    const now = current === null ? last : nearest(xs, current);
    showAll(xs[Math.min(Math.max(now + by, 0), last)]);
  });
}

// A heat map's values are read back from its picture, through the palette.
const code = (r, g, b) => r << 16 | g << 8 | b;
const levels = new Map(data.ramp.map((color, i) => [code(...color), i]));
all('figure.heat').forEach((figure, i) => {
  const map = data.maps[i], svg = figure.querySelector('svg');
  const at = figure.querySelector('.at'), plain = at.textContent;
  const cursor = figure.querySelector('.cursor');
  const rows = map.dots.length, columns = map.steps.length;
  let pixels = null;
  const picture = new Image();
  picture.onload = () => {
    const canvas = document.createElement('canvas');
    canvas.width = columns;
    canvas.height = rows;
    const context = canvas.getContext('2d');
    context.drawImage(picture, 0, 0);
    pixels = context.getImageData(0, 0, columns, rows).data;
  };
  picture.src = figure.querySelector('image').getAttribute('href');
  function value(row, column) {
    const [r, g, b, a] = pixels.slice(4 * (row * columns + column),
                                      4 * (row * columns + column) + 4);
    if (a < 32) return null;
    if (a < 250) return 0;
    const share = levels.get(code(r, g, b)) / (data.ramp.length - 1);
    return map.log ? map.low * Math.pow(map.high / map.low, share)
                   : map.low + share * (map.high - map.low);
  }
  const move = event => {
    const [x, y] = place(event, svg), [x0, y0, x1, y1] = map.box;
    const column = Math.floor((x - x0) / (x1 - x0) * columns);
    const row = Math.floor((y - y0) / (y1 - y0) * rows);
    cursor.replaceChildren();
    if (!pixels || row < 0 || row >= rows || column < 0 || column >= columns) {
      at.textContent = plain;
      return;
    }
    const v = value(row, column);
    at.textContent = map.dots[row] + ', step ' + map.steps[column] + ': ' +
                     (v === null ? 'none' : number(v, map.unit));
    const w = (x1 - x0) / columns, h = (y1 - y0) / rows;
    element(cursor, 'rect', {x: x0 + column * w, y: y0 + row * h,
                             width: w, height: h});
  };
  svg.addEventListener('pointermove', move);
  svg.addEventListener('pointerdown', move);
  svg.addEventListener('pointerleave', () => {
    cursor.replaceChildren();
    at.textContent = plain;
  });
});
}
"""
