"""Profiles of benchmarks/serving: what counts as a kernel's own time, and what as waiting."""

import sys
import time
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vllm import LLM, SamplingParams
from vllm.worker.kernel_spans import Span, own_nanoseconds, waiting

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "serving"))

from gpu_profile import breakdown, profile_steps
from rank_profile import profile_rank, recording_ranks


def own(*spans) -> list[tuple[str, int]]:
    return list(own_nanoseconds(Span(*span) for span in spans))


def test_kernels_one_after_another_count_whole():
    assert own(("b", 7, 12, 30), ("a", 7, 0, 10)) == [("a", 10), ("b", 18)]


def test_one_that_starts_early_counts_from_the_end_of_the_one_before():
    spans = ("a", 7, 0, 100), ("b", 7, 20, 130), ("c", 7, 60, 140)
    assert own(*spans) == [("a", 100), ("b", 30), ("c", 10)]
    assert sum(time for _, time in own(*spans)) == 140


def test_one_that_ends_before_the_one_it_waits_for_counts_nothing():
    assert own(("a", 7, 0, 100), ("b", 7, 20, 90), ("c", 7, 95, 110)) == [
        ("a", 100), ("b", 0), ("c", 10)
    ]  # fmt: skip


def test_streams_do_not_wait_for_one_another():
    assert own(("a", 7, 0, 100), ("b", 20, 20, 130)) == [("a", 100), ("b", 110)]


def test_waiting_is_when_no_kernel_runs_on_any_stream():
    # The second stream covers a gap of the first, and ends within the last kernel.
    spans = [(7, 100, 150), (7, 160, 200), (20, 140, 170), (7, 230, 300), (20, 250, 280)]
    spans = [Span("a", *span) for span in spans]
    assert waiting(spans[::-1], 40, 310) == (60, 30, 10)
    assert waiting(spans[:1], 100, 150) == (0, 0, 0)
    assert waiting([], 40, 310) == (0, 0, 270)


def test_a_breakdown_adds_up_to_the_run():
    spans = [Span("a", 7, 10_000 * i, 10_000 * i + 6_000) for i in range(1, 5)]
    found = breakdown([*spans, Span("b", 7, 50_000, 52_000)], 2, 3_000, 60_000)
    assert found["a"] == {"us": 12.0, "launches": 2.0}
    assert found["all"] == {"us": 13.0}
    assert found["waiting"] == {"before_us": 7.0, "between_us": 8.0, "after_us": 8.0}
    assert 2 * (13.0 + 8.0) + 7.0 + 8.0 == 57.0


def test_the_profiler_has_the_clock_of_the_system():
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        begin = time.time_ns()
        torch.ones(10)
        end = time.time_ns()
    events = profiled.profiler.kineto_results.events()
    (made,) = (e for e in events if e.name() == "aten::ones")
    slack = 1_000_000  # of what turns the processor's counter into a time
    assert begin - slack <= made.start_ns() <= made.end_ns() <= end + slack


@pytest.mark.slow
def test_a_rank_records_the_steps_that_it_is_asked_for(checkpoint):
    """On the CPU without kernels, so that all of the run is waiting."""
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with recording_ranks() as folder:
        llm = LLM(checkpoint("llama"), skip_tokenizer_init=True, tensor_parallel_size=2)

        def run() -> list[int]:
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            time.sleep(0.05)
            return output.outputs[0].token_ids

        tokens = run()
        here = profile_steps(run, 5)
        for _ in range(2):
            found = profile_rank(folder, run, 5, run)
            assert found.keys() == here.keys() == {"all", "waiting"}
            assert 0.05e6 < found["waiting"]["after_us"] < 20e6
        assert run() == tokens
        assert not [*folder.iterdir()]
