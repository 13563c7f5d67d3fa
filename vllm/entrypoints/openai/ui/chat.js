'use strict';
// The conversation: kept in memory, sent as a whole, answered as a stream.

const chat = {messages: [], views: [], running: null, model: null};

// ---------------------------------------------------------------- settings

// Fields of a request by the controls; an Error names the control that is wrong.
function requestFields() {
  const fields = {};
  for (const name of ['temperature', 'top_p', 'max_tokens', 'seed']) {
    const control = byId(`set-${name}`);
    if (!control.checkValidity()) {
      throw new Error(`${control.labels[0].firstChild.textContent.trim()}: ${control.validationMessage}`);
    }
    if (control.value !== '') fields[name] = Number(control.value);
  }
  const tools = parsed('set-tools', 'Tools', Array.isArray, 'a JSON list such as [{"type": "function", "function": {"name": "now"}}]');
  if (tools?.length) {
    fields.tools = tools;
    if (byId('set-tool_choice').value) fields.tool_choice = byId('set-tool_choice').value;
  }
  const isObject = value => typeof value === 'object' && value !== null && !Array.isArray(value);
  return {...fields, ...parsed('set-more', 'Further fields', isObject, 'a JSON object such as {"min_p": 0.1}')};
}

function parsed(id, name, isRight, accepted) {
  const text = byId(id).value.trim();
  if (!text) return undefined;
  try {
    const value = JSON.parse(text);
    if (isRight(value)) return value;
  } catch { /* as a value of another kind */ }
  throw new Error(`${name}: this is not ${accepted}`);
}

// Messages as the API takes them. An answer that failed before its first token is none.
function sentMessages() {
  const system = byId('set-system').value;
  const sent = system.trim() ? [{role: 'system', content: system}] : [];
  for (const {role, content, reasoning, calls, tool_call_id} of chat.messages) {
    if (role === 'tool') sent.push({role, content, tool_call_id});
    else if (role === 'user') sent.push({role, content});
    else if (calls.length) {
      const tool_calls = calls.map(({id, name, arguments: text}) =>
        ({id, type: 'function', function: {name, arguments: text}}));
      sent.push({role, content, tool_calls, ...(reasoning ? {reasoning_content: reasoning} : {})});
    } else if (content) sent.push({role, content});
  }
  return sent;
}

// ---------------------------------------------------------------- stream

// The JSON of each event of a stream; an Error where it ends before [DONE].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {done, value} = await reader.read().catch(error => {
      if (error.name === 'AbortError') throw error;
      throw new Error('The connection broke off before the answer was complete.');
    });
    if (done) throw new Error('The connection was closed before the answer was complete.');
    const lines = (rest + value).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data: ')) continue;
      const data = line.slice(6).trim();
      if (data === '[DONE]') return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// Adds an event to the answer that it is a part of.
function take(message, event) {
  for (const {index, delta, finish_reason: finish} of event.choices) {
    if (index) continue; // of several choices the first is shown
    message.content += delta.content ?? '';
    message.reasoning += delta.reasoning_content ?? delta.reasoning ?? '';
    for (const part of delta.tool_calls ?? []) {
      const call = message.calls[part.index] ??= {id: part.id, name: '', arguments: ''};
      call.name += part.function?.name ?? '';
      call.arguments += part.function?.arguments ?? '';
    }
    message.finish = finish ?? message.finish;
  }
  count(message.stats, event.usage?.completion_tokens ?? 0);
}

// Tokens by the server's usage, times by this clock.
function count(stats, tokens) {
  if (tokens <= stats.tokens) return;
  const now = performance.now();
  if (stats.firstToken === null) {
    stats.firstToken = (now - stats.begin) / 1000;
    stats.first = {at: now, tokens};
  } else {
    stats.rate = (tokens - stats.first.tokens) / ((now - stats.first.at) / 1000);
  }
  stats.tokens = tokens;
}

async function answer() {
  const message = {role: 'assistant', content: '', reasoning: '', calls: [], isRunning: true,
    stats: {tokens: 0, rate: 0, firstToken: null, begin: performance.now()}};
  const view = new AnswerView(message, {again: regenerate});
  const teller = new Teller();
  const messages = sentMessages();
  const controller = chat.running = new AbortController();
  add(message, view);
  showRunning();
  byId('told').textContent = 'The model is answering.';
  try {
    const body = {model: chat.model, messages, ...requestFields(), stream: true,
      stream_options: {include_usage: true, continuous_usage_stats: true}};
    const response = await get('v1/chat/completions', {method: 'POST', signal: controller.signal,
      headers: {'Content-Type': 'application/json'}, body: JSON.stringify(body)});
    for await (const event of eventsOf(response)) {
      take(message, event);
      view.changed();
      teller.tell(message.content, false);
    }
  } catch (error) {
    if (error.name === 'AbortError') message.isStopped = true;
    else message.error = error.message;
  }
  message.isRunning = false;
  view.draw();
  if (chat.running !== controller) return; // a new chat has begun
  chat.running = null;
  if (!message.error && message.finish === 'tool_calls') view.askForResults(giveResults);
  teller.tell(`${message.content}${message.isStopped ? ' Stopped.' : ''}`, true);
  showRunning();
}

// ---------------------------------------------------------------- actions

function add(message, view) {
  chat.messages.push(message);
  chat.views.push(view);
  if (view) byId('log').append(view.node);
  scrollToEnd(true);
}

function say(content) {
  const message = {role: 'user', content};
  const view = {node: userView(message, () => editFrom(message))};
  add(message, view);
  return answer();
}

function giveResults(results) {
  focusChat();
  const {calls} = chat.messages.at(-1);
  calls.forEach((call, index) => add({role: 'tool', content: results[index], tool_call_id: call.id}, null));
  return answer();
}

// Leaves the messages before `count`.
function cutTo(count) {
  chat.messages.length = count;
  for (const view of chat.views.splice(count)) view?.node.remove();
}

// Where the keyboard goes on after a button that is gone. A phone's would cover half the page.
function focusChat() {
  byId(matchMedia('(pointer: coarse)').matches ? 'log' : 'prompt').focus();
}

function regenerate() {
  focusChat();
  cutTo(chat.messages.length - 1);
  return answer();
}

// Back into the field with it, and its answers go.
function editFrom(message) {
  if (chat.running) return;
  cutTo(chat.messages.indexOf(message));
  byId('prompt').value = message.content;
  fitPrompt();
  byId('prompt').focus();
  showRunning();
}

function newChat() {
  stop();
  chat.running = null;
  cutTo(0);
  focusChat();
  byId('told').textContent = 'New chat.';
  showRunning();
}

function stop() {
  chat.running?.abort();
}

function send() {
  const field = byId('prompt'), text = field.value;
  if (!text.trim() || chat.running) return;
  field.value = '';
  fitPrompt();
  say(text);
}

// What can be done now: to stop an answer, or to send and to change what was said.
function showRunning() {
  const isRunning = chat.running !== null;
  byId('send').hidden = isRunning;
  byId('stop').hidden = !isRunning;
  byId('log').classList.toggle('busy', isRunning);
  byId('welcome').hidden = chat.messages.length > 0;
  chat.views.forEach((view, index) => view?.showButtons?.(index === chat.views.length - 1));
}

function fitPrompt() {
  const field = byId('prompt');
  field.style.height = 'auto';
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight * 0.4)}px`;
}

function showSettings(isShown) {
  byId('settings').hidden = !isShown;
  byId('show-settings').setAttribute('aria-expanded', String(isShown));
}

function startChat() {
  const field = byId('prompt');
  byId('composer').addEventListener('submit', event => {
    event.preventDefault();
    send();
  });
  field.addEventListener('input', fitPrompt);
  field.addEventListener('keydown', event => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId('chat').addEventListener('keydown', event => {
    if (event.key !== 'Escape' || !chat.running) return;
    stop();
    focusChat();
  });
  byId('stop').addEventListener('click', () => { stop(); focusChat() });
  byId('new').addEventListener('click', newChat);
  byId('show-settings').addEventListener('click', () => showSettings(byId('settings').hidden));
  // Beside the conversation where there is room for it.
  const isWide = matchMedia('(min-width: 68rem)');
  isWide.addEventListener('change', () => showSettings(isWide.matches));
  showSettings(isWide.matches);
  showRunning();
}
