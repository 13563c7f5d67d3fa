"""What was once seen to make a server deaf, unfair or blind."""

import os
import subprocess
import time
from pathlib import Path

import pytest
from entrypoints.serving import COMMAND, Background, RunningServer, environment, run_cli
from slowness import slowness

from .harness import Fault, answers, resident, tokens, wait_for

pytestmark = pytest.mark.chaos

JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def seconds_for(server: RunningServer) -> float:
    begin = time.monotonic()
    tokens(server)
    return time.monotonic() - begin


def test_body_of_800000_elements(fault: Fault, server: RunningServer) -> None:
    """One request of 6 MiB with 800,000 messages."""
    elements = b'{"x": 1}'
    body = b'{"messages": [' + b",".join([elements] * 800_000) + b"]}"
    fault.begins()
    sent = Background(lambda: server.request("POST", CHAT, body, JSON).status)
    assert seconds_for(server) < 10
    assert 400 <= sent.join(240) < 500
    fault.recovered()


def test_bodies_deep_and_wide(fault: Fault, server: RunningServer) -> None:
    """Bodies of 4 MiB that are deep, or full of one kind of element."""
    for body in (
        b'{"prompt": ' + b"[" * (2 << 20) + b"]" * (2 << 20) + b"}",
        b'{"prompt": [' + b",".join([b"[1]"] * 1_000_000) + b"]}",
        b'{"prompt": "a", "stop": [' + b",".join([b'"a"'] * 1_000_000) + b"]}",
        b'{"prompt": "a", "logit_bias": {' + b",".join(
            b'"%d": 1' % i for i in range(400_000)) + b"}}",
    ):  # fmt: skip
        assert 400 <= server.request("POST", TEXT, body, JSON).status < 500
    fault.recovered()


def test_many_sequences_of_one_client(fault: Fault, server: RunningServer) -> None:
    """16 prompts with n=128 from one client, and a neighbour."""
    quiet = max(seconds_for(server) for _ in range(5))
    many = {"prompt": ["ban"] * 16, "n": 128, "max_tokens": 32, "temperature": 1.0}
    fault.begins()
    sent = Background(lambda: server.post(TEXT, many, **{"X-Forwarded-For": "10.0.0.1"}).status)
    time.sleep(0.5)
    loaded = max(seconds_for(server) for _ in range(5))
    fault.recovered()
    assert loaded <= 3 * quiet + 1.0, f"{loaded:.2f} s and not {quiet:.2f} s"
    assert sent.join(240) in (200, 400, 429)


def test_prompt_logprobs_of_a_long_prompt(fault: Fault, server: RunningServer) -> None:
    """Long prompts with prompt_logprobs, and a neighbour."""
    quiet = max(seconds_for(server) for _ in range(5))
    long = {"prompt": [5] * 2000, "prompt_logprobs": 20, "max_tokens": 1}
    fault.begins()
    sent = [Background(lambda: server.post(TEXT, long).status) for _ in range(8)]
    loaded = max(seconds_for(server) for _ in range(3))
    fault.recovered()
    assert loaded <= 3 * quiet + 1.0, f"{loaded:.2f} s and not {quiet:.2f} s"
    assert {one.join(240) for one in sent} <= {200, 429}


def test_slow_grammars(fault: Fault, server: RunningServer) -> None:
    """Grammars that take long to compile, one after another, and a neighbour with a small one."""

    def slow(number: int) -> int:
        regex = f"(a|b){{1,500}}(c|d){{1,500}}(e|f){{1,500}}{number}"
        fields = {"prompt": "a", "guided_regex": regex, "max_tokens": 2}
        return server.post(TEXT, fields).status

    fault.begins()
    sent = [Background(lambda number=number: slow(number)) for number in range(8)]
    small = {"prompt": "a", "guided_choice": ["ban", "mest"], "max_tokens": 4}
    assert Background(lambda: server.post(TEXT, small).status).join(30) == 200
    fault.recovered()
    assert all(one.join(240) in (200, 400, 429, 503) for one in sent)


def test_waiting_requests_are_bounded(fault: Fault, server: RunningServer) -> None:
    """2,000 requests at once: those that cannot wait get 429 with Retry-After."""
    connections = []
    fault.begins()
    for _ in range(2000):
        connection = server.connect()
        server.send_completion(connection, max_tokens=200)
        connections.append(connection)
    refused = 0
    for connection in reversed(connections):
        connection.settimeout(0.05)
        try:
            head = connection.recv(4096)
        except TimeoutError:
            head = b""
        refused += head.startswith(b"HTTP/1.1 429") and b"retry-after" in head.lower()
        connection.close()
    assert refused > 0
    fault.noticed()
    wait_for(lambda: answers(server), 60)
    fault.recovered()


@pytest.mark.parametrize("damage", ["nothing", "half a file"])
def test_two_starts_at_once(fault: Fault, tmp_path: Path, damage: str) -> None:
    """Two starts at once write the demo model, which was there before"""
    from vllm.entrypoints.demo import DEMO_NAME

    code = "from vllm.entrypoints.demo import demo_model_path; demo_model_path()"
    weights = tmp_path / "models" / DEMO_NAME / "model.safetensors"
    if damage != "nothing":
        weights.parent.mkdir(parents=True)
        weights.write_bytes(b"half")
    fault.begins()
    command, given = [COMMAND[0], "-c", code], environment(VLLM_CACHE_ROOT=str(tmp_path))
    both = [subprocess.Popen(command, env=given) for _ in range(2)]
    assert [process.wait(280) for process in both] == [0, 0]
    fault.recovered()
    assert weights.stat().st_size > 100 << 20
    assert not list(weights.parents[1].glob(f".{DEMO_NAME}-*"))


def test_sigterm_as_process_1(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """SIGTERM while the model loads, as process 1 of a container."""
    from entrypoints import test_stop_while_starting as starts

    if not starts._can_be_process_1():
        pytest.skip("this machine has no user namespaces")
    log = tmp_path / "log"
    code, took, left = starts._stopped(
        [*starts._NEW_PIDS, *starts._serve(tiny_model)],
        starts._when_logged(log, "Loading weights"),
        log,
    )
    fault.row.recovered_s = took
    assert (code, left) == (143, []) and took < 2 * slowness()


def test_memory_under_load(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """The KV cache fills up: the engine's memory stays what it was after the start."""
    flags = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", "400M")
    with fault.server(tiny_model, tmp_path / "log", *flags) as server:
        pid = server.engine_pid()
        tokens(server)
        wait_for(lambda: resident(pid) > 600 << 20, 30)
        before = resident(pid)
        fault.begins()
        sent = [
            Background(lambda i=i: server.post(TEXT, {"prompt": [i + 5] * 1500, "max_tokens": 300,
                                                      "ignore_eos": True}).status)
            for i in range(64)
        ]  # fmt: skip
        assert {one.join(240) for one in sent} <= {200, 429}
        assert resident(pid) - before < 100 << 20
        fault.recovered()


def test_key_in_environments(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """VLLM_API_KEY is in no environment, title or answer of a process of ours."""
    secret = "a-secret-of-this-test"
    with fault.server(tiny_model, tmp_path / "log", VLLM_API_KEY=secret) as server:
        assert server.get("/v1/models").status == 401
        for pid in server.engine_pids():
            for name in ("environ", "cmdline"):
                assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        key = {"Authorization": f"Bearer {secret}"}
        for path in ("/server_info", "/metrics", "/kernels", "/load", "/v1/models"):
            assert secret.encode() not in server.get(path, **key).body
        assert secret not in server.log.read_text()


def test_fifo_in_place_of_a_file(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """A FIFO in place of tokenizer_config.json."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    fault.begins()
    done = run_cli("serve", str(folder), "--port", "0", timeout=30)
    fault.noticed()
    assert done.returncode == 2 and "no regular file" in done.stderr


def test_listening_without_a_key(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """A server that listens on 0.0.0.0 without a key says so, and allows no other origin."""
    flags = ("--host", "0.0.0.0")
    with fault.server(tiny_model, tmp_path / "log", *flags) as server:
        log = server.log.read_text()
        assert "WARNING" in log and "key" in log
        answer = server.get("/health", Origin="http://elsewhere.example")
        assert "access-control-allow-origin" not in answer.headers


def test_repetition_penalty_of_next_to_nothing(fault: Fault, server: RunningServer) -> None:
    """repetition_penalty: 1e-300."""
    for value in (1e-300, 5e-324, 1e300):
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 4, "repetition_penalty": value})
        assert answer.status in (200, 400), answer.body
    assert answers(server)
    fault.recovered()


def test_body_without_a_key(fault: Fault, tiny_model: Path, tmp_path: Path) -> None:
    """A body of 1 GiB without a key is refused before a byte of it is read."""
    with fault.server(tiny_model, tmp_path / "log", "--api-key", "one") as server:
        connection = server.connect()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        fault.begins()
        connection.sendall(f"{head}Content-Length: {1 << 30}\r\n\r\n".encode())
        connection.settimeout(5)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        fault.noticed()
        connection.close()
