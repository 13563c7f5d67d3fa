"""What is counted, and under which names."""

import subprocess
import sys

import pytest

from vllm.engine.metrics import Metrics, RequestStats, SchedulerStats

from .serving import environment


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m", **labels})


def finished(**changes: object) -> RequestStats:
    stats = {
        "num_prompt_tokens": 10, "num_cached_tokens": 4, "num_generation_tokens": 5,
        "e2e_seconds": 1.0, "queue_seconds": 0.1, "prefill_seconds": 0.2, "decode_seconds": 0.4,
        "finish_reason": "stop", "max_tokens": 16, "n": 1,
    }  # fmt: skip
    return RequestStats(**{**stats, **changes})  # type: ignore[arg-type]


def test_a_step_sets_levels_and_adds_counts() -> None:
    metrics = Metrics("m", 2048)
    for _ in range(2):
        metrics.record_step(SchedulerStats(3, 2, 0.5, 100, 60, 1))
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.5
    assert value(metrics, "prefix_cache_queries_total") == 200
    assert value(metrics, "prefix_cache_hits_total") == 120
    assert value(metrics, "num_preemptions_total") == 2


def test_a_finished_request_is_counted_once_under_its_reason() -> None:
    metrics = Metrics("m", 2048)
    metrics.record_finished(finished())
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 0
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert value(metrics, f"{name}_seconds_count") == 1


def test_tokens_count_when_they_come() -> None:
    metrics = Metrics("m", 2048)
    metrics.record_prompt(10, 4)
    for num_tokens in (1, 3):
        metrics.record_generated(num_tokens)
    assert value(metrics, "prompt_tokens_total") == 10
    assert value(metrics, "prompt_tokens_cached_total") == 4
    assert value(metrics, "generation_tokens_total") == 4


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    metrics = Metrics("m", 2048)
    metrics.record_finished(finished(decode_seconds=0.4, num_generation_tokens=5))
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    metrics.record_finished(finished(num_generation_tokens=1))
    assert value(metrics, "time_per_output_token_seconds_count") == 1


def test_choices_of_one_request_share_the_time_they_take() -> None:
    metrics = Metrics("m", 2048)
    metrics.record_finished(finished(decode_seconds=0.4, num_generation_tokens=10, n=2))
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_tokens_that_arrive_together_share_their_gap() -> None:
    metrics = Metrics("m", 2048)
    metrics.record_inter_token(0.6, 3)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.2)


def test_token_histograms_reach_the_context_length() -> None:
    text = Metrics("m", 3000).render().decode()
    assert 'vllm:request_prompt_tokens_bucket{le="5000.0",model_name="m"}' in text
    assert 'le="10000.0"' not in text


def test_the_records_can_be_imported_without_prometheus() -> None:
    code = (
        "import sys; from vllm.engine.metrics import SchedulerStats; "
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0
