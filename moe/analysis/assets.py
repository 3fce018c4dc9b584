"""Style and script of the page, inlined so that one file is all a reader needs."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f6f5f1; --card: #ffffff; --ink: #1d2127; --soft: #5b6470; --line: #dcdad3;
  --accent: #0b5cad; --fix: #a33a0a; --fix-back: #fdebe1; --watch: #7a5a00; --watch-back: #fdf4d3;
  --fine: #0b5cad; --fine-back: #e6f0fa; --note: #4b5563; --note-back: #eceef1;
  --heat-0: #0b4f8a; --heat-1: #6aa9d8; --heat-2: #f1efe9; --heat-3: #f0a35f; --heat-4: #b1400d;
  --second: #8fa3b5; --bad: #c2571a; --quiet: #b9bec5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --card: #1c2026; --ink: #e8eaed; --soft: #a3abb6; --line: #333a43;
    --accent: #7bbcff; --fix: #ffb48a; --fix-back: #40220f; --watch: #f0d27a; --watch-back: #3a3010;
    --fine: #8cc6ff; --fine-back: #12304d; --note: #b9c0ca; --note-back: #2a3038;
    --heat-0: #74bdff; --heat-1: #2f6ea8; --heat-2: #2a2f37; --heat-3: #b3651f; --heat-4: #ffb26b;
    --second: #5d6f82; --bad: #e98a4a; --quiet: #545c67;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main, header { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; }
h1 { font-size: 1.65rem; line-height: 1.2; margin: 0 0 4px; }
h2 { font-size: 1.15rem; margin: 0 0 4px; }
h3 { font-size: .95rem; margin: 12px 0 0; }
p { margin: 4px 0 10px; max-width: 92ch; }
.soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 18px 0; scroll-margin-top: 70px; }
code { font: .92em ui-monospace, "DejaVu Sans Mono", monospace; background: var(--note-back);
  padding: 1px 4px; border-radius: 4px; overflow-wrap: anywhere; }
.tiles { display: grid; gap: 12px; margin: 18px 0;
  grid-template-columns: repeat(auto-fit, minmax(146px, 1fr)); }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.25; white-space: nowrap; }
.tile .label { color: var(--soft); font-size: .84rem; display: block; }
.badge { display: inline-block; font-size: .8rem; font-weight: 600; padding: 1px 9px;
  border-radius: 99px; white-space: nowrap; color: var(--note); background: var(--note-back); }
.fix { color: var(--fix); background: var(--fix-back); }
.watch { color: var(--watch); background: var(--watch-back); }
.fine { color: var(--fine); background: var(--fine-back); }
.findings { list-style: none; margin: 8px 0 0; padding: 0; }
.findings li { padding: 12px 0; border-top: 1px solid var(--line); }
.findings li:first-child { border-top: 0; }
.findings p { margin: 3px 0 0; max-width: 118ch; }
.findings .title { font-weight: 600; }
.pair { display: grid; gap: 8px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); }
.trio { display: grid; gap: 8px 20px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.pair > *, .trio > * { min-width: 0; }
.chart { width: 100%; }
.legend { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 10px; font-size: .85rem;
  color: var(--soft); margin: 6px 0; }
.legend i { width: 210px; height: 12px; border-radius: 3px; background: linear-gradient(90deg,
  var(--heat-0), var(--heat-1), var(--heat-2), var(--heat-3), var(--heat-4)); }
.chooser { position: sticky; top: 0; z-index: 5; display: flex; flex-wrap: wrap; gap: 8px 14px;
  align-items: center; background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 10px 20px; margin: 18px 0; box-shadow: 0 2px 8px #0001; }
select, button { font: inherit; color: inherit; background: var(--page);
  border: 1px solid var(--line); border-radius: 6px; padding: 4px 8px; max-width: 100%; }
button { cursor: pointer; }
button.link { border: 0; background: none; color: var(--accent); text-decoration: underline;
  padding: 0; text-align: left; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.scroll { overflow-x: auto; max-height: 480px; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 8px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); }
.layers :is(td, th):nth-child(2) { text-align: left; }
thead th { vertical-align: bottom; color: var(--soft); font-weight: 600; white-space: normal; }
details { margin: 8px 0 0; }
summary { cursor: pointer; color: var(--accent); font-size: .88rem; }
dl { display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 6px 18px; margin: 8px 0; }
dt { font-weight: 600; } dd { margin: 0; max-width: 76ch; }
footer { color: var(--soft); font-size: .85rem; padding-bottom: 30px; }
@media (max-width: 560px) {
  main, header { padding: 0 10px; } header { padding-top: 16px; }
  section { padding: 14px 12px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
}
@media print { .chooser { position: static; } section { break-inside: avoid; } }
"""

SCRIPT = """
'use strict';
const figures = JSON.parse(document.getElementById('figures').textContent);
const chooser = document.getElementById('layer');
const config = {displaylogo: false, responsive: true,
  displayModeBar: matchMedia('(hover: hover)').matches ? 'hover' : false,
  modeBarButtonsToRemove: ['lasso2d', 'select2d', 'zoomIn2d', 'zoomOut2d', 'autoScale2d']};
const colour = name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

function painted(figure, layer) {
  const copy = structuredClone(figure);
  const axis = {gridcolor: colour('line'), zerolinecolor: colour('line'), linecolor: colour('line')};
  for (const trace of copy.data) {
    const role = trace.meta || 'main';
    if (role === 'diverging') {
      trace.colorscale = [0, 1, 2, 3, 4].map(i => [i / 4, colour('heat-' + i)]);
    } else if (role.layer) {
      const chosen = role.layer === layer;
      trace.line = {color: colour(chosen ? 'bad' : 'quiet'), width: chosen ? 3 : 1.2};
    } else {
      const name = {main: 'accent', second: 'second', bad: 'bad', marker: 'ink'}[role];
      const line = {width: role === 'marker' ? 2 : 0};
      trace.marker = {color: colour(name), size: 9, symbol: 'diamond-open', line};
    }
  }
  copy.data.sort((a, b) => (a.meta?.layer === layer) - (b.meta?.layer === layer));
  Object.assign(copy.layout, {paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {color: colour('ink'), family: getComputedStyle(document.body).fontFamily, size: 12}});
  copy.layout.modebar = {bgcolor: 'rgba(0,0,0,0)', color: colour('soft')};
  copy.layout.modebar.activecolor = colour('accent');
  copy.layout.hoverlabel = {bgcolor: colour('card'), bordercolor: colour('line')};
  copy.layout.hoverlabel.font = {color: colour('ink')};
  for (const key of Object.keys(copy.layout)) {
    if (/^[xy]axis/.test(key)) copy.layout[key] = {...axis, ...copy.layout[key]};
  }
  for (const shape of copy.layout.shapes || []) shape.line.color = colour('soft');
  return copy;
}

function sorted(figure) {
  const order = figure.layout.meta?.orders?.[document.getElementById('order').value];
  if (!order) return figure;
  const data = figure.data.map(trace => {
    const moved = {...trace};
    for (const key of trace.type === 'heatmap' ? ['y', 'z', 'text', 'customdata'] : ['x', 'y']) {
      moved[key] = order.map(row => trace[key][row]);
    }
    return moved;
  });
  return {...figure, data};
}

function show(chart) {
  const layer = chooser.value;
  const key = chart.dataset.figure + (chart.dataset.each ? ':' + layer : '');
  const figure = figures[key];
  chart.closest('.figure').hidden = !figure;
  if (!figure) return;
  const copy = painted(sorted(figure), layer);
  Plotly.react(chart, copy.data, copy.layout, config);
  const details = chart.parentElement.querySelector('details');
  details.ontoggle = () => details.open && fill(details, sorted(figure));
  details.ontoggle();
  if (chart.dataset.figure.startsWith('layers:') && !chart.dataset.wired) {
    chart.dataset.wired = 1;
    chart.on('plotly_click', event => choose(
      chart.dataset.figure.slice(7) + ':' + event.points[0].pointIndex[0], true));
  }
}

function fill(details, figure) {
  const heat = figure.data[0].type === 'heatmap';
  const head = heat ? ['', ...figure.data[0].x] : ['', ...figure.data.map(trace => trace.name)];
  const rows = heat
    ? figure.data[0].y.map((name, i) => [name, ...figure.data[0].text[i]])
    : figure.data[0].x.map((x, i) => [x, ...figure.data.map(trace => trace.y[i])]);
  const table = document.createElement('table');
  const row = (parent, cells, tag) => {
    const line = parent.insertRow();
    cells.forEach((cell, i) => {
      const item = document.createElement(i === 0 ? 'th' : tag);
      item.textContent = plain(cell);
      line.append(item);
    });
  };
  row(table.createTHead(), head, 'th');
  const body = table.createTBody();
  rows.forEach(cells => row(body, cells, 'td'));
  details.querySelector('.scroll').replaceChildren(table);
}

function plain(cell) {
  if (typeof cell === 'number') return String(Math.round(cell * 1e4) / 1e4);
  return new DOMParser().parseFromString(cell ?? '', 'text/html').body.textContent;
}

function choose(layer, scroll) {
  chooser.value = layer;
  showAll();
  if (scroll) document.getElementById('experts').scrollIntoView({behavior: 'smooth', block: 'start'});
}

function showAll() {
  const name = chooser.selectedOptions[0].dataset.name;
  document.querySelectorAll('.layer-name').forEach(item => { item.textContent = name; });
  document.querySelectorAll('.chart').forEach(chart => show(chart));
}

chooser.addEventListener('change', () => choose(chooser.value, false));
document.getElementById('order').addEventListener('change', showAll);
document.querySelectorAll('button[data-layer]').forEach(button =>
  button.addEventListener('click', () => choose(button.dataset.layer, true)));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', showAll);
showAll();
"""
