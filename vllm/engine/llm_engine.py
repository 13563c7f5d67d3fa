"""The engine in this process, driven by `LLM`."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.core.outputs import EngineOutput
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.engine.core import EngineCore
from vllm.engine.input_processor import InputProcessor, Prompt, refuse_lora
from vllm.engine.metrics import EngineMetrics, Metrics
from vllm.engine.metrics_reader import Metric, read_metrics
from vllm.engine.output_processor import OutputProcessor, PoolingState, RequestState
from vllm.engine.request_metrics import record_output, request_stats
from vllm.engine.tokenizer import import_transformers, load_tokenizer
from vllm.errors import ConfigError, RequestError, did_you_mean
from vllm.executor.uniproc import UniprocExecutor
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import PoolingParams, SamplingParams
from vllm.utils.interrupts import hold_back_interrupts


class LLMEngine:
    """add_request, then step until nothing is unfinished. finished: outputs that `LLM` has not
    handed out yet, by request id."""

    def __init__(self, config: VllmConfig, log_stats: bool = False):
        """log_stats: count for `get_metrics`."""
        num_engines = config.parallel_config.data_parallel_size
        if num_engines > 1:
            raise ConfigError(
                f"data_parallel_size = {num_engines}: LLM drives one engine; several serve "
                f"requests together behind `vllm serve --data-parallel-size {num_engines}`"
            )
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
            tokenizer = None
            if not config.model_config.skip_tokenizer_init:
                import_transformers()  # imports stay in this thread
                tokenizer = pool.submit(load_tokenizer, config.model_config)
            self.core = EngineCore(config)
        self.config = self.core.config
        model = self.config.model_config
        self.tokenizer: Any = tokenizer and tokenizer.result()
        self.inputs = InputProcessor(self.config, self.tokenizer)
        self.outputs = OutputProcessor(self.tokenizer)
        self._changed: dict[str, RequestState | PoolingState] = {}
        self.finished: dict[str, RequestOutput | PoolingRequestOutput] = {}
        self.metrics: Metrics | None = None
        if log_stats:
            self.metrics = Metrics(model.served_model_name[0], model.max_model_len)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **neutral: Any) -> "LLMEngine":
        """Loads the model. neutral: usage_context and others of upstream's; no effect."""
        is_logged = isinstance(engine_args, AsyncEngineArgs) and not engine_args.disable_log_stats
        return cls(engine_args.create_engine_config(), log_stats=is_logged)

    @property
    def vllm_config(self) -> VllmConfig:
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model_config

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    @property
    def has_unfinished(self) -> bool:
        return bool(self.outputs.states)

    def has_unfinished_requests(self) -> bool:
        return self.has_unfinished

    def get_num_unfinished_requests(self) -> int:
        return len(self.outputs.states)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        *,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queues a request; RequestError when it is malformed."""
        refuse_lora(lora_request)
        given = self.inputs.process(request_id, prompt, params)
        if isinstance(params, PoolingParams):
            self.outputs.states[request_id] = PoolingState(request_id, given)
        else:
            self.outputs.add(request_id, given, params)
        for request in given.requests:
            self.core.add(request)

    def abort(self, request_id: str) -> None:
        self._changed.pop(request_id, None)
        self.core.abort(self.outputs.remove(request_id))

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Removes requests; unknown ids are no error."""
        for request_id in request_ids:
            self.abort(request_id)
            self.finished.pop(request_id, None)

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Advances the engine one step; returns the requests that have something new. RequestError
        for one that failed; what the others have comes with the next call."""
        # An interrupt must not leave scheduler, batch and ranks at different steps.
        with hold_back_interrupts():
            changed, to_abort = self.outputs.process(self.core.step())
            self.core.abort(to_abort)
        self._record(changed)
        self._changed |= {state.request_id: state for state, _ in changed}
        for state in self._changed.values():
            if state.error is not None:
                self.abort(state.request_id)
                raise state.error
        results: list[RequestOutput | PoolingRequestOutput] = []
        news, self._changed = self._changed, {}
        for state in news.values():
            output = state.take()
            if state.is_finished:
                self.outputs.remove(state.request_id)
                if self._metrics is not None and isinstance(state, RequestState):
                    self._metrics.record_finished(request_stats(state))
            if output is not None:
                results.append(output)
        return results

    @property
    def _metrics(self) -> EngineMetrics | None:
        return None if self.metrics is None else self.metrics.engines[0]

    def _record(self, changed: Sequence[tuple[RequestState | PoolingState, EngineOutput]]) -> None:
        now = time.monotonic()
        for state, output in changed:
            if isinstance(state, RequestState):
                record_output(self._metrics, state, output, now)
        if self._metrics is not None:
            self._metrics.record_generated(sum(len(output.token_ids) for _, output in changed))
            self._metrics.record_step(self.core.stats())

    def get_metrics(self) -> list[Metric]:
        """All metrics as values; RequestError where they are not counted."""
        if self.metrics is None:
            raise RequestError("metrics are not counted: load with disable_log_stats=False")
        return read_metrics(self.metrics)

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        self.core.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.core.wake_up()

    def is_sleeping(self) -> bool:
        return self.core.is_sleeping

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Of an engine with one rank in this process; ConfigError for others."""
        executor = self._one_rank()
        if isinstance(method, str):
            found = getattr(executor, method, None)
            if not callable(found) or method.startswith("_"):
                names = [name for name in dir(executor) if not name.startswith("_")]
                raise ConfigError(f"a rank has no method {method!r}{did_you_mean(method, names)}")
            return [found(*args, **(kwargs or {}))]
        return [method(executor, *args, **(kwargs or {}))]

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """The same."""
        return [func(self._one_rank().runner.model)]

    def _one_rank(self) -> UniprocExecutor:
        if self.core.is_sleeping:
            raise RequestError("the engine sleeps; wake it up first")
        if not isinstance(self.core.executor, UniprocExecutor):
            raise ConfigError(
                "the ranks of this engine are other processes, which take no functions: use one "
                "rank (tensor_parallel_size=1, pipeline_parallel_size=1)"
            )
        return self.core.executor
