"""`--otlp-traces-endpoint`: what a collector gets of a server's requests, over its own protocol."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm.engine import request_traces
from vllm.engine.metrics import RequestStats
from vllm.engine.request_traces import FinishedRequest, RequestTracer, checked_endpoint
from vllm.errors import ConfigError
from vllm.sampling_params import SamplingParams

from .serving import REPOSITORY, RunningServer, environment, run_cli, started_server, wait_until

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire

# A backend that compiles a kernel while it serves, in the call after a file appears beside it.
BACKEND = """
import pathlib, time
from vllm.kernels.backends import cpu
from vllm.kernels.jit.monitor import MONITOR, Compilation
from vllm.kernels.select.spec import KernelSpec

TOLD = pathlib.Path(__file__).with_name("compile")

class Mine:
    SPECS = (KernelSpec(backend="mine", family="linear", devices=frozenset({"cpu"}),
                        formats=frozenset({"fp32", "bf16"}), dtypes=frozenset({"fp32"})),)

    def linear(self, problem, tensors, candidate):
        kernel = cpu.linear(problem, tensors, candidate)

        def call(x):
            if TOLD.exists():
                TOLD.unlink()
                time.sleep(0.2)
                MONITOR.note(Compilation("mine", "gemm<64>", 0.2))
            return kernel(x)

        return call

mine = Mine()
"""
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """Decodes what is posted to it. is_asked: somebody has posted. is_open: an answer
    waits until it is set."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.is_open, self.is_asked = threading.Event(), threading.Event()
        self.is_open.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.is_asked.set()
                collector.is_open.wait(60)
                collector.take(self.path, body)
                self.send_response(status)
                self.end_headers()
                with contextlib.suppress(OSError):  # whoever did not wait is gone
                    self.wfile.write(wire.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        for resource in wire.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def roots(self) -> list[Any]:
        return [span for span in self.spans if span.name == "llm_request"]

    def root(self, request_id: str) -> Any:
        """Of the request with this X-Request-Id, once it is there."""

        def found() -> list[Any]:
            return [r for r in self.roots() if attributes(r)["gen_ai.request.id"] == request_id]

        wait_until(lambda: bool(found()))
        return found()[0]

    def children(self, root: Any) -> dict[str, Any]:
        return {span.name: span for span in self.spans if span.parent_span_id == root.span_id}


def values(pairs: Any) -> dict[str, Any]:
    """Of the protocol's key-value pairs."""

    def value(given: Any) -> Any:
        kind = given.WhichOneof("value")
        if kind == "array_value":
            return [value(one) for one in given.array_value.values]
        return getattr(given, kind)

    return {pair.key: value(pair.value) for pair in pairs}


def attributes(span: Any) -> dict[str, Any]:
    return values(span.attributes)


def seconds(span: Any) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9


@contextlib.contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    collector = Collector(status)
    try:
        yield collector
    finally:
        collector.is_open.set()
        collector.server.shutdown()
        collector.server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def traced(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("traced")
    (folder / "backend.py").write_text(BACKEND)
    flags = ("--otlp-traces-endpoint", collector.url, "--max-num-seqs", "1",
             "--kernel", f"*.down_proj={folder}/backend.py:mine")  # fmt: skip
    with started_server(
        tiny_model, folder / "log", *flags,
        OTEL_RESOURCE_ATTRIBUTES="deployment.environment.name=test",
    ) as running:  # fmt: skip
        yield running


def test_a_request_is_a_span_of_its_caller_with_children(
    traced: RunningServer, collector: Collector
) -> None:
    begin = time.time_ns()
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 7,
            "ignore_eos": True, "messages": [{"role": "user", "content": "ban fick"}]}  # fmt: skip
    answer = traced.post("/v1/chat/completions", body, **{
        "X-Request-Id": "with-caller", "traceparent": f"00-{TRACE}-{CALLER}-01",
        "tracestate": "shop=7"})  # fmt: skip
    root = collector.root("with-caller")
    end = time.time_ns()
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, CALLER)
    assert root.trace_state == "shop=7" and root.kind == root.SPAN_KIND_SERVER
    assert begin <= root.start_time_unix_nano <= root.end_time_unix_nano <= end
    usage, told = answer.json["usage"], attributes(root)
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 4
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.response.id"].startswith(answer.json["id"])
    wanted = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 7, "choice.count": 1}
    assert {name: told[f"gen_ai.request.{name}"] for name in wanted} == wanted
    assert root.status.code == root.status.STATUS_CODE_UNSET and "error.type" not in told

    children = collector.children(root)
    assert list(children) == ["queue", "prefill", "decode"]
    assert {child.trace_id for child in children.values()} == {root.trace_id}
    places = [p for c in children.values() for p in (c.start_time_unix_nano, c.end_time_unix_nano)]
    assert places == sorted(places)
    assert root.start_time_unix_nano == places[0] and places[-1] <= root.end_time_unix_nano
    assert told["gen_ai.latency.time_in_model_prefill"] == pytest.approx(
        seconds(children["prefill"]), abs=1e-5
    )
    assert all(seconds(child) > 0 for child in children.values())
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resources[0]["service.name"] == "vllm"
    assert collector.resources[0]["deployment.environment.name"] == "test"


def test_requests_without_a_caller_are_traces_of_their_own(
    traced: RunningServer, collector: Collector
) -> None:
    for name in ("alone-1", "alone-2"):
        traced.post("/v1/completions", {"prompt": "ban", "max_tokens": 2},
                    **{"X-Request-Id": name, "traceparent": "00-nonsense"})  # fmt: skip
    first, second = collector.root("alone-1"), collector.root("alone-2")
    assert first.trace_id != second.trace_id and not first.parent_span_id


def test_a_caller_that_is_not_sampled_leaves_no_trace(
    traced: RunningServer, collector: Collector
) -> None:
    unsampled = {"traceparent": f"00-{TRACE}-{CALLER}-00", "X-Request-Id": "unsampled"}
    traced.post("/v1/completions", {"prompt": "ban", "max_tokens": 2}, **unsampled)
    traced.post("/v1/completions", {"prompt": "ban", "max_tokens": 2},
                **{"X-Request-Id": "after-it"})  # fmt: skip
    collector.root("after-it")
    ids = [attributes(root)["gen_ai.request.id"] for root in collector.roots()]
    assert "unsampled" not in ids


def test_who_leaves_early_is_told_with_what_was_waited_for(
    traced: RunningServer, collector: Collector
) -> None:
    """There is one place: the second request leaves while it is in the queue."""
    head = {"Content-Type": "application/json"}
    long = {"prompt": "ban", "max_tokens": 1500, "ignore_eos": True}
    with traced.connect() as first:
        traced.send_completion(first)
        wait_until(lambda: traced.metric("vllm:num_requests_running") == 1)
        late = {"X-Request-Id": "in-queue", "X-Request-Timeout": "0.3", **head}
        assert (
            traced.request("POST", "/v1/completions", json.dumps(long).encode(), late).status == 504
        )
        waited = collector.root("in-queue")
    assert list(collector.children(waited)) == ["queue"]
    assert attributes(waited)["gen_ai.response.finish_reasons"] == ["abort"]
    assert seconds(collector.children(waited)["queue"]) == pytest.approx(0.3, abs=0.25)


def test_a_compilation_that_requests_waited_for_is_a_child(
    traced: RunningServer, collector: Collector
) -> None:
    with traced.connect() as connection:
        traced.send_completion(connection, request_id="compiled")
        wait_until(lambda: traced.metric("vllm:num_requests_running") == 1)
        (traced.log.parent / "compile").touch()
        wait_until(lambda: traced.metric("vllm:num_kernels_compiled_total") == 1)
    root = collector.root("compiled")
    wait_until(lambda: "kernel_compile" in collector.children(root))  # spans may come apart
    child = collector.children(root)["kernel_compile"]
    assert seconds(child) == pytest.approx(0.2, abs=0.001)
    assert root.start_time_unix_nano < child.start_time_unix_nano < child.end_time_unix_nano
    traced.post("/v1/completions", {"prompt": "ban", "max_tokens": 2},
                **{"X-Request-Id": "not-compiled"})  # fmt: skip
    assert "kernel_compile" not in collector.children(collector.root("not-compiled"))


def test_a_failed_request_is_an_error(traced: RunningServer, collector: Collector) -> None:
    """Of an engine that is killed: the last test of this server."""
    with traced.connect() as connection:
        traced.send_completion(connection, request_id="killed")
        wait_until(lambda: traced.metric("vllm:num_requests_running") == 1)
        subprocess.run(["kill", "-9", str(traced.engine_pid())], check=True)
        root = collector.root("killed")
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert "died" in root.status.message and attributes(root)["error.type"] == "EngineDeadError"


def test_a_dead_collector_costs_a_warning_and_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    with collecting() as gone:
        pass
    flags = ("--otlp-traces-endpoint", gone.url)
    log = tmp_path / "log"
    with started_server(tiny_model, log, *flags, OTEL_EXPORTER_OTLP_TRACES_TIMEOUT="1") as server:
        for number in range(3):
            begin = time.monotonic()
            server.complete()
            assert time.monotonic() - begin < 10
            wait_until(lambda n=number: server.metric("vllm:lost_traces_total") == n + 1)
        server.process.terminate()
        assert server.process.wait(30) == 0
    told = [line for line in log.read_text().splitlines() if "race" in line and "WARN" in line]
    assert len(told) == 1 and gone.url in told[0] and "traces of 1 requests" in told[0]
    assert "pentelemetry" not in log.read_text()


STATS = RequestStats(3, 0, 4, 4, 0.5, 0.1, 0.2, 0.2, "stop", None, 1)


def finished(name: str = "r") -> FinishedRequest:
    now = time.time()
    return FinishedRequest(name, name, "m", SamplingParams(), STATS, now - 0.5, now, now - 0.4)


def test_a_slow_collector_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_traces, "_MAX_QUEUED", 8)
    lost: list[int] = []
    with collecting() as slow:
        slow.is_open.clear()
        tracer = RequestTracer(slow.url, lost.append)
        tracer.record(finished())
        wait_until(slow.is_asked.is_set)
        begin = time.monotonic()
        for _ in range(20):
            tracer.record(finished())
        assert time.monotonic() - begin < 0.1 and sum(lost) == 12
        slow.is_open.set()
        wait_until(lambda: len(slow.roots()) == 9)


def test_what_is_queued_is_sent_at_the_end() -> None:
    with collecting() as collector:
        tracer = RequestTracer(collector.url)
        tracer.record(finished("first"))
        collector.root("first")  # the libraries are imported
        for _ in range(600):
            tracer.record(finished())
        tracer.close()
        assert len(collector.roots()) == 601 and len(collector.spans) == 2404


def test_a_refusal_is_counted() -> None:
    lost: list[int] = []
    with collecting(status=403) as collector:
        tracer = RequestTracer(collector.url + "/other/path", lost.append)
        tracer.record(finished())
        wait_until(lambda: lost == [1])
        assert collector.paths == ["/other/path"]


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://host:4317", "http://", "/v1/traces"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"http://localhost:4318/v1/traces"):
        checked_endpoint(url)


def test_grpc_is_refused_before_anything_is_loaded(tiny_model: Path) -> None:
    told = run_cli("serve", str(tiny_model), "--otlp-traces-endpoint", "http://localhost:4317",
                   "--port", "0", OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="grpc")  # fmt: skip
    assert told.returncode == 2 and "http/protobuf" in told.stderr and "4318" in told.stderr


def test_without_the_libraries_the_extra_is_named(tiny_model: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from vllm.entrypoints.cli.main import program\n"
        "sys.exit(program())"
    )
    words = ("serve", str(tiny_model), "--port", "0", "--otlp-traces-endpoint", "http://c:4318")
    told = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True,
                          env=environment(), cwd=REPOSITORY, timeout=120)  # fmt: skip
    assert told.returncode == 2 and "pip install 'vllm[traces]'" in told.stderr
