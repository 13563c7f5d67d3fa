"""Style and script of the page that `html_report.py` writes; kept inline so that it is one file."""

from vllm.kernels.select.reason import Why

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1b1f24; --soft: #5c6670; --line: #d5dae0; --raised: #f6f8fa;
  --chosen: #116329; --chosen-text: #ffffff; --free: #d3f2dc; --free-text: #0b4a20;
  --device: #e6e9ed; --device-text: #3d4650; --library: #d6e6fb; --library-text: #0b3f7d;
  --format: #ece8e1; --format-text: #564a37; --shape: #fde7b8; --shape-text: #664300;
  --dtype: #f8dcc6; --dtype-text: #733100; --policy: #e8dcfa; --policy-text: #4d2291;
  --numerics: #fbd5d5; --numerics-text: #8a1220;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --text: #e4e8ec; --soft: #98a2ad; --line: #2c343d; --raised: #1a2027;
    --chosen: #3fb950; --chosen-text: #04170a; --free: #163322; --free-text: #8fe0a8;
    --device: #242b33; --device-text: #aab4be; --library: #14304f; --library-text: #9cc8fa;
    --format: #2e2a23; --format-text: #cdbfa5; --shape: #43330d; --shape-text: #f4cd77;
    --dtype: #472a14; --dtype-text: #f5b98c; --policy: #35215a; --policy-text: #cfb4fb;
    --numerics: #4d1a20; --numerics-text: #ffa8ae;
  }
}
* { box-sizing: border-box }
body { margin: 0; padding: 1.5rem 1.2rem 6rem; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.5rem; margin: 0 0 .75rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
code { font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0 0 1rem }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
.note { max-width: 75ch; padding: .6rem .9rem; background: var(--policy); color: var(--policy-text);
  border-radius: 6px }
.legend { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(25rem, 100%), 1fr));
  gap: .3rem 1.2rem; padding: 0; margin: 1rem 0 .5rem; list-style: none; color: var(--soft) }
.legend li { display: flex; gap: .5rem; align-items: baseline }
.legend span { flex: 0 0 5.6rem; padding: .1rem 0; border-radius: 4px; text-align: center;
  font-size: 12px }
.hint { color: var(--soft); margin: 0 }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--line);
  border-radius: 8px }
table { border-collapse: separate; border-spacing: 0 }
th, td { text-align: left; vertical-align: middle; padding: .45rem .25rem;
  border-bottom: 1px solid var(--line) }
tbody tr:last-child > * { border-bottom: 0 }
thead th { color: var(--soft); font-weight: 600; font-size: 12px; background: var(--raised);
  vertical-align: bottom }
thead th span { display: block; min-width: 4.6rem; max-width: 6rem; font-size: 10.5px }
tbody th { font-weight: 400; min-width: 22rem; padding-left: .8rem; background: var(--page) }
thead th:first-child { padding-left: .8rem }
@media (min-width: 60rem) {
  tr > :first-child { position: sticky; left: 0; z-index: 1 }
}
.problem { color: var(--soft); font-size: 11.5px; margin-top: .15rem }
.rank { white-space: nowrap }
.winner { min-width: 12rem; max-width: 19rem }
.missing .winner strong { color: var(--numerics-text) }
button { width: 100%; padding: .3rem .25rem; border: 1px solid transparent; border-radius: 5px;
  font: inherit; font-size: 11.5px; cursor: default; white-space: nowrap }
button:hover, button:focus { outline: 2px solid var(--text); outline-offset: 1px }
.more { opacity: .75; font-size: 11px; margin-left: .25em }
.why { display: none; text-align: left; white-space: normal }
.line { display: block }
.line b { font-weight: 600; padding: 0 .35rem; border-radius: 3px; font-size: 12px }
#tip { position: fixed; z-index: 2; max-width: min(32rem, calc(100vw - 2rem)); padding: .6rem .8rem;
  background: var(--raised); color: var(--text); border: 1px solid var(--line); border-radius: 8px;
  box-shadow: 0 6px 24px rgb(0 0 0 / 30%); pointer-events: none; overflow-wrap: anywhere }
#tip .line + .line { margin-top: .3rem }
.is-chosen { background: var(--chosen); color: var(--chosen-text); font-weight: 600 }
.is-could-run { background: var(--free); color: var(--free-text) }
""" + "".join(
    f".is-{why} {{ background: var(--{why}); color: var(--{why}-text) }}\n" for why in Why
)

# One tab stop per table; arrow keys move inside. The reasons stand in the page too (.why), for
# screen readers as the text of each button and for browsers without scripts in plain sight.
SCRIPT = """
const tip = document.getElementById('tip');
function show(button) {
  tip.innerHTML = button.querySelector('.why').innerHTML;
  tip.hidden = false;
  const at = button.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const below = at.bottom + 8 + own.height < innerHeight;
  tip.style.top = Math.max(8, below ? at.bottom + 8 : at.top - 8 - own.height) + 'px';
  tip.style.left = Math.max(8, Math.min(at.left, innerWidth - own.width - 8)) + 'px';
}
const hide = () => { tip.hidden = true };
for (const table of document.querySelectorAll('table')) {
  const rows = [...table.tBodies[0].rows].map(row => [...row.cells].slice(2)
    .map(cell => cell.firstElementChild));
  rows.flat().filter(Boolean).forEach((button, i) => {
    button.tabIndex = i ? -1 : 0;
    button.setAttribute('aria-label', [...button.querySelectorAll('.line')]
      .map(line => line.textContent).join('. '));
    button.addEventListener('mouseenter', () => show(button));
    button.addEventListener('mouseleave', hide);
    button.addEventListener('focus', () => show(button));
    button.addEventListener('blur', hide);
  });
  table.addEventListener('keydown', event => {
    if (event.key === 'Escape') return hide();
    const step = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
    if (!(event.key in step)) return;
    event.preventDefault();
    let y = rows.findIndex(row => row.includes(document.activeElement));
    let x = y < 0 ? -1 : rows[y].indexOf(document.activeElement);
    do { y += step[event.key][0]; x += step[event.key][1] } while (rows[y] && rows[y][x] === null);
    const next = rows[y] && rows[y][x];
    if (!next) return;
    document.activeElement.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
addEventListener('scroll', hide, true);
"""
