'use strict';
// The engine's load over the last minutes, and the seconds of its start.

const POLL_MS = 2000;
const SHOWN_MS = 5 * 60_000;
const RATE_MS = 6_000; // over which a rate is taken
const LATENCY_MS = 30_000; // over which quantiles are taken
const samples = [];
let polling = null;

const readMetrics = async () => parseMetrics(await (await get('metrics')).text());

// ---------------------------------------------------------------- load

function svg(tag, attributes, ...children) {
  const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const whole = value => Math.round(value).toLocaleString('en');
const percent = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const rate = value => value < 10 ? value.toFixed(1) : whole(value);
const latency = value => value < 0.01 ? `${(value * 1000).toFixed(1)} ms` : seconds(value);

// By title: how a number is written, of each line its name and value at a sample, and the value at
// the top, where that is not the largest.
const CHARTS = [
  ['Requests', whole, [['running', at => at.running], ['waiting', at => at.waiting]]],
  ['KV cache in use', percent, [['of all blocks', at => at.cache]], 1],
  ['Tokens per second', rate, [['generated', at => perSecond(at, 'generated')], ['of prompts', at => perSecond(at, 'prompts')]]],
  ['Time in the queue', latency, [['median', at => over(at, 'queue', 0.5)], ['95 %', at => over(at, 'queue', 0.95)]]],
  ['Time to first token', latency, [['median', at => over(at, 'first', 0.5)], ['95 %', at => over(at, 'first', 0.95)]]],
  ['Time between tokens', latency, [['median', at => over(at, 'between', 0.5)], ['95 %', at => over(at, 'between', 0.95)]]],
];

// The newest sample at least `ms` before `sample`, or the first.
function before(sample, ms) {
  const earlier = samples.filter(other => other.at < sample.at);
  return earlier.findLast(other => other.at <= sample.at - ms) ?? earlier[0];
}

function perSecond(sample, name) {
  const earlier = before(sample, RATE_MS);
  return earlier ? Math.max(0, sample[name] - earlier[name]) / ((sample.at - earlier.at) / 1000) : null;
}

function over(sample, name, share) {
  const earlier = before(sample, LATENCY_MS);
  return earlier ? quantile(earlier[name], sample[name], share) : null;
}

function chart([title, written, lines, top]) {
  const end = samples.at(-1).at, width = 300, height = 100;
  const series = lines.map(([, value]) => samples.map(sample => [sample.at, sample.values.get(value)]));
  const values = series.flat().map(([, value]) => value).filter(value => value !== null);
  const most = Math.max(...values, 0), scale = top ?? (most || 1);
  const mostText = values.length ? written(most) : '–';
  const x = at => (width * (1 - (end - at) / SHOWN_MS)).toFixed(1);
  const y = value => (height * (1 - value / scale)).toFixed(1);
  const paths = series.map((points, index) =>
    svg('path', {class: `series-${index}`, d: pathOf(points, x, y)}));
  const grid = [0, 50, 100].map(at => svg('line', {x1: 0, x2: width, y1: at, y2: at}));
  const now = lines.map(([name, value]) => {
    const last = samples.at(-1).values.get(value);
    return `${name} ${last === null ? '–' : written(last)}`;
  });
  return element('figure', {},
    element('figcaption', {}, element('h3', {}, title), element('div', {class: 'legend'},
      ...now.map((text, index) => element('span', {class: `series-${index}`}, text)))),
    svg('svg', {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', role: 'img',
      'aria-label': `${title}: now ${now.join(', ')}; at most ${mostText} in the last 5 minutes`}, ...grid, ...paths),
    element('div', {class: 'axis'}, element('span', {}, '5 min ago'), element('span', {}, `most: ${mostText}`),
      element('span', {}, 'now')));
}

// Broken where nothing was read for a while, or there was nothing to measure.
function pathOf(points, x, y) {
  let path = '', last = null;
  for (const [at, value] of points) {
    if (value !== null) path += `${last !== null && at - last < 3 * POLL_MS ? 'L' : 'M'}${x(at)} ${y(value)}`;
    last = value === null ? null : at;
  }
  return path;
}

function tiles(sample) {
  const hits = sample.prompts ? percent(sample.cached / sample.prompts) : '–';
  const shown = {
    Running: whole(sample.running), Waiting: whole(sample.waiting), 'KV cache': percent(sample.cache),
    'Prompt tokens cached': hits, 'Requests finished': whole(sample.finished), Preemptions: whole(sample.preempted),
  };
  return element('dl', {class: 'tiles'}, ...Object.entries(shown).map(([name, text]) =>
    element('div', {}, element('dt', {}, name), element('dd', {}, text))));
}

async function pollOnce(panel) {
  const at = performance.now();
  const sample = sampleOf(await readMetrics(), at);
  const last = samples.at(-1);
  if (last && sample.generated < last.generated) samples.length = 0; // the server was started again
  samples.push(sample);
  while (samples[0].at < at - SHOWN_MS) samples.shift();
  const values = CHARTS.flatMap(([, , lines]) => lines.map(([, value]) => value));
  sample.values = new Map(values.map(value => [value, value(sample)]));
  panel.replaceChildren(element('h2', {}, 'Server'),
    element('p', {}, 'Read every 2 s while this tab is shown. Latencies are of the last 30 s.'),
    tiles(sample), element('div', {class: 'charts'}, ...CHARTS.map(chart)));
}

// Until `signal` is aborted; not while the page is hidden.
async function showServer(panel, signal) {
  while (!signal.aborted) {
    if (!document.hidden) await pollOnce(panel);
    await new Promise(resolve => setTimeout(resolve, POLL_MS));
  }
}

// ---------------------------------------------------------------- start

async function showStartup(panel) {
  const phases = (await readMetrics())['vllm:startup_seconds'] ?? [];
  const processes = Map.groupBy(phases, ({labels}) => labels.process);
  const order = [...processes.keys()].sort((a, b) => (a === 'server') - (b === 'server'));
  panel.replaceChildren(element('h2', {}, 'Start-up'),
    element('p', {}, 'Where the seconds of the last start went. The server starts first and waits for its engines, which load the model.'),
    ...order.flatMap(name => [startTable(name, processes.get(name))]));
  if (!phases.length) panel.append(element('p', {}, 'The model is still loading.'));
}

function startTable(name, phases) {
  const total = phases.reduce((sum, {value}) => sum + value, 0);
  const most = Math.max(...phases.map(({value}) => value), 1e-9);
  const row = ({labels, value}) => element('tr', {},
    element('th', {scope: 'row'}, labels.phase), element('td', {class: 'number'}, `${value.toFixed(2)} s`),
    element('td', {'aria-hidden': 'true'}, svg('svg', {viewBox: '0 0 100 10', preserveAspectRatio: 'none'},
      svg('rect', {x: 0, y: 0, height: 10, width: (100 * value / most).toFixed(1)}))));
  const head = element('tr', {}, element('th', {scope: 'col'}, 'Phase'), element('th', {scope: 'col', class: 'number'}, 'Time'),
    element('td', {'aria-hidden': 'true'}));
  const caption = `${name.charAt(0).toUpperCase()}${name.slice(1)}: ${total.toFixed(2)} s`;
  return element('section', {}, element('h3', {}, caption), element('div', {class: 'scroll'},
    element('table', {class: 'phases', 'aria-label': caption}, element('thead', {}, head),
      element('tbody', {}, ...phases.map(row)))));
}
