"""Several engines behind one server, and what it says when a rank is gone."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from entrypoints.serving import RunningServer, started_server, wait_until

from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.async_llm import AsyncLLM
from vllm.engine.supervision import Supervision
from vllm.errors import ConfigError, EngineDeadError, VllmError

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 3 + length) % 90 + 3 for i in range(length)] for length in (5, 33, 17, 60, 2)]
FLAGS = ("--skip-tokenizer-init", "--max-model-len", "512", "--max-num-seqs", "4",
         "--restarts", "0")  # fmt: skip


@pytest.fixture(scope="module")
def experts(checkpoint) -> Path:
    return checkpoint("qwen3_5_moe")


@pytest.fixture(scope="module")
def wanted(experts) -> list[list[int]]:
    llm = LLM(experts, skip_tokenizer_init=True, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(inputs, params, use_tqdm=False)]


def complete(server: RunningServer, prompt: list[int], **fields):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True} | fields
    return server.post("/v1/completions", body)


def all_at_once(server: RunningServer) -> list[list[int]]:
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        found[index] = complete(server, PROMPTS[index]).json["choices"][0]["token_ids"]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(PROMPTS))]


def child_with(server: RunningServer, mark: str) -> int:
    """The pid of a process under the server whose command line has `mark`, the youngest."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(
                Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
        if mark.encode() in words and server.process.pid in (parent, grandparent):
            found.append(int(entry.name))
    return max(found)


def kill_while_busy(server: RunningServer, mark: str) -> str:
    """Kills a process in the middle of a request; returns what the request's answer says."""
    answers = []
    body = {"max_tokens": 400, "n": 4, "temperature": 1.0}
    thread = threading.Thread(target=lambda: answers.append(complete(server, [5, 6], **body)))
    thread.start()
    wait_until(lambda: server.metric("vllm:num_requests_running") > 0)
    died = time.monotonic()
    os.kill(child_with(server, mark), signal.SIGKILL)
    assert server.process.wait(20) == 1
    assert time.monotonic() - died < 10
    thread.join()
    assert answers[0].status == 500
    return answers[0].error


def test_a_number_of_engines_that_is_refused_starts_none(experts):
    args = EngineArgs.from_keywords(model=experts, data_parallel_size=1500)
    with pytest.raises(ConfigError, match="--data-parallel-size 1500"):
        AsyncLLM(args)
    assert not multiprocessing.active_children()


def test_an_engine_that_cannot_load_is_named(experts, tmp_path):
    shutil.copytree(experts, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")

    async def start() -> None:
        args = EngineArgs.from_keywords(
            model=tmp_path / "model", data_parallel_size=2, skip_tokenizer_init=True
        )
        llm = AsyncLLM(args)
        try:
            await llm.wait_ready()
        finally:
            await llm.shutdown()

    with pytest.raises(VllmError, match=r"^data-parallel engine [01]: .*model\.safetensors"):
        asyncio.run(start())


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_named_and_killed(experts):
    async def ask(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=400, ignore_eos=True, detokenize=False)
        async for _ in llm.generate({"prompt_token_ids": [5, 6]}, params, "one"):
            pass

    async def hang() -> None:
        args = EngineArgs.from_keywords(
            model=experts, data_parallel_size=2, skip_tokenizer_init=True
        )
        llm = AsyncLLM(args, supervision=Supervision(dead_after_s=5.5, restarts=0))
        try:
            await llm.wait_ready()
            await ask(llm)
            os.kill(llm._engines[0].process.pid, signal.SIGSTOP)
            begin = time.monotonic()
            message = r"^data-parallel engine 0: the engine process .* no sign of life .*SIGSTOP"
            with pytest.raises(EngineDeadError, match=message):
                await asyncio.wait_for(ask(llm), 30)
            assert 5 <= time.monotonic() - begin < 8
        finally:
            await llm.shutdown()

    asyncio.run(hang())


@pytest.mark.slow
def test_two_engines_in_lock_step_share_the_experts(experts, wanted, tmp_path):
    flags = ("--data-parallel-size", "2", "--enable-expert-parallel")
    with started_server(experts, tmp_path / "log", *FLAGS, *flags) as server:
        assert all_at_once(server) == wanted
        time.sleep(1)  # both rest, and wake up for one request
        assert complete(server, PROMPTS[1]).json["choices"][0]["token_ids"] == wanted[1]
        assert all_at_once(server) == wanted
        assert server.metric("vllm:num_requests_running") == 0
        calls = server.get("/kernels").json["calls"]
        assert "1" in calls["linear"] and "1" not in calls["moe"], "experts see both ranks' tokens"
        assert sum(calls["linear"].values()) == sum(calls["moe"].values())
        error = kill_while_busy(server, "spawn_main")
        assert "data-parallel engine 1: the engine process died (killed by SIGKILL" in error
        assert f"vllm: error: {error}" in server.log.read_text()


@pytest.mark.slow
def test_engines_in_lock_step_rest_and_wake_for_several_api_processes(experts, wanted, tmp_path):
    flags = ("-dp", "2", "--enable-expert-parallel", "--api-server-count", "2", *FLAGS[:-1], "1")
    with started_server(experts, tmp_path / "log", *flags) as server:
        for _ in range(3):
            assert all_at_once(server) == wanted
            time.sleep(1)  # both rest
            assert complete(server, PROMPTS[1]).json["choices"][0]["token_ids"] == wanted[1]
        lost = server.api_pids()[0]
        busy = [server.connect() for _ in range(4)]
        for connection in busy:
            server.send_completion(connection, prompt=PROMPTS[0], max_tokens=400, stream=True)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        os.kill(lost, signal.SIGKILL)
        wait_until(lambda: len(server.api_pids()) == 2 and lost not in server.api_pids())
        for connection in busy:
            connection.close()
        time.sleep(1)
        for _ in range(3):
            assert all_at_once(server) == wanted
            time.sleep(1)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)


@pytest.mark.slow
def test_two_engines_on_their_own_and_a_rank_of_one_is_killed(experts, wanted, tmp_path):
    with started_server(
        experts, tmp_path / "log", *FLAGS, "-dp", "2", "-pp", "2", VLLM_LOGGING_LEVEL="warning"
    ) as server:
        assert all_at_once(server) == wanted
        calls = server.get("/kernels").json["calls"]["moe"]
        assert sum(calls.values()) >= 2 * NUM_TOKENS, "of both engines"
        error = kill_while_busy(server, "vllm-rank-1")
        assert "data-parallel engine 0: rank 1 (pipeline stage 1): killed by SIGKILL" in error
        assert f"vllm: error: {error}" in server.log.read_text()
