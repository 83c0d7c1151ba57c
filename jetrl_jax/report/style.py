"""The report's style sheet: light and dark, from phones to wide screens.

The eight colours of curves were chosen to stay apart for colour-blind readers
on both backgrounds; legends and read-outs say everything without them.
"""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #16181d; --soft: #5b6270;
  --edge: #dfe3ea; --grid: #e8ebf0; --good: #0b6b3a; --bad: #a8201a;
  --good-back: #e3f4ea; --bad-back: #fbe6e4; --link: #1f5fbf;
  --c0: #2a78d6; --c1: #d9541e; --c2: #12946a; --c3: #b98500;
  --c4: #cf4f8a; --c5: #2f6f2f; --c6: #5b4bb5; --c7: #8a8f99;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101216; --card: #191c22; --ink: #e8eaee; --soft: #a2a9b6;
    --edge: #2c313a; --grid: #272c34; --good: #6fd69b; --bad: #ff9a90;
    --good-back: #14301f; --bad-back: #3b1b19; --link: #8ab8ff;
    --c0: #4f9bf0; --c1: #f07a48; --c2: #2fbd8c; --c3: #dba520;
    --c4: #e878aa; --c5: #6fbf5f; --c6: #a196f0; --c7: #8f96a3;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
header, main, nav, footer {
  max-width: 1320px; margin: 0 auto; padding: 0 16px;
}
header { padding-top: 22px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 34px 0 10px; scroll-margin-top: 52px; }
h3 { font-size: 14px; margin: 0; font-weight: 600; }
.grid + h3 { margin: 16px 0 8px; }
h4 { font-size: 13px; margin: 0 0 4px; font-weight: 600; color: var(--soft); }
p { margin: 6px 0; }
a { color: var(--link); }
.sub, .note, .missing { color: var(--soft); }
.note { font-size: 12.5px; margin: 4px 0 0; line-height: 1.4; }
.lead { font-size: 16px; max-width: 78ch; }
nav {
  position: sticky; top: 0; z-index: 2; background: var(--page);
  padding-top: 8px; padding-bottom: 8px; display: flex; flex-wrap: wrap;
  gap: 4px 16px; font-size: 14px;
}
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
.tiles, .grid { display: grid; gap: 12px; }
.tiles { grid-template-columns: repeat(6, 1fr); }
.grid {
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr));
}
.card, .tile, .sample {
  background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  padding: 10px 12px; margin: 0; min-width: 0;
}
.tile .label { font-size: 12.5px; color: var(--soft); }
.tile .value { font-size: 17px; font-weight: 650; line-height: 1.25; }
.tile.good .value { color: var(--good); }
.tile.bad .value { color: var(--bad); }
.tile .note { margin-top: 2px; }
figcaption { display: flow-root; }
figcaption h3 { float: left; margin-right: 8px; }
.at { float: right; font-size: 12.5px; color: var(--soft); }
figcaption ul {
  clear: both; list-style: none; margin: 0; padding: 2px 0 0; display: flex;
  flex-wrap: wrap; gap: 0 12px; font-size: 12.5px; line-height: 1.45;
}
figcaption li { overflow-wrap: anywhere; }
figcaption li b, .num, .value { font-variant-numeric: tabular-nums; }
.chart li b { display: inline-block; min-width: 6ch; }
.heat .at {
  float: none; clear: both; margin: 2px 0; min-height: 1.5em;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
}
.swatch {
  display: inline-block; width: 12px; height: 3px; border-radius: 2px;
  vertical-align: middle; margin-right: 3px; background: var(--s);
}
.swatch.dashed {
  background: repeating-linear-gradient(
    90deg, var(--s) 0 4px, transparent 4px 6px);
}
svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.line { fill: none; stroke: var(--s); stroke-width: 1.8;
  stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-width: 1; opacity: .4; }
.line.dashed { stroke-dasharray: 5 3; }
.band { fill: var(--s); opacity: .15; }
.area { fill: var(--s); stroke: var(--card); stroke-width: .6; }
.grid-line { stroke: var(--grid); stroke-width: 1; fill: none; }
.tick { font-size: 11px; fill: var(--soft); }
.end { text-anchor: end; } .mid { text-anchor: middle; }
.cursor line { stroke: var(--soft); stroke-width: 1; }
.cursor circle { fill: var(--s); stroke: var(--card); stroke-width: 1.5; }
.cursor rect { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.heat image { image-rendering: pixelated; }
.heat .gap { stroke: var(--card); stroke-width: 2.5; }
.scale {
  clear: both; display: flex; align-items: center; gap: 6px; margin: 2px 0 0;
  font-size: 12.5px; color: var(--soft); flex-wrap: wrap;
}
.scale i { display: inline-block; height: 9px; width: 14px; }
.scale .ramp { width: 90px; background: linear-gradient(90deg, RAMP); }
.scale .zero { background: rgb(127 127 127 / 38%); margin-left: 8px; }
.scale .none { border: 1px solid var(--edge); margin-left: 8px; }
.c0 { --s: var(--c0); } .c1 { --s: var(--c1); } .c2 { --s: var(--c2); }
.c3 { --s: var(--c3); } .c4 { --s: var(--c4); } .c5 { --s: var(--c5); }
.c6 { --s: var(--c6); } .c7 { --s: var(--c7); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th, td {
  text-align: left; padding: 4px 12px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--edge); overflow-wrap: anywhere;
}
th { font-weight: 600; color: var(--soft); }
tbody th { font-weight: 500; color: var(--ink); }
.num { white-space: nowrap; }
.keys td, .keys th { min-width: 110px; }
.runs tbody th { min-width: 8em; }
.runs td { min-width: 120px; white-space: pre-line; }
.finals td::first-line { font-weight: 600; }
pre, code { font: 13px/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  unicode-bidi: isolate; max-height: 22em; overflow-y: auto;
}
.samples {
  display: grid; gap: 10px; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr));
}
.group table { width: auto; }
.group th, .group td { overflow-wrap: normal; }
.group pre { min-width: 16ch; }
.sample .prompt { font-weight: 600; margin-bottom: 8px; }
.pair {
  display: grid; gap: 6px 20px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 200px), 1fr));
}
.chip {
  font-weight: 600; font-size: 12px; padding: 1px 7px; border-radius: 9px;
}
.chip.good { color: var(--good); background: var(--good-back); }
.chip.bad { color: var(--bad); background: var(--bad-back); }
.words { font-size: 14px; align-self: start; }
.words p { margin: 0 0 6px; }
.words b { font-weight: 600; }
.words:only-child { grid-column: 1 / -1; }
details { margin: 8px 0; }
summary { cursor: pointer; font-weight: 600; }
footer { color: var(--soft); font-size: 12.5px; padding: 26px 16px; }
@media (max-width: 1000px) {
  .tiles { grid-template-columns: repeat(3, 1fr); }
}
@media (max-width: 480px) {
  header, main, nav { padding-left: 10px; padding-right: 10px; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  nav { position: static; }
  /* A row's heading above its cells, which are as many as there are runs. */
  .runs tr {
    display: grid; border-bottom: 1px solid var(--edge); padding: 4px 0;
    grid-template-columns: repeat(var(--runs), minmax(112px, 1fr));
  }
  .runs th, .runs td { border: 0; padding: 0 8px 0 0; min-width: 0; }
  .runs th:first-child { grid-column: 1 / -1; font-weight: 600; }
  .keys thead { display: none; }
  .keys tbody th { font-weight: 600; }
  .keys tr, .keys th, .keys td { display: block; border: 0; padding: 0; }
  .keys tr { border-bottom: 1px solid var(--edge); padding: 6px 0; }
}
@media print {
  nav { display: none; }
  .card, .tile, .sample { break-inside: avoid; }
}
"""
