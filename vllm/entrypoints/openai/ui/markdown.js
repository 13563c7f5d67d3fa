'use strict';
// Markdown to DOM nodes, without HTML: what looks like a tag is shown as written.

// Source text of each block of a document: paragraphs, lists, code and the like.
function blocksOf(text) {
  const blocks = [];
  let current = [], fence = null;
  const end = () => {
    if (current.length) blocks.push(current.join('\n'));
    current = [];
  };
  for (const line of text.split('\n')) {
    const mark = /^\s*(`{3,}|~{3,})/.exec(line)?.[1];
    const isInList = isList(current[0]) && (!line.trim() || /^\s{2,}/.test(line));
    if (fence) {
      current.push(line);
      if (!closes(line, fence)) continue;
      fence = null;
      if (!isList(current[0])) end();
    } else if (mark) {
      if (!isInList) end();
      fence = mark;
      current.push(line);
    } else if (!line.trim() && !isInList) {
      end();
    } else {
      if (!isInList && startsAnew(line, current)) end();
      current.push(line);
    }
  }
  end();
  return blocks;
}

const closes = (line, fence) => /^(`{3,}|~{3,})$/.test(line.trim()) && line.trim().startsWith(fence);
const isList = line => line !== undefined && /^\s*([-*+]|\d{1,9}[.)])\s+\S/.test(line) && !isRule(line);
const isRule = line => /^ {0,3}([-*_])( *\1){2,} *$/.test(line);
const isHeading = line => /^ {0,3}#{1,6}\s/.test(line);
const isQuote = line => /^ {0,3}>/.test(line);

function startsAnew(line, current) {
  if (!current.length) return false;
  const first = current[0];
  if (isHeading(line) || isHeading(first) || isRule(line) || isRule(first)) return true;
  // A line beside an item or a quote belongs to it, unless it is empty before.
  if (isList(first)) return isQuote(line) || (!isList(line) && current.at(-1) === '');
  // A number may begin a line of a paragraph by chance, and then it is rarely the first.
  return /^\s*([-*+]|1[.)])\s+\S/.test(line) || isQuote(line) !== isQuote(first);
}

function blockNode(source) {
  const lines = source.split('\n'), first = lines[0];
  const fence = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(first);
  if (fence) return codeBlock(lines, fence[2]);
  if (isHeading(first)) {
    const [, marks, text] = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(first) ?? [null, '#', first];
    // The page has h1 and h2 of its own.
    return element(`h${Math.min(6, marks.length + 2)}`, {}, ...inlineNodes(text));
  }
  if (isRule(first)) return element('hr');
  if (isQuote(first)) {
    const inner = lines.map(line => line.replace(/^ {0,3}> ?/, '')).join('\n');
    return element('blockquote', {}, ...blocksOf(inner).map(blockNode));
  }
  if (isList(first)) return listNode(lines);
  if (lines.length > 1 && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[1]) && first.includes('|')) {
    return tableNode(lines);
  }
  return element('p', {}, ...inlineNodes(source));
}

function codeBlock(lines, language) {
  const isClosed = lines.length > 1 && /^ {0,3}(`{3,}|~{3,})\s*$/.test(lines.at(-1));
  const text = lines.slice(1, isClosed ? -1 : undefined).join('\n');
  const bar = element('div', {class: 'code-bar'}, element('span', {}, language || 'text'), copyButton(() => text));
  return element('div', {class: 'code'}, bar, element('pre', {tabIndex: 0}, element('code', {}, text)));
}

function listNode(lines) {
  const marker = /^(\s*)([-*+]|(\d{1,9})[.)])\s+/;
  const [, indent, , start] = marker.exec(lines[0]);
  const list = start === undefined ? element('ul') : element('ol', {start: Number(start)});
  let item = null;
  const add = () => {
    if (!item) return;
    const blocks = blocksOf(item.join('\n'));
    const nodes = blocks.map(blockNode);
    // Of a tight list, without paragraphs.
    const content = nodes[0]?.tagName === 'P' ? [...nodes.shift().childNodes, ...nodes] : nodes;
    list.append(element('li', {}, ...content));
  };
  for (const line of lines) {
    const match = marker.exec(line);
    if (match && match[1].length <= indent.length + 1) {
      add();
      item = [line.slice(match[0].length)];
    } else {
      item.push(line.replace(new RegExp(`^\\s{0,${indent.length + (start === undefined ? 2 : 3)}}`), ''));
    }
  }
  add();
  return list;
}

function tableNode(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, '').split(/(?<!\\)\|/)
    .map(cell => cell.trim().replaceAll('\\|', '|'));
  const row = (line, tag) => element('tr', {}, ...cells(line).map(cell => element(tag, {}, ...inlineNodes(cell))));
  const table = element('table', {}, element('thead', {}, row(lines[0], 'th')),
    element('tbody', {}, ...lines.slice(2).map(line => row(line, 'td'))));
  return element('div', {class: 'scroll', tabIndex: 0}, table);
}

// The first that matches at the earliest place wins; each makes the node of its match.
const INLINE = [
  [/(`+)(.*?[^`])\1(?!`)/s, match => element('code', {}, match[2].trim())],
  [/!?\[([^\]\n]*)\]\(\s*<?([^\s)>]+)>?(?:\s+["'(][^)]*)?\)/, match => link(match[2], inlineNodes(match[1]))],
  [/<?(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_])>?/, match => link(match[1], [match[1]])],
  [/\*\*(?=\S)(.+?)(?<=\S)\*\*/s, match => element('strong', {}, ...inlineNodes(match[1]))],
  [/(?<!\w)__(?=\S)(.+?)(?<=\S)__(?!\w)/s, match => element('strong', {}, ...inlineNodes(match[1]))],
  [/\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)/s, match => element('em', {}, ...inlineNodes(match[1]))],
  [/(?<!\w)_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)/s, match => element('em', {}, ...inlineNodes(match[1]))],
  [/~~(?=\S)(.+?)~~/s, match => element('del', {}, ...inlineNodes(match[1]))],
  [/\\([\\`*_{}[\]()#+\-.!~>|])/, match => match[1]],
  [/(?: {2,}|\\)\n/, () => element('br')],
];

function inlineNodes(text) {
  const nodes = [];
  while (text) {
    let best = null, make = null;
    for (const [pattern, maker] of INLINE) {
      const match = pattern.exec(text);
      if (match && (!best || match.index < best.index)) [best, make] = [match, maker];
    }
    if (!best) break;
    if (best.index) nodes.push(text.slice(0, best.index));
    nodes.push(make(best));
    text = text.slice(best.index + best[0].length);
  }
  if (text) nodes.push(text);
  return nodes;
}

// Only addresses that run nothing; any other is shown as its text.
function link(address, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(address)) return element('span', {}, ...children);
  return element('a', {href: address, target: '_blank', rel: 'noopener noreferrer'}, ...children);
}

// Shows `text` in `node`. Blocks that have not changed stay, with what is selected in them.
function showMarkdown(node, text) {
  const sources = blocksOf(text), before = node.sources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  node.append(...sources.slice(same).map(blockNode));
  node.sources = sources;
}
