'use strict';
// Tabs, and what the page does when it is opened.

const VIEWS = {kernels: showKernels, server: showServer, startup: showStartup};
let leaving = new AbortController();

const tabs = () => [...document.querySelectorAll('[role=tab]')];

async function select(name, hasFocus = false) {
  leaving.abort();
  leaving = new AbortController();
  const {signal} = leaving;
  for (const tab of tabs()) {
    const isSelected = tab.id === `tab-${name}`;
    tab.setAttribute('aria-selected', String(isSelected));
    tab.tabIndex = isSelected ? 0 : -1;
    byId(tab.getAttribute('aria-controls')).hidden = !isSelected;
    if (isSelected && hasFocus) tab.focus();
  }
  history.replaceState(null, '', name === 'chat' ? location.pathname : `#${name}`);
  byId('skip').href = name === 'chat' ? '#prompt' : `#${name}`;
  byId('skip').textContent = name === 'chat' ? 'Skip to the message' : 'Skip to the content';
  const panel = byId(name);
  if (!(name in VIEWS)) return;
  if (!panel.firstChild) panel.append(element('p', {}, 'Loading…'));
  try {
    await VIEWS[name](panel, signal);
  } catch (error) {
    if (signal.aborted) return;
    panel.replaceChildren(element('p', {class: 'wrong', role: 'alert'}, error.message),
      element('button', {type: 'button', onclick: () => select(name)}, 'Try again'));
  }
}

function startTabs() {
  for (const tab of tabs()) {
    tab.addEventListener('click', () => select(tab.getAttribute('aria-controls')));
    tab.addEventListener('keydown', event => {
      const all = tabs(), at = all.indexOf(tab);
      const next = {ArrowRight: all[(at + 1) % all.length], ArrowLeft: all.at(at - 1), Home: all[0], End: all.at(-1)}[event.key];
      if (!next) return;
      event.preventDefault();
      select(next.getAttribute('aria-controls'), true);
    });
  }
  const name = location.hash.slice(1);
  select(name in VIEWS ? name : 'chat');
}

// Waits while the model loads, and says so.
async function untilServing() {
  const state = byId('state');
  for (;;) {
    let reason = 'The server cannot be reached.';
    try {
      const response = await fetch('health', {cache: 'no-store'});
      if (response.ok) break;
      reason = await wordsOf(response);
    } catch { /* as said */ }
    state.textContent = reason;
    state.hidden = false;
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
  state.hidden = true;
}

async function showModels() {
  const {data} = await (await get('v1/models')).json();
  const [{id, max_model_len: length}] = data;
  chat.model = id;
  byId('model').textContent = id;
  byId('model').title = data[0].root;
  document.title = `${id} · vLLM`;
  byId('prompt').placeholder = `Message ${id}`;
  byId('about').textContent = `${id} takes up to ${length.toLocaleString('en')} tokens. The conversation stays in this tab.`;
  const choice = byId('set-model');
  choice.replaceChildren(...data.map(model => element('option', {}, model.id)));
  choice.addEventListener('change', () => { chat.model = choice.value });
  byId('model-choice').hidden = data.length < 2;
}

startTheme();
startKey();
startChat();
startTabs();
if (!byId('chat').hidden) focusChat();
untilServing().then(showModels).catch(error => {
  byId('state').textContent = error.message;
  byId('state').hidden = false;
});
