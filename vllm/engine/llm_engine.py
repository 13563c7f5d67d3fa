"""The engine in this process, driven by `LLM`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.core import EngineCore
from vllm.engine.input_processor import InputProcessor, Prompt
from vllm.engine.output_processor import OutputProcessor, PoolingState, RequestState
from vllm.engine.tokenizer import import_transformers, load_tokenizer
from vllm.errors import ConfigError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import PoolingParams, SamplingParams
from vllm.utils.interrupts import hold_back_interrupts


class LLMEngine:
    """add_request, then step until nothing is unfinished."""

    def __init__(self, config: VllmConfig):
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
        self.inputs = InputProcessor(model, self.tokenizer)
        self.outputs = OutputProcessor(self.tokenizer)
        self._changed: dict[str, RequestState | PoolingState] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self.outputs.states)

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | PoolingParams
    ) -> None:
        """Queues a request; RequestError when it is malformed."""
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

    def step(self) -> list[RequestOutput | PoolingRequestOutput]:
        """Advances the engine one step; returns the requests that have something new. RequestError
        for one that failed; what the others have comes with the next call."""
        # An interrupt must not leave scheduler, batch and ranks at different steps.
        with hold_back_interrupts():
            changed, to_abort = self.outputs.process(self.core.step())
            self.core.abort(to_abort)
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
            if output is not None:
                results.append(output)
        return results
