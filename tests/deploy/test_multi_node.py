"""The scripts of the manifest for several nodes, run as two nodes of a Ray cluster here."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from deployed import MANIFESTS, pods
from entrypoints.serving import RunningServer, environment, wait_until
from entrypoints.tiny_model import write_tiny_llama

pytest.importorskip("ray", reason="Ray is not installed: pip install 'vllm[ray]'")
pytestmark = pytest.mark.slow
START_SECONDS = 240


def scripts(port: int, serve: str) -> dict[str, str]:
    """By role, with one core for each node in place of 8 GPUs, and another port for Ray. Two nodes
    of one machine cannot both have Ray's port of the dashboard's agent."""
    found = {place.split()[1]: spec["containers"][0]["args"][0] for place, spec in pods()
             if "multi-node" in place}  # fmt: skip
    leader, count = re.subn(r"vllm serve (?:.*\\\n)*.*", serve, found["leader"])
    assert count == 1 and len(MANIFESTS) == 2
    head = "--head --num-cpus 1 --include-dashboard false"
    block = "--block --num-cpus 1 --dashboard-agent-listen-port 0"
    return {
        "leader": leader.replace("6379", str(port)).replace("--head", head),
        "worker": found["worker"].replace("6379", str(port)).replace("--block", block),
    }


def free_port(first: int) -> int:
    """Below those that Ray gives to its workers."""
    for port in range(first, first + 200):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("no free port")


@pytest.fixture
def started(tmp_path):
    """Starts a script; at the end every process that names this Ray's folder is killed."""
    folder = Path("/tmp") / f"vllm-ray-{os.getpid()}"  # short: sockets are in it
    folder.mkdir()
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = environment(
        LWS_LEADER_ADDRESS="127.0.0.1", LWS_GROUP_SIZE="2", RAY_TMPDIR=str(folder), PATH=programs
    )
    variables.pop("RAY_ADDRESS", None)
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, script: str) -> "subprocess.Popen[bytes]":
        with (tmp_path / name).open("wb") as log:
            command = ["bash", "-ec", script]
            running.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait(10)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and str(folder) in _command_line(entry):
            os.kill(int(entry.name), signal.SIGKILL)
    subprocess.run(["rm", "-rf", folder], check=True)


def _command_line(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_leader_waits_for_its_worker_serves_and_drains(started: Callable, tmp_path):
    model = write_tiny_llama(tmp_path / "model")
    port = free_port(8600)
    serve = (
        f"{sys.executable} -m vllm.entrypoints.cli.main serve {model} --served-model-name tiny "
        f"--host 127.0.0.1 --port {port} --distributed-executor-backend ray -tp 2 --max-num-seqs 4"
    )
    texts = scripts(free_port(6400), serve)
    worker = started("worker", texts["worker"])  # which waits for the leader's Ray
    leader = started("leader", texts["leader"])
    server = RunningServer(leader, port, tmp_path / "leader")

    def is_healthy() -> bool:
        assert leader.poll() is None and worker.poll() is None, server.log.read_text()[-3000:]
        try:
            return server.get("/health").status == 200
        except OSError:
            return False

    wait_until(is_healthy, START_SECONDS)
    assert server.complete()["usage"]["completion_tokens"] > 0
    leader.send_signal(signal.SIGTERM)
    assert leader.wait(60) == 0
