"""The style of the pages that `html_document.py` writes; kept inline so that each is one file."""

from vllm.kernels.select.grade import Grade
from vllm.kernels.select.reason import Why

# By name: light and dark. Text on each ground, `-text`, has a contrast of at least 4.5.
COLOURS: dict[str, tuple[str, str]] = {
    "page": ("#ffffff", "#0f1318"),
    "text": ("#1b1f24", "#e4e8ec"),
    "soft": ("#59636e", "#98a2ad"),
    "line": ("#d5dae0", "#2c343d"),
    "raised": ("#f4f6f8", "#1a2027"),
    "track": ("#d5dae0", "#39434d"),
    "chosen": ("#116329", "#3fb950"),
    "chosen-text": ("#ffffff", "#04170a"),
    "could-run": ("#d3f2dc", "#163322"),
    "could-run-text": ("#0b4a20", "#8fe0a8"),
    "device": ("#e6e9ed", "#242b33"),
    "device-text": ("#3d4650", "#aab4be"),
    "library": ("#d6e6fb", "#14304f"),
    "library-text": ("#0b3f7d", "#9cc8fa"),
    "format": ("#efe6d6", "#332c20"),
    "format-text": ("#564a37", "#cdbfa5"),
    "shape": ("#fbe394", "#4a3a0c"),
    "shape-text": ("#574000", "#f4cd77"),
    "dtype": ("#fbd3b4", "#4d2a10"),
    "dtype-text": ("#6b2d00", "#f5b98c"),
    "policy": ("#e5d8fa", "#35215a"),
    "policy-text": ("#4d2291", "#cfb4fb"),
    "numerics": ("#fbcfd2", "#4d1a20"),
    "numerics-text": ("#8a1220", "#ffa8ae"),
}
_SHOWN = ("chosen", "could-run", *Why)
# By grade of evidence; the fuller, the better.
MARKS = {
    Grade.MEASURED: "\N{BLACK CIRCLE}",
    Grade.IMPORTED: "\N{CIRCLE WITH ALL BUT UPPER LEFT QUADRANT BLACK}",
    Grade.ESTIMATED: "\N{CIRCLE WITH RIGHT HALF BLACK}",
    Grade.RUN: "\N{CIRCLE WITH UPPER RIGHT QUADRANT BLACK}",
    Grade.COMPILED: "\N{WHITE CIRCLE}",
}


def _variables(scheme: int) -> str:
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())


_SCHEMES = f"""
:root {{ color-scheme: light dark; {_variables(0)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(1)} }} }}
""" + "".join(
    f".is-{name} {{ background: var(--{name}); color: var(--{name}-text) }}\n" for name in _SHOWN
)
# The second content is for browsers that know a text in its place, as screen readers say it.
_MARKS = "".join(
    f'.grade-{grade}::before {{ content: "{mark}"; content: "{mark}" / "{grade}" }}\n'
    for grade, mark in MARKS.items()
)

_TEXT = """
* { box-sizing: border-box }
[hidden] { display: none !important }
html { -webkit-text-size-adjust: 100% }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 14px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .75rem }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h2 small { font-weight: 400 }
h3 { font-size: 1rem; margin: 1rem 0 .25rem }
small { color: var(--soft); font-size: 11.5px; line-height: 1.35 }
code { font: 12px/1.4 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
pre { margin: 0; padding: .6rem .8rem; font: 12px/1.4 ui-monospace, "DejaVu Sans Mono", monospace }
code i { font-style: normal; white-space: nowrap }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem 1rem;
  margin: 0 0 1rem }
dt { color: var(--soft) }
dd { margin: 0; overflow-wrap: anywhere }
.note { max-width: 90ch; margin: .5rem 0; padding: .5rem .8rem; background: var(--raised);
  border-left: 4px solid var(--soft); border-radius: 4px }
b[class^=is-] { display: inline-block; min-width: 5.2rem; padding: 0 .4rem; border-radius: 4px;
  font-weight: 500; font-size: 12px; text-align: center }
i[class^=grade-] { font: 13px/1 "DejaVu Sans", "Segoe UI Symbol", "Apple Symbols", sans-serif }
em { font-style: normal; font-weight: 600 }
.legend { display: flex; flex-wrap: wrap; gap: .35rem 1.4rem; padding: 0; margin: 1rem 0;
  list-style: none; color: var(--soft) }
.legend li { display: flex; gap: .4rem; align-items: baseline }
.legend b { flex: none }
.legend em { color: var(--text) }
.legend + .legend { margin-top: -.4rem }
#filters { display: flex; flex-wrap: wrap; gap: .6rem 1.2rem; align-items: center;
  margin: 1rem 0 .5rem }
#filters label { color: var(--soft) }
#filters input, #filters select { font: inherit; color: var(--text); background: var(--page);
  border: 1px solid var(--soft); border-radius: 6px; padding: .3rem .5rem; margin-left: .3rem }
#filters input { width: 15rem; max-width: 60vw }
.hint { color: var(--soft); margin: 0; max-width: 90ch }
"""

_TABLE = """
:root { --layers: 18.5rem; --kernel: 12.5rem }
.scroll { overflow: auto; width: fit-content; max-width: 100%; max-height: 92vh;
  border: 1px solid var(--line); border-radius: 8px;
  scroll-padding: 3.2rem .5rem 1rem calc(var(--layers) + var(--kernel) + .5rem) }
table { border-collapse: separate; border-spacing: 0 }
th, td { text-align: left; vertical-align: middle; padding: .35rem .2rem;
  border-bottom: 1px solid var(--line) }
tbody tr:last-child > * { border-bottom: 0 }
table[role=grid] th, table[role=grid] td { min-width: 5.2rem; max-width: 7rem }
table[role=grid] tr > :nth-child(1) { position: sticky; left: 0; z-index: 1;
  background: var(--page); width: var(--layers); min-width: var(--layers);
  max-width: var(--layers); padding-left: .8rem }
table[role=grid] tr > :nth-child(2) { position: sticky; left: var(--layers); z-index: 1;
  background: var(--page); width: var(--kernel); min-width: var(--kernel);
  max-width: var(--kernel); padding-right: .5rem; border-right: 1px solid var(--line) }
table[role=grid] thead tr > * { position: sticky; top: 0; z-index: 2; background: var(--raised);
  color: var(--soft); font-weight: 600; font-size: 11px; line-height: 1.25; vertical-align: bottom;
  text-align: center; overflow-wrap: break-word }
table[role=grid] thead tr > :nth-child(-n+2) { z-index: 3; background: var(--raised);
  text-align: left; font-size: 12px }
table[role=grid] thead tr > :nth-child(2) { padding-left: .6rem }
tbody th { font-weight: 400 }
.names { font-size: 12px; line-height: 1.35 }
th small, td small { display: block }
table[role=grid] a { display: block; padding: .3rem .15rem; border-radius: 5px; font-size: 11px;
  line-height: 1.3; white-space: nowrap; text-align: center; text-decoration: none;
  cursor: default }
table[role=grid] a.off { opacity: .25 }
table[role=grid] a:hover { outline: 2px solid var(--soft) }
table[role=grid] a:focus { outline: 2px solid var(--text); outline-offset: 1px }
a.is-chosen { font-weight: 600 }
td small.is-chosen { background: var(--chosen); color: var(--chosen-text); border-radius: 3px;
  margin-top: .15rem; font-size: 10.5px }
td.kernel a { text-align: left; white-space: normal; color: inherit; padding: .3rem .4rem;
  overflow-wrap: anywhere }
td.kernel small { display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 2;
  overflow: hidden }
td.kernel strong { font-size: 13px }
td.none strong { color: var(--numerics-text) }
.m { display: block; font-size: 10.5px; line-height: 1.2; color: var(--soft) }
.part { display: block; position: relative; padding: 3px 0 6px; font-weight: 600; font-size: 12px }
.part i { font-style: normal; font-weight: 400; display: inline-block; min-width: 4.6rem }
.part::after { content: ""; position: absolute; inset: auto 0 2px 0; height: 3px;
  border-radius: 2px; background: var(--track) }
.part s { position: absolute; bottom: 2px; height: 3px; min-width: 3px; z-index: 1;
  border-radius: 2px; background: var(--chosen) }
td a i[class^=grade-] { font-size: 10px }
td:not(.kernel) a small { font-size: 10.5px }
td:not(.kernel) a small:not(.is-chosen) { color: inherit }
td a.split { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 5.8rem }
td a.split .part { font-size: 11px }
td a.split .part i { display: block; min-width: 0; line-height: 1.1 }
a.split + a.split { margin-top: .3rem }
@media (max-width: 60rem) { :root { --layers: 12rem; --kernel: 9.5rem } }
@media (max-width: 36rem) {
  :root { --layers: 8rem; --kernel: 6.5rem }
  body { padding: 1rem .6rem 4rem }
  table[role=grid] tr > :nth-child(1) { padding-left: .4rem }
  td.kernel a { padding: .2rem }
  table[role=grid] code, .part { font-size: 11px }
  table[role=grid] small { font-size: 10.5px }
  .part i { min-width: 0; display: block; line-height: 1.1 }
}
"""

_DETAILS = """
.changes { margin-top: .4rem; width: 100%; table-layout: fixed; font-size: 13px }
.changes th, .changes td { vertical-align: top; padding: .3rem .5rem; overflow-wrap: anywhere }
.changes thead th { color: var(--soft); font-weight: 600; font-size: 12px }
.changes tr > :first-child { width: 11rem; color: var(--soft) }
.scroll > .changes { margin: 0 }
.change h2 { margin-bottom: .2rem }
#tip { position: fixed; z-index: 9; max-width: min(36rem, calc(100vw - 1rem)); padding: .6rem .8rem;
  max-height: 80vh; overflow: hidden; background: var(--raised); color: var(--text);
  border: 1px solid var(--soft); border-radius: 8px; box-shadow: 0 6px 24px rgb(0 0 0 / 30%);
  pointer-events: none; overflow-wrap: anywhere }
#tip dl { margin: .3rem 0 0 }
#tip div { margin-top: .25rem }
#decisions ol, #verdicts ul { list-style: none; margin: 0; padding: 0 }
#decisions li, #verdicts li { padding: .4rem .5rem; border-top: 1px solid var(--line) }
#decisions dl { margin: .2rem 0 0 }
#verdicts li { display: grid; grid-template-columns: 13rem minmax(0, 1fr); gap: .1rem 1rem }
#verdicts li > * { grid-column: 2 }
#verdicts li > strong { grid-column: 1; grid-row: 1 / span 9; font-size: 13px }
.times-drawn { margin: .4rem 0 .2rem; max-width: 44rem }
.times-drawn svg { display: block; width: 100%; max-width: 32rem }
.times-drawn text { fill: var(--soft); font-size: 9px }
.times-drawn .grid { stroke: var(--line); stroke-width: .5 }
.kernel path { fill: none }
.kernel .error { fill: inherit; fill-opacity: .12; stroke: none }
.kernel .serves { stroke-width: 6; stroke-opacity: .45; stroke-linecap: round;
  stroke-linejoin: round }
.kernel .marks { stroke-width: 4; stroke-linecap: round }
.estimated .times { stroke-dasharray: 4 3 }
.estimated .marks { stroke-width: 2 }
.left-out { opacity: .4 }
.times-drawn figcaption { color: var(--soft); font-size: 11.5px }
.times-drawn span { white-space: nowrap; margin-right: .6rem }
.times-drawn i { display: inline-block; width: .8rem; height: .25rem; vertical-align: middle }
li:target { background: var(--raised); outline: 2px solid var(--soft) }
@media (max-width: 36rem) {
  #verdicts li { display: block }
  .changes tr { display: block; padding: .3rem 0; border-bottom: 1px solid var(--line) }
  .changes thead { display: none }
  .changes tr > :nth-child(n) { display: block; width: auto; border: 0; padding: .1rem .3rem }
  .changes td::before { content: "before: "; color: var(--soft) }
  .changes td + td::before { content: "after: " }
  .changes td div { display: inline }
  #tip { inset: auto 0 0 0 !important; max-width: none; border-radius: 12px 12px 0 0 }
}
"""

# The table shows where each verdict stands, the lists after it have the reasons in full.
_PRINT = """
@page { size: A4 landscape; margin: 10mm }
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { padding: 0; font-size: 8.5pt }
  #filters, .hint, #tip { display: none }
  .scroll { overflow: visible; max-height: none; width: auto; border: 0 }
  table[role=grid] { width: 100% }
  table[role=grid] tr > :nth-child(n) { position: static; min-width: 0; max-width: none;
    width: auto; padding: .6mm .3mm }
  table[role=grid] tr > :nth-child(1) { width: 48mm }
  table[role=grid] tr > :nth-child(2) { width: 40mm }
  table[role=grid] thead tr > :nth-child(n+3) { writing-mode: vertical-rl; text-align: left;
    vertical-align: middle }
  table[role=grid] :is(a, b, i, code, small, strong, span, div) { font-size: 6pt }
  table[role=grid] thead tr > :nth-child(n) { font-size: 6.5pt }
  table[role=grid] a { padding: .5mm .2mm; white-space: normal; border-radius: 1mm }
  table[role=grid] a::after { content: attr(href); display: block; opacity: .8 }
  td:not(.kernel) a small { font-size: 5.5pt; letter-spacing: -.1pt }
  td.kernel small { display: block }
  #decisions li::before, #verdicts li::before { content: "#" attr(id) " "; color: var(--soft) }
  #verdicts ul { columns: 2; column-gap: 8mm }
  #verdicts li { display: block; padding: 1mm 0 }
  tr, li { break-inside: avoid }
  h2, h3 { break-after: avoid }
}
"""

STYLE = _SCHEMES + _MARKS + _TEXT + _TABLE + _DETAILS + _PRINT
