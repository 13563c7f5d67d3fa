"""What compiles is counted: as a part of the start, then as a wait of requests."""

import importlib
import json
import logging
import os
import sys
import time
import types

import pytest
from machines import write_package

from vllm.kernels.jit.monitor import Compilation, Monitor

ONE = Compilation("nvcc", "gemm<64>", 2.5)
# What Triton's package has of its interface: a place for one listener.
_TRITON = """
class knobs:
    class compilation:
        listener = None
"""


@pytest.fixture
def monitor(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_LOG", "")  # restored afterwards
    write_package(tmp_path, "triton", _TRITON)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monitor = Monitor()
    monitor.watch()
    yield monitor
    sys.modules.pop("triton", None)


def compile_with_triton(name: str, seconds: float, cache_hit: bool = False) -> None:
    src = types.SimpleNamespace(name=name, signature={"x": "*bf16"}, constants={(1,): 128})
    times = types.SimpleNamespace(total=seconds * 1e6)
    knobs = importlib.import_module("triton").knobs
    knobs.compilation.listener(
        src=src, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit
    )


def compile_with_nvcc(kernel: str, seconds: float) -> None:
    with open(os.environ["NVCC_LOG"], "a") as log:
        log.write(json.dumps({"kernel": kernel, "seconds": seconds, "end": time.time()}) + "\n")


def test_before_the_engine_is_ready_compiling_is_a_part_of_the_start(monitor):
    compile_with_triton("decode_kernel", 1.5)
    compile_with_nvcc("gemm<16>", 2.0)
    monitor.note(ONE)
    monitor.serve()
    assert not monitor.take()
    assert monitor.summary() == "3 kernels compiled in 6.0 s"
    assert Monitor().summary() == ""


def test_afterwards_each_is_counted_once_and_told_with_its_name(monitor, caplog):
    monitor.serve()
    with caplog.at_level(logging.WARNING, "vllm"):
        compile_with_triton("prefill_kernel", 1.5)
        compile_with_nvcc("gemm<32>", 3.0)
        assert len(monitor.take()) == 2 and not monitor.take()
    told = [record.getMessage() for record in caplog.records]
    assert "1.5 s" in told[0] and "prefill_kernel(x: *bf16; 128)" in told[0]
    assert "3.0 s" in told[1] and "gemm<32>" in told[1]


def test_what_was_found_in_a_cache_is_no_compilation(monitor):
    monitor.serve()
    compile_with_triton("decode_kernel", 0.01, cache_hit=True)
    assert not monitor.take()


def test_a_line_that_is_being_written_waits_for_its_end(monitor):
    monitor.serve()
    with open(os.environ["NVCC_LOG"], "a") as log:
        log.write('{"kernel": "gemm<16>", ')
        log.flush()
        assert not monitor.take()
        log.write('"seconds": 1.0, "end": 2.0}\n')
    assert len(monitor.take()) == 1


def test_what_is_no_line_of_the_log_is_passed_over(monitor):
    monitor.serve()
    with open(os.environ["NVCC_LOG"], "a") as log:
        log.write('{"kernel": "cut o{"kernel": "gemm<16>", "seconds": 1.0, "end": 2.0}\n')
    compile_with_nvcc("gemm<32>", 1.0)
    assert len(monitor.take()) == 1
    os.unlink(os.environ["NVCC_LOG"])
    assert not monitor.take()


def test_a_second_start_in_a_process_counts_anew(monitor):
    monitor.note(ONE)
    monitor.serve()
    monitor.note(ONE)
    monitor.watch()
    monitor.note(ONE)
    compile_with_triton("decode_kernel", 0.5)
    monitor.serve()
    assert not monitor.take() and monitor.summary() == "2 kernels compiled in 3.0 s"


def test_a_listener_that_was_there_is_told_too(tmp_path, monkeypatch):
    heard = []
    monkeypatch.setenv("NVCC_LOG", "")
    write_package(tmp_path, "triton", _TRITON)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    importlib.import_module("triton").knobs.compilation.listener = lambda **told: heard.append(told)
    monitor = Monitor()
    monitor.watch()
    compile_with_triton("decode_kernel", 0.5)
    assert heard[0]["cache_hit"] is False and len(monitor.made) == 1
    sys.modules.pop("triton")


def test_triton_is_not_imported_where_it_does_not_work(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_LOG", "")
    write_package(tmp_path, "triton", 'raise ImportError("libtriton.so: undefined symbol")')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    Monitor().watch(with_triton=False)
    assert "triton" not in sys.modules


def test_a_step_that_compiled_is_seen_in_the_metrics(tmp_path):
    import torch
    from tiny_models import build_model

    from vllm import LLM, SamplingParams
    from vllm.engine.metrics import Metrics
    from vllm.kernels.jit.monitor import MONITOR

    build_model("qwen3").to(torch.float32).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
    core, metrics = llm.llm_engine.core, Metrics("tiny", 64)
    for number in range(3):
        for _ in range(number):
            MONITOR.note(ONE)
        params = SamplingParams(max_tokens=2, detokenize=False)
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], params, use_tqdm=False)
        stats = core.stats()
        assert len(stats.compile_waits) == number
        metrics.engines[0].record_step(stats)
    counted = 'vllm:num_kernels_compiled_total{engine="0",model_name="tiny"} 3.0'
    assert counted in metrics.render().decode()
