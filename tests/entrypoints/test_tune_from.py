"""`vllm kernels tune --from URL`: a server's steps decide what is tuned, and first."""

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.entrypoints.cli.main import main

from .serving import RunningServer, run_cli, started_server

PROMPT = [5] * 100


@pytest.mark.slow
def test_what_a_server_lacks_is_tuned_and_measured_at_its_next_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    variables = {"VLLM_CACHE_ROOT": str(tmp_path), "VLLM_API_KEY": "secret"}
    flags = ("--max-num-seqs", "4")

    def ask(server: RunningServer) -> dict[str, Any]:
        """/kernels after a prompt of 100 tokens and 20 steps of decoding, counted as they run."""
        key = {"Authorization": "Bearer secret"}
        assert not server.get("/kernels", **key).json["calls"]
        body = {"prompt": PROMPT, "max_tokens": 21, "ignore_eos": True}
        assert server.post("/v1/completions", body, **key).status == 200
        content: dict[str, Any] = server.get("/kernels", **key).json
        assert content["calls"] == {"linear": {"1": 20, "128": 1}, "lm_head": {"1": 21}}
        return content

    def tune(*words: str) -> str:
        done = run_cli("kernels", "tune", "--from", server.url, *words, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with started_server(tiny_model, tmp_path / "log", *flags, **variables) as server:
        calls = calls_of(ask(server))
        assert calls["mlp.down_proj"] == {"hits": {}, "misses": {"1": 20, "128": 1}}
        assert calls["lm_head"] == {"hits": {}, "misses": {"1": 21}}
        assert "attn" not in calls
        plan = tune("--plan")
        assert f"{server.url}: steps: 21: 20 with M = 1, 1 with 128\n" in plan
        found = re.findall(r"^ *(\d+)%  bf16:(\d+x\d+) .*  cpu  M = (.*)$", plan, re.MULTILINE)
        shares = [int(share) for share, *_ in found]
        assert shares == sorted(shares, reverse=True) and 97 <= sum(shares) <= 103
        assert [size for _, size, _ in found][-1] == "64x64", "the smallest layer"
        tokens = {size: m for _, size, m in found}
        assert tokens["512x64"] == "1, 512, then 16, 64, 128, 4096", "of lm_head"
        assert tokens["64x64"] == "1, 128, 512, then 16, 64, 4096"
        assert tune("tiny", "--tokens", "512,1", "--plan").count("M = 1, 512\n") == len(found) * 2
        out = tune("--seconds-per-kernel", "0.05", "--budget", "100s")
        timed = re.findall(r"  timed  bf16:(\d+x\d+) \S+ none  M = (\d+)", out)
        sizes = [size for _, size, _ in found]
        assert timed[:5] == [(size, "1") for size in sizes], "misses of all sizes come first"
        assert "for want of time" in out or timed[5:] == [(size, "16") for size in sizes]
    with started_server(tiny_model, tmp_path / "log", *flags, **variables) as server:
        hits = calls_of(ask(server))
        assert hits["mlp.down_proj"] == {"hits": {"1": 20, "128": 1}, "misses": {}}
        assert hits["lm_head"] == {"hits": {"1": 21}, "misses": {}}


def calls_of(content: dict[str, Any]) -> dict[str, Any]:
    """By layer without the number of its block."""
    return {
        layer.removeprefix("model.layers.0."): decision["calls"]
        for decision in content["decisions"]
        if "calls" in decision
        for layer in decision["layers"]
    }


# ---------------------------------------------------------------- what cannot be used


class Canned(http.server.BaseHTTPRequestHandler):
    """Answers from `answers`: by path a status, the body, and how much of it is sent."""

    answers: dict[str, tuple[int, bytes, int]]

    def do_GET(self) -> None:
        status, body, sent = self.answers.get(self.path, (404, b'{"detail":"Not Found"}', 99))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:sent])

    def log_message(self, *given: object) -> None:
        pass


Start = Callable[..., str]


@pytest.fixture
def canned() -> Iterator[Start]:
    """canned(kernels, status=200, sent=None, models=...) -> address of a server that says so."""
    servers = []

    def start(
        kernels: bytes, status: int = 200, sent: int | None = None, models: Any = None
    ) -> str:
        listed = json.dumps(models or {"data": [{"id": "m", "root": "org/model"}]}).encode()
        whole = len(kernels) if sent is None else sent
        answers = {"/kernels": (status, kernels, whole), "/v1/models": (200, listed, len(listed))}
        handler = type("Handler", (Canned,), {"answers": answers})
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def content(server: RunningServer) -> dict[str, Any]:
    """/kernels of a server that has served."""
    server.complete()
    answer: dict[str, Any] = server.get("/kernels").json
    return answer


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of `tune` with exit code 2."""
    assert main(["kernels", "tune", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line.startswith("vllm: error: ")]
    assert lines[-1] == line
    return line


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("", "ftp://host", "http://", "http://[::1", "http://host:x", "http://h:99999"):
        assert "takes an address such as http://localhost:8000" in refusal(capsys, "--from", url)
    assert "no server answers" in refusal(capsys, "--from", "http://127.0.0.1:1")
    assert "no server answers" in refusal(capsys, "--from", "127.0.0.1:1/v1/")


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (b"<html>hello</html>", 200, "/kernels answers no JSON: b'<html>"),
        (b"[" * 100_000, 200, "/kernels answers no JSON: b'[["),
        (b'{"detail":"Not Found"}', 404, "/kernels: HTTP 404"),
        (b"{}", 200, "/kernels: the whole lacks 'device'; --from takes a vllm serve"),
        (b"[]", 200, "/kernels: the whole is not an object; --from takes a vllm serve"),
        (b'{"device": "cpu", "kernels": []}', 200, "unknown field 'kernels'"),
        (b'{"error": {"message": "still loading"}}', 503, "/kernels: HTTP 503: still loading"),
        (b'{"error": {"message": "a key"}}', 401, "HTTP 401: a key; --api-key or VLLM_API_KEY"),
    ],
)
def test_a_server_of_another_kind_is_refused(
    canned: Start, capsys: pytest.CaptureFixture[str], answer: bytes, status: int, message: str
) -> None:
    assert message in refusal(capsys, "--from", canned(answer, status), "--plan")


def test_an_answer_that_is_cut_off_or_garbled_is_refused(
    canned: Start, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.dumps(content).encode()
    assert "broke off" in refusal(capsys, "--from", canned(whole, sent=len(whole) // 2))
    assert "answers no JSON" in refusal(capsys, "--from", canned(whole[: len(whole) // 2]))
    assert "lists no models" in refusal(capsys, "--from", canned(whole, models={"data": 3}))
    content["calls"]["linear"] = {"1": "many"}
    garbled = canned(json.dumps(content).encode())
    assert "calls.linear.1 'many' is not a whole number" in refusal(capsys, "--from", garbled)


def test_another_model_and_sizes_of_ones_own_are_refused(
    server: RunningServer, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "Qwen3-8B-FP8", "--from", server.url)
    assert f"it serves tiny, alias, {tiny_model}, not Qwen3-8B-FP8; leave MODEL out" in line
    for words in (("--tp", "2"), ("--ep", "2"), ("--dtype", "bf16"), ("--layer", "bf16:8x8")):
        assert f"leave out {words[0]}" in refusal(capsys, "--from", server.url, *words)
    assert "leave out a second MODEL" in refusal(capsys, "a", "b", "--from", server.url)
    for name in ("tiny", "alias", str(tiny_model), f"org/{tiny_model.name}"):
        assert main(["kernels", "tune", name, "--from", f"{server.url}/v1", "--plan"]) == 0


def test_without_steps_the_usual_token_counts_are_planned(
    canned: Start, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for calls in ({}, None):
        content["calls"] = calls
        kept = {key: value for key, value in content.items() if value is not None}
        assert main(["kernels", "tune", "--from", canned(json.dumps(kept).encode()), "--plan"]) == 0
        out = capsys.readouterr().out
        assert "has counted no step yet, so the usual numbers of tokens are measured" in out
        assert "M = 1, 2, 4, 8, 16, 24" in out and "%" not in out


def test_steps_of_another_chip_count_and_its_measurements_do_not(
    canned: Start, content: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    content["device"] = "cuda:sm_90"
    assert main(["kernels", "tune", "--from", canned(json.dumps(content).encode()), "--plan"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"warning: \S+: it runs on cuda:sm_90, and this is cpu", err)
    assert re.search(r"^ *\d+%  bf16:.*  cpu  M = ", out, re.MULTILINE)
