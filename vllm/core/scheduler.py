"""Schedules the tokens of every step. No torch; the output is plain data."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter

from vllm.architectures.cache_groups import WHOLE, CacheGroup
from vllm.config.scheduler import SchedulerConfig
from vllm.config.speculative import STEP_DRAFT_TOKENS
from vllm.core import fair_share
from vllm.core.kv_blocks import CachedPrefix, KVBlocks
from vllm.core.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from vllm.core.prefix_cache import PrefixCache
from vllm.core.prompt_limits import PromptLimits
from vllm.core.request import FinishReason, Request
from vllm.core.speculation import drop_waiting_drafts
from vllm.core.state_snapshots import StateSnapshots
from vllm.core.waiting import WaitingQueue

# Requests that wait behind a long prompt, as far as a step looks for shorter ones.
LOOKAHEAD = 16
# Steps that a request of a client with less than its share waits before another client's sequence
# is preempted for it.
FAIR_STEPS = 4
_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching with chunked prefill, first come first served or by priority.

    Running requests come first: one token each, its draft tokens, or the next prompt chunk.
    Waiting requests fill the rest of the token budget. A request is admitted when there are free
    blocks for all its known tokens, of window layers for those of a step. When a running request
    gets no block, the request admitted last of the client with the most blocks is preempted: its
    blocks are released and it is recomputed later. With priorities, both queues are in their order:
    the request that is preempted is one of the least priority.

    Clients share places and blocks: the one with the fewest running sequences is admitted first.
    After FAIR_STEPS steps in which a request found no place or no blocks, sequences of the client
    that holds most are preempted for it, as long as that client keeps no less than its own gets.

    A prompt that needs several steps by itself is long. The first of them in a step leaves as much
    of the budget as shorter requests behind it need, up to half of it; further ones take what is
    left. So short requests are answered beside long prompts, and neither starves the other. Prompts
    with logprobs take a part of each step, which is slower for them than for others.

    Draft tokens take what others leave of the budget and the blocks. Those that a step does not
    accept are taken back: they do not count as computed, and the next tokens reuse their KV slots.

    Async scheduling: `schedule` may be called once more before `update` for the step in flight. It
    skips requests that are sure to finish with that step, and those with draft tokens in it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefix_caching: bool,
        snapshots: StateSnapshots | None = None,
        groups: Sequence[CacheGroup] = WHOLE,
    ):
        """snapshots: for a model with recurrent states and prefix caching."""
        self.blocks = KVBlocks(num_blocks, block_size, config.max_num_batched_tokens, groups)
        self._num_blocks_for = self.blocks.needs.of
        assert num_blocks >= self._num_blocks_for(max_model_len), "one request must always fit"
        self.config = config
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.pool = self.blocks.pool
        self.prefix_cache = PrefixCache(self.blocks, block_size, prefix_caching)
        self.snapshots = snapshots
        self.requests: dict[str, Request] = {}
        self.is_by_priority = config.policy == "priority"
        self.waiting = WaitingQueue(self.is_by_priority, config.max_num_seqs_per_client)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._has_long = False  # whether a long prompt has tokens of this step
        self._limits = PromptLimits()
        self._num_scored = 0  # requests with prompt logprobs
        self._num_steps = 0
        self._num_owed = 0  # blocks that a running request found no way to get in the last step
        self._yielded: set[str] = set()  # preempted for other clients in this step
        self._removed_ids: list[str] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        room = self.max_model_len - request.num_prompt_tokens
        request.max_tokens = min(request.max_tokens, room)
        self.requests[request.request_id] = request
        self._num_scored += request.sampling.prompt_logprobs is not None
        request.queued_step = self._num_steps
        self.waiting.add(request)

    def abort(self, request_id: str) -> None:
        """Removes a request in any state; an unknown id has finished before and is no error."""
        request = self.requests.get(request_id)
        if request is not None:
            request.finish_reason = FinishReason.ABORT
            self._remove([request])

    def forget_cached(self, request_id: str) -> None:
        """Removes the request's blocks from the prefix cache; unknown ids are no error."""
        request = self.requests.get(request_id)
        if request is not None:
            self.prefix_cache.forget(request)
            if self.snapshots is not None:
                self.snapshots.forget(request.block_hashes)

    def reset_prefix_cache(self) -> None:
        """No later request finds what was computed so far; running ones keep their blocks."""
        self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()

    def schedule(self) -> SchedulerOutput:
        output = SchedulerOutput()
        if self.snapshots is not None:
            self.snapshots.begin_step()
        self._num_steps += 1
        self._yield_places()
        num_preemptions = self.num_preemptions
        self._has_long, self._limits = False, self._prompt_limits()
        budget = self._schedule_running(output, self.config.max_num_batched_tokens)
        drop_waiting_drafts(self.running, output)
        # A request preempted just now may be in the step in flight, so it must not be admitted.
        if budget > 0 and self.waiting and self.num_preemptions == num_preemptions:
            self._admit_waiting(output, budget)
        if not output.is_empty:
            output.removed_request_ids, self._removed_ids = self._removed_ids, []
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        while self.pool.num_free < self._num_owed and len(self.running) > 1:
            self._preempt(
                fair_share.last_of_richest(self.running, fair_share.blocks, self.is_by_priority)
            )
        self._num_owed = index = 0
        self._draft_room = min(budget - len(self.running), STEP_DRAFT_TOKENS)
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_pending = request.num_pending_tokens
            if num_pending and (
                request.spec_token_ids
                or request.num_output_tokens + num_pending >= request.max_tokens
            ):
                index += 1
                continue
            num_tokens = 1  # as of most requests, most of the time
            if request.num_unscheduled_tokens > 1:
                num_tokens = self._num_tokens_now(request, budget, index + 1)
            if num_tokens <= 0:
                index += 1
                continue
            if request.spec_token_ids:
                num_tokens += self._trim_drafts(index, num_tokens, budget)
            start = request.num_computed_tokens + request.num_scheduled_tokens
            if start + num_tokens > request.num_slots:
                counts = self.blocks.lacking(request, start + num_tokens)
                if not self._make_free(sum(counts), index):
                    index += bool(request.block_ids)  # else it was preempted itself
                    continue
                output.new_block_ids[request.request_id] = self.blocks.extend(request, counts)
            self._add(output, request, num_tokens)
            budget -= num_tokens
            index += 1
        return budget

    def _admit_waiting(self, output: SchedulerOutput, budget: int) -> None:
        passed, num_held = 0, 0  # long ones that get no token in this step, and their blocks
        while passed < LOOKAHEAD and budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.at(passed)
            if request is None or request.request_id in self._yielded:
                break
            if self._is_passed(request, budget, passed + 1):
                num_held += self._num_blocks_for(len(request.all_token_ids))
                passed += 1
                continue
            new = self._admit(request, num_held)
            if new is None:
                break
            # One at least: it proves to be long where its blocks are cached and its state is not.
            num_tokens = max(1, self._num_tokens_now(request, budget, passed=passed + 1))
            self.waiting.start(request)
            if self.is_by_priority:
                insort(self.running, request, key=_rank)
            else:
                self.running.append(request)
            output.scheduled_new_reqs.append(new)
            self._add(output, request, num_tokens)
            budget -= num_tokens

    def _is_passed(self, request: Request, budget: int, passed: int) -> bool:
        """Whether a waiting request gets no token of this step, which is for those behind it."""
        is_long = self._is_long(request)
        if self._limits.left_to(request, is_long) == 0:
            return True
        return is_long and budget <= self._left_to_shorter(budget, passed=passed)

    def _num_left(self, request: Request) -> int:
        """Tokens that no step computes yet; of a long prompt that waits, those not cached."""
        left = request.num_unscheduled_tokens
        if left > self.config.max_num_batched_tokens and not request.block_ids:
            left -= self.prefix_cache.match(request).num_tokens
        return left

    def _is_long(self, request: Request) -> bool:
        return self._num_left(request) > self.config.max_num_batched_tokens

    def _left_to_shorter(self, budget: int, first: int | None = None, passed: int = 0) -> int:
        """Tokens of the budget that a long prompt leaves to shorter requests behind it: those that
        run from the `first` on, and those that wait from the one after `passed` on."""
        most = budget if self._has_long else budget // 2
        running = self.running[first:] if first is not None else ()
        need = sum(r.num_unscheduled_tokens for r in running if not self._is_long(r))
        num_blocks = self.pool.num_free - self._num_kept
        room = self.config.max_num_seqs - len(self.running)
        for request in islice(self.waiting, passed, passed + LOOKAHEAD):
            num_blocks -= self._num_blocks_for(len(request.all_token_ids))
            if need >= most or room <= 0 or num_blocks < 0:
                break
            if not self._is_long(request):
                need += self._num_left(request)
                room -= 1
        return min(need, most)

    def _trim_drafts(self, index: int, num_tokens: int, budget: int) -> int:
        """Cuts the draft tokens of the running request at `index` to those that the step can verify
        without the budget and the blocks of others; returns how many."""
        request, room = self.running[index], 0
        if num_tokens == request.num_unscheduled_tokens:
            num_others = len(self.running) - index - 1
            spare = max(0, self.pool.num_free - num_others * self.blocks.num_per_step)
            num_left = request.max_tokens - request.num_output_tokens
            num_slots = self.blocks.spare_slots(request, spare) - len(request.all_token_ids)
            room = min(budget - num_tokens, self._draft_room, num_left - 1, num_slots)
        del request.spec_token_ids[max(room, 0) :]
        self._draft_room -= len(request.spec_token_ids)
        return len(request.spec_token_ids)

    def _add(self, output: SchedulerOutput, request: Request, num_tokens: int) -> None:
        request_id = request.request_id
        output.num_scheduled_tokens[request_id] = num_tokens
        if request.spec_token_ids:
            output.scheduled_spec_decode_tokens[request_id] = request.spec_token_ids
            num_tokens -= len(request.spec_token_ids)
        request.schedule(num_tokens)
        if self.snapshots is None or not request.states_kept_after:
            return
        end = request.num_computed_tokens + request.num_scheduled_tokens
        if end in request.states_kept_after:
            num_blocks = end // self.block_size
            self.prefix_cache.hash(request, num_blocks)
            slot = self.snapshots.keep(request.block_hashes[num_blocks - 1])
            if slot is not None:
                output.state_snapshots[request_id] = slot

    def _num_tokens_now(
        self, request: Request, budget: int, first: int | None = None, passed: int = 0
    ) -> int:
        """Tokens to compute in this step: at most up to the next state snapshot. first, passed:
        where the requests behind it begin, as in `_left_to_shorter`."""
        is_long = self._is_long(request)
        if is_long:
            budget -= self._left_to_shorter(budget, first, passed)
            self._has_long = True
        num_tokens = min(request.num_unscheduled_tokens, budget)
        limit = self._limits.left_to(request, is_long)
        if limit is not None:
            num_tokens = min(num_tokens, limit)
            self._limits.take(request, is_long, num_tokens)
        if not request.states_kept_after:
            return num_tokens
        start = request.num_computed_tokens + request.num_scheduled_tokens
        stops = (stop - start for stop in request.states_kept_after if stop > start)
        return min([num_tokens, *stops])

    def _find_state(self, request: Request, cached: CachedPrefix) -> tuple[CachedPrefix, int]:
        """The longest cached prefix that ends at a snapshot of the recurrent state, and the
        snapshot's slot; sets where to save snapshots of this request.

        Those are the end of its known tokens, for a request that continues it, and the end of the
        cached blocks: two requests share that prefix, so a third may.
        """
        request.states_kept_after = ()
        if self.snapshots is None:
            return cached, 0
        size = self.block_size
        num_blocks, slot = self.snapshots.find(request.block_hashes[: cached.num_tokens // size])
        whole = (len(request.all_token_ids) - 1) // size * size
        ends = {end for end in (cached.num_tokens, whole) if end > num_blocks * size}
        least = num_blocks * size + self.snapshots.least_tokens
        request.states_kept_after = tuple(sorted(end for end in ends if end >= least))
        return self.prefix_cache.shortened(cached, num_blocks), slot

    def _admit(self, request: Request, num_held: int) -> NewRequestData | None:
        """Allocates the blocks of the request; None if it must wait. num_held: blocks that stay
        free for those it passes."""
        cached, state_slot = self._find_state(request, self.prefix_cache.match(request))
        # What the next token of each running request needs stays free: otherwise a request
        # admitted into the last blocks is preempted at once.
        if not self.blocks.admit(request, cached, self._num_kept + num_held):
            return None
        self.prefix_cache.num_queried += len(request.all_token_ids)
        self.prefix_cache.num_hit += cached.num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = cached.num_tokens
        return NewRequestData(request, cached.num_tokens, state_slot)

    @property
    def _num_kept(self) -> int:
        """Blocks for the next token of each running request."""
        return len(self.running) * self.blocks.num_per_step

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        self._removed_ids.append(request.request_id)
        request.queued_step = self._num_steps
        self.waiting.stop(request)
        self.waiting.add(request, is_preempted=True)
        self.num_preemptions += 1

    def _make_free(self, num_new: int, index: int) -> bool:
        """Preempts until `num_new` blocks are free for the running request at `index`. False where
        it was preempted itself, or must wait because what is to be preempted is in this step."""
        request = self.running[index]
        while self.pool.num_free < num_new:
            victim = fair_share.last_of_richest(
                self.running, fair_share.blocks, self.is_by_priority
            )
            if victim is not request and victim in self.running[:index]:
                self._num_owed = max(self._num_owed, num_new)
                return False
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _yield_places(self) -> None:
        """Preempts for requests that have waited for FAIR_STEPS, of clients with less than a share:
        one that keeps no less than they get gives up its newest sequences."""
        self._yielded.clear()
        if self.waiting.num_clients < 2:
            return
        places = self.config.max_num_seqs - len(self.running)
        promised = 0
        taken: Counter[str] = Counter()
        for request in [*islice(self.waiting, LOOKAHEAD)]:
            if self._num_steps - request.queued_step <= FAIR_STEPS:
                continue
            need = self._num_blocks_for(len(request.all_token_ids))
            places -= 1
            promised += need
            while places < 0 and self._yields(
                request, fair_share.places, taken[request.client] + 1
            ):
                places += 1
            if places < 0:
                break
            while self.pool.num_free - self._num_kept < promised and self._yields(
                request, fair_share.blocks, need
            ):
                places += 1
            taken[request.client] += 1

    def _yields(self, request: Request, size: fair_share.Size, need: int) -> bool:
        """Preempts one sequence for `request`; False where no client has to yield one."""
        victim = fair_share.yields_to(request, need, self.running, size, self.is_by_priority)
        if victim is None:
            return False
        self._preempt(victim)
        self._yielded.add(victim.request_id)
        return True

    def _prompt_limits(self) -> PromptLimits:
        is_alone = self.waiting.num_clients == 1 and self._num_scored == len(self.requests)
        is_beside = self.config.max_prefill_share < 1 and any(
            request.num_output_tokens for request in self.running
        )
        return PromptLimits.of_step(self.config, is_beside, is_alone)

    def prepare_update(self, output: SchedulerOutput) -> None:
        """Hashes the blocks that `update` will record, while the step is in flight."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens > 1:  # one token rarely fills a block; that hash can wait
                request = self.requests[request_id]
                end = request.num_computed_tokens + request.num_scheduled_tokens
                self.prefix_cache.hash_ahead(request, end)

    def update(
        self,
        scheduled: SchedulerOutput,
        output: ModelRunnerOutput,
        ends_grammar: Callable[[str, int], bool] = lambda request_id, token: False,
    ) -> list[tuple[Request, list[int]]]:
        """Applies the results of a step.

        Returns the requests that sampled, each with its new tokens: those up to the one that
        finishes it. Finished requests are removed. ends_grammar(request id, token): advances the
        grammar of a request with structured output; True where the token completes it.
        """
        progress, finished, taken_back = [], [], {}
        drafts, has_windows = scheduled.scheduled_spec_decode_tokens, self.blocks.has_windows
        for request_id, tokens in zip(output.request_ids, output.sampled_token_ids):
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_pending_tokens -= 1
            tokens = self._append(request, tokens, ends_grammar)
            if drafts or len(tokens) != 1:
                taken_back[request_id] = self._num_taken_back(request, tokens, drafts)
            if drafts or output.draft_token_ids:
                # Not of a preempted request, nor where another step samples for it.
                is_next = request.num_scheduled_tokens and not request.num_pending_tokens
                proposed = output.draft_token_ids.get(request_id, ()) if is_next else ()
                request.spec_token_ids = list(proposed)
            progress.append((request, tokens))
            if request.finish_reason is not None:
                finished.append(request)
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            # A preempted request has lost what was computed, but keeps its new tokens.
            if request is None or request.num_scheduled_tokens == 0:
                continue
            request.num_scheduled_tokens -= num_tokens
            if drafts:
                request.num_scheduled_tokens += len(drafts.get(request_id, ()))
            if taken_back:
                num_tokens -= taken_back.get(request_id, 0)
            before = request.num_computed_tokens
            request.num_computed_tokens = before + num_tokens
            self.prefix_cache.record(request, before)
            if has_windows:
                self.blocks.release_passed(request)
        self._remove(finished)
        return progress

    def _append(
        self, request: Request, tokens: list[int], ends_grammar: Callable[[str, int], bool]
    ) -> list[int]:
        """Appends new tokens up to the one that finishes the request; returns them."""
        known, sampling = request.all_token_ids, request.sampling
        limit = request.num_prompt_tokens + request.max_tokens
        if request.max_tokens == 0:
            request.finish_reason, tokens = FinishReason.LENGTH, []
        for index, token in enumerate(tokens):
            known.append(token)
            if token in request.stop_token_ids and request.num_output_tokens >= sampling.min_tokens:
                request.finish_reason, request.stop_reason = FinishReason.STOP, token
            elif len(known) >= limit:
                request.finish_reason = FinishReason.LENGTH
            elif sampling.structured_outputs is not None and ends_grammar(
                request.request_id, token
            ):
                request.finish_reason = FinishReason.STOP
            else:
                continue
            return tokens[: index + 1]
        return tokens

    def _num_taken_back(
        self, request: Request, tokens: list[int], drafts: dict[str, list[int]]
    ) -> int:
        """Scheduled tokens that do not count as computed: drafts after the last new token, and
        without a new token the last known one, whose logits are needed again."""
        if request.max_tokens == 0:
            return 0
        assert len(tokens) == 1 or not request.num_pending_tokens, "the next step is in flight"
        return max(0, len(drafts.get(request.request_id, ())) + 1 - len(tokens))

    def _release(self, request: Request) -> None:
        self.blocks.release(request)
        request.spec_token_ids = []
        request.num_computed_tokens = request.num_scheduled_tokens = 0

    def _remove(self, finished: list[Request]) -> None:
        """Releases finished requests and removes them from the queues and the batch."""
        if not finished:
            return
        for request in finished:
            self._release(request)
            del self.requests[request.request_id]
            self._num_scored -= request.sampling.prompt_logprobs is not None
        gone = {request.request_id for request in finished}
        in_batch = {r.request_id for r in self.running if r.request_id in gone}
        if in_batch:
            self.running = [r for r in self.running if r.request_id not in gone]
        for request in finished:
            if request.request_id in in_batch:
                self._removed_ids.append(request.request_id)
                self.waiting.stop(request)
            else:
                self.waiting.remove(request)
