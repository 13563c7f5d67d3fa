"""GET /kernels: a page in a browser, JSON for every other client; and the pages of the command."""

import html
import json
import re
from pathlib import Path

import pytest

from vllm.entrypoints.cli.main import main
from vllm.entrypoints.openai.http import prefers_html

from .serving import Answer, RunningServer

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize(
    "accept, is_page",
    [
        ([BROWSER], True),
        (["text/html"], True),
        (["TEXT/HTML ; charset=utf-8"], True),
        (["application/json;q=0.5, text/html;q=0.6"], True),
        (["text/html, application/json"], True),
        (["text/html", "application/json"], True),
        ([], False),
        ([""], False),
        (["*/*"], False),
        (["application/json"], False),
        (["application/json, text/html"], False),
        (["text/html;q=0.5, application/json"], False),
        (["text/html;q=0"], False),
        (["text/html;q=x, */*"], False),
        (["text/plain, text/html;q=0.9"], False),
    ],
)
def test_a_page_is_for_clients_that_want_it_most(accept, is_page):
    assert prefers_html(accept) is is_page


def embedded(page: str) -> object:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def check_varies(answer: Answer) -> None:
    varies = next(text for name, text in answer.headers.items() if name.lower() == "vary")
    assert "accept" in re.split(r"[ ,]+", varies.lower())


def test_the_server_shows_the_decisions_in_force_as_a_page_and_as_json(
    server: RunningServer,
) -> None:
    as_json = server.get("/kernels", Accept="*/*")
    check_varies(as_json)
    for headers in ({}, {"Accept": "application/json"}):
        assert server.get("/kernels", **headers).json == as_json.json
    answer = server.get("/kernels", Accept=BROWSER, Origin="http://a.example")
    check_varies(answer)
    page = answer.body.decode()
    assert answer.status == 200 and page.startswith("<!doctype html>")
    kinds = [text for name, text in answer.headers.items() if name.lower() == "content-type"]
    assert kinds == ["text/html; charset=utf-8"]
    assert embedded(page) == as_json.json
    model = server.get("/v1/models").json["data"][0]["id"]
    heading = re.sub("<.*?>", "", page.partition("<h1>")[2].partition("</h1>")[0])
    assert html.unescape(heading) == f"Kernels of {model}"


def explain(*words: str) -> int:
    return main(["kernels", "explain", *words])


@pytest.mark.parametrize("flags", [(), ("--for", "vllm")])
def test_the_command_writes_what_it_prints_as_json_into_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    page = tmp_path / "page.html"
    words = ("Qwen3-30B-A3B-FP8", "--device", "sm_90", "--libs", "all", "--json", *flags)
    assert explain(*words, "--html", str(page)) == 0
    content = json.loads(capsys.readouterr().out)
    assert embedded(page.read_text()) == content
    assert ("upstream" in content) == bool(flags)
    assert ("<h2>Flags of vLLM" in page.read_text()) == bool(flags)


def test_a_difference_is_written_as_a_page_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, page = (tmp_path / name for name in ("a.json", "b.json", "page.html"))
    for file, flags in ((before, ()), (after, ("--linear-backend", "triton"))):
        asked = ("--layer", "fp8-block:4096x7168", "--device", "sm_100", "--libs", "all")
        assert explain(*asked, "--json", *flags) == 0
        file.write_text(capsys.readouterr().out)
    files = (str(before), str(after))
    assert explain("--diff", *files, "--html", str(page)) == 1
    printed = capsys.readouterr()
    assert "--linear-backend triton" in printed.out and f"wrote {page}" in printed.err
    written = page.read_text()
    assert "--linear-backend triton" in written
    assert explain("--diff", *files, "--json") == 1
    assert embedded(written) == json.loads(capsys.readouterr().out)


def test_a_page_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "nowhere" / "page.html"
    assert explain("Qwen3-8B-FP8", "--device", "sm_90", "--html", str(page)) != 0
    assert f"{page} cannot be written" in capsys.readouterr().err
