"""The page of a report in headless Chromium: nothing overlaps, the chosen kernel stays in view, and
keys and filters work. Pictures to look at: --basetemp FOLDER."""

import json
import struct
from contextlib import redirect_stdout
from pathlib import Path

import browser
import pages
import pytest

from vllm.entrypoints.cli.main import main

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        browser.installed() is None,
        reason=f"no browser is installed: none of {', '.join(browser.NAMES)} is on the PATH",
    ),
]
WIDTHS = (1280, 390)
MODELS = {"Qwen3-30B-A3B-FP8": "sm_90", "Qwen3.5-35B-A3B-FP8": "sm_100"}
SPLITS, RULED = MODELS


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """page_of(model) -> its page, as `explain --html` writes it."""
    made: dict[str, str] = {}

    def make(model: str) -> str:
        if model not in made:
            file = tmp_path_factory.mktemp("page") / "page.html"
            words = ["--device", MODELS[model], "--libs", "all", "--brief", "--html", str(file)]
            assert main(["kernels", "explain", model, *words]) == 0
            made[model] = file.read_text(encoding="utf-8")
        return made[model]

    return make


@pytest.fixture(scope="module")
def difference(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("difference")
    files = [folder / "rule.json", folder / "lifted.json"]
    for file, flags in zip(files, ([], ["--requant", "allow"])):
        with file.open("w") as out, redirect_stdout(out):
            words = ["--device", "sm_100", "--libs", "all", "--json", *flags]
            assert main(["kernels", "explain", RULED, *words]) == 0
    page = folder / "page.html"
    assert main(["kernels", "explain", "--diff", *map(str, files), "--html", str(page)]) == 1
    return page.read_text(encoding="utf-8")


# ---------------------------------------------------------------- to look at


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_a_picture_is_taken(page_of, tmp_path, model, width):
    picture = tmp_path / f"{model}_{width}.png"
    browser.screenshot(page_of(model), picture, width, 2000)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (max(width, 500), 2000)
    assert len(content) > 50_000, "an empty page is smaller"


# ---------------------------------------------------------------- layout

# Names of elements whose text is wider than they are, or stands on another's.
_OVERLAPS = """
  const found = [];
  const box = element => {
    const range = document.createRange();
    range.selectNodeContents(element);
    return range.getBoundingClientRect();
  };
  for (const element of document.querySelectorAll('th, td a, .changes td')) {
    const own = element.getBoundingClientRect(), text = box(element);
    if (text.left < own.left - 1 || text.right > own.right + 1) found.push(element.textContent);
  }
  for (const row of document.querySelectorAll('table[role=grid] thead tr')) {
    const cells = [...row.cells].slice(2).map(box);
    cells.slice(1).forEach((cell, i) => {
      if (cell.left < cells[i].right) found.push(row.cells[i + 3].textContent);
    });
  }
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_no_names_overlap_and_only_tables_scroll_sideways(page_of, tmp_path, model, width):
    script = f"{_OVERLAPS} return [found, document.documentElement.scrollWidth, innerWidth]"
    overlaps, scroll_width, inner = browser.found_in(page_of(model), script, tmp_path, width)
    assert overlaps == [] and inner == width
    assert scroll_width == width


@pytest.mark.parametrize("width", WIDTHS)
def test_a_difference_fits_too(difference, tmp_path, width):
    script = f"{_OVERLAPS} return [found, document.documentElement.scrollWidth]"
    assert browser.found_in(difference, script, tmp_path, width) == [[], width]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("model", MODELS)
def test_the_chosen_kernel_stays_in_view_at_every_scroll_position(page_of, tmp_path, model, width):
    script = """
      const hidden = [];
      let scrolled = 0;
      for (const box of document.querySelectorAll('.scroll')) {
        box.scrollLeft = 1e6;
        scrolled += box.scrollLeft > 0;
        const outer = box.getBoundingClientRect();
        for (const row of box.querySelectorAll('tbody tr')) {
          const cell = row.querySelector('.kernel').getBoundingClientRect();
          const name = row.cells[0].getBoundingClientRect();
          if (cell.left < name.right - 1 || cell.right > outer.right) hidden.push(row.textContent);
          const at = document.elementFromPoint(cell.left + 20, cell.top + cell.height / 2);
          if (at && !at.closest('.kernel')) hidden.push(at.outerHTML);
        }
      }
      return [hidden, scrolled];
    """
    hidden, num_scrolled = browser.found_in(page_of(model), script, tmp_path, width, 3000)
    assert hidden == [] and num_scrolled >= 1


# ---------------------------------------------------------------- keyboard

_KEYS = """
  const tip = document.getElementById('tip');
  const press = (key, more) => document.activeElement.dispatchEvent(
    new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true, ...more}));
  const shown = () => tip.hidden ? null : tip.querySelector('strong').textContent;
  const table = document.querySelector('table[role=grid]');
"""


def test_arrow_keys_move_between_cells_and_show_their_details(page_of, tmp_path):
    script = f"""{_KEYS}
      const seen = [];
      table.querySelector('a[tabindex="0"]').focus();
      seen.push(shown());
      for (const key of ['ArrowRight', 'ArrowRight', 'ArrowLeft', 'ArrowDown', 'End', 'ArrowRight',
                         'Home']) {{ press(key); seen.push(shown()) }}
      const stops = [...document.querySelectorAll('table[role=grid]')]
        .map(one => one.querySelectorAll('a[tabindex="0"]').length);
      return [seen, stops];
    """
    seen, stops = browser.found_in(page_of(RULED), script, tmp_path)
    assert seen == ["cutlass", "deep_gemm", "scaled_mm", "deep_gemm", "deep_gemm",
                    "emulation-ue8m0", "emulation-ue8m0", "torch"]  # fmt: skip
    assert set(stops) == {1}, "a table is one stop of the Tab key"


def test_escape_closes_the_details_and_enter_shows_them_again(page_of, tmp_path):
    script = f"""{_KEYS}
      const link = table.querySelector('a[href="#v1"]');
      link.focus();
      const texts = [tip.textContent, link.getAttribute('aria-describedby')];
      press('Escape');
      texts.push(shown());
      link.click();  // what Enter does on a link
      texts.push(shown(), location.hash);
      return texts;
    """
    text, described_by, closed, again, fragment = browser.found_in(page_of(RULED), script, tmp_path)
    assert "model rule: qwen3_5_moe_text" in text and "compiled: not run on hardware" in text
    assert "about 2.66%, estimated from the format" in text
    assert described_by == "v1"
    assert (closed, again, fragment) == (None, "deep_gemm", "")


@pytest.mark.parametrize("width", WIDTHS)
def test_details_do_not_cover_the_cell_that_has_the_focus(page_of, tmp_path, width):
    script = f"""{_KEYS}
      const covered = [];
      for (const row of document.querySelectorAll('table[role=grid] tbody tr')) {{
        for (const link of row.querySelectorAll('a')) {{
          link.focus();
          const at = link.getBoundingClientRect(), own = tip.getBoundingClientRect();
          if (own.left < at.right && at.left < own.right && own.top < at.bottom - 1
              && at.top < own.bottom - 1) covered.push(link.textContent + link.hash);
          if (own.left < 0 || own.right > innerWidth) covered.push('out: ' + link.hash);
        }}
      }}
      return covered;
    """
    assert browser.found_in(page_of(SPLITS), script, tmp_path, width, 844) == []


# ---------------------------------------------------------------- filters


def filtered(page: str, folder: Path, *asked: tuple[str, str]) -> list[tuple[list[str], str]]:
    """Of each (layer, kind): the layers of the rows that are left, and what the page says of their
    number."""
    script = f"""
      const set = (id, value) => {{
        const control = document.getElementById(id);
        control.value = value;
        control.dispatchEvent(new Event('input', {{bubbles: true}}));
      }};
      const rows = [...document.querySelectorAll('table[role=grid] tbody tr')];
      return {json.dumps(asked)}.map(([name, kind]) => {{
        set('by-layer', name);
        set('by-kind', kind);
        const left = rows.filter(row => row.offsetParent);
        return [left.map(row => row.querySelector('.names').textContent),
                document.getElementById('found').textContent];
      }});
    """
    return [(left, said) for left, said in browser.found_in(page, script, folder)]


def test_rows_are_filtered_by_a_part_of_a_name_or_a_pattern_of_the_whole(page_of, tmp_path):
    gate, experts = "model.layers.{0-47}.mlp.gate", "model.layers.{0-47}.mlp.experts"
    expected = {
        "mlp.experts": [experts],
        "layers.5.mlp.gate": [gate],
        "layers.48.mlp.gate": [],
        "LM_HEAD": ["lm_head"],
        "*.7.mlp.*": [gate, experts],
        "mlp.*": [],
        "{0-47}.mlp.gate": [gate],
        "(": [],
    }
    found = filtered(page_of(SPLITS), tmp_path, *((name, "") for name in expected))
    for (name, left), (shown, said) in zip(expected.items(), found):
        assert sorted(shown) == sorted(left) and said == f"{len(left)} of 7", name


def test_rows_are_filtered_by_the_kind_of_any_reason(page_of, tmp_path):
    asked = [("", "policy"), ("experts", "policy"), ("", "numerics"), ("", "")]
    (policy, said), (both, _), (numerics, _), unfiltered = filtered(
        page_of(RULED), tmp_path, *asked
    )
    assert "lm_head" not in policy and "model.layers.{0-39}.mlp.experts" in policy
    assert said == f"{len(policy)} of 12" and len(policy) == 6
    assert both == ["model.layers.{0-39}.mlp.experts"]
    assert numerics, "a reason that is not the first"
    assert len(unfiltered[0]) == 12 and unfiltered[1] == ""


def test_a_difference_is_filtered_by_layer(difference, tmp_path):
    script = """
      const control = document.getElementById('by-layer');
      control.value = 'mlp.experts';
      control.dispatchEvent(new Event('input', {bubbles: true}));
      return [...document.querySelectorAll('article')].filter(one => one.offsetParent)
        .map(one => one.querySelector('.names').textContent);
    """
    assert browser.found_in(difference, script, tmp_path) == ["model.layers.{0-39}.mlp.experts"]


# ---------------------------------------------------------------- drawings

# By decision, kernel and class of line: what it stands for by the ticks of the axes.
_DRAWN = """
  const found = {};
  for (const item of document.querySelectorAll('#decisions li')) {
    const svg = item.querySelector('svg');
    if (!svg) continue;
    const ticks = [...svg.querySelectorAll('text')].map(text => ({
      isX: text.getAttribute('text-anchor') === 'middle', value: +text.textContent,
      at: text.getAttribute('text-anchor') === 'middle' ? +text.getAttribute('x')
        : text.getAttribute('y') - 3}));
    const scale = isX => {
      const own = ticks.filter(tick => tick.isX === isX), a = own[0], b = own.at(-1);
      return at => a.value * (b.value / a.value) ** ((at - a.at) / (b.at - a.at));
    };
    const x = scale(true), y = scale(false);
    const read = path => [...path.getAttribute('d').matchAll(/([\\d.]+) ([\\d.]+)/g)]
      .map(pair => [Math.round(x(+pair[1])), y(+pair[2])]);
    found[item.id.slice(1)] = Object.fromEntries([...svg.querySelectorAll('g')].map(g => [
      g.dataset.kernel, {kinds: g.getAttribute('class'), lines: Object.fromEntries(
        [...g.querySelectorAll('path')].map(path => [path.getAttribute('class'), read(path)]))}]));
  }
  return found;
"""


def test_kernel_times_are_drawn_and_what_serves_is_marked(page_of, tmp_path):
    page = page_of(SPLITS)
    drawn = browser.found_in(page, _DRAWN, tmp_path)
    decisions = pages.embedded(page)["decisions"]
    timed = {str(i): d for i, d in enumerate(decisions) if "timings" in d}
    assert drawn.keys() == timed.keys() and len(timed) >= 3
    for number, decision in timed.items():
        timings = decision["timings"]
        assert drawn[number].keys() == timings["us"].keys()
        winner = next(c for c in decision["candidates"] if c["backend"] == decision["chosen"])
        parts = winner["parts"] or [[None, winner["backend"]]]
        for backend, us in timings["us"].items():
            expected = [(m, t) for m, t in zip(timings["tokens"], us) if t is not None]
            lines = drawn[number][backend]["lines"]
            check_line(lines["times"], expected)
            check_line(lines["marks"], expected)
            serving = [next(b for limit, b in parts if limit is None or m <= limit)
                       for m, _ in expected]  # fmt: skip
            own = [point for point, name in zip(expected, serving) if name == backend]
            check_line(lines.get("serves", []), own)
            assert ("estimated" in drawn[number][backend]["kinds"]) == (
                timings["grade"] != "measured"
            )


def check_line(found, expected) -> None:
    assert [us for _, us in found] == pytest.approx([us for _, us in expected], rel=0.03)
    assert [m for m, _ in found] == pytest.approx([m for m, _ in expected], rel=0.03)


def test_a_page_without_times_draws_nothing(tmp_path):
    file = tmp_path / "a.html"
    words = ["--device", "sm_120", "--libs", "all", "--html", str(file), "--brief"]
    assert main(["kernels", "explain", "--layer", "nvfp4:4096x7168", *words]) == 0
    count = "return document.querySelectorAll('#decisions svg').length"
    assert browser.found_in(file.read_text(), count, tmp_path) == 0
