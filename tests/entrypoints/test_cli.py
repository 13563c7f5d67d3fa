"""The command line."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from slow import quick

import vllm
from vllm.entrypoints.cli.bench_serve import Timing, percentile, summarise
from vllm.entrypoints.cli.client import Server
from vllm.entrypoints.cli.main import SUBCOMMANDS, main
from vllm.utils.http_client import HttpClient, HttpError

from .serving import RunningServer, environment, run_cli


def test_help_lists_every_command() -> None:
    done = run_cli("--help")
    assert all(name in done.stdout for name in SUBCOMMANDS)
    assert run_cli("--version").stdout.strip() == vllm.__version__


COMMANDS = [*SUBCOMMANDS, "bench serve", "bench latency", "bench throughput",
            "bench steps"]  # fmt: skip
_EXPLAIN_ALL = f"""
import sys
from vllm.entrypoints.cli.main import main
for command in {COMMANDS}:
    try:
        main([*command.split(), "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    assert not {{"torch", "transformers", "fastapi"}} & set(sys.modules), command
"""


def test_every_command_explains_itself_without_loading_torch() -> None:
    """In one process: each may load what others do not."""
    done = subprocess.run(
        [sys.executable, "-c", _EXPLAIN_ALL], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr
    usages = re.findall(r"^usage: vllm (.+)", done.stdout, re.MULTILINE)
    assert all(usage.startswith(command) for usage, command in zip(usages, COMMANDS, strict=True))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "did you mean serve?"),
        (["fly"], "unknown command 'fly': it takes serve"),
        (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--max_model_le=1"], "did you mean --max-model-len?"),
        (["serve", "--max-model", "1"], "unknown flag --max-model; did you mean"),
        (["serve", "a", "b"], "too many arguments: b"),
        (["serve", "--port", "99999"], "'99999' is not a port"),
        (["serve", "--allowed-origins", "*"], "is not a JSON list"),
        (["serve", "--nonsense"], "unknown flag --nonsense\n"),  # `--` is like that of --seed
        (["serve", "--api-key", ""], "--api-key: it is empty"),
        (["serve", "--root-path", "llm"], "'llm' is not a path such as /llm"),
        (["bench", "serve", "--num-prompt", "1"], "did you mean --num-prompts?"),
        (["bench", "serve", "--random-range-ratio", "2"], "it takes 0 to below 1"),
        (["bench", "serve", "--metric-percentiles", "x"], "it takes numbers from 0 to 100"),
        (["bench", "serve", "--result-filename", "/nowhere/x"], "a file in a folder that exists"),
        (["bench", "latency", "--num-iters", "0"], "--num-iters 0: it takes 1 or more"),
        (["chat", "--url", "ftp://x/v1", "-q", "a"], "it takes an address such as http://"),
        (["eval", "paired", "--a", "", "--b", "", "--prompts", "x", "--max-kl", "nan"], "--max-kl"),
        (["eval", "paired", "--a", "FO=1 m", "--b", "", "--prompts", "x"], "unknown environment"),
        (["eval", "paired", "--a", "m --seed x", "--b", "", "--prompts", "x"], "not a whole"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_word_is_an_error_with_a_hint(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = end.code
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert "Traceback" not in said and "usage:" not in said


def test_a_wrong_variable_is_an_error_and_an_unknown_one_a_warning() -> None:
    for command in SUBCOMMANDS:
        wrong = run_cli(command, VLLM_LOGGING_LEVEL="loud")
        assert wrong.returncode == 2
        assert wrong.stderr.startswith("vllm: error: ")
        assert "VLLM_LOGGING_LEVEL='loud' is not valid" in wrong.stderr
    assert run_cli("--version", VLLM_LOGGING_LEVEL="loud").returncode == 0
    unknown = run_cli("complete", "--url", "http://127.0.0.1:9", "-q", "a", VLLM_CACHE_ROTO="x")
    assert "unknown environment variable VLLM_CACHE_ROTO; did you mean" in unknown.stderr


def test_a_flag_can_be_written_with_underscores(server: RunningServer) -> None:
    done = run_cli("complete", "--url", f"{server.url}/v1", "--model_name=alias", "-q", "ban",
                   "--max_tokens", "2")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_collect_env_hides_secrets() -> None:
    done = run_cli("collect-env", VLLM_API_KEY="hunter2", VLLM_LOGGING_LEVEL="warning")
    assert done.returncode == 0, done.stderr
    assert "VLLM_API_KEY: (set, hidden)" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    assert "VLLM_LOGGING_LEVEL: warning" in done.stdout
    for title in ("Versions", "Processor", "Native library", "Kernel selector", "GPUs"):
        assert f"\n{title}\n" in "\n" + done.stdout
    assert "error:" not in done.stdout


def test_chat_prints_what_the_server_answers(server: RunningServer) -> None:
    expected = server.chat(
        messages=[{"role": "system", "content": "lon"}, {"role": "user", "content": "ban"}],
        max_tokens=12,
    )["choices"][0]["message"]["content"]
    done = run_cli("chat", "--url", f"{server.url}/v1", "--system-prompt", "lon", "-q", "ban",
                   "--max-tokens", "12", "--temperature", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"


def test_complete_prints_what_the_server_answers(server: RunningServer) -> None:
    expected = server.complete(prompt="ban", max_tokens=12)["choices"][0]["text"]
    url = server.url.removeprefix("http://")  # of which scheme and /v1 go without saying
    done = run_cli("complete", "--url", url, "-q", "ban", "--max-tokens", "12",
                   "--temperature", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"


def test_what_the_server_refuses_is_told(server: RunningServer) -> None:
    done = run_cli("complete", "--url", f"{server.url}/v1", "-q", "ban", "--max-tokens", "99999")
    assert done.returncode == 2
    assert "context of 2048" in done.stderr


def test_a_server_that_is_not_there_is_told() -> None:
    done = run_cli("chat", "--url", "http://127.0.0.1:9/v1", "-q", "a")
    assert done.returncode == 2
    assert "no server answers at http://127.0.0.1:9/v1" in done.stderr


def bench(server: RunningServer, *flags: str) -> Any:
    return run_cli("bench", "serve", "--port", str(server.port), "--random-input-len", "20",
                   "--random-output-len", "6", *flags)  # fmt: skip


def test_bench_serve_reports_what_was_asked_for(server: RunningServer, tmp_path: Path) -> None:
    before = server.metric("vllm:prompt_tokens_total")
    path = tmp_path / "result.json"
    done = bench(server, "--num-prompts", "8", "--ignore-eos", "--request-rate", "50",
                 "--max-concurrency", "3", "--save-result", "--result-filename", str(path),
                 "--metric-percentiles", "50,99", "--percentile-metrics", "ttft,e2el")  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (160, 48)
    # One request more than asked for warms up.
    assert server.metric("vllm:prompt_tokens_total") - before == 180
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["mean_ttft_ms"] <= result["mean_e2el_ms"]
    assert "p50_itl_ms" not in result
    assert result["output_throughput"] == pytest.approx(48 / result["duration"])
    assert "Requests completed" in done.stdout


def test_bench_serve_varies_lengths_by_the_ratio_and_repeats_with_the_seed(
    server: RunningServer, tmp_path: Path
) -> None:
    lengths = []
    for name in ("a", "b"):
        path = tmp_path / name
        done = bench(server, "--num-prompts", "12", "--random-range-ratio", "0.5", "--save-result",
                     "--result-filename", str(path))  # fmt: skip
        assert done.returncode == 0, done.stderr
        requests = json.loads(path.read_text())["requests"]
        lengths.append([request["num_prompt_tokens"] for request in requests])
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 3
    assert all(10 <= length <= 30 for length in lengths[0])


def test_bench_serve_fails_where_nothing_answers(server: RunningServer) -> None:
    assert bench(server, "--model", "other").returncode == 2
    assert run_cli("bench", "serve", "--port", "9", "--num-prompts", "1").returncode == 2


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "closed the connection without a response"),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed the connection without a response"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ndat\r\n",
         "the response broke off"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 38\r\n\r\n"
         b'{"error": {"message": "no such path"}}', "HTTP 404: no such path"),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_off_is_told_as_such(sent: bytes, error: str) -> None:
    with answers(sent) as url, pytest.raises(HttpError, match=error):
        asyncio.run(models_of(url))


async def models_of(url: str) -> Any:
    async with HttpClient(url) as client:
        return await client.get_json("/v1/models")


@contextmanager
def answers(sent: bytes) -> Iterator[str]:
    """The address of a server that answers every request with `sent`; aiohttp sends some again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # the listener was shut down
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        # All of it: to close with unread bytes resets the connection.
                        request = connection.recv(1 << 16)
                        while not _is_whole(request):
                            request += connection.recv(1 << 16)
                        connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\ncontent-length: *(\d+)", head)
    return bool(end) and len(body) >= (int(length[1]) if length else 0)


_OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("body", [b'{"data": []}', b"[", b"5"])
def test_a_server_that_lists_no_model_is_told(body: bytes) -> None:
    with answers(_OK + b"\r\n" + body) as url, pytest.raises(HttpError) as error:
        Server(url, None).first_model()
    assert f"{url}/v1/models" in str(error.value)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'\r\ndata: {"choices": []}\n\n', "ended early"),
        (b"\r\n<html>\n", "sends no events"),
        (b"\r\ndata: <html>\n", "sends no events of JSON"),
        (b'Transfer-Encoding: chunked\r\n\r\nff\r\ndata: {"choices": []}\n\n', "broke off"),
    ],
)
def test_a_stream_that_is_none_or_breaks_off_is_told(sent: bytes, says: str) -> None:
    with answers(_OK + sent) as url, pytest.raises(HttpError, match=says):
        Server(url, None).show("/completions", {}, lambda choice: choice["text"])


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)


def test_failed_requests_count_as_failed_alone() -> None:
    good = Timing(num_prompt_tokens=10, num_output_tokens=5, ttft=0.1, e2el=0.5, gaps=[0.1] * 4)
    bad = Timing(num_prompt_tokens=10, error="HttpError: HTTP 503")
    result = summarise([good, bad], 2.0, ["ttft", "tpot"], [50])
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["errors"] == ["HttpError: HTTP 503"]
    assert result["total_input_tokens"] == 10
    assert result["mean_tpot_ms"] == pytest.approx(100)
    assert result["request_throughput"] == 0.5


@pytest.mark.parametrize("kind", quick(["latency", "throughput"], ["throughput"]))
def test_bench_measures_the_engine_in_its_own_process(
    tiny_model: Path, tmp_path: Path, kind: str
) -> None:
    flags = {"latency": ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1"],
             "throughput": ["--num-prompts", "4"]}[kind]  # fmt: skip
    path = tmp_path / "result.json"
    done = run_cli("bench", kind, "--model", str(tiny_model), "--input-len", "8", "--output-len",
                   "4", "--output-json", str(path), *flags)  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(path.read_text())
    if kind == "latency":
        assert len(result["latencies"]) == 2
        assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    else:
        assert result["total_num_tokens"] == 4 * 12
        assert result["requests_per_second"] == pytest.approx(4 / result["elapsed_time"])
