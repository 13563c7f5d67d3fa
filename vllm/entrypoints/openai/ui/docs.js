'use strict';
// The paths of openapi.json, with the fields of their bodies and an example of each.

// The schema that a `$ref` stands for, of the definitions that came with the body.
function resolved(schema, definitions) {
  const name = schema.$ref?.split('/').at(-1);
  return name && definitions[name] ? definitions[name] : schema;
}

const typeName = {integer: 'integer', number: 'number', string: 'text', boolean: 'true or false', null: 'null', object: 'object'};

function typeText(schema, definitions, depth = 0) {
  const own = resolved(schema, definitions);
  if (own.const !== undefined) return JSON.stringify(own.const);
  if (own.enum) return own.enum.map(value => JSON.stringify(value)).join(' | ');
  const options = own.anyOf ?? own.oneOf;
  if (options) {
    const texts = options.filter(option => option.type !== 'null').map(option => typeText(option, definitions, depth));
    return [...new Set(texts)].join(' | ');
  }
  if (own.type === 'array') {
    return `list of ${own.items && depth < 2 ? typeText(own.items, definitions, depth + 1) : 'values'}`;
  }
  const names = Object.keys(own.properties ?? {});
  if (names.length) return `object with ${names.slice(0, 5).join(', ')}${names.length > 5 ? ', …' : ''}`;
  return typeName[own.type] ?? 'any value';
}

function limits(schema) {
  const parts = [schema, ...(schema.anyOf ?? [])];
  const of = name => parts.map(part => part[name]).find(value => value !== undefined);
  const found = [];
  if (of('minimum') !== undefined) found.push(`at least ${of('minimum')}`);
  if (of('exclusiveMinimum') !== undefined) found.push(`above ${of('exclusiveMinimum')}`);
  if (of('maximum') !== undefined) found.push(`at most ${of('maximum')}`);
  if (of('exclusiveMaximum') !== undefined) found.push(`below ${of('exclusiveMaximum')}`);
  if (schema.default !== undefined && schema.default !== null) found.push(`default ${JSON.stringify(schema.default)}`);
  return found.join(', ');
}

function fieldRow(name, schema, isRequired, definitions) {
  const own = resolved(schema, definitions), about = schema.description ?? own.description;
  return element('tr', {},
    element('th', {scope: 'row'}, element('code', {}, name), isRequired ? element('small', {}, 'required') : null),
    element('td', {}, typeText(schema, definitions), element('small', {}, [limits(schema), about].filter(Boolean).join('. '))));
}

function fieldTable(schema, definitions, title) {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties ?? {}).sort((a, b) => required.has(b) - required.has(a));
  if (!names.length) return null;
  const head = element('tr', {}, element('th', {scope: 'col'}, 'Field'), element('th', {scope: 'col'}, 'Value'));
  return element('div', {class: 'scroll', tabIndex: 0, role: 'region', 'aria-label': title},
    element('table', {class: 'fields'}, element('thead', {}, head),
      element('tbody', {}, ...names.map(name => fieldRow(name, schema.properties[name], required.has(name), definitions)))));
}

function example(method, path, body) {
  const key = sessionStorage.getItem(KEY) ? ` \\\n  -H 'Authorization: Bearer YOUR_KEY'` : '';
  const address = new URL(`.${path}`, location.href).href;
  const verb = method === 'GET' ? '' : method === 'POST' ? '' : ` -X ${method}`;
  const data = body === undefined ? (method === 'POST' ? ' -X POST' : '')
    : ` \\\n  -H 'Content-Type: application/json' \\\n  -d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
  return `curl ${address}${verb}${key}${data}`;
}

function operation(path, method, described) {
  const content = described.requestBody?.content?.['application/json'] ?? {};
  const definitions = {...content.schema?.$defs, ...Object.assign({}, ...(content.schema?.anyOf ?? []).map(one => one.$defs))};
  const bodies = content.schema ? (content.schema.anyOf ?? [content.schema]).map(one => resolved(one, definitions)) : [];
  const about = described.description ?? '';
  const curl = example(method, path, content.example);
  const fold = element('details', {class: 'path', id: `${method} ${path}`},
    element('summary', {}, element('b', {class: method}, method), element('code', {}, path),
      element('span', {}, about)));
  // Filled when it is opened: a body may have a hundred fields.
  fold.addEventListener('toggle', () => {
    if (!fold.open || fold.children.length > 1) return;
    fold.append(element('div', {},
      element('h3', {}, 'Example', copyButton(() => curl)), element('pre', {class: 'example', tabIndex: 0}, curl),
      ...bodies.flatMap(body => [
        element('h3', {}, bodies.length > 1 ? `Fields of ${body.title}` : 'Fields'),
        fieldTable(body, definitions, `Fields of ${path}`)])));
  });
  const words = [method, path, ...bodies.flatMap(body => Object.keys(body.properties ?? {}))].join(' ').toLowerCase();
  return {fold, words, isRefused: about.startsWith('Refused')};
}

async function showPaths() {
  const {info, paths} = await (await get('openapi.json')).json();
  byId('version').textContent = info.version;
  // First what generates, last what is refused.
  const rank = ({fold, isRefused}) => isRefused ? 2 : fold.id.includes(' /v1/') ? 0 : 1;
  const rows = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, described]) => operation(path, method.toUpperCase(), described)))
    .sort((a, b) => rank(a) - rank(b));
  byId('paths').replaceChildren(...rows.map(({fold}) => fold));
  byId('filter').addEventListener('input', event => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const {fold, words} of rows) fold.hidden = !words.includes(wanted);
    byId('found').textContent = `${plural(rows.filter(({fold}) => !fold.hidden).length, 'path')} shown`;
  });
}

startTheme();
startKey();
showPaths().catch(error => {
  byId('paths').replaceChildren(element('p', {class: 'wrong', role: 'alert'}, error.message),
    element('button', {type: 'button', onclick: () => location.reload()}, 'Try again'));
});
