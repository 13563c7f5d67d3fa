"""The engine: scheduler, model and grammars, advanced one step at a time."""

import gc
import time
from typing import TYPE_CHECKING

from torch import Tensor

from vllm.config import VllmConfig
from vllm.core.request import EngineOutput, EngineRequest, FinishReason, Request
from vllm.core.scheduler import Scheduler, Step
from vllm.core.state_snapshots import StateSnapshots
from vllm.engine.metrics import SchedulerStats
from vllm.engine.structured_output import StructuredOutputs
from vllm.errors import GrammarError
from vllm.executor.base import Address, Launched, make_executor
from vllm.logger import get_logger
from vllm.platforms import native
from vllm.worker.model_runner import ModelRunner, StepResult

if TYPE_CHECKING:
    from vllm.distributed.dp_coordinator import LockStep
    from vllm.executor.uniproc import UniprocExecutor
    from vllm.kernels.selection import Selection

logger = get_logger(__name__)


class EngineCore:
    """Loads the model, then turns requests into outputs, `step` by `step`.

    Where the runner runs ahead, a step is prepared and launched while the one before still
    computes, so that the device waits for no scheduling. Requests whose next step depends on the
    tokens of this one in more than its input (penalties, grammars) hold that back while they run.

    config: as resolved with the model loaded; max_model_len may have come down.
    """

    def __init__(
        self,
        config: VllmConfig,
        lock_step: "LockStep | None" = None,
        meeting: "Address | None" = None,
    ):
        """lock_step: the engines to compute with, whose ranks meet at `meeting`."""
        if (status := native.status()).state != "present":
            logger.warning("The native kernels are %s, and torch is far slower: %s",
                           status.state, status.text)  # fmt: skip
        self.lock_step = lock_step
        self.executor = make_executor(config, meeting)
        self.config = config = self.executor.config
        snapshots = config.snapshot_slots
        self.scheduler = Scheduler(
            config.scheduler_config,
            self.executor.num_blocks,
            config.cache_config.block_size,
            config.model_config.max_model_len,
            config.cache_config.enable_prefix_caching,
            StateSnapshots(snapshots) if snapshots else None,
        )
        self.grammars = StructuredOutputs(config.model_config)
        self._arrivals: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._num_compiled = 0
        self._counted = (0, 0, 0, 0)
        self._running: tuple[Step, Launched] | None = None
        self._held: list[EngineOutput] = []
        self._reads_tokens: set[str] = set()
        # What is loaded stays: collections need not look at it again.
        gc.collect()
        gc.freeze()

    @property
    def has_work(self) -> bool:
        waits = self.scheduler.has_requests or self.grammars.has_pending
        return waits or self._running is not None or bool(self._held)

    @property
    def runner(self) -> "ModelRunner":
        """Of an engine whose one rank is in this process."""
        return self._own_rank.runner

    @property
    def selection(self) -> "Selection":
        """The same."""
        return self._own_rank.selection

    @property
    def _own_rank(self) -> "UniprocExecutor":
        from vllm.executor.uniproc import UniprocExecutor

        assert isinstance(self.executor, UniprocExecutor)
        return self.executor

    @property
    def is_awaited(self) -> bool:
        """Whether `step` must be called even without work, for the sake of other engines."""
        return self.lock_step is not None and self.lock_step.is_running

    def add(self, request: EngineRequest) -> None:
        if self._running is not None and request.request_id in self._running[0].num_tokens:
            # One of the same id was aborted during this step, whose token is not for its successor.
            self._held += self._finish_running()
        self._arrivals[request.request_id] = time.monotonic()
        sampling = request.sampling
        if sampling.penalises or sampling.structured_outputs is not None:
            self._reads_tokens.add(request.request_id)
        if request.sampling.structured_outputs is not None:
            self.grammars.submit(request)
        else:
            self.scheduler.add(Request.of(request))

    def abort(self, request_ids: list[str]) -> None:
        """Forgets requests; ids that are not here any more are no error."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)
            self._forget(request_id)

    def step(self) -> list[EngineOutput]:
        """Advances by one step; empty when nothing could be scheduled or it only just began."""
        outputs, self._held = self._held, []
        outputs += self._admit_compiled()
        if self._reads_tokens:
            outputs += self._finish_running()
        step = self.scheduler.schedule()
        if self.lock_step is not None:
            step.token_counts, step.all_decode = self.lock_step.agree(
                sum(step.num_tokens.values()), self.has_work, self._is_decode(step)
            )
        is_computed = not step.is_empty or any(step.token_counts)
        if not is_computed and self._running is None:
            if self.grammars.has_pending and not outputs:
                time.sleep(0.001)  # nothing to do but to wait for a grammar
            return outputs
        launched = None
        if is_computed:
            bitmasks, hopeless = self._bitmasks(step)
            launched = step, self.executor.launch(step, bitmasks)
            self._note_waits(step)
            self.scheduler.prepare_update(step)
            outputs += [self._refusal(*refused) for refused in hopeless.items()]
        outputs += self._finish_running()
        self._running = launched
        if not self.executor.runs_ahead:
            outputs += self._finish_running()
        return outputs

    def _is_decode(self, step: Step) -> bool:
        """Whether every request computes its last token, and nothing is wanted of it but the next.
        So does an engine without requests."""
        requests = (self.scheduler.requests[request_id] for request_id in step.num_tokens)
        return all(count == 1 for count in step.num_tokens.values()) and all(
            request.num_unscheduled_tokens == 0
            and (request.num_output_tokens > 0 or request.sampling.prompt_logprobs is None)
            for request in requests
        )

    def _finish_running(self) -> list[EngineOutput]:
        """What the step that was launched last gives, if its result was not taken yet."""
        if self._running is None:
            return []
        (step, launched), self._running = self._running, None
        result = launched.result()
        self._num_compiled += result.num_compiled
        requests = self.scheduler.requests
        # Who stopped with the step before, or was aborted since, got a token in vain.
        broken = {name: why for name, why in result.broken.items() if name in requests}
        outputs = [self._fail(name, why) for name, why in broken.items()]
        takers = [requests[request_id] for request_id in result.tokens if request_id in requests]
        self.scheduler.update(step, result.tokens)
        self._follow_grammars(result)
        return outputs + [self._output(request, result) for request in takers]

    def _note_waits(self, step: Step) -> None:
        now = time.monotonic()
        for admission in step.admitted:
            request_id = admission.request.request_id
            if request_id not in self._waits:
                self._waits[request_id] = now - self._arrivals[request_id]

    def shutdown(self) -> None:
        """Ends the processes that work for this engine."""
        self.grammars.close()
        self.executor.shutdown()

    def check_idle(self) -> None:
        """With no request there must be no block in use; AssertionError tells of a leak."""
        if not self.has_work:
            self.scheduler.pool.check_idle()

    def stats(self) -> SchedulerStats:
        """The scheduler now, with counts since the last call."""
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        counts = (
            cache.num_queried, cache.num_hit, scheduler.num_preemptions, self._num_compiled
        )  # fmt: skip
        queried, hit, preempted, compiled = (new - old for new, old in zip(counts, self._counted))
        self._counted = counts
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - scheduler.pool.num_free / scheduler.pool.num_blocks,
            prefix_cache_queries=queried,
            prefix_cache_hits=hit,
            num_preemptions=preempted,
            num_compiled=compiled,
        )

    def _admit_compiled(self) -> list[EngineOutput]:
        if not self.grammars.has_pending:
            return []
        ready, refused = self.grammars.collect()
        for request in ready:
            self.scheduler.add(Request.of(request))
        return [self._refusal(request_id, error) for request_id, error in refused.items()]

    def _bitmasks(self, step: Step) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Allowed tokens of the requests with a grammar; and those whose grammar allows none."""
        bitmasks, hopeless = {}, {}
        for request_id in step.num_tokens:
            if self.grammars.follows_grammar(request_id):
                try:
                    bitmasks[request_id] = self.grammars.bitmask(request_id)
                except GrammarError as error:
                    hopeless[request_id] = str(error)
        return bitmasks, hopeless

    def _follow_grammars(self, result: StepResult) -> None:
        for request_id, token in result.tokens.items():
            follows = self.grammars.follows_grammar(request_id)
            runs = request_id in self.scheduler.requests
            if follows and runs and self.grammars.accept(request_id, token):
                self.scheduler.finish_early(request_id, FinishReason.STOP)

    def _refusal(self, request_id: str, error: str) -> EngineOutput:
        self.abort([request_id])
        return EngineOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)

    def _fail(self, request_id: str, error: str) -> EngineOutput:
        """Ends a request whose numbers went wrong; nobody else gets to read them."""
        logger.error("Request %s failed: %s", request_id, error)
        self.scheduler.forget_cached(request_id)
        output = self._refusal(request_id, error)
        output.is_fault = True
        return output

    def _output(self, request: Request, result: StepResult) -> EngineOutput:
        request_id = request.request_id
        is_prompt_only = request.max_tokens == 0
        entry = result.logprobs.get(request_id)
        output = EngineOutput(
            request_id=request_id,
            token_ids=[] if is_prompt_only else [result.tokens[request_id]],
            logprobs=None if entry is None or is_prompt_only else [entry],
            prompt_logprobs=result.prompt_logprobs.get(request_id),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            queue_seconds=self._waits[request_id],
        )
        if request.finish_reason is not None:
            self._forget(request_id)
        return output

    def _forget(self, request_id: str) -> None:
        self.grammars.forget(request_id)
        self._reads_tokens.discard(request_id)
        self._arrivals.pop(request_id, None)
        self._waits.pop(request_id, None)
