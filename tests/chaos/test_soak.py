"""Mixed requests for a long time: memory, descriptors and blocks are accounted for."""

import random
import threading
import time
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer

from .harness import Fault, descriptors, resident, tokens, wait_for

pytestmark = pytest.mark.chaos

_CLIENTS = 6
_MOST_GROWTH = 64 << 20


def requests_until(end: float, server: RunningServer, seed: int, faults: list[object]) -> None:
    draw = random.Random(seed)
    while time.monotonic() < end:
        fields = {
            "prompt": [draw.randrange(5, 500) for _ in range(draw.choice((1, 20, 300, 1200)))],
            "max_tokens": draw.randrange(1, 60),
            "temperature": draw.choice((0, 0.8)),
            "stream": draw.random() < 0.3,
        }
        if draw.random() < 0.1:
            fields |= {"guided_regex": "[a-z ]{1,20}"}
        if draw.random() < 0.1:
            fields |= {"prompt_logprobs": 2, "stream": False}
        if draw.random() < 0.1:  # a client that goes away
            with server.connect() as connection:
                server.send_completion(connection, max_tokens=500)
                time.sleep(draw.random() / 10)
            continue
        answer = server.post("/v1/completions", fields)
        if answer.status not in (200, 429):
            faults.append((fields, answer.status, answer.body))


def test_soak(fault: Fault, tiny_model: Path, tmp_path: Path, soak_seconds: float) -> None:
    """Mixed requests of six clients for a long time."""
    # A cache that is too small for all of them: requests are preempted.
    flags = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "320")
    with fault.server(tiny_model, tmp_path / "log", *flags) as server:
        expected, faults = tokens(server), []
        pids = (server.process.pid, server.engine_pid())

        def load(seconds: float) -> None:
            end = time.monotonic() + seconds
            threads = [
                threading.Thread(target=requests_until, args=(end, server, seed, faults))
                for seed in range(_CLIENTS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        load(max(20.0, soak_seconds / 4))  # until caches are as large as they get
        before = [(resident(pid), descriptors(pid)) for pid in pids]
        load(soak_seconds)
        assert not faults, faults[:3]
        # An engine that is idle with a block in use ends itself (check_idle).
        wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 60)
        wait_for(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, 60)
        fault.recovered()
        for pid, (memory, files) in zip(pids, before):
            assert resident(pid) - memory < _MOST_GROWTH
            assert descriptors(pid) <= files + 10
        assert tokens(server) == expected
