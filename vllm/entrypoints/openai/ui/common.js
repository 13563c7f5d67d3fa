'use strict';
// What all pages share: elements, requests with the key, and the theme.

const byId = id => document.getElementById(id);

// Text goes into a page as text nodes only: nothing of a model, or of a server, is read as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'class') made.className = value;
    else if (name in made && !name.startsWith('aria')) made[name] = value;
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

const button = (text, onclick, properties = {}) =>
  element('button', {type: 'button', class: 'plain', onclick, ...properties}, text);

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that did not come over HTTPS has no clipboard
    const area = element('textarea', {value: text, class: 'unseen'});
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
}

function copyButton(text, label = 'Copy') {
  const made = button(label, async () => {
    const before = document.activeElement;
    await copy(text());
    before?.focus();
    made.textContent = 'Copied';
    setTimeout(() => { made.textContent = label }, 1500);
  });
  return made;
}

function plural(count, word) {
  return `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
}

// ---------------------------------------------------------------- requests

// Of this tab alone, and gone with it. A request sends it as a header, never in an address.
const KEY = 'vllm-key';
let asking = null;

function askForKey(isWrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = byId('key'), field = byId('key-field'), trouble = byId('key-trouble');
    const tell = text => { trouble.textContent = text; trouble.hidden = !text };
    tell(isWrong ? 'The server does not accept this key.' : '');
    field.value = '';
    dialog.querySelector('form').onsubmit = event => {
      event.preventDefault();
      const key = field.value.trim();
      if (!/^[\x21-\x7e]+$/.test(key)) {
        tell('A key is made of ASCII characters without spaces.');
        return;
      }
      sessionStorage.setItem(KEY, key);
      field.value = '';
      dialog.close('given');
      resolve();
    };
    byId('key-cancel').onclick = () => dialog.close('');
    dialog.onclose = () => {
      asking = null;
      byId('change-key')?.removeAttribute('hidden');
      if (dialog.returnValue !== 'given') reject(new Error('The server needs an API key.'));
      dialog.returnValue = '';
    };
    dialog.showModal();
  });
  return asking;
}

// A response of this server. Paths are relative, so that a proxy may put a prefix before them.
async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {...options.headers, ...(key ? {Authorization: `Bearer ${key}`} : {})};
    let response;
    try {
      response = await fetch(path, {...options, headers, cache: 'no-store'});
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      throw new Error('The server cannot be reached. It may have stopped, or the network is gone.');
    }
    if (response.status !== 401) return response;
    if (key === sessionStorage.getItem(KEY)) await askForKey(Boolean(key));
  }
}

// As `ask`, of which the answer must be a success.
async function get(path, options) {
  const response = await ask(path, options);
  if (!response.ok) throw new Error(await wordsOf(response));
  return response;
}

async function wordsOf(response) {
  const body = await response.json().catch(() => null);
  const text = body?.error?.message ?? `${response.status} ${response.statusText}`;
  const wait = response.headers.get('Retry-After');
  const later = wait ? ` Try again in ${plural(Number(wait), 'second')}.` : '';
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? '' : '.') + later;
}

// ---------------------------------------------------------------- theme

const THEMES = {'': 'Theme: system', light: 'Theme: light', dark: 'Theme: dark'};

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  const toggle = byId('theme');
  toggle.textContent = {'': '◐', light: '☀︎', dark: '☾'}[theme];
  toggle.title = THEMES[theme];
  toggle.setAttribute('aria-label', THEMES[theme]);
}

function storedTheme() {
  try {
    const theme = localStorage.getItem('vllm-theme') ?? '';
    return theme in THEMES ? theme : '';
  } catch { // a browser may refuse storage
    return '';
  }
}

function startTheme() {
  setTheme(storedTheme());
  byId('theme').addEventListener('click', () => {
    const names = Object.keys(THEMES);
    const current = document.documentElement.dataset.theme ?? '';
    const next = names[(names.indexOf(current) + 1) % names.length];
    try {
      localStorage.setItem('vllm-theme', next);
    } catch { /* it holds for this page then */ }
    setTheme(next);
  });
}

function startKey() {
  const change = byId('change-key');
  change.hidden = !sessionStorage.getItem(KEY);
  change.addEventListener('click', () => askForKey(false).catch(() => {}));
}
