"""The pages at `/`, `/docs` and `/redoc`: who gets them, what they may do, and that they need no
network."""

import base64
import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from vllm.entrypoints.cli.main import make_parser
from vllm.entrypoints.openai import pages
from vllm.entrypoints.openai.descriptions import ABOUT, EXAMPLES
from vllm.entrypoints.openai.field_policy import validated
from vllm.entrypoints.openai.http import Gate
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeTextRequest,
)

from .bare_app import bare_app
from .serving import REPOSITORY, RunningServer

PATHS = ("/", "/docs", "/redoc")
FOLDER = Path(pages.__file__).with_name("ui")
# Names that are no addresses: of SVG, and what Markdown takes for the begin of a link.
NAMESPACE = "http://www.w3.org/2000/svg"
UNSAFE = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    r"|createContextualFragment|srcdoc|setHTML"
)


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(bare_app())


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_one_file_that_names_no_other(client: TestClient, path: str) -> None:
    page = client.get(path).text
    assert page.startswith("<!doctype html>") and len(page) < 100_000
    own = page.replace(NAMESPACE, "")
    assert not re.search(r"https?://[\w.]", own)
    assert not re.search(r"\b(src|srcset|action)=|url\(|@import|\bimport\(", own)
    # Paths without a slash, so that they hold behind a proxy's prefix too.
    assert not re.search(r"""(href=|fetch\(|get\()["'`]/""", own)
    opened = re.findall(r"<(style|script)\b", own)
    assert len(opened) == len(re.findall(r"</(style|script)>", own)) >= 4


@pytest.mark.parametrize("path", PATHS)
def test_a_page_may_run_its_own_scripts_alone(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = {
        name: sources.split()
        for name, _, sources in (
            rule.partition(" ") for rule in answer.headers["content-security-policy"].split("; ")
        )
    }
    for kind in ("style", "script"):
        texts = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", answer.text)
        digests = [hashlib.sha256(text.encode()).digest() for text in texts]
        expected = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert policy.pop(f"{kind}-src") == expected != []
    assert policy.pop("connect-src") == ["'self'"]
    assert policy.pop("img-src") == ["data:"]
    assert policy.pop("require-trusted-types-for") == ["'script'"]
    assert policy.keys() == {
        "default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"
    }  # fmt: skip
    assert set(map(tuple, policy.values())) == {("'none'",)}
    assert not re.search(r"<[^>]+\s(style|on\w+)=", answer.text.partition("<script>")[0])


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_no_text_is_read_as_html(file: Path) -> None:
    assert not UNSAFE.search(file.read_text())
    assert file.suffix == ".html" or "</script" not in file.read_text()


def test_the_files_of_the_pages_are_in_the_package() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["vllm"]
    packaged = {file for pattern in patterns for file in (REPOSITORY / "vllm").glob(pattern)}
    assert {*FOLDER.iterdir()} <= packaged


def test_pages_are_for_those_without_a_key_too(keyed: RunningServer) -> None:
    for path in PATHS:
        answer = keyed.get(path)
        assert answer.status == 200 and b'<dialog id="key"' in answer.body
        for key in ("one", "two", "three", "from-file", "variable-key", "hub-token"):
            assert not re.search(rf"Bearer {key}|[\"']{key}[\"']", answer.body.decode())
    assert keyed.get("/openapi.json").status == 401


def test_pages_are_shown_while_the_model_loads() -> None:
    client = TestClient(bare_app(Gate()))
    assert client.get("/v1/models").status_code == 503
    assert [client.get(path).status_code for path in PATHS] == [200] * 3
    assert client.head("/").status_code == 200


def test_a_server_may_have_no_page() -> None:
    assert make_parser(["serve"]).parse_args(["serve", "--no-ui"]).ui is False
    assert make_parser(["serve"]).parse_args(["serve"]).ui is True
    client = TestClient(bare_app(ui=False))
    assert [client.get(path).status_code for path in PATHS] == [404, 200, 200]
    client = TestClient(bare_app(disable_fastapi_docs=True))
    assert [client.get(path).status_code for path in PATHS] == [200, 404, 404]


def test_every_path_is_described(client: TestClient) -> None:
    paths: dict[str, dict[str, Any]] = client.get("/openapi.json").json()["paths"]
    served = {
        f"{method.upper()} {path}": described
        for path, methods in paths.items()
        for method, described in methods.items()
    }
    assert served.keys() == ABOUT.keys()
    for name, described in served.items():
        assert described["description"] == ABOUT[name]
        _, path = name.split()
        if (body := described.get("requestBody")) is not None:
            assert body["content"]["application/json"]["example"].keys() == EXAMPLES[path].keys()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", CompletionRequest),
        ("/v1/chat/completions", ChatCompletionRequest),
        ("/tokenize", TokenizeTextRequest),
        ("/detokenize", DetokenizeRequest),
    ],
)
def test_an_example_is_a_valid_request(path: str, kind: Any) -> None:
    validated(kind, EXAMPLES[path], is_strict=True)


def test_the_start_of_every_process_is_told(server: RunningServer) -> None:
    text = server.get("/metrics").body.decode()
    found = re.findall(r'vllm:startup_seconds\{phase="([^"]+)",process="([^"]+)"\} (\S+)', text)
    phases = {name: [phase for phase, process, _ in found if process == name]
              for name in ("server", "engine 0")}  # fmt: skip
    assert phases["server"][-2:] == ["waiting for the engine", "other"]
    assert "weights" in phases["engine 0"] and "KV cache" in phases["engine 0"]
    log = server.log.read_text()
    for name, who in (("server", "Server ready"), ("engine 0", "Ready")):
        total = sum(float(seconds) for _, process, seconds in found if process == name)
        logged = float(re.search(rf"{who} after ([\d.]+) s", log)[1])  # type: ignore[index]
        assert total == pytest.approx(logged, abs=0.5 + 0.2 * logged)
