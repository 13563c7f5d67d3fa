"""What a start says: where its seconds went, and which option to change when a GPU is full."""

import subprocess
import sys
import time

import pytest
import torch

from vllm import LLM
from vllm.errors import ConfigError
from vllm.utils.startup import StartupReport
from vllm.utils.torch_utils import naming_the_knob


def test_an_inner_phase_counts_for_itself():
    report = StartupReport()
    with report.phase("outer"):
        time.sleep(0.02)
        with report.phase("inner"):
            time.sleep(0.05)
    assert 0.02 <= report.seconds["outer"] < 0.05 <= report.seconds["inner"]


def test_a_phase_that_fails_is_counted_too():
    report = StartupReport()
    with pytest.raises(KeyError), report.phase("broken"):
        raise KeyError
    assert "broken" in report.seconds


def test_what_no_phase_has_counted_has_a_name():
    report = StartupReport()
    with report.phase("first"):
        time.sleep(0.02)
    time.sleep(0.05)
    report.count_rest("imports")
    assert 0.02 <= report.seconds["first"] < 0.05 <= report.seconds["imports"]
    assert sum(report.seconds.values()) == pytest.approx(report.total, abs=0.01)


def test_a_process_knows_how_long_it_has_run():
    code = (
        "import time; time.sleep(0.3)\n"
        "from vllm.utils.startup import current_report; print(current_report().total)"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The kernel tells a process's start in hundredths of a second.
    assert 0.29 < float(done.stdout) < time.perf_counter() - begin + 0.02


def test_a_start_tells_where_all_its_seconds_went(text_checkpoint):
    begin = time.perf_counter()
    llm = LLM(text_checkpoint, max_num_seqs=2)
    waited = time.perf_counter() - begin
    seconds = llm.llm_engine.core.executor.report.seconds
    assert list(seconds)[:3] == ["configuration", "imports", "libraries and device"]
    assert sum(seconds.values()) <= waited


def test_a_full_gpu_names_the_option():
    full = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a total capacity of 79 GiB. "
        "Process 7 has 70 GiB memory in use. Of the allocated memory 1 GiB is allocated by PyTorch"
    )
    told = pytest.raises(ConfigError, match="change --max-num-seqs")
    with told as error, naming_the_knob("--max-num-seqs (lower)"):
        raise full
    assert "Process 7 has 70 GiB memory in use" in str(error.value)
    assert "by PyTorch" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
    ],
)
def test_a_full_gpu_is_known_by_what_libraries_say_of_it(text):
    with (
        pytest.raises(ConfigError, match="change --max-num-seqs"),
        naming_the_knob("--max-num-seqs"),
    ):
        raise RuntimeError(text)
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        naming_the_knob("--max-num-seqs"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
