"""Decides, step by step, which tokens of which requests are computed. No torch, plain data out."""

from collections import deque
from dataclasses import dataclass, field

from vllm.config.scheduler import SchedulerConfig
from vllm.core.block_pool import BlockPool
from vllm.core.prefix_cache import PrefixCache
from vllm.core.request import FinishReason, Request
from vllm.core.state_snapshots import StateSnapshots


@dataclass(slots=True)
class Admission:
    """A request that joins the running batch, or rejoins it after it was preempted.

    state_from: the slot that holds its recurrent state after `num_computed_tokens`; 0 for none.
    """

    request: Request
    num_computed_tokens: int
    state_from: int = 0


@dataclass(slots=True)
class Step:
    """The work of one step.

    num_tokens: how many tokens to compute, by request, in batch order. new_blocks: block ids
    that requests already in the batch got. dropped: ids that left the batch since the last step.
    kept_states: slots to copy recurrent states to when they are computed, by request.
    token_counts: tokens that each data-parallel engine computes, where they do so in lock step;
    all_decode: each of these engines computes one token of each of its requests, their last.
    """

    admitted: list[Admission] = field(default_factory=list)
    num_tokens: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    kept_states: dict[str, int] = field(default_factory=dict)
    token_counts: tuple[int, ...] = ()
    all_decode: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.num_tokens


class Scheduler:
    """Continuous batching with chunked prefill, first come first served.

    Running requests go first, one token each or the next chunk of their prompt; waiting ones
    fill the rest of the step's token budget. A request is admitted when the blocks of all its
    known tokens are free. When a running request finds no block for its next token, the request
    admitted last is preempted: its blocks are released and it is computed anew later.

    `schedule` may be called again before `update` told what the step gave, for one step at most:
    requests that are sure to end with that one are left out, all others go on.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefix_caching: bool,
        snapshots: StateSnapshots | None = None,
    ):
        """snapshots: of a model with recurrent states whose prefixes are cached."""
        assert num_blocks * block_size >= max_model_len, "one request must always fit"
        self.config = config
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.prefix_cache = PrefixCache(self.pool, block_size, prefix_caching)
        self.snapshots = snapshots
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._dropped: list[str] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forgets a request in any state; unknown ids were finished before and are no error."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
            self._remove([request])

    def forget_cached(self, request_id: str) -> None:
        """Lets no later request find the blocks of this one; unknown ids are no error."""
        request = self.requests.get(request_id)
        if request is not None:
            # By content: one that was preempted has no blocks, but they may still be found.
            blocks = map(self.pool.find, request.block_hashes)
            self.pool.forget([block for block in blocks if block is not None])
            if self.snapshots is not None:
                self.snapshots.forget(request.block_hashes)

    def schedule(self) -> Step:
        step = Step()
        if self.snapshots is not None:
            self.snapshots.begin_step()
        preempted_before = self.num_preemptions
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        # Who was preempted just now may still be part of a running step, so must not be admitted.
        if budget > 0 and self.waiting and self.num_preemptions == preempted_before:
            self._admit_waiting(step, budget)
        if not step.is_empty:
            step.dropped, self._dropped = self._dropped, []
        return step

    def _schedule_running(self, step: Step, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_pending = request.num_pending_tokens
            if num_pending and self._ends_by_length(request, num_pending):
                index += 1
                continue
            num_tokens = self._num_tokens_now(request, budget)
            start = request.num_computed_tokens + request.num_scheduled_tokens
            num_new = self._num_blocks_for(start + num_tokens) - len(request.block_ids)
            if num_new > 0:
                while self.pool.num_free < num_new and self.running[-1] is not request:
                    self._preempt_last()
                if self.pool.num_free < num_new:
                    self._preempt_last()
                    break
                blocks = self.pool.take(num_new)
                request.block_ids += blocks
                step.new_blocks[request.request_id] = blocks
            self._take_up(step, request, num_tokens)
            budget -= num_tokens
            index += 1
        return budget

    def _admit_waiting(self, step: Step, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            admission = self._admit(request)
            if admission is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            step.admitted.append(admission)
            num_tokens = self._num_tokens_now(request, budget)
            self._take_up(step, request, num_tokens)
            budget -= num_tokens

    def _take_up(self, step: Step, request: Request, num_tokens: int) -> None:
        step.num_tokens[request.request_id] = num_tokens
        request.schedule(num_tokens)
        if self.snapshots is None or not request.states_kept_after:
            return
        end = request.num_computed_tokens + request.num_scheduled_tokens
        if end in request.states_kept_after:
            num_blocks = end // self.block_size
            self.prefix_cache.hash(request, num_blocks)
            slot = self.snapshots.keep(request.block_hashes[num_blocks - 1])
            if slot is not None:
                step.kept_states[request.request_id] = slot

    def _num_tokens_now(self, request: Request, budget: int) -> int:
        """Tokens to compute in this step: up to where its state is to be kept, if it is."""
        num_tokens = min(request.num_unscheduled_tokens, budget)
        if not request.states_kept_after:
            return num_tokens
        start = request.num_computed_tokens + request.num_scheduled_tokens
        stops = (stop - start for stop in request.states_kept_after if stop > start)
        return min([num_tokens, *stops])

    def _find_state(self, request: Request, cached: list[int]) -> tuple[list[int], int]:
        """Those of the cached blocks after which the recurrent state is kept as well, and its slot;
        notes where this request's are worth keeping.

        That is at the end of what it knows, for one that goes on from there, and where the cached
        blocks end, since two begin alike that far: a third may too.
        """
        request.states_kept_after = ()
        if self.snapshots is None:
            return cached, 0
        num_blocks, slot = self.snapshots.find(request.block_hashes[: len(cached)])
        whole = (len(request.all_token_ids) - 1) // self.block_size
        ends = {n * self.block_size for n in (len(cached), whole) if n > num_blocks}
        least = num_blocks * self.block_size + self.snapshots.least_tokens
        request.states_kept_after = tuple(sorted(end for end in ends if end >= least))
        return cached[:num_blocks], slot

    def _admit(self, request: Request) -> Admission | None:
        """Gives the request its blocks; None if it must wait."""
        known = len(request.all_token_ids)
        cached, state_from = self._find_state(request, self.prefix_cache.match(request))
        num_new = self._num_blocks_for(known) - len(cached)
        # A block for the next token of each running request stays free: without it, whatever is
        # admitted into the last blocks is preempted at once.
        reserve = len(self.running)
        if self.pool.num_free - sum(map(self.pool.is_free, cached)) < num_new + reserve:
            return None
        for block in cached:
            self.pool.share(block)
        request.block_ids = cached + self.pool.take(num_new)
        request.num_computed_tokens = len(cached) * self.block_size
        self.prefix_cache.count(known, request.num_computed_tokens)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed_tokens
        return Admission(request, request.num_computed_tokens, state_from)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self._release(request)
        self._dropped.append(request.request_id)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def prepare_update(self, step: Step) -> None:
        """Does what `update` need not do anew, once a step was launched."""
        for request_id, num_tokens in step.num_tokens.items():
            if num_tokens > 1:  # one token ends a block now and then, which may wait
                request = self.requests[request_id]
                end = request.num_computed_tokens + request.num_scheduled_tokens
                self.prefix_cache.hash_ahead(request, end)

    def update(self, step: Step, sampled: dict[str, int]) -> list[Request]:
        """Takes the results of a step: the next token of each request that got one.

        Returns the requests that ended with it, already removed.
        """
        for request_id, num_tokens in step.num_tokens.items():
            request = self.requests.get(request_id)
            # One that was preempted meanwhile has lost what was computed, but keeps its token.
            if request is None or request.num_scheduled_tokens == 0:
                continue
            request.num_scheduled_tokens -= num_tokens
            before = request.num_computed_tokens
            request.num_computed_tokens = before + num_tokens
            self.prefix_cache.record(request, before)
        ended = []
        for request_id, token in sampled.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_pending_tokens -= 1
            if request.max_tokens > 0:
                request.all_token_ids.append(token)
            if self._check_end(request, token):
                ended.append(request)
        self._remove(ended)
        return ended

    def _check_end(self, request: Request, token: int) -> bool:
        num_output = request.num_output_tokens
        may_stop = num_output > 0 and num_output >= request.sampling.min_tokens
        if may_stop and token in request.stop_token_ids:
            self._finish(request, FinishReason.STOP)
            request.stop_reason = token
        elif self._ends_by_length(request, 0):
            self._finish(request, FinishReason.LENGTH)
        return request.finish_reason is not None

    def _ends_by_length(self, request: Request, num_pending: int) -> bool:
        """Whether it does with its tokens so far and `num_pending` more."""
        num_tokens = len(request.all_token_ids) + num_pending
        num_output = num_tokens - request.num_prompt_tokens
        return num_output >= request.max_tokens or num_tokens >= self.max_model_len

    def finish_early(self, request_id: str, reason: FinishReason) -> None:
        """Ends a request for a cause outside the scheduler, after a step."""
        request = self.requests[request_id]
        self._finish(request, reason)
        self._remove([request])

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        self._release(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = request.num_scheduled_tokens = 0

    def _remove(self, ended: list[Request]) -> None:
        """Takes ended requests out of the queues and out of the batch."""
        if not ended:
            return
        gone = {request.request_id for request in ended}
        in_batch = [r.request_id for r in self.running if r.request_id in gone]
        self._dropped += in_batch
        if in_batch:
            self.running = [r for r in self.running if r.request_id not in gone]
        if len(in_batch) < len(gone):
            self.waiting = deque(r for r in self.waiting if r.request_id not in gone)
