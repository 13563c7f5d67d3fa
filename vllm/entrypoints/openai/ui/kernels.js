'use strict';
// The kernel decisions in force: what /kernels says, as a table.

async function showKernels(panel) {
  const report = await (await get('kernels', {headers: {Accept: 'application/json'}})).json();
  const fact = (name, text) => element('div', {}, element('dt', {}, name), element('dd', {}, text));
  const rows = report.decisions.map(decisionRow);
  const filter = element('input', {type: 'search', class: 'filter', placeholder: 'Layers, such as mlp or lm_head',
    'aria-label': 'Show layers with this in their name'});
  const found = element('p', {class: 'unseen', role: 'status'});
  filter.addEventListener('input', () => {
    const wanted = filter.value.trim().toLowerCase();
    for (const {row, names} of rows) row.hidden = !names.some(name => name.toLowerCase().includes(wanted));
    found.textContent = `${plural(rows.filter(({row}) => !row.hidden).length, 'decision')} shown`;
  });
  const head = element('tr', {}, ...['Layers', 'Problem', 'Kernel', 'Decided by', 'Candidates']
    .map(name => element('th', {scope: 'col'}, name)));
  panel.replaceChildren(
    element('h2', {}, 'Kernels'),
    element('p', {}, 'Each layer was given its kernel once, when the model was loaded.'),
    element('dl', {class: 'facts'}, fact('Device', report.device), fact('Libraries', libraries(report.libs)),
      ...(report.model?.notes ?? []).map(note => fact('Note', note))),
    fullReport(), filter, found,
    element('div', {class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': 'Decisions'},
      element('table', {class: 'decisions'}, element('thead', {}, head),
        element('tbody', {}, ...rows.map(({row}) => row)))));
}

// Names and versions, without what each can do: `torch=2.13.0+scaled-blocks`.
function libraries(libs) {
  const named = libs.map(lib => lib.split('+')[0].replace(/=$/, '')).filter(name => name !== 'build');
  return named.map(name => name.replace('=', ' ')).join(', ') || 'none';
}

function decisionRow({layers, problem, chosen, origin, candidates}) {
  const others = candidates.filter(({backend}) => backend !== chosen);
  const items = others.map(({backend, reasons}) => element('li', {}, element('b', {}, spaced(backend)), ' ',
    verdict(reasons)));
  const fold = others.length
    ? element('details', {}, element('summary', {}, plural(others.length, 'other')), element('ul', {}, ...items))
    : 'no other';
  const cell = (name, content, properties = {}) => element('td', {'data-name': name, ...properties}, content);
  const names = element('td', {}, ...shortened(layers).flatMap((name, index) =>
    index ? [element('br'), element('code', {}, name)] : [element('code', {}, name)]));
  const row = element('tr', {}, names, cell('Problem', element('code', {}, problem.text)),
    cell('Kernel', chosen ? spaced(chosen) : 'none', {class: 'kernel'}), cell('Decided by', origin.text),
    cell('Candidates', fold));
  return {row, names: layers};
}

// The first reason against a kernel; the full report has all.
function verdict(reasons) {
  if (!reasons.length) return 'could run';
  const [{why, text}, ...more] = reasons;
  return `${why}: ${text}${more.length ? `, and ${plural(more.length, 'reason')} more` : ''}`;
}

// Splits by the number of tokens: `skinny<=16|torch`.
const spaced = name => name.replaceAll('|', ' | ').replaceAll('<=', ' ≤ ');

// Names that differ in one number as one: model.layers.{0-29}.mlp.gate.
function shortened(names) {
  const groups = new Map();
  for (const name of names) {
    const [, before, number, after] = /^(.*?\.)(\d+)(\..*)$/.exec(name) ?? [null, name, null, ''];
    const key = JSON.stringify([before, after]);
    if (!groups.has(key)) groups.set(key, {before, after, numbers: []});
    if (number !== null) groups.get(key).numbers.push(Number(number));
  }
  return [...groups.values()].map(({before, after, numbers}) => {
    if (numbers.length < 2) return before + (numbers[0] ?? '') + after;
    return `${before}{${ranges(numbers)}}${after}`;
  });
}

function ranges(numbers) {
  const found = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === number - 1) found.at(-1)[1] = number;
    else found.push([number, number]);
  }
  return found.map(([low, high]) => low === high ? low : `${low}-${high}`).join(',');
}

// A link cannot send a key, so with one the page is fetched and saved.
function fullReport() {
  const text = 'Full report, with times and all reasons';
  if (!sessionStorage.getItem(KEY)) {
    return element('p', {}, element('a', {href: 'kernels', target: '_blank', rel: 'noopener'}, text));
  }
  return element('p', {}, button(`${text} (save as a file)`, async () => {
    const response = await get('kernels', {headers: {Accept: 'text/html'}});
    const address = URL.createObjectURL(await response.blob());
    element('a', {href: address, download: 'kernels.html'}).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }, {class: ''}));
}
