"""The engine core: scheduler, executor and grammars, advanced one step at a time."""

import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.core.outputs import EngineOutput, ModelRunnerOutput, SchedulerOutput
from vllm.core.request import EngineRequest, FinishReason, Request
from vllm.core.scheduler import Scheduler
from vllm.core.speculation import Speculation
from vllm.core.state_snapshots import StateSnapshots
from vllm.engine.metrics import SchedulerStats
from vllm.engine.structured_output import StructuredOutputs
from vllm.errors import ConfigError, RequestError
from vllm.executor.base import Address, PendingOutput
from vllm.executor.make_executor import make_executor
from vllm.executor.uniproc import UniprocExecutor, give_back_memory
from vllm.kernels.report.calls import CallCounter
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.platforms import native
from vllm.worker.model_runner import ModelRunner
from vllm.worker.profiler import Profiler

if TYPE_CHECKING:
    from vllm.distributed.dp_coordinator import DPCoordinator

logger = get_logger(__name__)


class EngineCore:
    """Loads the model, then turns requests into outputs, `step` by `step`.

    With async scheduling, the next step is scheduled and launched while the current one computes.
    Requests whose next step needs the sampled tokens on the host (penalties, grammars) suspend
    async scheduling while they run, and so do draft tokens, where they pay.

    config: as resolved with the model loaded; max_model_len may have been lowered. on_scheduled:
    called in each step before it is computed.
    """

    def __init__(
        self,
        config: VllmConfig,
        dp_coordinator: "DPCoordinator | None" = None,
        rendezvous: "Address | None" = None,
    ):
        """dp_coordinator, rendezvous: of data-parallel ranks in lock-step; None otherwise."""
        if (status := native.status()).state != "present":
            logger.warning("The native kernels are %s, and torch is far slower: %s",
                           status.state, status.text)  # fmt: skip
        self.dp_coordinator = dp_coordinator
        self._given, self._rendezvous = config, rendezvous
        self.is_sleeping = False
        self._profiler: Profiler | None = None
        self._load()
        dump = config.kernel_config.dump_decisions
        if dump is not None and config.parallel_config.data_parallel_rank == 0:
            _dump(self.executor.kernels(), dump)
        self.grammars = StructuredOutputs(self.config.model_config)
        self._compile_waits: list[tuple[float, float]] = []
        self._counted = (0, 0, 0)
        drafts = config.speculative_config
        self.speculation = None if drafts is None else Speculation(drafts)
        self._calls = CallCounter()
        self._step_tokens: Counter[int] = Counter()
        self.on_scheduled: Callable[[SchedulerOutput], None] = lambda scheduled: None
        self._running: tuple[SchedulerOutput, PendingOutput] | None = None
        self._held: list[EngineOutput] = []
        self._reads_tokens: set[str] = set()

    def _load(self) -> None:
        """Loads the model and makes the scheduler of its KV cache."""
        self.executor = make_executor(self._given, self._rendezvous)
        self.config = config = self.executor.config
        snapshots = config.snapshot_slots
        self.scheduler = Scheduler(
            config.scheduler_config,
            self.executor.num_blocks,
            config.cache_config.block_size,
            config.model_config.max_model_len,
            config.cache_config.enable_prefix_caching,
            StateSnapshots(snapshots) if snapshots else None,
            config.cache_groups,
        )
        # Loaded objects are permanent: garbage collections skip them.
        gc.collect()
        gc.freeze()

    @property
    def has_work(self) -> bool:
        waits = self.scheduler.has_requests or self.grammars.has_pending
        return waits or self._running is not None or bool(self._held)

    @property
    def runner(self) -> ModelRunner:
        """Of an engine with one rank in this process."""
        assert isinstance(self.executor, UniprocExecutor)
        return self.executor.runner

    @property
    def selection(self) -> Selection:
        """The same."""
        assert isinstance(self.executor, UniprocExecutor)
        return self.executor.selection

    @property
    def is_awaited(self) -> bool:
        """Whether `step` must be called even without work, for other data-parallel ranks."""
        return self.dp_coordinator is not None and self.dp_coordinator.is_running

    def add(self, wire: EngineRequest) -> None:
        if self.is_sleeping:
            self._held.append(self._refusal(wire.request_id, "the engine sleeps; wake it up first"))
            return
        request = Request.of(wire)
        running = self._running
        if running is not None and request.request_id in running[0].num_scheduled_tokens:
            # An aborted request of the same id is in flight: its token is not for this one.
            self._held += self._finish_running()
        if request.reads_own_tokens:
            self._reads_tokens.add(request.request_id)
        if request.sampling.structured_outputs is not None:
            self.grammars.submit(request)
        else:
            self.scheduler.add(request)

    def abort(self, request_ids: list[str]) -> None:
        """Removes requests; unknown ids are no error."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)
            self._forget(request_id)

    def step(self) -> list[EngineOutput]:
        """Advances by one step; returns nothing while its first step is in flight."""
        outputs, self._held = self._held, []
        outputs += self._admit_compiled()
        if self._reads_tokens or self._drafts_tokens:
            outputs += self._finish_running()
        scheduled = self.scheduler.schedule()
        if self.speculation is not None:
            scheduled.num_draft_tokens = self.speculation.max_draft_tokens(
                len(self.scheduler.running), (r.request_id for r in self.scheduler.running)
            )
        if self.dp_coordinator is not None:
            scheduled.num_tokens_across_dp, scheduled.uniform_decode = self.dp_coordinator.sync(
                sum(scheduled.num_scheduled_tokens.values()),
                self.has_work,
                self._is_decode(scheduled),
            )
        is_computed = not scheduled.is_empty or any(scheduled.num_tokens_across_dp)
        if not is_computed and self._running is None:
            if self.grammars.has_pending and not outputs:
                time.sleep(0.001)  # nothing to do but to wait for a grammar
            return outputs
        running = None
        if is_computed:
            self._step_tokens[sum(scheduled.num_scheduled_tokens.values())] += 1
            self.on_scheduled(scheduled)
            bitmasks, refused = self.grammars.bitmasks(scheduled.num_scheduled_tokens)
            running = scheduled, self.executor.execute_model(scheduled, bitmasks)
            self._note_waits(scheduled)
            self.scheduler.prepare_update(scheduled)
            outputs += [self._refusal(*refusal) for refusal in refused.items()]
        outputs += self._finish_running()
        self._running = running
        if not self.executor.async_scheduling:
            outputs += self._finish_running()
        return outputs

    @property
    def _drafts_tokens(self) -> bool:
        """Whether the next step may have draft tokens, which depend on the tokens before."""
        if self.speculation is None or self._running is None:
            return False
        scheduled = self._running[0]
        return bool(scheduled.num_draft_tokens or scheduled.scheduled_spec_decode_tokens)

    def _fit_drafts(self, progress: list[tuple[Request, list[int]]]) -> None:
        """Cuts what was drafted to what is likely to be accepted, and to what grammars allow."""
        assert self.speculation is not None
        for request, _ in progress:
            draft = request.spec_token_ids
            if draft:
                del draft[self.speculation.length(request.request_id) :]
                self.grammars.fit_draft(request.request_id, draft)

    def _is_decode(self, scheduled: SchedulerOutput) -> bool:
        """Whether every request only computes its last token to sample the next. True without
        requests."""
        counts = scheduled.num_scheduled_tokens
        requests = (self.scheduler.requests[request_id] for request_id in counts)
        return all(count == 1 for count in counts.values()) and all(
            request.num_unscheduled_tokens == 0
            and (request.num_output_tokens > 0 or not request.reads_prompt)
            for request in requests
        )

    def _finish_running(self) -> list[EngineOutput]:
        """Outputs of the step in flight, if there is one."""
        if self._running is None:
            return []
        (scheduled, pending), self._running = self._running, None
        result = pending.result()
        self._compile_waits += result.compile_waits
        self._calls.add(result.rows._asdict())
        # A request that finished with the step before, or was aborted since, is gone.
        failed = {i: why for i, why in result.errors.items() if i in self.scheduler.requests}
        lacking = result.out_of_memory
        outputs = [self._fail(i, why, i in lacking) for i, why in failed.items()]
        progress = self.scheduler.update(scheduled, result, self.grammars.accept)
        if self.speculation is not None:
            self.speculation.record(scheduled, result, time.monotonic())
            self._fit_drafts(progress)
        return outputs + [self._output(request, tokens, result) for request, tokens in progress]

    def _note_waits(self, scheduled: SchedulerOutput) -> None:
        now = time.monotonic()
        for request in (new.request for new in scheduled.scheduled_new_reqs):
            if request.queue_seconds is None:  # not after a preemption
                request.queue_seconds = now - request.arrival

    def shutdown(self) -> None:
        """Ends the worker processes of this engine."""
        self.grammars.close()
        if not self.is_sleeping:
            self.executor.shutdown()

    def reset_prefix_cache(self) -> bool:
        """Later requests compute their prompts anew. Always True: it cannot fail."""
        self.scheduler.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees weights and KV cache until `wake_up`, at every level. RequestError while there are
        requests."""
        if self.is_sleeping:
            return
        if self.has_work:
            raise RequestError("the engine cannot sleep while it has requests; finish them first")
        if self.dp_coordinator is not None:
            raise RequestError("engines that step together for expert parallelism cannot sleep")
        self.is_sleeping = True
        self.scheduler.reset_prefix_cache()
        self.executor.shutdown()
        del self.executor
        gc.unfreeze()
        gc.collect()
        give_back_memory()

    def wake_up(self) -> None:
        """Loads the model again, from the same checkpoint."""
        if self.is_sleeping:
            self._load()
            self._counted = (0, 0, 0)  # the scheduler is new
            self.is_sleeping = False

    def start_profile(self) -> None:
        """Traces what this process computes until `stop_profile`. ConfigError without a folder."""
        if self._profiler is None:
            self._profiler = Profiler()

    def stop_profile(self) -> str:
        """The file of the trace; "" where no profile runs."""
        profiler, self._profiler = self._profiler, None
        return "" if profiler is None else str(profiler.stop())

    def check_idle(self) -> None:
        """AssertionError where a block is in use without a request: a leak."""
        if not self.has_work:
            self.scheduler.pool.check_idle()

    def stats(self) -> SchedulerStats:
        """Current gauges, and counts since the last call."""
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        counts = (cache.num_queried, cache.num_hit, scheduler.num_preemptions)
        queried, hit, preempted = (new - old for new, old in zip(counts, self._counted))
        self._counted = counts
        compile_waits, self._compile_waits = self._compile_waits, []
        step_tokens, self._step_tokens = self._step_tokens, Counter()
        drafts = self.speculation.take_counts() if self.speculation is not None else (0, 0, {})
        return SchedulerStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - scheduler.pool.num_free / scheduler.pool.num_blocks,
            prefix_cache_queries=queried,
            prefix_cache_hits=hit,
            num_preemptions=preempted,
            compile_waits=compile_waits,
            calls=self._calls.take(),
            step_tokens=step_tokens,
            num_drafts=drafts[0],
            num_draft_tokens=drafts[1],
            num_accepted_tokens=drafts[2],
        )

    def _admit_compiled(self) -> list[EngineOutput]:
        if not self.grammars.has_pending:
            return []
        ready, refused = self.grammars.collect()
        for request in ready:
            self.scheduler.add(request)
        return [self._refusal(request_id, error) for request_id, error in refused.items()]

    def _refusal(self, request_id: str, error: str) -> EngineOutput:
        self.abort([request_id])
        return EngineOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)

    def _fail(self, request_id: str, error: str, is_out_of_memory: bool) -> EngineOutput:
        """Ends a request with non-finite logits, or without memory, and removes its blocks from the
        prefix cache."""
        logger.error("Request %s failed: %s", request_id, error, extra={"request_id": request_id})
        self.scheduler.forget_cached(request_id)
        output = self._refusal(request_id, error)
        output.is_fault, output.is_out_of_memory = True, is_out_of_memory
        return output

    def _output(
        self, request: Request, tokens: list[int], result: ModelRunnerOutput
    ) -> EngineOutput:
        request_id = request.request_id
        logprobs = result.logprobs.get(request_id)
        output = EngineOutput(
            request_id=request_id,
            token_ids=tokens,
            logprobs=None if logprobs is None else logprobs[: len(tokens)],
            prompt_logprobs=result.prompt_logprobs.get(request_id),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            queue_seconds=request.queue_seconds or 0.0,
            pooler_output=result.pooler_output.get(request_id),
        )
        if request.finish_reason is not None:
            self._forget(request_id)
        return output

    def _forget(self, request_id: str) -> None:
        self.grammars.forget(request_id)
        self._reads_tokens.discard(request_id)
        if self.speculation is not None:
            self.speculation.forget(request_id)


def _dump(decisions: dict[str, Any], file: Path) -> None:
    try:
        file.write_text(json.dumps(decisions, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--dump-decisions {file}: cannot be written: {error}") from error
