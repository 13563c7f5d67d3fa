'use strict';
// How messages look. What they are and what is sent: chat.js.

const isReducedMotion = matchMedia('(prefers-reduced-motion: reduce)');

function userView(message, onEdit) {
  const edit = button('Edit', onEdit, {'aria-label': 'Edit this message and answer anew'});
  const bar = element('div', {class: 'bar'}, edit, copyButton(() => message.content));
  const bubble = element('div', {class: 'bubble'}, message.content);
  return element('article', {class: 'user', 'aria-label': 'You'}, bubble, bar);
}

// The answer of a model, drawn at most once a frame while it grows.
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = element('div', {class: 'reasoning'});
    this.thoughts = element('details', {class: 'fold', hidden: true},
      element('summary', {}, 'Reasoning'), this.reasoning);
    this.content = element('div', {class: 'text'});
    this.calls = element('div', {class: 'calls'});
    this.trouble = element('div', {class: 'wrong', role: 'alert', hidden: true});
    this.status = element('span', {class: 'stats'});
    this.buttons = element('span', {class: 'bar'});
    this.node = element('article', {class: 'answer', 'aria-label': 'Answer', 'aria-busy': 'true'},
      this.thoughts, this.content, this.calls, this.trouble,
      element('div', {class: 'foot'}, this.status, this.buttons));
    this.callViews = [];
    this.isDue = false;
    this.draw();
  }

  // Also where nothing is drawn, in a tab behind others, it is drawn in the end.
  changed() {
    if (this.isDue) return;
    this.isDue = true;
    const draw = () => { if (this.isDue) this.draw() };
    requestAnimationFrame(draw);
    setTimeout(draw, 250);
  }

  draw() {
    this.isDue = false;
    const {content, reasoning, calls, error, isRunning} = this.message;
    const wasAtEnd = isAtEnd();
    this.thoughts.hidden = !reasoning;
    if (reasoning) {
      showMarkdown(this.reasoning, reasoning);
      const isThinking = isRunning && !content && !calls.length;
      if (isThinking !== this.wasThinking) this.thoughts.open = isThinking;
      this.wasThinking = isThinking;
      this.thoughts.firstChild.textContent = isThinking ? 'Reasoning…' : 'Reasoning';
    }
    showMarkdown(this.content, content);
    calls.forEach((call, index) => {
      this.callViews[index] ??= this.callView(call);
      this.callViews[index].draw();
    });
    this.trouble.textContent = error ?? '';
    this.trouble.hidden = !error;
    this.status.textContent = statusText(this.message);
    this.node.classList.toggle('running', isRunning);
    this.node.setAttribute('aria-busy', String(isRunning));
    if (wasAtEnd) scrollToEnd();
  }

  callView(call) {
    const name = element('code'), code = element('code');
    const fold = element('details', {class: 'fold call', open: true},
      element('summary', {}, 'Tool call ', name), element('pre', {tabIndex: 0}, code));
    this.calls.append(fold);
    const draw = () => {
      name.textContent = call.name;
      code.textContent = indented(call.arguments);
    };
    return {fold, draw};
  }

  // A field for the result of each call, and one button for all.
  askForResults(onResults) {
    const fields = this.message.calls.map((call, index) => {
      const field = element('textarea', {class: 'mono', rows: 2, spellcheck: false});
      const label = element('label', {class: 'result'}, `Result of ${call.name}`, field);
      this.callViews[index].fold.append(label);
      return field;
    });
    const send = element('button', {type: 'button', class: 'main', onclick: () => {
      const results = fields.map(field => field.value);
      for (const field of fields) field.readOnly = true;
      send.remove();
      onResults(results);
    }}, fields.length > 1 ? 'Send results' : 'Send result');
    this.calls.append(send);
    this.dropResults = () => send.remove();
  }

  // Only the last answer can be made again or changed.
  showButtons(isLast) {
    this.buttons.replaceChildren();
    if (this.message.isRunning) return;
    if (this.message.content) this.buttons.append(copyButton(() => this.message.content));
    if (!isLast) {
      this.dropResults?.();
      return;
    }
    this.buttons.append(button(this.message.error ? 'Try again' : 'Regenerate', this.actions.again));
    if (this.message.content) this.buttons.append(button('Edit', () => this.edit()));
  }

  edit() {
    const field = element('textarea', {value: this.message.content, rows: 8, 'aria-label': 'The answer'});
    const close = () => {
      editor.remove();
      this.content.hidden = this.buttons.hidden = false;
      this.draw();
      this.buttons.querySelector('button')?.focus();
    };
    const save = () => {
      this.message.content = field.value;
      close();
    };
    const editor = element('div', {class: 'editor'}, field, element('div', {class: 'row'},
      element('button', {type: 'button', onclick: close}, 'Cancel'),
      element('button', {type: 'button', class: 'main', onclick: save}, 'Save')));
    field.addEventListener('keydown', event => { if (event.key === 'Escape') close() });
    this.content.after(editor);
    this.content.hidden = this.buttons.hidden = true;
    field.focus();
  }
}

function statusText(message) {
  const {isRunning, isStopped, finish, stats} = message;
  const parts = [];
  if (isRunning && !stats.tokens) return 'Waiting for the first token…';
  if (stats.tokens) parts.push(plural(stats.tokens, 'token'));
  if (stats.rate) parts.push(`${stats.rate.toFixed(1)} tokens/s`);
  if (stats.firstToken !== null) parts.push(`first token after ${seconds(stats.firstToken)}`);
  if (isStopped) parts.push('stopped');
  if (finish === 'length') parts.push('cut at the maximum length');
  return parts.join(' · ');
}

const seconds = value => value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch { // it is not complete yet, or never will be
    return json;
  }
}

function isAtEnd() {
  const log = byId('log');
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function scrollToEnd(isSmooth = false) {
  const log = byId('log');
  const behavior = isSmooth && !isReducedMotion.matches ? 'smooth' : 'instant';
  log.scrollTo({top: log.scrollHeight, behavior});
}

// Screen readers hear whole sentences of an answer, not every token.
class Teller {
  constructor() {
    this.length = 0;
    this.last = 0;
  }

  tell(content, isEnd) {
    const now = performance.now(), rest = content.slice(this.length);
    if (!isEnd && now - this.last < 1500) return;
    const end = isEnd ? rest.length : Math.max(...['. ', '.\n', '? ', '! ', '\n'].map(mark => rest.lastIndexOf(mark) + 1));
    if (end <= 0) return;
    byId('told').textContent = rest.slice(0, end);
    this.length += end;
    this.last = now;
  }
}
