"""Endpoints of operators, and bodies that are compressed."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.entrypoints.openai.management import POOLING_PATHS

from .serving import RunningServer, started_server

TEXT = "/v1/completions"
GZIP = {"Content-Encoding": "gzip"}


def test_the_load_is_the_number_of_requests_being_answered(server: RunningServer) -> None:
    assert server.get("/load").json == {"server_load": 0}
    with server.connect() as connection:
        server.send_completion(connection)
        while server.get("/load").json != {"server_load": 1}:
            pass


@pytest.mark.parametrize("path", POOLING_PATHS)
def test_a_generating_model_gives_no_vectors(server: RunningServer, path: str) -> None:
    answer = server.post(path, {"model": "tiny", "input": "a"})
    assert answer.status == 400
    assert answer.error.startswith("tiny is not a pooling model")


@pytest.mark.parametrize(
    ("method", "path", "switch"),
    [("GET", "/server_info", "VLLM_SERVER_DEV_MODE=1"), ("POST", "/sleep", "VLLM_SERVER_DEV_MODE"),
     ("GET", "/tokenizer_info", "--enable-tokenizer-info-endpoint"),
     ("POST", "/start_profile", "VLLM_TORCH_PROFILER_DIR=")],
)  # fmt: skip
def test_paths_behind_a_switch_say_which(
    server: RunningServer, method: str, path: str, switch: str
) -> None:
    answer = server.request(method, path)
    assert answer.status == 404
    assert switch in answer.error


def test_a_compressed_body_is_read_and_limited_after_inflating(server: RunningServer) -> None:
    body = json.dumps({"prompt": "ban fick", "max_tokens": 4, "temperature": 0}).encode()
    plain = server.post(TEXT, body).json["choices"]
    assert server.post(TEXT, gzip.compress(body), **GZIP).json["choices"] == plain
    two_members = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert server.post(TEXT, two_members, **GZIP).json["choices"] == plain
    bomb = gzip.compress(b" " * (200 << 20))
    answer = server.post(TEXT, bomb, **GZIP)
    assert answer.status == 413
    assert "--max-request-bytes" in answer.error
    for wrong, words in ((b"no gzip", "no valid gzip"), (gzip.compress(body)[:-9], "too early"),
                         (b"", "empty")):  # fmt: skip
        answer = server.post(TEXT, wrong, **GZIP)
        assert answer.status == 400
        assert words in answer.error
    answer = server.post(TEXT, body, **{"Content-Encoding": "br"})
    assert answer.status == 415
    assert "send gzip or none" in answer.error


@pytest.fixture(scope="module")
def developed(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("developed")
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_TORCH_PROFILER_DIR": str(folder / "traces")}
    flags = ("--enable-tokenizer-info-endpoint", "--max-num-seqs", "8", "--api-key", "key")
    with started_server(tiny_model, folder / "log", *flags, **variables) as running:
        yield running


def ask(server: RunningServer, method: str, path: str) -> tuple[int, bytes]:
    answer = server.request(method, path, headers={"Authorization": "Bearer key"})
    return answer.status, answer.body


@pytest.mark.slow
def test_settings_are_told_without_keys(developed: RunningServer) -> None:
    for path in ("/server_info", "/server_info?config_format=json"):
        status, body = ask(developed, "GET", path)
        assert status == 200
        assert b"max_num_seqs" in body
        assert b"Bearer" not in body
    config = json.loads(ask(developed, "GET", "/server_info?config_format=json")[1])["vllm_config"]
    assert config["scheduler_config"]["max_num_seqs"] == 8
    info = json.loads(ask(developed, "GET", "/tokenizer_info")[1])
    assert "<|im_start|>" in info["chat_template"]
    assert info["tokenizer_class"]
    assert developed.get("/server_info").status == 401


@pytest.mark.slow
def test_the_prefix_cache_is_forgotten(developed: RunningServer) -> None:
    fields = {"prompt": [5 + i % 90 for i in range(200)], "max_tokens": 2}

    def cached() -> int:
        answer = developed.post(TEXT, fields, Authorization="Bearer key")
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 0
    assert ask(developed, "POST", "/reset_prefix_cache")[0] == 200
    assert cached() == 0


@pytest.mark.slow
def test_a_server_sleeps_and_answers_as_before_when_woken(developed: RunningServer) -> None:
    def text() -> tuple[int, bytes]:
        fields = {"prompt": "ban fick", "max_tokens": 6, "temperature": 0}
        answer = developed.post(TEXT, fields, Authorization="Bearer key")
        content = answer.json["choices"][0]["text"] if answer.status == 200 else answer.error
        return answer.status, content

    before = text()
    assert ask(developed, "POST", "/sleep?level=9")[0] == 400
    assert ask(developed, "POST", "/sleep?level=1")[0] == 200
    assert ask(developed, "GET", "/is_sleeping")[1] == b'{"is_sleeping":true}'
    assert text()[0] == 400
    assert developed.get("/health").status == 200
    assert ask(developed, "POST", "/wake_up")[0] == 200
    assert ask(developed, "GET", "/is_sleeping")[1] == b'{"is_sleeping":false}'
    assert text() == before


@pytest.mark.slow
def test_a_profile_leaves_a_trace(developed: RunningServer) -> None:
    assert ask(developed, "POST", "/start_profile")[0] == 200
    developed.post(TEXT, {"prompt": "ban", "max_tokens": 2}, Authorization="Bearer key")
    assert ask(developed, "POST", "/stop_profile")[0] == 200
    assert [*(developed.log.parent / "traces").iterdir()]
