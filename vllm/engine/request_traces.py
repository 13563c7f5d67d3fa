"""OpenTelemetry traces: a span of each request, with children for what its time was spent on.

A thread makes the spans and sends them. A request only leaves a record in a queue: where that is
full, since a collector is slow or gone, its trace is lost and counted.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm import envs
from vllm.engine.metrics import RequestStats
from vllm.engine.output_processor import RequestState
from vllm.errors import ConfigError
from vllm.logger import get_logger
from vllm.logger import request_id as logged_request_id
from vllm.sampling_params import SamplingParams
from vllm.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = get_logger(__name__)

TRACE_HEADERS = ("traceparent", "tracestate")
"""Of a request over HTTP, by W3C: the span of its caller."""

FLAG = "--otlp-traces-endpoint"
_LIBRARIES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_PATH = "/v1/traces"
_GRPC_PORT = 4317
_MAX_QUEUED = 4096
_MAX_BATCH = 256
_BATCH_SECONDS = 1.0
_CLOSE_SECONDS = 2.0
_WARNING_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended. arrival, end, scheduled: Unix time; scheduled is None where it ended
    in the queue. engine_id: its id inside the engine, which contains that of its client.
    compile_waits: begin (Unix time) and seconds. error: what ended it; "" for nothing."""

    engine_id: str
    request_id: str
    model: str
    params: SamplingParams
    stats: RequestStats
    arrival: float
    end: float
    scheduled: float | None
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    compile_waits: Sequence[tuple[float, float]] = ()
    error: str = ""


@dataclass(slots=True)
class RequestTrace:
    """What the trace of a request in flight has beside its state. scheduled: Unix time of its first
    step, None before."""

    request_id: str | None
    headers: Mapping[str, str]
    scheduled: float | None = None
    compile_waits: list[tuple[float, float]] = field(default_factory=list)

    @classmethod
    def of_current(cls, headers: Mapping[str, str]) -> "RequestTrace":
        """Of the HTTP request that the current task answers, if it does."""
        return cls(logged_request_id.get(), headers)

    def begin(self) -> None:
        """Its first step begins, unless that has been said."""
        self.scheduled = self.scheduled or time.time()

    def finished(
        self, state: RequestState, stats: RequestStats, model: str, error: Exception | None
    ) -> FinishedRequest:
        """Of a request that ends now."""
        arrival, scheduled = state.times.arrival_time, self.scheduled
        if state.times.first_token_ts:  # the engine has told it, which knows it better
            scheduled = arrival + stats.queue_seconds
        return FinishedRequest(
            engine_id=state.request_id,
            request_id=self.request_id or state.request_id,
            model=model,
            params=state.params,
            stats=stats,
            arrival=arrival,
            end=arrival + stats.e2e_seconds,
            scheduled=scheduled,
            trace_headers=self.headers,
            compile_waits=self.compile_waits,
            error="" if error is None else f"{type(error).__name__}: {error}",
        )


def checked_endpoint(url: str) -> str:
    """The URL that spans are posted to. ConfigError for one that is none, for a protocol that is
    not spoken, and without the libraries."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"{FLAG} {url!r}: it takes the URL of a collector, such as http://localhost:4318{_PATH}"
        )
    protocol = envs.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL
    if protocol not in (None, "http/protobuf"):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol}: traces are sent as http/protobuf, "
            f"for which collectors listen on port 4318; unset it"
        )
    if any(_is_missing(name) for name in _LIBRARIES):
        raise ConfigError(f"{FLAG} needs OpenTelemetry: pip install 'vllm[traces]'")
    return url if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ImportError:  # of a package above it
        return True


class RequestTracer:
    """Sends a trace of each request that it is told of. on_lost: called with the number of requests
    of which no trace was sent."""

    def __init__(self, endpoint: str, on_lost: Callable[[int], None] = lambda count: None):
        """ConfigError as of `checked_endpoint`."""
        self.endpoint = checked_endpoint(endpoint)
        self._on_lost = on_lost
        self._queue: queue.Queue[FinishedRequest] = queue.Queue(_MAX_QUEUED)
        self._is_closing = threading.Event()
        self._num_untold = 0
        self._warned = -_WARNING_SECONDS
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def record(self, request: FinishedRequest) -> None:
        """Returns at once, whatever the collector does."""
        try:
            self._queue.put_nowait(request)
        except queue.Full:
            self._lost(1, "the queue is full")

    def close(self) -> None:
        """Sends what is queued; within two seconds, after which it is lost."""
        self._is_closing.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        sender = _Sender(self.endpoint)  # here, since its imports take half a second
        while not (self._is_closing.is_set() and self._queue.empty()):
            batch = self._next_batch()
            if batch and (reason := sender.send(batch)):
                self._lost(len(batch), reason)

    def _next_batch(self) -> list[FinishedRequest]:
        """What arrives until a batch is full or a second over; nothing is waited for at the end."""
        batch: list[FinishedRequest] = []
        end = time.monotonic() + _BATCH_SECONDS
        with suppress(queue.Empty):
            while len(batch) < _MAX_BATCH:
                left = 0.0 if self._is_closing.is_set() else end - time.monotonic()
                batch.append(self._queue.get(timeout=min(left, 0.1)) if left > 0
                             else self._queue.get_nowait())  # fmt: skip
        return batch

    def _lost(self, count: int, reason: str) -> None:
        """A warning a minute at most."""
        self._on_lost(count)
        self._num_untold += count
        if time.monotonic() - self._warned < _WARNING_SECONDS:
            return
        is_grpc = urlsplit(self.endpoint).port == _GRPC_PORT
        hint = "; 4317 is the port of gRPC, HTTP's is 4318" if is_grpc else ""
        logger.warning("traces of %d requests could not be sent to %s: %s%s", self._num_untold,
                       self.endpoint, reason, hint)  # fmt: skip
        self._num_untold, self._warned = 0, time.monotonic()


class _Sender:
    """Makes spans and posts them, in the thread of its caller."""

    def __init__(self, endpoint: str):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

        made: list[ReadableSpan] = []

        class Collected(SpanProcessor):
            def on_end(self, span: "ReadableSpan") -> None:
                made.append(span)

        resource = Resource.create({"service.version": __version__})  # and of OTEL_ variables
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "vllm"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Collected())
        self._made = made
        self._tracer = provider.get_tracer("vllm", __version__)
        self._said = _LastMessage()
        self._exporter = OTLPSpanExporter(endpoint=endpoint)

    def send(self, requests: Sequence[FinishedRequest]) -> str:
        """Why it failed; "" where it did not. Takes up to OTEL_EXPORTER_OTLP_TRACES_TIMEOUT (10)
        seconds."""
        for request in requests:
            self._make(request)
        spans, self._made[:] = [*self._made], []
        if not spans:  # none is sampled
            return ""
        try:
            is_sent = self._exporter.export(spans).name == "SUCCESS"
        except Exception as error:  # of the library: the server goes on
            return repr(error)
        return "" if is_sent else self._said.text or "the collector refused them"

    def _make(self, request: FinishedRequest) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract(request.trace_headers)
        root = self._tracer.start_span(
            "llm_request", caller, SpanKind.SERVER, attributes=attributes(request),
            start_time=_nanoseconds(request.arrival),
        )  # fmt: skip
        own = set_span_in_context(root)
        for name, begin, end in phases(request):
            child = self._tracer.start_span(name, own, start_time=_nanoseconds(begin))
            child.end(_nanoseconds(end))
        if request.error:
            root.set_status(StatusCode.ERROR, request.error)
        root.end(_nanoseconds(request.end))


class _LastMessage(logging.Handler):
    """What OpenTelemetry says, at each failure, instead of the log: it becomes a part of ours."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage().partition("\n")[0]


def phases(request: FinishedRequest) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end (Unix time) of the children of a request's span."""
    if request.scheduled is None:
        yield "queue", request.arrival, request.end
        return
    yield "queue", request.arrival, request.scheduled
    has_tokens = request.stats.num_generation_tokens > 0
    first = request.scheduled + request.stats.prefill_seconds
    yield "prefill", request.scheduled, first if has_tokens else request.end
    if has_tokens:
        yield "decode", first, first + request.stats.decode_seconds
    for begin, seconds in request.compile_waits:
        own = max(begin, request.scheduled), min(begin + seconds, request.end)
        if own[0] < own[1]:
            yield "kernel_compile", *own


def attributes(request: FinishedRequest) -> dict[str, Any]:
    """Of a request's span, by the semantic conventions of GenAI; `gen_ai.latency` and
    `gen_ai.request.id` are upstream's."""
    params, stats = request.params, request.stats
    given = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.response.id": request.engine_id,
        "gen_ai.request.max_tokens": stats.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": stats.n,
        "gen_ai.usage.input_tokens": stats.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
        "gen_ai.usage.output_tokens": stats.num_generation_tokens,
        "gen_ai.response.finish_reasons": (stats.finish_reason,),
        "gen_ai.latency.time_in_queue": stats.queue_seconds,
        "gen_ai.latency.e2e": stats.e2e_seconds,
        "error.type": request.error.partition(":")[0] or None,
    }
    if stats.num_generation_tokens:
        given |= {
            "gen_ai.latency.time_to_first_token": stats.queue_seconds + stats.prefill_seconds,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_seconds,
            "gen_ai.latency.time_in_model_decode": stats.decode_seconds,
        }
    return {name: value for name, value in given.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
