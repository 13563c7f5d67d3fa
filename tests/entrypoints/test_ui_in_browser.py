"""The pages of a running server in headless Chromium: a chat, a stop, a tool call, the tabs, unsafe
answers, keys, widths and colours. Pictures to look at: --basetemp FOLDER."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slow import quick

from .serving import RunningServer, started_server, wait_until
from .test_tools import TEMPLATE, TOOLS, check_call
from .webdriver import ENTER, ESCAPE, MISSING, RIGHT, SHIFT, TAB, Session, started_browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"needed and not installed: {', '.join(MISSING)}"),
]

SIZES = ((390, 844), (768, 1024), (1280, 900), (1600, 1000))
PICTURED = (390, 1280)
ANSWER = "document.querySelector('article.answer:last-of-type')"
IS_DONE = f"{ANSWER} && {ANSWER}.getAttribute('aria-busy') === 'false'"

MARKDOWN = """# A title

Text with **bold**, *slanted* and `code`, and <b>no tag</b>.

- one
- two
  1. inner
- three

| format | bits |
|---|---:|
| FP8 | 8 |

```python
if a < b:
    print("<i>")
```

> quoted [link](https://example.com/a_b?c=d) end
"""
UNSAFE = """<img src=x onerror="window.bad=1"><script>window.bad=2</script>

[one](javascript:window.bad=3) [two](JaVaScRiPt:window.bad=4) [three](data:text/html,bad) \
![four](http://127.0.0.1:1/x.png) <javascript:window.bad=5>

```html
<img src=x onerror="window.bad=6">
```

<svg onload="window.bad=7"></svg><iframe srcdoc="<script>parent.bad=8</script>"></iframe>
"""


@pytest.fixture(scope="module")
def talker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that knows tools and reasoning."""
    folder = tmp_path_factory.mktemp("talker")
    (folder / "template.jinja").write_text(TEMPLATE)
    flags = ["--chat-template", str(folder / "template.jinja"), "--tool-call-parser", "hermes",
             "--reasoning-parser", "qwen3"]  # fmt: skip
    with started_server(tiny_model, folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with started_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture
def page(window: Session, talker: RunningServer) -> Iterator[Session]:
    """The chat, new. What it complains of, of its policy or its scripts, is an error."""
    window.resize(1280, 900)
    window.prefer("light")
    window.open("about:blank")
    window.open(talker.url)
    window.until("document.getElementById('model').textContent === 'tiny'")
    yield window
    assert window.complaints() == []


def set_values(page: Session, **values: Any) -> None:
    """Of settings, by name."""
    page.run(
        """for (const [name, value] of Object.entries(arguments[0])) {
             const control = document.getElementById(`set-${name}`);
             control.value = typeof value === 'object' ? JSON.stringify(value) : value;
             control.dispatchEvent(new Event('input', {bubbles: true}));
           }""",
        values,
    )


def say(page: Session, text: str = "ban fick") -> None:
    page.type("#prompt", text + ENTER)


def answer_with(page: Session, text: str) -> None:
    """Lets the model say `text`, which a grammar holds it to."""
    more = {"structured_outputs": {"choice": [text]}, "chat_template_kwargs": {"think": False}}
    set_values(page, more=more, max_tokens=1500)
    say(page)
    page.until(IS_DONE)


# ---------------------------------------------------------------- chat


def test_an_answer_is_streamed_and_counted(page: Session, talker: RunningServer) -> None:
    fields = {"max_tokens": 24, "temperature": 0, "seed": 7, "system": "lon"}
    more = {"ignore_eos": True, "chat_template_kwargs": {"think": False}}
    set_values(page, **fields, more=more)
    page.run(
        """window.seen = new Set();
           new MutationObserver(() => seen.add(document.querySelector('.answer .text').innerText))
             .observe(document.getElementById('log'), {subtree: true, childList: true})"""
    )
    say(page, f"ban{SHIFT}{ENTER}{SHIFT}fick")
    page.until(IS_DONE)
    assert page.text(".bubble") == "ban\nfick"
    messages = [{"role": "system", "content": "lon"}, {"role": "user", "content": "ban\nfick"}]
    expected = talker.chat(messages=messages, max_tokens=24, temperature=0, seed=7, **more)
    content = expected["choices"][0]["message"]["content"]
    assert page.run("return chat.messages.at(-1).content") == content
    assert page.run("return seen.size") > 2
    stats = page.text(".stats")
    assert stats.startswith("24 tokens · ") and " tokens/s · first token after " in stats
    assert stats.endswith("cut at the maximum length")


def test_a_conversation_goes_on_and_its_end_can_be_changed(page: Session) -> None:
    set_values(page, max_tokens=6, temperature=0, more={"chat_template_kwargs": {"think": False}})
    roles = "return chat.messages.map(message => message.role)"
    for count in (1, 2):
        say(page)
        page.until(f"{IS_DONE} && chat.messages.length === {2 * count}")
    assert page.run(roles) == ["user", "assistant"] * 2
    assert page.run("return document.querySelectorAll('.answer .bar').length") == 2
    page.run("[...document.querySelectorAll('.bar button')].at(-1).click()")
    page.run("document.querySelector('.editor textarea').value = 'changed'")
    page.run("document.querySelector('.editor .main').click()")
    assert page.run("return chat.messages.at(-1).content") == "changed"
    page.run(
        f"[...{ANSWER}.querySelectorAll('button')].find(b => b.innerText === 'Regenerate').click()"
    )
    page.until(f"{IS_DONE} && chat.messages.length === 4")
    assert page.run("return chat.messages.at(-1).content") != "changed"
    assert page.run("return document.activeElement.id") == "prompt"
    page.run("document.querySelector('.user .bar button').click()")
    assert page.run(roles) == []
    assert page.run("return document.getElementById('prompt').value") == "ban fick"
    say(page, "")
    page.until(IS_DONE)
    page.click("#new")
    assert page.run(roles) == [] and page.text("article") == ""
    assert "What would you like to ask?" in page.text("#log")


@pytest.mark.parametrize("stop", ["the button", "Escape"])
def test_a_stop_ends_the_request_and_keeps_what_was_said(
    page: Session, talker: RunningServer, stop: str
) -> None:
    before = talker.metric("vllm:request_success_total")
    set_values(page, more={"ignore_eos": True, "chat_template_kwargs": {"think": False}})
    say(page)
    page.until(f"{ANSWER} && {ANSWER}.querySelector('.text').innerText.length > 20")
    if stop == "Escape":
        page.press(ESCAPE)
    else:
        page.click("#stop")
    page.until(IS_DONE)
    wait_until(lambda: talker.metric("vllm:request_success_total") == before + 1)
    assert talker.metric("vllm:num_requests_running") == 0
    assert "stopped" in page.text(".stats") and len(page.text(".answer .text")) > 20
    assert page.run("return document.activeElement.id") == "prompt"


def test_reasoning_is_folded_away(page: Session) -> None:
    set_values(page, max_tokens=12, more={"chat_template_kwargs": {"think": True}})
    say(page)
    page.until(IS_DONE)
    assert page.run(f"return {ANSWER}.querySelector('details').open") is False
    page.run(f"{ANSWER}.querySelector('summary').click()")
    assert len(page.text(".reasoning")) > 5 and page.text(".answer .text") == ""


def test_a_tool_is_called_and_its_result_sent_back(page: Session) -> None:
    more = {"chat_template_kwargs": {"think": False}, "parallel_tool_calls": False}
    set_values(page, tools=TOOLS, tool_choice="required", max_tokens=300, seed=1, more=more)
    say(page)
    page.until(IS_DONE)
    (call,) = page.run("return chat.messages.at(-1).calls")
    check_call({"function": call})
    shown = page.text(".call pre")
    assert call["name"] in page.text(".call summary")
    assert json.loads(shown) == json.loads(call["arguments"])
    set_values(page, tool_choice="none", max_tokens=5)
    page.type(".result textarea", "21")
    page.click(".calls button")
    page.until(f"{IS_DONE} && chat.messages.length === 4")
    result = page.run("return chat.messages[2]")
    assert result == {"role": "tool", "content": "21", "tool_call_id": call["id"]}
    assert page.run("return chat.messages.map(message => message.error ?? '').join('')") == ""


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"tools": "{"}, "Tools: this is not a JSON list"),
        ({"more": "[]"}, "Further fields: this is not a JSON object"),
        ({"temperature": 3}, "Temperature: "),
        ({"more": {"temperature": "warm"}}, 'valid number, not "warm"'),
        ({"more": {"audio": "x"}}, "Audio is not supported"),
    ],
)
def test_mistakes_are_told_in_words(page: Session, values: dict[str, Any], says: str) -> None:
    set_values(page, **values)
    say(page)
    page.until(IS_DONE)
    page.complaints()  # of the console, which tells every status of 400
    assert says in page.text(".answer .wrong")


# ---------------------------------------------------------------- Markdown


def test_markdown_is_shown(page: Session, tmp_path: Path) -> None:
    answer_with(page, MARKDOWN)
    text = f"{ANSWER}.querySelector('.text')"
    tags = page.run(f"return [...{text}.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    for tag in ("h3", "p", "strong", "em", "code", "ul", "ol", "table", "pre", "blockquote", "a"):
        assert tag in tags, tag
    shown = page.text(".answer .text")
    assert "and <b>no tag</b>." in shown and 'if a < b:\n    print("<i>")' in shown
    items = f"return [...{text}.querySelectorAll('ul > li')].map(e => e.innerText)"
    assert page.run(items) == ["one", "two\ninner", "three"]
    link = page.run(f"const a = {text}.querySelector('a'); return [a.href, a.rel, a.innerText]")
    assert link == ["https://example.com/a_b?c=d", "noopener noreferrer", "link"]
    page.picture(tmp_path / "markdown.png")


def test_an_answer_runs_nothing(page: Session) -> None:
    answer_with(page, UNSAFE)
    time.sleep(0.2)
    assert page.run("return window.bad ?? null") is None
    text = f"{ANSWER}.querySelector('.text')"
    tags = page.run(f"return [...{text}.querySelectorAll('*')].map(e => e.tagName.toLowerCase())")
    assert not {"img", "script", "svg", "iframe"} & set(tags)
    links = page.run(f"return [...{text}.querySelectorAll('a')].map(a => a.href)")
    assert links == ["http://127.0.0.1:1/x.png"]
    assert '<img src=x onerror="window.bad=1">' in page.text(".answer .text")


def test_text_made_html_would_be_refused(page: Session) -> None:
    """Also where a script of the page did it."""
    with pytest.raises(Exception, match="TrustedHTML"):
        page.run("document.body.innerHTML = '<img src=x>'")
    page.complaints()


# ---------------------------------------------------------------- what serves


def test_tabs_are_moved_between_with_arrow_keys(page: Session, talker: RunningServer) -> None:
    page.run("document.getElementById('tab-chat').focus()")
    seen = []
    for _ in range(4):
        page.press(RIGHT)
        seen.append(page.run("return [document.activeElement.innerText, location.hash]"))
    assert seen == [["Kernels", "#kernels"], ["Server", "#server"], ["Start-up", "#startup"],
                    ["Chat", ""]]  # fmt: skip
    page.press(RIGHT, TAB, TAB)
    page.until("document.activeElement.id === 'kernels'")  # after the theme


def test_kernels_are_those_of_the_report(page: Session, talker: RunningServer) -> None:
    page.click("#tab-kernels")
    page.until("document.querySelector('.decisions tbody tr')")
    decisions = talker.get("/kernels").json["decisions"]
    rows = page.run("""return [...document.querySelectorAll('.decisions tbody tr')].map(row =>
        [...row.cells].map(cell => cell.innerText.trim()))""")
    assert [row[1] for row in rows] == [one["problem"]["text"] for one in decisions]
    assert [row[3] for row in rows] == [one["origin"]["text"] for one in decisions]
    assert "model.layers.{0-1}.mlp.down_proj" in " ".join(row[0] for row in rows)
    page.type(".filter", "lm_head")
    left = "[...document.querySelectorAll('.decisions tbody tr')].filter(row => row.offsetParent)"
    assert page.run(f"return {left}.map(row => row.cells[0].innerText)") == ["lm_head"]


def test_the_load_is_drawn_while_its_tab_is_shown(page: Session, talker: RunningServer) -> None:
    page.click("#tab-server")
    page.until("document.querySelectorAll('figure path').length === 11")
    for _ in range(3):
        talker.complete(max_tokens=16, ignore_eos=True)
    page.until("samples.length > 1 && samples.at(-1).generated >= samples[0].generated + 48")
    legends = page.text(".legend")
    for part in ("generated ", "running ", "median ", "95 % "):
        assert part in legends
    assert "generated 0.0" not in legends
    finished = talker.metric("vllm:request_success_total")
    page.until(f"document.querySelector('.tiles').innerText.includes('{finished:.0f}')")
    page.click("#tab-chat")
    time.sleep(0.1)
    count = page.run("return samples.length")
    time.sleep(2.5)
    assert page.run("return samples.length") == count


def test_a_quantile_is_that_of_the_counts_between_two_readings(page: Session) -> None:
    script = "return quantile([[1, 5], [2, 5], [Infinity, 5]], [[1, 5], [2, 15], [Infinity, 15]], "
    assert page.run(f"{script} 0.5)") == 1.5
    assert page.run("return quantile([[1, 5]], [[1, 5]], 0.5)") is None


def test_the_seconds_of_the_start_are_shown(page: Session, talker: RunningServer) -> None:
    page.click("#tab-startup")
    page.until("document.querySelectorAll('.phases').length === 2")
    text = page.text("#startup")
    assert "Engine 0: " in text and "weights" in text and "waiting for the engine" in text


# ---------------------------------------------------------------- keys


def test_the_key_is_asked_for_and_kept_in_the_tab(window: Session, keyed: RunningServer) -> None:
    window.open(keyed.url)
    window.until("document.getElementById('key').open")
    window.type("#key-field", "wrong" + ENTER)
    window.until("!document.getElementById('key-trouble').hidden")
    assert "does not accept" in window.text("#key-trouble")
    window.type("#key-field", "from-file" + ENTER)
    window.until("document.getElementById('model').textContent === 'tiny'")
    set_values(window, max_tokens=4)
    say(window)
    window.until(IS_DONE)
    assert window.text(".answer .wrong") == "" and window.text(".answer .text")
    window.click("#tab-server")
    window.until("document.querySelector('figure')")
    kept = "return [{...sessionStorage}, {...localStorage}, document.cookie, location.href]"
    assert window.run(kept) == [{"vllm-key": "from-file"}, {}, "", f"{keyed.url}/#server"]
    addresses = window.run("return performance.getEntriesByType('resource').map(e => e.name)")
    assert addresses and all(address.startswith(keyed.url) for address in addresses)
    assert all("from-file" not in address for address in addresses)
    assert "from-file" not in window.run("return document.documentElement.outerHTML")
    window.open(f"{keyed.url}/docs")
    window.until("document.querySelector('.path')")
    window.run("sessionStorage.clear()")
    window.complaints()


# ---------------------------------------------------------------- the API's description


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_the_api_is_described_offline(
    window: Session, talker: RunningServer, tmp_path: Path, path: str
) -> None:
    window.complaints()
    window.resize(1280, 900)
    window.open(talker.url + path)
    window.until("document.querySelectorAll('.path').length > 20")
    window.type("#filter", "chat/completions")
    left = "[...document.querySelectorAll('.path')].filter(fold => fold.offsetParent)"
    assert window.run(f"return {left}.map(fold => fold.id)") == ["POST /v1/chat/completions"]
    window.run(f"{left}[0].open = true")
    text = window.until(f"{left}[0].innerText.includes('Fields') && {left}[0].innerText")
    assert f"curl {talker.url}/v1/chat/completions" in text
    for name in ("messages", "required", "top_p", "tool_choice"):
        assert name in text
    window.picture(tmp_path / "docs.png")
    assert window.complaints() == []


# ---------------------------------------------------------------- widths, colours, names

# Text whose contrast with what is behind it is below 4.5.
_FAINT = """
  const rgb = text => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgb(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.9) return colour;
    }
    return [255, 255, 255];
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const own = node.parentElement;
    if (!node.textContent.trim() || !own.offsetParent || own.closest('.unseen, script, style'))
      continue;
    const [a, b] = [light(rgb(getComputedStyle(own).color)), light(ground(own))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) faint.push([own.className || own.tagName, node.textContent, contrast]);
  }
  return faint;
"""
# Controls without a name that a screen reader could say.
_NAMELESS = """
  return [...document.querySelectorAll('button, input, select, textarea, a, summary, [role=log]')]
    .filter(e => !(e.ariaLabel || e.innerText.trim() || e.textContent.trim() || e.labels?.length
                   || e.getAttribute('aria-labelledby')))
    .map(e => e.outerHTML);
"""


@pytest.mark.parametrize("scheme", quick(["light", "dark"], ["light"]))
def test_all_views_fit_and_are_read_easily(page: Session, tmp_path: Path, scheme: str) -> None:
    page.prefer(scheme)
    set_values(page, seed=3)
    answer_with(page, MARKDOWN)
    for tab in ("chat", "kernels", "server", "startup"):
        page.click(f"#tab-{tab}")
        page.until(f"!/Loading…/.test(document.getElementById('{tab}').innerText)")
        for width, height in SIZES:
            page.resize(width, height)
            wide = page.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide == [width, width], (tab, width)
            if width in PICTURED:
                page.picture(tmp_path / f"{tab}_{width}_{scheme}.png")
        assert page.run(_FAINT) == [], tab
        assert page.run(_NAMELESS) == [], tab


def test_the_theme_can_be_chosen(page: Session) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.click("#theme")
    assert page.run(ground) == light
    page.click("#theme")
    dark = page.run(ground)
    assert dark != light
    page.run("location.reload()")
    page.until("document.getElementById('model').textContent === 'tiny'")
    assert page.run(ground) == dark
    assert page.run("return document.getElementById('theme').ariaLabel") == "Theme: dark"
    page.click("#theme")
    assert page.run(ground) == light


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(page: Session) -> None:
    page.run("document.getElementById('skip').focus()")
    seen: list[str] = []
    for _ in range(30):
        name, outline = page.run(
            """const at = document.activeElement, style = getComputedStyle(at);
               const box = at.closest('.composer') ?? at, shadow = getComputedStyle(box).boxShadow;
               return [at.id, style.outlineStyle !== 'none' || shadow !== 'none']"""
        )
        if name in seen:
            break
        seen.append(name)
        assert outline or not name, name
        page.press(TAB)
    expected = ["skip", "tab-chat", "theme", "log", "prompt", "new", "show-settings", "send"]
    assert [name for name in seen if name in expected] == expected
    assert {"set-system", "set-temperature", "set-tools", "set-more"} <= {*seen}


def test_screen_readers_hear_whole_answers(page: Session) -> None:
    answer_with(page, "One sentence. And another one.")
    told = page.run("return document.getElementById('told').textContent")
    assert told.endswith("And another one.")
    assert page.run("return document.getElementById('told').ariaLive") == "polite"
