"""What is counted, and under which names."""

import subprocess
import sys

import pytest

from vllm.config import CacheConfig
from vllm.engine.metrics import Metrics, RequestStats, SchedulerStats
from vllm.engine.metrics_reader import Gauge, Histogram, read_metrics

from .serving import environment


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    labels = {"model_name": "m", "engine": "0", **labels}
    return metrics.registry.get_sample_value(f"vllm:{name}", labels)


def finished(**changes: object) -> RequestStats:
    stats = {
        "num_prompt_tokens": 10, "num_cached_tokens": 4, "num_generation_tokens": 5,
        "max_generation_tokens": 5,
        "e2e_seconds": 1.0, "queue_seconds": 0.1, "prefill_seconds": 0.2, "decode_seconds": 0.4,
        "finish_reason": "stop", "max_tokens": 16, "n": 1,
    }  # fmt: skip
    return RequestStats(**{**stats, **changes})  # type: ignore[arg-type]


def test_a_step_sets_levels_and_adds_counts() -> None:
    metrics = Metrics("m", 2048)
    for _ in range(2):
        metrics.engines[0].record_step(SchedulerStats(3, 2, 0.5, 100, 60, 1))
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.5
    assert value(metrics, "prefix_cache_queries_total") == 200
    assert value(metrics, "prefix_cache_hits_total") == 120
    assert value(metrics, "num_preemptions_total") == 2


def test_a_finished_request_is_counted_once_under_its_reason() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_finished(finished())
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="length") == 0
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert value(metrics, f"{name}_seconds_count") == 1
    assert value(metrics, "request_inference_time_seconds_sum") == pytest.approx(0.6)
    assert value(metrics, "request_prefill_kv_computed_tokens_sum") == 6
    assert value(metrics, "request_max_num_generation_tokens_sum") == 5


def test_tokens_count_when_they_come() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_prompt(10, 4)
    for num_tokens in (1, 3):
        metrics.engines[0].record_generated(num_tokens)
    assert value(metrics, "prompt_tokens_total") == 10
    assert value(metrics, "prompt_tokens_cached_total") == 4
    assert value(metrics, "generation_tokens_total") == 4


def test_time_per_output_token_leaves_the_first_token_out() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_finished(finished(decode_seconds=0.4, num_generation_tokens=5))
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)
    metrics.engines[0].record_finished(finished(num_generation_tokens=1))
    assert value(metrics, "time_per_output_token_seconds_count") == 1


def test_choices_of_one_request_share_the_time_they_take() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_finished(finished(decode_seconds=0.4, num_generation_tokens=10, n=2))
    assert value(metrics, "time_per_output_token_seconds_sum") == pytest.approx(0.1)


def test_tokens_that_arrive_together_share_their_gap() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_inter_token(0.6, 3)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.2)


def test_token_histograms_reach_the_context_length() -> None:
    text = Metrics("m", 3000).render().decode()
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="5000.0",model_name="m"}' in text
    assert 'le="10000.0"' not in text


def test_each_engine_has_its_own_values() -> None:
    metrics = Metrics("m", 2048, num_engines=2)
    metrics.engines[1].record_step(SchedulerStats(3, 2, 0.5, step_tokens={7: 2}))
    assert value(metrics, "num_requests_running", engine="1") == 3
    assert value(metrics, "num_requests_running") == 0
    assert value(metrics, "iteration_tokens_total_sum", engine="1") == 14


def test_answers_count_by_class_of_status_too() -> None:
    metrics = Metrics("m", 2048)
    for status in (200, 500, 503):
        metrics.record_http("/v1/completions", "POST", status, 0.25)
    labels = {"handler": "/v1/completions", "method": "POST"}
    sample = metrics.registry.get_sample_value
    assert sample("http_requests_total", {**labels, "status": "5xx"}) == 2
    assert sample("http_request_duration_seconds_sum", labels) == 0.75


def test_metrics_can_be_read_as_values() -> None:
    metrics = Metrics("m", 2048)
    metrics.engines[0].record_finished(finished())
    metrics.record_cache_config(CacheConfig(block_size=32), num_blocks=7)
    found = {metric.name: metric for metric in read_metrics(metrics)}
    config = found["vllm:cache_config_info"]
    assert isinstance(config, Gauge) and config.value == 1
    shown = {"block_size": "32", "cache_dtype": "auto", "num_gpu_blocks": "7", "engine": "0"}
    assert shown.items() <= config.labels.items()
    queue = found["vllm:request_queue_time_seconds"]
    assert isinstance(queue, Histogram) and queue.count == 1 and queue.buckets["+Inf"] == 1
    assert found["vllm:request_success"].labels["finished_reason"]
    assert all(name.startswith("vllm:") for name in found)


def test_the_process_tells_of_itself() -> None:
    text = Metrics("m", 2048).render().decode()
    assert "process_resident_memory_bytes" in text and "python_info" in text


def test_the_records_can_be_imported_without_prometheus() -> None:
    code = (
        "import sys; from vllm.engine.metrics import SchedulerStats; "
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env=environment()).returncode == 0


def test_draft_tokens_are_counted_in_all_and_by_position() -> None:
    metrics = Metrics("tiny", 64)
    for _ in range(2):
        stats = SchedulerStats(
            1, 0, 0.5, num_drafts=3, num_draft_tokens=9, num_accepted_tokens={0: 3, 1: 1}
        )
        metrics.engines[0].record_step(stats)
    text = metrics.render().decode()
    labels = 'engine="0",model_name="tiny"'
    for name, value in (("num_drafts", 6), ("num_draft_tokens", 18), ("num_accepted_tokens", 8)):
        assert f"vllm:spec_decode_{name}_total{{{labels}}} {value}.0" in text
    for position, value in ((0, 6), (1, 2)):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{{labels},position="{position}"}} {value}.0' in text
