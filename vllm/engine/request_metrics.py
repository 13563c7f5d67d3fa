"""Times and counts of requests in flight, from the outputs of the engine."""

import time

from vllm.core.outputs import EngineOutput
from vllm.engine.metrics import EngineMetrics, RequestStats
from vllm.engine.output_processor import RequestState


def record_output(
    metrics: EngineMetrics | None, state: RequestState, output: EngineOutput, now: float
) -> None:
    """Counts one step's output of a request, but for its tokens. now: time.monotonic. metrics: None
    to keep the times of the request alone."""
    times, num_tokens = state.times, len(output.token_ids)
    is_first, gap = not times.first_token_ts, now - times.last_token_ts
    if num_tokens:
        if is_first:
            times.first_token_ts = now
            times.scheduled_ts = times.queued_ts + state.queue_seconds
        times.last_token_ts = now
    if metrics is None:
        return
    if not state.is_counted and output.error is None:
        state.is_counted = True
        metrics.record_prompt(len(state.prompt_token_ids), state.num_cached_tokens)
    if num_tokens and is_first:
        metrics.record_first_token(times.first_token_latency)
    elif num_tokens:
        metrics.record_inter_token(gap, num_tokens)


def request_stats(state: RequestState) -> RequestStats:
    """Of a request that ends now."""
    times, now = state.times, time.monotonic()
    first = times.first_token_ts or now
    reasons = {c.finish_reason.value for c in state.choices if c.finish_reason is not None}
    return RequestStats(
        num_prompt_tokens=len(state.prompt_token_ids),
        num_cached_tokens=state.num_cached_tokens,
        num_generation_tokens=times.num_generation_tokens,
        max_generation_tokens=max(len(choice.token_ids) for choice in state.choices),
        e2e_seconds=now - times.queued_ts,
        queue_seconds=state.queue_seconds,
        prefill_seconds=max(0.0, first - times.queued_ts - state.queue_seconds),
        decode_seconds=max(0.0, times.last_token_ts - first),
        finish_reason=sorted(reasons)[0] if state.is_finished else "abort",
        max_tokens=state.params.max_tokens,
        n=state.params.n,
    )
