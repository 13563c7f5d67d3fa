"""The script of the pages that `html_document.py` writes; kept inline so that it is one file.

Without it every cell is a link to its details further down. With it the details are shown beside
the cell, a table is one tab stop with arrow keys inside, and rows are filtered.
"""

SCRIPT = """
const byId = id => document.getElementById(id);
const data = JSON.parse(byId('report').textContent);
const entries = data.decisions || data;
const tip = byId('tip');
const detailsOf = link => byId(link.hash.slice(1));
const linksOf = row => [...row.cells].slice(1).map(cell => cell.querySelector('a'));
const isShown = row => !row.hidden;
const rowsOf = table => [...table.tBodies[0].rows].filter(isShown);

// ---- details of a cell
let shown = null;
function place() {
  const at = shown.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own.height < innerHeight;
  tip.style.top = Math.max(8, below ? at.bottom + 8 : at.top - 8 - own.height) + 'px';
  tip.style.left = Math.max(8, Math.min(at.left, innerWidth - own.width - 8)) + 'px';
}
function show(link) {
  shown = link;
  tip.replaceChildren(...detailsOf(link).cloneNode(true).childNodes);
  tip.hidden = false;
  place();
  const at = link.getBoundingClientRect(), own = tip.getBoundingClientRect();
  if (link === focused() && own.top < at.bottom && at.top < own.bottom)
    scrollBy(0, at.bottom - own.top + 8);
}
function hide() { shown = null; tip.hidden = true }
function focused() {
  const link = document.activeElement;
  return link && link.closest('table[role=grid]') && link.hash ? link : null;
}
addEventListener('scroll', () => shown && place(), true);
addEventListener('resize', () => shown && place());
addEventListener('keydown', event => { if (event.key === 'Escape') hide() });

// ---- a table is one tab stop; arrow keys move inside
function tabStops() {
  for (const table of document.querySelectorAll('table[role=grid]')) {
    const all = [...table.tBodies[0].rows].flatMap(linksOf).filter(Boolean);
    const stop = all.find(link => link.tabIndex === 0 && isShown(link.closest('tr')))
      || rowsOf(table).flatMap(linksOf).find(Boolean);
    for (const link of all) link.tabIndex = link === stop ? 0 : -1;
  }
}
function next(rows, y, x, key, isFar) {
  if (key === 'Home' || key === 'End') {
    const y2 = !isFar ? y : key === 'Home' ? 0 : rows.length - 1;
    return (key === 'Home' ? rows[y2] : [...rows[y2]].reverse()).find(Boolean);
  }
  const dy = {ArrowUp: -1, ArrowDown: 1}[key] || 0, dx = {ArrowLeft: -1, ArrowRight: 1}[key] || 0;
  do { y += dy; x += dx } while (rows[y] && rows[y][x] === null);
  return rows[y] && rows[y][x];
}
for (const table of document.querySelectorAll('table[role=grid]')) {
  for (const link of table.querySelectorAll('tbody a')) {
    link.setAttribute('aria-describedby', link.hash.slice(1));
    link.addEventListener('mouseenter', () => show(link));
    link.addEventListener('mouseleave', () => focused() ? show(focused()) : hide());
    link.addEventListener('focus', () => show(link));
    link.addEventListener('blur', hide);
    link.addEventListener('click', event => { event.preventDefault(); link.focus(); show(link) });
  }
  table.addEventListener('keydown', event => {
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) || event.altKey) return;
    const rows = rowsOf(table).map(linksOf), link = focused();
    const y = rows.findIndex(row => row.includes(link));
    if (y < 0) return;
    event.preventDefault();
    const to = next(rows, y, rows[y].indexOf(link), event.key, event.ctrlKey || event.metaKey);
    if (!to) return;
    link.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
  });
}

// ---- filters
function namePattern(text) {
  const plain = text.replace(/[.+^${}()|[\\]\\\\]/g, '\\\\$&');
  if (!/[*?]/.test(text)) return new RegExp(plain, 'i');
  return new RegExp('^' + plain.replace(/\\*/g, '.*').replace(/\\?/g, '.') + '$', 'i');
}
const kindsOf = element => new Set([...element.querySelectorAll('b[class^=is-]')]
  .map(chip => chip.textContent));
const kinds = new Map();
for (const entry of document.querySelectorAll('#decisions li, #verdicts li'))
  kinds.set(entry.id, kindsOf(entry));
function hasKind(link, kind) {
  const own = link && kinds.get(link.hash.slice(1));
  return Boolean(own && own.has(kind));
}
const shownNames = row => row.querySelector('.names').textContent;
function filter() {
  const text = byId('by-layer').value.trim(), kind = byId('by-kind')?.value || '';
  const pattern = namePattern(text);
  const named = entries.map(entry => !text || entry.layers.some(name => pattern.test(name)));
  let count = 0, total = 0;
  const keeps = new Set();
  for (const row of document.querySelectorAll('table[role=grid] tbody tr, article.change')) {
    const links = row.cells ? linksOf(row) : [];
    const isKept = (named[row.dataset.d] || shownNames(row).includes(text))
      && (!kind || links.some(link => hasKind(link, kind)));
    row.hidden = !isKept;
    for (const link of links) link?.classList.toggle('off', Boolean(kind) && !hasKind(link, kind));
    total += 1;
    count += isKept;
    if (isKept) keeps.add(row.dataset.d);
  }
  for (const item of document.querySelectorAll('#decisions li'))
    item.hidden = !keeps.has(item.dataset.d);
  for (const item of document.querySelectorAll('#verdicts li'))
    item.hidden = Boolean(kind) && !kinds.get(item.id).has(kind);
  for (const section of document.querySelectorAll('section.family'))
    section.hidden = !rowsOf(section.querySelector('table')).length;
  byId('found').textContent = text || kind ? `${count} of ${total}` : '';
  hide();
  tabStops();
}
const form = byId('filters');
if (form) {
  form.hidden = false;
  form.addEventListener('input', filter);
  form.addEventListener('submit', event => event.preventDefault());
  filter();
}
"""
