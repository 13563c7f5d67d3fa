"""`--log-format json`, and the request ids of lines."""

import io
import json
import logging
import re
import time
from pathlib import Path

import pytest

from vllm import logger as loggers

from .serving import started_server, wait_until


def test_every_line_of_a_server_is_a_json_object(tiny_model: Path, tmp_path: Path) -> None:
    """Of one that has an engine, bars of progress, refused requests and an end."""
    log = tmp_path / "log"
    begin = time.time()
    with started_server(tiny_model, log, "--log-format", "json", "--swap-space", "1") as server:
        body = {"prompt": "ban", "max_tokens": 2}
        server.post("/v1/completions", body, **{"X-Request-Id": "mine"})
        server.post("/v1/completions", body | {"request_id": "in-the-body"})
        server.post("/v1/completions", body | {"temperature": -1})
        server.get("/nowhere")
        server.post("/v1/completions", b"{")
        wait_until(lambda: log.read_text().count('"http":') == 5)  # they follow their answers
        text = log.read_text()  # before its end: it is killed
    lines = [json.loads(line) for line in text.splitlines()]
    assert all({"time", "level", "logger", "message", "process"} <= line.keys() for line in lines)
    assert all(re.fullmatch(r"\d{4}(-\d\d){2}T\d\d(:\d\d){2}\.\d{3}Z", li["time"]) for li in lines)
    assert {line["level"] for line in lines} >= {"info", "warning"}
    assert len({line["process"] for line in lines}) == 2  # the server's and the engine's
    assert time.strftime("%Y-%m-%dT%H", time.gmtime(begin)) <= lines[0]["time"]
    assert any("--swap-space" in line["message"] for line in lines)
    assert any(line["message"].startswith("Serving tiny at http") for line in lines)
    answered = [line for line in lines if "http" in line]
    ids = [line["request_id"] for line in answered]
    assert ids[:2] == ["mine", "in-the-body"]
    assert len(set(ids)) == len(ids) == 5
    seen = [(one["http"]["method"], one["http"]["path"], one["http"]["status"]) for one in answered]
    completions = ("POST", "/v1/completions")
    assert seen == [(*completions, 200), (*completions, 200), (*completions, 400),
                    ("GET", "other", 404), (*completions, 400)]  # fmt: skip
    assert all(0 <= line["http"]["seconds"] < 60 for line in answered)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch):
    """What a logger of the project writes in the format that the variable names."""
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def write(form: str, say) -> str:
        out = io.StringIO()
        monkeypatch.setattr("sys.stderr", out)
        monkeypatch.setenv("VLLM_LOG_FORMAT", form)
        loggers._configure()
        say(loggers.get_logger("vllm.core.scheduler"))
        return out.getvalue()

    yield write
    logging.captureWarnings(False)


def fails(logger: logging.Logger) -> None:
    try:
        raise ValueError("naïve\nvalue")
    except ValueError:
        logger.exception("a step failed")


def test_a_traceback_is_in_the_line_of_its_error(written) -> None:
    line = json.loads(written("json", fails))
    assert (line["message"], line["level"]) == ("a step failed", "error")
    assert line["logger"] == "vllm.core.scheduler"
    assert line["exception"].startswith("Traceback") and "naïve\nvalue" in line["exception"]
    assert "request_id" not in line
    text = written("text", fails)
    assert re.match(r"ERROR \d\d-\d\d [\d:]{8} \[scheduler\] a step failed\nTraceback", text)


def test_a_line_has_the_id_of_the_request_that_is_answered(written) -> None:
    def say(logger: logging.Logger) -> None:
        logger.info("computing")

    token = loggers.request_id.set("abc-1")
    try:
        assert json.loads(written("json", say))["request_id"] == "abc-1"
        assert written("text", say).endswith("] computing [request abc-1]\n")
        own = written("json", lambda logger: logger.info("x", extra={"request_id": "abc-2"}))
        assert json.loads(own)["request_id"] == "abc-2"
        assert written("text", lambda logger: logger.info("abc-1 ends")).endswith("] abc-1 ends\n")
    finally:
        loggers.request_id.reset(token)
