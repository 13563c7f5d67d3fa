"""What the engine counts, under the names that dashboards of this field already use."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.config.cache import CacheConfig
from vllm.utils.dataclasses import asdict, fields

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS_TO_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_SECONDS_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_SECONDS_OF_REQUEST = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_SECONDS_OF_HTTP = (0.1, 0.5, 1.0)
_TOKENS_OF_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

# Upstream's; weights are not kept elsewhere here.
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
FINISH_REASONS = ("stop", "length", "abort", "error")

# Fields of CacheConfig that are labels under another name.
_CACHE_LABELS = {"kv_cache_dtype": "cache_dtype", "num_blocks": "num_gpu_blocks_override"}

# Help texts by name, without the prefix `vllm:`.
_GAUGES = {
    "num_requests_running": "Requests being computed.",
    "num_requests_waiting": "Requests waiting to be computed.",
    "kv_cache_usage_perc": "KV cache in use; 1 is full.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests put back for lack of KV cache.",
    "num_kernels_compiled": "Kernels compiled after the start, while requests waited.",
    "prompt_tokens": "Prompt tokens that were computed or cached.",
    "prompt_tokens_cached": "Of those, tokens taken from the prefix cache.",
    "generation_tokens": "Generated tokens.",
    "spec_decode_num_drafts": "Drafts of speculative decoding that were verified.",
    "spec_decode_num_draft_tokens": "Tokens of these drafts.",
    "spec_decode_num_accepted_tokens": "Of those, tokens that were accepted.",
}
# Help texts and buckets; None: 1, 2, 5, 10 ... up to max_model_len.
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival to first token.", _SECONDS_TO_TOKEN),
    "time_per_output_token_seconds": (
        "The older name of request_time_per_output_token_seconds.", _SECONDS_PER_TOKEN
    ),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a request.", _SECONDS_PER_TOKEN
    ),
    "inter_token_latency_seconds": ("Time between two tokens.", _SECONDS_PER_TOKEN),
    "e2e_request_latency_seconds": ("Arrival to end.", _SECONDS_OF_REQUEST),
    "request_queue_time_seconds": ("Arrival to first scheduled.", _SECONDS_OF_REQUEST),
    "request_inference_time_seconds": ("Scheduled to last token.", _SECONDS_OF_REQUEST),
    "request_prefill_time_seconds": ("Scheduled to first token.", _SECONDS_OF_REQUEST),
    "request_decode_time_seconds": ("First to last token.", _SECONDS_OF_REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request.", None),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were not cached.", None
    ),
    "request_generation_tokens": ("Generated tokens of a request.", None),
    "request_max_num_generation_tokens": (
        "Generated tokens of the longest choice of a request.", None
    ),
    "request_params_max_tokens": ("max_tokens of a request.", None),
    "request_params_n": ("n of a request.", _CHOICES),
    "iteration_tokens_total": ("Tokens that one step computed.", _TOKENS_OF_STEP),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler after a step. kv_cache_usage: share of blocks in use, 0 to 1.

    All others are of the time since the stats before: prompt tokens looked up in the prefix cache,
    prompt tokens found there, requests preempted, begin (Unix time) and seconds of each compilation
    of a kernel while requests waited, calls of kernels (`vllm.kernels.report.calls.Calls`), steps
    by how many tokens they computed, drafts that were verified, their tokens, and the accepted ones
    by position in the draft, from 0 on.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    compile_waits: Sequence[tuple[float, float]] = ()
    calls: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    step_tokens: Mapping[int, int] = field(default_factory=dict)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A finished request. Times in seconds; num_generation_tokens over all its n choices,
    max_generation_tokens of the longest.

    queue: arrival to first scheduled; prefill: from there to the first token; decode: first to
    last token; e2e: arrival to end.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    max_generation_tokens: int
    e2e_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    finish_reason: str
    max_tokens: int | None
    n: int


class Metrics:
    """Prometheus metrics of one served model, in a registry of their own, and those of this
    process. engines: of each data-parallel engine. on_render: called before each `render`."""

    def __init__(self, model_name: str, max_model_len: int, num_engines: int = 1):
        import prometheus_client as client

        self.registry: CollectorRegistry = client.CollectorRegistry()
        self.on_render: Callable[[], None] = lambda: None
        for collector in (client.ProcessCollector, client.PlatformCollector, client.GCCollector):
            collector(registry=self.registry)
        self._client = client
        self._model_name = model_name
        made = _Families(client, self.registry, max_model_len)
        self.engines = [EngineMetrics(made, model_name, str(i)) for i in range(num_engines)]
        make = partial(client.Counter, registry=self.registry)
        names = [_CACHE_LABELS.get(f.name, f.name) for f in fields(CacheConfig)]
        self._cache_config = client.Gauge(
            "vllm:cache_config_info", "1; the settings of the KV cache are labels.",
            [*names, "num_gpu_blocks", "engine"], registry=self.registry,
        )  # fmt: skip
        labels = ["path", "method", "status"]
        self._http_requests = make("vllm:http_requests", "Answered HTTP requests.", labels)
        self._ignored_fields = make(
            "vllm:ignored_request_fields", "Fields of requests without effect here.", ["field"]
        )
        self._restarts = make(
            "vllm:engine_restarts", "Starts of the engine after it had failed.", ["model_name"]
        ).labels(model_name=model_name)
        self._lost_traces = make(
            "vllm:lost_traces", "Requests of which no trace could be sent.", ["model_name"]
        ).labels(model_name=model_name)
        self._silent = client.Gauge(
            "vllm:seconds_since_heartbeat", "Since the last sign of life of a process.",
            ["process"], registry=self.registry,
        )  # fmt: skip
        self._startup = client.Gauge(
            "vllm:startup_seconds", "Of the last start of a process, by phase.",
            ["process", "phase"], registry=self.registry,
        )  # fmt: skip
        self._phases: dict[str, Mapping[str, float]] = {}
        labels = ["handler", "method", "status"]
        self._http_classes = make("http_requests", "HTTP requests by class of status.", labels)
        self._http_seconds = client.Histogram(
            "http_request_duration_seconds", "From the request to the end of its answer.",
            ["handler", "method"], registry=self.registry, buckets=_SECONDS_OF_HTTP,
        )  # fmt: skip

    def record_ignored_field(self, name: str) -> None:
        """A request had a field without effect. `name` must come from a finite set."""
        self._ignored_fields.labels(field=name).inc()

    def record_cache_config(self, config: CacheConfig, num_blocks: int) -> None:
        """config: of the KV cache of every engine; num_blocks: as resolved."""
        values = asdict(config) | {"num_gpu_blocks": num_blocks}
        texts = {_CACHE_LABELS.get(name, name): str(value) for name, value in values.items()}
        for index in range(len(self.engines)):
            self._cache_config.labels(**texts, engine=str(index)).set(1)

    def record_restart(self) -> None:
        self._restarts.inc()

    def record_lost_traces(self, count: int) -> None:
        self._lost_traces.inc(count)

    def record_startup(self, process: str, phases: Mapping[str, float]) -> None:
        """phases: seconds by phase, in order; they replace those of a start before."""
        self._phases[process] = phases
        self._startup.clear()
        for name, own in self._phases.items():
            for phase, seconds in own.items():
                self._startup.labels(process=name, phase=phase).set(seconds)

    def record_silence(self, seconds: Mapping[str, float]) -> None:
        """By the name of the process."""
        self._silent.clear()
        for name, value in seconds.items():
            self._silent.labels(process=name).set(value)

    def record_http(self, path: str, method: str, status: int, seconds: float) -> None:
        """One answered HTTP request. `path` must come from a finite set: it is a label."""
        self._http_requests.labels(path=path, method=method, status=str(status)).inc()
        of_class = f"{status // 100}xx"
        self._http_classes.labels(handler=path, method=method, status=of_class).inc()
        self._http_seconds.labels(handler=path, method=method).observe(seconds)

    def render(self) -> bytes:
        """The text exposition format, to be sent as CONTENT_TYPE."""
        self.on_render()
        return bytes(self._client.generate_latest(self.registry))


class _Families:
    """The metrics of engines, without values of their labels."""

    def __init__(self, client: Any, registry: "CollectorRegistry", max_model_len: int):
        labels, tokens = ["model_name", "engine"], _one_two_five(max_model_len)

        def make(kind: Any, name: str, text: str, more: Sequence[str] = (), **options: Any) -> Any:
            return kind(f"vllm:{name}", text, [*labels, *more], registry=registry, **options)

        self.gauges = {name: make(client.Gauge, name, text) for name, text in _GAUGES.items()}
        self.counters = {name: make(client.Counter, name, t) for name, t in _COUNTERS.items()}
        self.histograms = {
            name: make(client.Histogram, name, text, buckets=buckets or tokens)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        text = "Whether the engine is awake, or has freed weights and KV cache."
        self.sleep = make(client.Gauge, "engine_sleep_state", text, ["sleep_state"])
        text = "Finished requests by reason."
        self.success = make(client.Counter, "request_success", text, ["finished_reason"])
        text = "Accepted draft tokens by position in the draft, from 0 on."
        self.accepted = make(
            client.Counter, "spec_decode_num_accepted_tokens_per_pos", text, ["position"]
        )


class EngineMetrics:
    """Of one engine. Updates are a few float additions, so they can be made at every step."""

    def __init__(self, families: _Families, model_name: str, engine: str):
        labels = {"model_name": model_name, "engine": engine}
        self._gauges, self._counters, self._histograms = (
            {name: made.labels(**labels) for name, made in kind.items()}
            for kind in (families.gauges, families.counters, families.histograms)
        )
        self._sleep = {state: families.sleep.labels(**labels, sleep_state=state)
                       for state in SLEEP_STATES}  # fmt: skip
        self.record_sleep(False)
        self._accepted = partial(families.accepted.labels, **labels)
        self._success = {
            reason: families.success.labels(**labels, finished_reason=reason)
            for reason in FINISH_REASONS
        }

    def record_step(self, stats: SchedulerStats) -> None:
        self.record_requests(stats.num_running, stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        self._counters["prefix_cache_queries"].inc(stats.prefix_cache_queries)
        self._counters["prefix_cache_hits"].inc(stats.prefix_cache_hits)
        self._counters["num_preemptions"].inc(stats.num_preemptions)
        self._counters["num_kernels_compiled"].inc(len(stats.compile_waits))
        self._counters["spec_decode_num_drafts"].inc(stats.num_drafts)
        self._counters["spec_decode_num_draft_tokens"].inc(stats.num_draft_tokens)
        for position, num_accepted in stats.num_accepted_tokens.items():
            self._counters["spec_decode_num_accepted_tokens"].inc(num_accepted)
            self._accepted(position=str(position)).inc(num_accepted)
        for num_tokens, num_steps in stats.step_tokens.items():
            for _ in range(num_steps):
                self._histograms["iteration_tokens_total"].observe(num_tokens)

    def record_requests(self, num_running: int, num_waiting: int) -> None:
        self._gauges["num_requests_running"].set(num_running)
        self._gauges["num_requests_waiting"].set(num_waiting)

    def record_sleep(self, is_asleep: bool) -> None:
        state = "discard_all" if is_asleep else "awake"
        for name, gauge in self._sleep.items():
            gauge.set(name == state)

    def record_prompt(self, num_tokens: int, num_cached: int) -> None:
        """A prompt was computed, of which `num_cached` tokens came from the prefix cache."""
        self._counters["prompt_tokens"].inc(num_tokens)
        self._counters["prompt_tokens_cached"].inc(num_cached)

    def record_generated(self, num_tokens: int) -> None:
        self._counters["generation_tokens"].inc(num_tokens)

    def record_first_token(self, seconds: float) -> None:
        """`seconds` from the arrival of a request to its first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def record_inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` tokens arrived at once, `seconds` after the ones before them."""
        self._histograms["inter_token_latency_seconds"].observe(seconds / max(1, num_tokens))

    def record_finished(self, finished: RequestStats) -> None:
        reason = finished.finish_reason if finished.finish_reason in FINISH_REASONS else "error"
        self._success[reason].inc()
        values = {
            "request_prompt_tokens": finished.num_prompt_tokens,
            "request_prefill_kv_computed_tokens": (
                finished.num_prompt_tokens - finished.num_cached_tokens
            ),
            "request_generation_tokens": finished.num_generation_tokens,
            "request_max_num_generation_tokens": finished.max_generation_tokens,
            "request_params_n": finished.n,
            "request_params_max_tokens": finished.max_tokens,
            "e2e_request_latency_seconds": finished.e2e_seconds,
            "request_queue_time_seconds": finished.queue_seconds,
            "request_inference_time_seconds": finished.prefill_seconds + finished.decode_seconds,
            "request_prefill_time_seconds": finished.prefill_seconds,
            "request_decode_time_seconds": finished.decode_seconds,
        }
        # The choices of one request are decoded side by side: time per token is that of one.
        num_per_choice = finished.num_generation_tokens / max(1, finished.n)
        if num_per_choice > 1:
            per_token = finished.decode_seconds / (num_per_choice - 1)
            values["time_per_output_token_seconds"] = per_token
            values["request_time_per_output_token_seconds"] = per_token
        for name, value in values.items():
            if value is not None:
                self._histograms[name].observe(value)


def _one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to and including the first value >= `limit`."""
    values: list[int] = []
    while not values or values[-1] < limit:
        power, step = divmod(len(values), 3)
        values.append((1, 2, 5)[step] * 10**power)
    return values
