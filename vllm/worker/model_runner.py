"""Runs the model on a scheduler output: computes logits and samples the next tokens."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from vllm.config import VllmConfig
from vllm.core.outputs import SchedulerOutput, StepRows, TokenLogprobs
from vllm.distributed.parallel import Parallel
from vllm.errors import is_out_of_memory
from vllm.kernels.device_ops import usable_ops
from vllm.kernels.jit.ready import WarmUp
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.model_executor.layers.attention import planners
from vllm.model_executor.model_loader import load_model
from vllm.utils.startup import StartupReport
from vllm.utils.torch_utils import naming_the_knob
from vllm.worker.async_output import AsyncModelRunnerOutput
from vllm.worker.cuda_graph import (
    MOST_VERIFIED,
    CudaGraphs,
    PromptShape,
    bucket_sizes,
    captured_prompts,
    pays_off,
)
from vllm.worker.draft_model import load_draft_model
from vllm.worker.drafts import (
    DraftsInFlight,
    LateTokens,
    NewTokens,
    Proposals,
    Ready,
    StepTokens,
    no_proposals,
)
from vllm.worker.first_calls import HANG_SECONDS, FirstCalls
from vllm.worker.input_batch import make_batch
from vllm.worker.input_buffers import to_device
from vllm.worker.kv_cache import (
    allocate_kv_cache,
    allocate_states,
    copy_states,
    fit_max_model_len,
    state_layers,
)
from vllm.worker.make_drafter import drafting_part, make_drafter
from vllm.worker.numerics import NumericsWatch, mark_broken
from vllm.worker.out_of_memory import FinishedOutput, compute_alone, drafts_or
from vllm.worker.peak_memory import peak_memory
from vllm.worker.pooling import pooled_vectors
from vllm.worker.prompt_logprobs import PromptLogprobs
from vllm.worker.sampler import sample, widened
from vllm.worker.sampling_rows import sampling_batch
from vllm.worker.speculation import SampledRows, Verification, draw_lots, new_tokens
from vllm.worker.step_inputs import StepInputs
from vllm.worker.warm_up import begin_warm_up, finish_warm_up

logger = get_logger(__name__)


class ModelRunner:
    """The model with its KV cache and the input batch. async_scheduling: as of an Executor."""

    # Where the batch stood before the step, and who wanted prompt logprobs.
    _before: tuple[np.ndarray, frozenset[str]] | None = None

    def __init__(
        self,
        config: VllmConfig,
        selection: Selection,
        report: StartupReport,
        parallel: Parallel,
    ):
        """parallel: process groups of this rank."""
        self._parallel = parallel
        self.device = torch.device(selection.device.kind)
        self._ops = usable_ops(selection.device.kind)
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self._warm_up: WarmUp | None = None
        with torch.inference_mode():
            with report.phase("weights"), naming_the_knob("--tensor-parallel-size (higher)"):
                self._load(config, selection)
            hang_s = min(HANG_SECONDS, (parallel.timeout_s or math.inf) / 2)  # before peers give up
            calls = FirstCalls(nn.ModuleList(self._models), selection, hang_s)
            with report.phase("compiling"), naming_the_knob("--max-num-batched-tokens (lower)"):
                finish_warm_up(self._warm_up)
                self._call_kernels(calls, config, report)
            is_eager = config.model_config.enforce_eager or config.parallel_config.needs_eager
            is_eager |= selection.needs_eager
            self._prompt_shapes = captured_prompts(
                config, is_eager or self.device.type == "cpu", bool(planners(self.model))
            )
            with report.phase("largest step"), naming_the_knob("--max-num-batched-tokens (lower)"):
                state_bytes = allocate_states(self.model, config, self.device)
                peak_bytes = peak_memory(
                    self._models, calls, config, parallel, self._prompt_shapes, self.device
                )
            with report.phase("KV cache"), naming_the_knob("--gpu-memory-utilization (lower)"):
                self.num_blocks, tables = allocate_kv_cache(
                    nn.ModuleList(self._models), config, self.device, peak_bytes, state_bytes,
                    parallel.engine.least, drafting_part(self._models),
                )  # fmt: skip
        self.config = config = fit_max_model_len(config, self.num_blocks, self.device.type)
        self.batch = make_batch(config, tables)
        pages = self.batch.max_blocks, self.batch.block_size
        self._inputs = StepInputs(
            self._max_tokens, config.scheduler_config.max_num_seqs, *pages, self.device,
            num_groups=len(tables), keeps_draft_states=config.num_draft_states > 0,
            verifies_drafts=config.speculative_config is not None,
        )  # fmt: skip
        self._inputs.planners = planners(self.model)
        self._drafter = make_drafter(config, self._models, self.batch, self.num_blocks, self.device)
        self._drafter.timeout_s = parallel.timeout_s
        self._state_layers = state_layers(self.model)
        compute_logits = self.model.compute_logits if parallel.pipeline.is_last else None
        self._prompt_logprobs = PromptLogprobs(self.batch, compute_logits)
        self.async_scheduling = self.device.type == "cuda"
        size = 2, config.max_num_logits
        self._copies = [*torch.zeros(size, dtype=torch.int64, pin_memory=self.async_scheduling)]
        self._graphs: CudaGraphs[int] | None = None
        self._prompt_graphs: CudaGraphs[PromptShape] | None = None
        if self.device.type == "cuda":
            self._make_decoding_ready(config, report, is_eager)
        # Not of steps before requests, whose numbers mean nothing.
        self._watch = NumericsWatch(self.model) if config.model_config.debug_numerics else None

    def _load(self, config: VllmConfig, selection: Selection) -> None:
        """The model, and before it the one that drafts for it, if there is one."""
        draft = load_draft_model(config, selection, self._parallel)
        self.model = load_model(config, selection, self._parallel, self._begin_warm_up)
        self._models = (self.model,) if draft is None else (self.model, draft)
        self._parallel.barrier("loaded")

    def _begin_warm_up(self, selection: Selection) -> None:
        """Compiles kernels while weights are read."""
        if self.device.type == "cuda":
            self._warm_up = begin_warm_up(selection, self._max_tokens)

    def _call_kernels(self, calls: FirstCalls, config: VllmConfig, report: StartupReport) -> None:
        """Runs every chosen kernel once; on a CPU, where nothing compiles, with one token. Then
        compares those that are new on this machine with the reference."""
        sizes = 1, 1, 1
        if self.device.type == "cuda":
            num_seqs = config.scheduler_config.max_num_seqs
            sizes = self._max_tokens, num_seqs, self._parallel.data.size
        calls.of_weights(*sizes)
        with report.phase("numerics"), self._cores_for_kernels():
            calls.of_results(config.cache_config.block_size)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _make_decoding_ready(
        self, config: VllmConfig, report: StartupReport, is_eager: bool
    ) -> None:
        """Captures CUDA graphs, or decodes once eagerly: kernels compile at their first call."""
        max_num_seqs = config.scheduler_config.max_num_seqs
        knobs = "--gpu-memory-utilization, --max-num-seqs"
        wants_prompts = bool(self._prompt_shapes)
        with (
            torch.inference_mode(),
            report.phase("small steps" if is_eager else "CUDA graphs"),
            naming_the_knob(f"{knobs}{', --max-prompt-graph-tokens' * wants_prompts} (lower)"),
        ):
            if is_eager:
                for size in {1, min(2, max_num_seqs)}:  # strides of a single row are arbitrary
                    self._decode_once(size)
                torch.cuda.synchronize()
            else:
                pool = None
                if wants_prompts:  # first: they need more memory
                    prepare = self._inputs.pad_prompts
                    self._prompt_graphs = CudaGraphs(
                        self._prompts_once, self._prompt_shapes, prepare=prepare, pays=pays_off
                    )
                    pool = self._prompt_graphs.pool
                    few = [one for one in self._prompt_shapes if one.longest <= MOST_VERIFIED]
                    self._parallel.num_tokens_across_dp = ()  # as in steps: no ranks in lock-step
                    self._drafter.capture(few, pool)
                self._graphs = CudaGraphs(self._decode_once, bucket_sizes(max_num_seqs), pool)

    def _decode_once(self, size: int) -> Tensor:
        """Logits; hidden states where what drafts reads them."""
        self._parallel.num_tokens_across_dp = (size,) * self._parallel.data.size
        hidden: Tensor = self.model(self._inputs.decode_batch(size))
        return hidden if self._drafter.reads_hidden else self.model.compute_logits(hidden)

    def _prompts_once(self, shape: PromptShape) -> Tensor:
        self._parallel.num_tokens_across_dp = (shape.tokens,) * self._parallel.data.size
        hidden: Tensor = self.model(self._inputs.prompt_batch(shape))
        return hidden

    def drop_graphs(self) -> None:
        """Later steps run eagerly."""
        self._graphs = self._prompt_graphs = None
        self._drafter.drop_graphs()

    def execute_model(
        self, scheduler_output: SchedulerOutput, bitmasks: dict[str, Tensor]
    ) -> AsyncModelRunnerOutput | FinishedOutput:
        """Starts a step. bitmasks: allowed tokens of requests with a grammar. Requests with
        penalties or a grammar must not be scheduled while a result is pending."""
        with torch.inference_mode(), self._cores_for_kernels():
            if self._warm_up is not None:
                self._warm_up.promote()
            self._before, in_flight = None, self._drafter.in_flight
            try:
                return self._execute(scheduler_output, bitmasks)
            except Exception as error:
                if not (self._can_drop_requests and is_out_of_memory(error)):
                    raise
            # What failed is freed by now.
            return self._execute_alone(scheduler_output, bitmasks, in_flight)

    @property
    def _can_drop_requests(self) -> bool:
        """Ranks must not fail alone; on a GPU tokens of a step in flight are taken over."""
        is_alone = self._parallel.engine.size == 1
        return is_alone and not self.async_scheduling and self._before is not None

    def _execute_alone(
        self,
        scheduler_output: SchedulerOutput,
        bitmasks: dict[str, Tensor],
        in_flight: DraftsInFlight | None,
    ) -> FinishedOutput:
        """A step for which memory ran out, and the drafts before it. Recurrent states may have
        advanced, and prompt logprobs been taken: such requests cannot be repeated."""
        assert self._before is not None
        self.batch.num_computed[:], taken = self._before
        if self._state_layers:
            taken = frozenset(scheduler_output.num_scheduled_tokens)
        if in_flight is not None:
            known = in_flight.resolved(scheduler_output.scheduled_spec_decode_tokens)
            scheduler_output = replace(scheduler_output, scheduled_spec_decode_tokens=known)
        return compute_alone(scheduler_output, bitmasks, taken, self._execute)

    @contextmanager
    def _cores_for_kernels(self) -> Iterator[None]:
        """Limits torch to this thread while kernels with their own thread pool run. torch's threads
        spin after each operation, on the cores that the next kernel needs: a third of a step."""
        num_threads = torch.get_num_threads()
        if not self._ops.USES_TORCH_THREADS:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def _execute(
        self, scheduler_output: SchedulerOutput, bitmasks: dict[str, Tensor]
    ) -> AsyncModelRunnerOutput:
        self._update_batch(scheduler_output)
        batch = self.batch
        self._before = batch.num_computed.copy(), self._prompt_logprobs.request_ids
        # A data-parallel rank without requests computes one token of padding.
        self._parallel.num_tokens_across_dp = tuple(
            max(1, count) for count in scheduler_output.num_tokens_across_dp
        )
        if scheduler_output.is_empty:
            num_padding = self._compute_padding(scheduler_output)
            step_rows = self._step_rows(num_padding, 0)
            return AsyncModelRunnerOutput.without_tokens(batch, step_rows)
        rows = np.array([batch.row_of[i] for i in scheduler_output.num_scheduled_tokens], np.int64)
        counts = np.fromiter(scheduler_output.num_scheduled_tokens.values(), np.int64, len(rows))
        if counts.max() == 1:
            # Longest first: a long request that starts last would leave most of the GPU idle.
            rows = rows[np.argsort(-batch.num_computed[rows], kind="stable")]
        starts = batch.num_computed[rows]
        ends = starts + counts
        complete = np.flatnonzero(ends == batch.num_tokens[rows] + batch.num_drafts[rows])
        is_decode = len(complete) == len(counts) and counts.max() == 1
        is_decode &= not (self._prompt_logprobs or batch.wants_pooling[rows].any())
        size = self._graph_size(scheduler_output, is_decode, len(rows))
        pooled: dict[str, list[float]] = {}
        last = np.cumsum(counts) - 1
        sampled = SampledRows.of(last[complete], rows[complete], batch.num_drafts[rows[complete]])
        if size is not None:
            logits, hidden = self._decoded(size, rows, starts)
            computed, prompt_logprobs = StepTokens(rows, counts, starts, hidden), {}
            step_rows = self._step_rows(size, size)
        else:
            read = self._read_rows(scheduler_output, last, sampled.tokens)
            late = self._drafter.late_tokens(scheduler_output, last)
            hidden, computed, num_tokens = self._computed(rows, counts, starts, read, late)
            prompt_logprobs = self._prompt_logprobs.take(hidden, rows, last + 1, counts, starts)
            if len(complete):
                if len(hidden) > len(sampled.tokens):
                    hidden = hidden[to_device(sampled.tokens, self.device)]
                is_pooled = batch.wants_pooling[sampled.rows]
                if is_pooled.any():
                    last_hidden = self.model.last_hidden(hidden[is_pooled])
                    pooled = pooled_vectors(batch, last_hidden, sampled.rows[is_pooled])
                    hidden, sampled = hidden[~is_pooled], sampled.only(~is_pooled)
                if len(sampled.rows):
                    logits = self.model.compute_logits(hidden)
            step_rows = self._step_rows(num_tokens, len(sampled.rows))
        batch.num_computed[rows] = ends
        snapshots = scheduler_output.state_snapshots.items()
        copy_states(self._state_layers, [(batch.state_slot(i), slot) for i, slot in snapshots])
        if len(sampled.rows) == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            new = partial(new_tokens, batch, sampled, nothing, computed.input_ids)
            drafted = self._drafting(scheduler_output, computed, new)(())
            return AsyncModelRunnerOutput.without_tokens(
                batch, step_rows, prompt_logprobs, pooled, drafted.catch_up_seconds
            )
        rest = bitmasks, prompt_logprobs, pooled, step_rows
        return self._sample(logits, sampled, computed, scheduler_output, *rest)

    def _decoded(self, size: int, rows: np.ndarray, starts: np.ndarray) -> tuple[Tensor, Tensor]:
        """Logits of a captured step, and hidden states where what drafts reads them."""
        assert self._graphs is not None
        self._inputs.fill_decode(self.batch, rows, starts, size)
        found = self._graphs.replay(size)[: len(rows)]
        return (self.model.compute_logits(found) if self._drafter.reads_hidden else found), found

    def _step_rows(self, num_tokens: int, num_logits: int) -> StepRows:
        """Experts compute as many tokens for every rank in lock-step as for the one with most."""
        across = self._parallel.num_tokens_across_dp
        num_most = max((num_tokens, *across))
        return StepRows(num_tokens, num_most * max(1, len(across)), num_logits)

    def _computed(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        read: np.ndarray | None,
        late: LateTokens | None,
    ) -> tuple[Tensor, StepTokens, int]:
        """A step with prompts or drafts: last hidden states of all tokens, or only of `read`; what
        drafts are made from; and how many tokens the layers computed."""
        shape = None
        sizes = int(counts.sum()), int(counts.max()), len(rows)
        if self._prompt_graphs is not None:
            shape = self._prompt_graphs.fitting(lambda one: one.holds(*sizes))
        if shape is None:
            filled = self._inputs.fill(self.batch, rows, counts, starts, read)
        else:
            filled = self._inputs.fill(self.batch, rows, counts, starts, shape=shape)
        if late is not None:
            late.put_into(filled.input_ids)
        if shape is None or self._prompt_graphs is None:
            hidden: Tensor = self.model(filled)
        else:
            hidden = self._prompt_graphs.replay(shape)[: sizes[0]]
        step = StepTokens(rows, counts, starts, hidden, filled.input_ids, late)
        return hidden, step, sizes[0] if shape is None else shape.tokens

    def _read_rows(
        self, scheduler_output: SchedulerOutput, last: np.ndarray, sampled: np.ndarray
    ) -> np.ndarray | None:
        """Tokens whose last hidden state is needed; None for all. last: last token of each request;
        sampled: those whose next token is sampled. Where there is none it is one token, because no
        kernel takes zero rows. Prompt logprobs need all, as some drafts do. So do data-parallel
        ranks in lock-step, which exchange all tokens."""
        is_lock_step = bool(scheduler_output.num_tokens_across_dp)
        needs_all = self._prompt_logprobs or is_lock_step or self._drafter.reads_hidden
        if needs_all or len(sampled) > last[-1]:
            return None
        return sampled if len(sampled) else last[-1:]

    def _compute_padding(self, scheduler_output: SchedulerOutput) -> int:
        """The step of a data-parallel rank without requests: others need its experts. How many
        tokens it computes."""
        nothing = np.empty(0, np.int64)
        size = self._graph_size(scheduler_output, False, 0)
        if size is None:
            self.model(self._inputs.padding(1))
            return 1
        assert self._graphs is not None
        self._inputs.fill_decode(self.batch, nothing, nothing, size)
        self._graphs.replay(size)
        return size

    def _graph_size(
        self, scheduler_output: SchedulerOutput, is_decode: bool, num_seqs: int
    ) -> int | None:
        """The captured decode graph for this step; None where it has to run eagerly. Data-parallel
        ranks in lock-step choose the same one: it contains their exchange sizes."""
        if scheduler_output.num_tokens_across_dp:
            is_decode = scheduler_output.uniform_decode
            num_seqs = max(scheduler_output.num_tokens_across_dp)
        if self._graphs is None or not is_decode:
            return None
        return self._graphs.fitting(lambda size: size >= num_seqs)

    def _drafting(
        self, step: SchedulerOutput, computed: StepTokens, new: Callable[[], NewTokens]
    ) -> Ready:
        """Drafts for the next step, which some drafters launch here. Without memory for them there
        are none."""
        most, is_alone = step.num_draft_tokens, self._parallel.engine.size == 1
        nothing: Ready = no_proposals
        ready = drafts_or(nothing, lambda: self._drafter.follow(computed, new, most), is_alone)

        def propose(request_ids: Sequence[str]) -> Proposals:
            with torch.inference_mode(), self._cores_for_kernels():
                return drafts_or(Proposals({}), lambda: ready(request_ids), is_alone)

        return propose

    def _sample(
        self,
        logits: Tensor,
        sampled: SampledRows,
        computed: StepTokens,
        step: SchedulerOutput,
        bitmasks: dict[str, Tensor],
        prompt_logprobs: dict[str, list[TokenLogprobs]],
        pooled: dict[str, list[float]],
        step_rows: StepRows,
    ) -> AsyncModelRunnerOutput:
        batch, rows, num_rows = self.batch, sampled.rows, len(sampled.rows)
        tokens, reported, logprobs = self._next_tokens(logits, sampled, bitmasks)
        self._copies.reverse()
        host = self._copies[0][:num_rows]
        host.copy_(reported, non_blocking=True)
        drafts, copied = step.scheduled_spec_decode_tokens, None
        if self.device.type == "cuda":  # before what drafts, for which the host does not wait
            copied = torch.cuda.Event()
            copied.record()
        is_draft, verification, in_flight = bool(drafts), None, self._drafter.in_flight
        drawn = draw_lots(batch, drafts, self.config.speculative_config)
        new = partial(new_tokens, batch, sampled, tokens, computed.input_ids, drawn)
        propose = self._drafting(step, computed, new)
        if is_draft or step.num_draft_tokens:
            verification = Verification(drafts, propose, drawn, in_flight)
        if self.async_scheduling:
            batch.sampled_at.fill(-1)
            if not is_draft:
                self._inputs.sampled[:num_rows] = tokens
                batch.sampled_at[rows] = np.arange(num_rows)
        ids = [batch.requests[row].request_id for row in rows]
        entries: dict[str, list[TokenLogprobs]] = {}
        for index, entry in logprobs.items():
            entries.setdefault(ids[index], []).append(entry)
        return AsyncModelRunnerOutput(
            batch=batch,
            request_ids=list(dict.fromkeys(ids)),
            places=None if is_draft else batch.reserve_tokens(rows),
            tokens=host,
            copied=copied,
            logprobs=entries,
            prompt_logprobs=prompt_logprobs,
            pooled=pooled,
            rows=step_rows,
            verification=verification,
            watch=self._watch,
            first_broken=self._watch.first if self._watch is not None else None,
            timeout_s=self._parallel.timeout_s,
        )

    def _next_tokens(
        self, logits: Tensor, sampled: SampledRows, bitmasks: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[int, TokenLogprobs]]:
        """Sampled tokens, the same on all pipeline stages; the tokens with broken ones marked, on
        the last stage; and logprobs. Tensor-parallel ranks have equal logits and so sample equal
        tokens."""
        stages = self._parallel.pipeline
        if not stages.is_last:
            tokens = torch.empty(len(sampled.rows), dtype=torch.int64, device=self.device)
            tokens = stages.broadcast(tokens, stages.size - 1)
            return tokens, tokens, {}
        settings = sampling_batch(self.batch, sampled, bitmasks)
        logits = widened(logits, settings, self._ops)
        tokens, logprobs = sample(logits, settings, self._ops)
        return stages.broadcast(tokens, stages.size - 1), mark_broken(logits, tokens), logprobs

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in scheduler_output.removed_request_ids:
            self.batch.drop(request_id)
            self._prompt_logprobs.drop(request_id)
            self._drafter.drop(request_id)
        new_reqs = scheduler_output.scheduled_new_reqs
        for new in new_reqs:
            self.batch.add(new.request, new.num_computed_tokens)
            self._prompt_logprobs.add(new.request)
            self._drafter.add(new.request, new.num_computed_tokens)
        restored = [(n.state_slot, n.request.request_id) for n in new_reqs if n.state_slot]
        copy_states(self._state_layers, [(slot, self.batch.state_slot(i)) for slot, i in restored])
        for request_id, blocks in scheduler_output.new_block_ids.items():
            self.batch.append_blocks(request_id, blocks)
            self._drafter.take(blocks[0])
        self.batch.put_drafts(scheduler_output.scheduled_spec_decode_tokens)
