"""The part of the page's script that draws kernel times: what `vllm kernels plot` draws, from the
JSON of the page, so that a drawing adds nothing to its size."""

import json

from vllm.kernels.report.curves import PALETTE

DRAWING = (
    f"\n// ---- kernel times over the number of tokens\nconst palette = {json.dumps(PALETTE)};"
    + """
const timed = entries.filter(entry => entry.timings
  && ['linear', 'moe'].includes(entry.problem.family));
const used = new Set(timed.flatMap(entry => Object.keys(entry.timings.us)));
const heads = [...document.querySelectorAll('table[role=grid] thead th')];
const inOrder = [...new Set([...heads.map(head => head.textContent), ...used])]
  .filter(name => used.has(name));
const colourOf = name => palette[inOrder.indexOf(name) % palette.length];
const holder = document.createElement('div');
holder.innerHTML = '<svg></svg>';
function make(name, attributes, ...children) {
  const isHtml = ['figure', 'figcaption', 'span', 'i'].includes(name);
  const parent = isHtml ? holder : holder.firstChild;
  const one = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.append(...children);
  return one;
}
function kernelFor(entry, tokens) {
  const winner = entry.candidates.find(candidate => candidate.backend === entry.chosen);
  const parts = !winner ? [] : winner.parts.length ? winner.parts : [[null, winner.backend]];
  return parts.find(([limit]) => limit === null || tokens <= limit)?.[1];
}
function curvesOf(entry) {
  const {tokens, us, grade, stale, error} = entry.timings;
  const errors = Object.fromEntries(error), old = new Set(stale.map(([backend]) => backend));
  return Object.entries(us).map(([backend, times]) => ({
    backend,
    isMeasured: grade === 'measured' && !old.has(backend),
    canRun: entry.candidates.some(candidate => candidate.backend === backend
      && candidate.reasons.every(reason => reason.why === 'shape')),
    points: times.map((time, i) => ({tokens: tokens[i], us: time,
      error: errors[backend]?.[i] || 0, isChosen: kernelFor(entry, tokens[i]) === backend}))
      .filter(point => point.us !== null),
  })).filter(curve => curve.points.length);
}
function logarithmic(low, high, start, end) {
  const span = Math.log(high / low) || 1;
  return value => start + (end - start) * Math.log(value / low) / span;
}
function lineOf(curve, x, y) {
  const at = (tokens, us) => `${x(tokens).toFixed(1)} ${y(us).toFixed(1)}`;
  const places = curve.points.map(point => at(point.tokens, point.us));
  const line = (kind, d) => make('path', {class: kind, d});
  const serves = curve.points.map((point, i) => !point.isChosen ? ''
    : (i && curve.points[i - 1].isChosen ? 'L' : 'M') + places[i] + 'h0').join('');
  const high = curve.points.map(p => at(p.tokens, p.us * (1 + p.error)));
  const low = curve.points.map(p => at(p.tokens, p.us / (1 + p.error))).reverse();
  const kinds = ['kernel', curve.isMeasured ? '' : 'estimated', curve.canRun ? '' : 'left-out'];
  const group = make('g', {class: kinds.filter(Boolean).join(' '), 'data-kernel': curve.backend,
    stroke: colourOf(curve.backend), fill: colourOf(curve.backend)});
  if (curve.points.some(point => point.error))
    group.append(line('error', `M${[...high, ...low].join('L')}Z`));
  if (serves) group.append(line('serves', serves));
  group.append(line('times', 'M' + places.join('L')),
    line('marks', places.map(place => `M${place}h0`).join('')));
  return group;
}
function drawing(entry) {
  const curves = curvesOf(entry), points = curves.flatMap(curve => curve.points);
  if (!points.length) return '';
  const tokens = points.map(point => point.tokens), most = Math.max(...tokens);
  const us = points.map(point => point.us);
  const low = Math.min(...us) / 1.1, high = Math.max(...us) * 1.1;
  const x = logarithmic(Math.min(...tokens), most, 38, 406), y = logarithmic(low, high, 134, 4);
  const decades = [-2, -1, 0, 1, 2, 3, 4, 5, 6].map(power => 10 ** power);
  const steps = high > 200 * low ? [1] : [1, 2, 5];
  const times = decades.flatMap(decade => steps.map(step => +(step * decade).toPrecision(1)))
    .filter(time => low <= time && time <= high);
  const svg = make('svg', {viewBox: '0 0 420 150', role: 'img',
    'aria-label': 'Kernel times over the number of tokens'});
  svg.append(make('path', {class: 'grid', d: times.map(time => `M38 ${y(time)}H420`).join('')}));
  for (const time of times)
    svg.append(make('text', {x: 34, y: y(time) + 3, 'text-anchor': 'end'}, time));
  for (const count of [1, 4, 16, 64, 256, 1024, 4096, 16384].filter(count => count <= most))
    svg.append(make('text', {x: x(count), y: 147, 'text-anchor': 'middle'}, count));
  svg.append(...curves.map(curve => lineOf(curve, x, y)));
  const caption = make('figcaption', {}, 'Microseconds over M. Thick: what serves. ');
  if (curves.some(curve => !curve.isMeasured)) caption.append('Dashed: not measured here. ');
  for (const {backend} of curves)
    caption.append(make('span', {}, make('i', {style: `background:${colourOf(backend)}`}),
      ` ${backend}`), ' ');
  return make('figure', {class: 'times-drawn'}, svg, caption);
}
for (const entry of timed) byId(`d${entries.indexOf(entry)}`)?.append(drawing(entry));
"""
)
