"""Decode steps of an engine in this process, timed: so many requests with so long a context."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.llm_engine import LLMEngine
from vllm.errors import ConfigError
from vllm.sampling_params import SamplingParams
from vllm.worker.step_profile import MORE_STEPS, StepProfile, profile_decode


def check_fits(config: VllmConfig, batch: int, context: int, num_steps: int) -> None:
    """ConfigError where requests of so many prompt tokens become too long for the model."""
    most = config.model_config.max_model_len
    needed = _num_generated(config, batch, context, num_steps)
    if context + needed > most:
        raise ConfigError(
            f"--context {context}: with the {needed} tokens that are generated for --batch {batch} "
            f"and --steps {num_steps} it is more than the {most} of --max-model-len; at most "
            f"{max(0, most - needed)} fit, or fewer steps"
        )


def _num_generated(config: VllmConfig, batch: int, context: int, num_steps: int) -> int:
    """By a request at most: in the steps that are timed, and while prompts of others are read."""
    most = config.scheduler_config.max_num_batched_tokens
    num_prompt_steps = batch + 2 * (batch * context // max(1, most - batch)) + 1
    return 2 * num_steps + MORE_STEPS + num_prompt_steps


class StepBench:
    """engine: with one rank, in this process, whose steps are scheduled one at a time."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._rng = random.Random(0)
        self._count = 0

    def measure(self, batch: int, context: int, num_steps: int, by_kernel: bool) -> StepProfile:
        """context: prompt tokens of each request. ConfigError where the cache does not hold them
        all at once, or the model."""
        core = self._engine.core
        check_fits(self._engine.config, batch, context, num_steps)
        with self._decoding(batch, context, num_steps), _timed_waits(core.executor) as waited:
            found = profile_decode(core.runner, self._engine.step, waited, num_steps, by_kernel)
            self._check_cache(batch, context)
            return found

    @contextmanager
    def _decoding(self, batch: int, context: int, num_steps: int) -> Iterator[None]:
        """Within it every step computes one token of each of `batch` requests."""
        engine = self._engine
        vocab_size = engine.config.model_config.vocab_size
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False,
            max_tokens=_num_generated(engine.config, batch, context, num_steps),
        )  # fmt: skip
        ids = [f"step-{self._count + i}" for i in range(batch)]
        self._count += batch
        for request_id in ids:
            prompt = self._rng.choices(range(vocab_size), k=context)
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        try:
            waiting = set(ids)
            while waiting:
                outputs = engine.step()
                waiting -= {output.request_id for output in outputs}
                self._check_cache(batch, context, any(output.finished for output in outputs))
            yield
        finally:
            engine.abort_request(ids)
            while engine.core.has_work:
                engine.core.step()
            engine.reset_prefix_cache()

    def _check_cache(self, batch: int, context: int, is_short: bool = False) -> None:
        """is_short: whether a request ended before all were there."""
        if is_short or self._engine.core.stats().num_preemptions > 0:
            raise ConfigError(
                f"--batch {batch} --context {context}: the KV cache does not hold so many tokens "
                f"at once; lower one of them, or raise --gpu-memory-utilization or "
                f"--kv-cache-memory-bytes"
            )


@contextmanager
def _timed_waits(executor: Any) -> Iterator[Callable[[], float]]:
    """Seconds in which the host has waited for results since."""
    execute_model, seconds = executor.execute_model, 0.0

    class Timed:
        def __init__(self, pending: Any):
            self._pending = pending

        def result(self) -> Any:
            nonlocal seconds
            start = time.perf_counter()
            try:
                return self._pending.result()
            finally:
                seconds += time.perf_counter() - start

    executor.execute_model = lambda *given: Timed(execute_model(*given))
    try:
        yield lambda: seconds
    finally:
        del executor.execute_model
