"""Runs the model: from a step of the scheduler to the next token of each request."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.core.request import Request, TokenLogprobs
from vllm.core.scheduler import Step
from vllm.distributed.groups import wait_for
from vllm.distributed.parallel import Parallel
from vllm.kernels.device_ops import usable_ops
from vllm.kernels.jit.monitor import MONITOR
from vllm.kernels.jit.ready import WarmUp
from vllm.kernels.selection import Selection
from vllm.logger import get_logger
from vllm.model_executor.layers.attention import Attention, planners
from vllm.model_executor.model_loader import load_model
from vllm.utils.startup import StartupReport
from vllm.utils.torch_utils import naming_the_knob
from vllm.worker.cuda_graph import (
    CudaGraphs,
    PromptShape,
    bucket_sizes,
    captured_prompts,
    decode_shape,
    prompt_shape,
)
from vllm.worker.first_calls import HANG_SECONDS, FirstCalls
from vllm.worker.input_batch import InputBatch, make_batch
from vllm.worker.input_buffers import to_device
from vllm.worker.kv_cache import allocate_kv_cache, fit_max_model_len
from vllm.worker.numerics import BROKEN, NumericsWatch, mark_broken
from vllm.worker.prompt_logprobs import PromptLogprobs
from vllm.worker.sampler import RowEdits, SamplingBatch, sample, widened
from vllm.worker.state_cache import allocate_states, copy_states, state_layers
from vllm.worker.step_inputs import StepInputs
from vllm.worker.warm_up import begin_warm_up, finish_warm_up

logger = get_logger(__name__)


@dataclass(slots=True)
class StepResult:
    """tokens: the next token by request. logprobs: by request, where asked for.

    prompt_logprobs: by request, once, with the step that completes the prompt; the first token
    of a prompt has none. broken: why requests got no token; their logits were not finite.
    num_compiled: kernels that were compiled since the step before, which should be none.
    """

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    num_compiled: int = 0


@dataclass(slots=True)
class LaunchedStep:
    """A step on its way. On a GPU it may still run; the next one can be launched meanwhile.

    places: where each request's token goes in the batch. copied: when `tokens` (host memory) hold
    them; None where they do at once. watch: of the layers, where --debug-numerics is set;
    first_broken: the first it had found when the step was launched. timeout_s: how long to wait.
    """

    batch: InputBatch
    request_ids: list[str]
    places: np.ndarray
    tokens: Tensor
    copied: torch.cuda.Event | None
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    watch: NumericsWatch | None = None
    first_broken: str | None = None
    timeout_s: float | None = None

    def result(self) -> StepResult:
        """Waits for the step's end. To be called once, in the order of launching."""
        if self.copied is not None:
            wait_for(self.copied, self.timeout_s)
        self.batch.put_tokens(self.request_ids, self.places, self.tokens.numpy())
        tokens = dict(zip(self.request_ids, self.tokens.tolist()))
        broken = {}
        if BROKEN in tokens.values():
            reason = self._what_broke()
            broken = {name: reason for name, token in tokens.items() if token == BROKEN}
            tokens = {name: token for name, token in tokens.items() if token != BROKEN}
        num_compiled = MONITOR.take()
        return StepResult(tokens, self.logprobs, self.prompt_logprobs, broken, num_compiled)

    def _what_broke(self) -> str:
        text = "the model's logits for the next token are NaN or infinite"
        if self.watch is None:
            return f"{text}; start with --debug-numerics to learn in which layer that begins"
        self.watch.reset()  # the next failure may begin elsewhere
        return f"{text}; the first output that is not finite is that of {self.first_broken}"


class ModelRunner:
    """The model with its KV cache and the batch it works on.

    runs_ahead: a step may be launched before the result of the one before it was taken; of two
    before it, the first must have been.
    """

    def __init__(
        self,
        config: VllmConfig,
        selection: Selection,
        report: StartupReport,
        parallel: Parallel | None = None,
    ):
        """parallel: the ranks that share the model with this one; None: it is alone."""
        self._parallel = parallel = parallel or Parallel()
        self.device = torch.device(selection.device.kind)
        self._ops = usable_ops(selection.device.kind)
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self._warm_up: WarmUp | None = None
        with torch.inference_mode():
            with report.phase("weights"), naming_the_knob("--tensor-parallel-size (higher)"):
                self.model = load_model(config, selection, parallel, self._begin_warm_up)
                parallel.meet("loaded")
            hang_s = min(HANG_SECONDS, (parallel.timeout_s or math.inf) / 2)  # before peers give up
            calls = FirstCalls(self.model, selection, hang_s)
            with report.phase("compiling"), naming_the_knob("--max-num-batched-tokens (lower)"):
                finish_warm_up(self._warm_up)
                self._call_kernels(calls, config)
            is_eager = config.model_config.enforce_eager or config.parallel_config.needs_eager
            is_eager |= selection.needs_eager
            self._prompt_shapes = captured_prompts(
                config, is_eager or self.device.type == "cpu", bool(planners(self.model))
            )
            with report.phase("largest step"), naming_the_knob("--max-num-batched-tokens (lower)"):
                state_bytes = allocate_states(self.model, config, self.device)
                peak_bytes = self._peak_bytes(calls, config) if self.device.type == "cuda" else 0
            with report.phase("KV cache"), naming_the_knob("--gpu-memory-utilization (lower)"):
                self.num_blocks = allocate_kv_cache(
                    self.model, config, self.device, peak_bytes, state_bytes, parallel.engine.least
                )
        self.config = config = fit_max_model_len(config, self.num_blocks, self.device.type)
        scheduler = config.scheduler_config
        self.batch = make_batch(config)
        self._inputs = StepInputs(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            self.batch.block_table.shape[1],
            self.batch.block_size,
            self.device,
        )
        self._inputs.planners = planners(self.model)
        self._state_layers = state_layers(self.model)
        compute_logits = self.model.compute_logits if parallel.pipeline.is_last else None
        self._prompt_logprobs = PromptLogprobs(self.batch, compute_logits)
        self.runs_ahead = self.device.type == "cuda"
        self._copies = [
            torch.zeros(scheduler.max_num_seqs, dtype=torch.int64, pin_memory=self.runs_ahead)
            for _ in range(2)
        ]
        self._graphs: CudaGraphs[int] | None = None
        self._prompt_graphs: CudaGraphs[PromptShape] | None = None
        if self.device.type == "cuda":
            self._make_decoding_ready(config, report, is_eager)
        # Not of steps before requests, whose numbers mean nothing.
        debugs = config.model_config.debug_numerics
        self._watch = NumericsWatch(self.model) if debugs else None

    def _begin_warm_up(self, selection: Selection) -> None:
        """While weights are read, compilers run."""
        if self.device.type == "cuda":
            self._warm_up = begin_warm_up(selection, self._max_tokens)

    def _call_kernels(self, calls: FirstCalls, config: VllmConfig) -> None:
        """On a CPU, where nothing compiles and time is short, with one token."""
        if self.device.type == "cpu":
            calls.of_weights(1, 1)
            return
        num_seqs = config.scheduler_config.max_num_seqs
        calls.of_weights(self._max_tokens, num_seqs, self._parallel.data.size)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _peak_bytes(self, calls: FirstCalls, config: VllmConfig) -> int:
        """Memory that the largest step allocates on the way, measured without a cache: of one
        request, and of as many as there can be, for each of which kernels may keep something."""
        num_tokens = config.scheduler_config.max_num_batched_tokens
        num_seqs = config.scheduler_config.max_num_seqs
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.kernel.allocate(1, config.cache_config.block_size, self.device)
        self._parallel.token_counts = (num_tokens,) * self._parallel.data.size
        inputs = StepInputs(num_tokens, num_seqs, 1, config.cache_config.block_size, self.device)
        longest, most = config.model_config.max_model_len, min(num_seqs, num_tokens)
        calls.of_attention(inputs, [(num_tokens, 1, num_tokens), (most, most, longest)])
        torch.cuda.reset_peak_memory_stats()
        for count, max_seq_len in ((1, num_tokens), (most, longest)):
            hidden = self.model(inputs.padding(num_tokens, count, max_seq_len))
            self.model.compute_logits(hidden[:num_seqs])
            del hidden
        torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        if self._prompt_shapes:  # graphs keep what their steps need to themselves
            torch.cuda.reset_peak_memory_stats()
            largest = self._prompt_shapes[-1]
            self._parallel.token_counts = (largest.tokens,) * self._parallel.data.size
            self.model(inputs.padding(*largest, max_seq_len=longest))
            torch.cuda.synchronize()
            peak_bytes += torch.cuda.max_memory_allocated() - before
        return peak_bytes

    def _make_decoding_ready(
        self, config: VllmConfig, report: StartupReport, is_eager: bool
    ) -> None:
        """Captures graphs, or decodes once: kernels of few tokens compile at a first call."""
        max_num_seqs = config.scheduler_config.max_num_seqs
        knobs = "--gpu-memory-utilization, --max-num-seqs"
        wants_prompts = bool(self._prompt_shapes)
        with (
            torch.inference_mode(),
            report.phase("small steps" if is_eager else "CUDA graphs"),
            naming_the_knob(f"{knobs}{', --max-prompt-graph-tokens' * wants_prompts} (lower)"),
        ):
            if is_eager:
                for size in {1, min(2, max_num_seqs)}:  # strides of one row may be any
                    self._decode_once(size)
                torch.cuda.synchronize()
            else:
                pool = None
                if wants_prompts:  # first, for they need more memory
                    prepare = self._inputs.pad_prompts
                    self._prompt_graphs = CudaGraphs(
                        self._prompts_once, self._prompt_shapes, prepare=prepare
                    )
                    pool = self._prompt_graphs.pool
                self._graphs = CudaGraphs(self._decode_once, bucket_sizes(max_num_seqs), pool)

    def _decode_once(self, size: int) -> Tensor:
        self._parallel.token_counts = (size,) * self._parallel.data.size
        return self.model.compute_logits(self.model(self._inputs.decode_batch(size)))

    def _prompts_once(self, shape: PromptShape) -> Tensor:
        self._parallel.token_counts = (shape.tokens,) * self._parallel.data.size
        hidden: Tensor = self.model(self._inputs.prompt_batch(shape))
        return hidden

    def drop_graphs(self) -> None:
        """After which steps run eagerly."""
        self._graphs = self._prompt_graphs = None

    def launch(self, step: Step, bitmasks: dict[str, Tensor]) -> LaunchedStep:
        """Starts a step. bitmasks: allowed tokens of requests that follow a grammar.

        Requests whose logits are edited by what they sampled before, and those with a grammar,
        take part only when the results of all steps before were taken.
        """
        with torch.inference_mode(), self._cores_for_kernels():
            if self._warm_up is not None:
                self._warm_up.promote()
            return self._launch(step, bitmasks)

    @contextmanager
    def _cores_for_kernels(self) -> Iterator[None]:
        """Lets torch compute in this thread alone while kernels with threads of their own run.

        torch's threads spin for a while after each of its operations, on the very cores that the
        next kernel needs: that was a third of a step.
        """
        num_threads = torch.get_num_threads()
        if not self._ops.USES_TORCH_THREADS:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)

    def _launch(self, step: Step, bitmasks: dict[str, Tensor]) -> LaunchedStep:
        self._update_batch(step)
        batch = self.batch
        # An engine without requests computes a token of padding with the others.
        self._parallel.token_counts = tuple(max(1, count) for count in step.token_counts)
        if step.is_empty:
            self._compute_padding(step)
            return self._without_tokens({})
        rows = np.array([batch.row_of[i] for i in step.num_tokens], np.int64)
        counts = np.fromiter(step.num_tokens.values(), np.int64, len(rows))
        if counts.max() == 1:
            # Longest first, or attention ends with a long one while most of a GPU has no work.
            rows = rows[np.argsort(-batch.num_computed[rows], kind="stable")]
        starts = batch.num_computed[rows]
        ends = starts + counts
        complete = np.flatnonzero(ends == batch.num_tokens[rows])
        size = self._graph_size(step, counts, complete)
        if size is not None:
            assert self._graphs is not None
            self._inputs.fill_decode(batch, rows, starts, size)
            logits = self._graphs.replay(size)[: len(rows)]
            prompt_logprobs = {}
        else:
            last = np.cumsum(counts) - 1
            hidden = self._hidden(step, rows, counts, starts, complete)
            prompt_logprobs = self._prompt_logprobs.take(hidden, rows, last + 1, counts, starts)
            if len(complete):
                if len(hidden) > len(complete):
                    hidden = hidden[to_device(last[complete], self.device)]
                logits = self.model.compute_logits(hidden)
        batch.num_computed[rows] = ends
        kept = step.kept_states.items()
        copy_states(self._state_layers, [(batch.state_slot(i), slot) for i, slot in kept])
        if len(complete) == 0:
            return self._without_tokens(prompt_logprobs)
        return self._sample(logits, rows[complete], bitmasks, prompt_logprobs)

    def _hidden(
        self,
        step: Step,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        complete: np.ndarray,
    ) -> Tensor:
        """Last hidden states of all tokens of a step with prompts, or of those that are read."""
        last = np.cumsum(counts) - 1
        if self._prompt_graphs is not None:
            num_tokens = int(last[-1]) + 1
            shape = prompt_shape(self._prompt_graphs, num_tokens, len(rows))
            if shape is not None:
                self._inputs.fill(self.batch, rows, counts, starts, shape=shape)
                return self._prompt_graphs.replay(shape)[:num_tokens]
        read = self._read_rows(step, last, complete)
        hidden: Tensor = self.model(self._inputs.fill(self.batch, rows, counts, starts, read))
        return hidden

    def _read_rows(self, step: Step, last: np.ndarray, complete: np.ndarray) -> np.ndarray | None:
        """The tokens of a step whose last hidden state somebody reads; None for all. last: of each
        request.

        Where nothing is sampled it is one that nobody reads, for no kernel takes none. Prompt
        logprobs read all. Engines in lock step count on each other's tokens in every layer.
        """
        if self._prompt_logprobs or step.token_counts or len(complete) > last[-1]:
            return None
        return last[complete] if len(complete) else last[-1:]

    def _without_tokens(self, prompt_logprobs: dict[str, list[TokenLogprobs]]) -> LaunchedStep:
        nothing, no_tokens = np.empty(0, np.int64), self._copies[0][:0]
        return LaunchedStep(self.batch, [], nothing, no_tokens, None, {}, prompt_logprobs)

    def _compute_padding(self, step: Step) -> None:
        """What an engine without requests does where others need its experts."""
        nothing = np.empty(0, np.int64)
        size = self._graph_size(step, nothing, nothing)
        if size is None:
            self.model(self._inputs.padding(1))
            return
        assert self._graphs is not None
        self._inputs.fill_decode(self.batch, nothing, nothing, size)
        self._graphs.replay(size)

    def _graph_size(self, step: Step, counts: np.ndarray, complete: np.ndarray) -> int | None:
        """The captured graph that serves this step; None for a step that has to run eagerly.

        Engines in lock step take the same one: sizes of what they exchange are in it.
        """
        if self._graphs is None:
            return None
        if step.token_counts:
            return decode_shape(self._graphs, max(step.token_counts)) if step.all_decode else None
        is_decode = len(complete) == len(counts) and counts.max() == 1
        if not is_decode or self._prompt_logprobs:
            return None
        return decode_shape(self._graphs, len(counts))

    def _sample(
        self,
        logits: Tensor,
        rows: np.ndarray,
        bitmasks: dict[str, Tensor],
        prompt_logprobs: dict[str, list[TokenLogprobs]],
    ) -> LaunchedStep:
        batch, num_rows = self.batch, len(rows)
        tokens, reported, logprobs = self._next_tokens(logits, rows, bitmasks)
        self._copies.reverse()
        host = self._copies[0][:num_rows]
        host.copy_(reported, non_blocking=True)
        copied = None
        if self.runs_ahead:
            self._inputs.sampled[:num_rows] = tokens
            batch.sampled_at.fill(-1)
            batch.sampled_at[rows] = np.arange(num_rows)
            if self.device.type == "cuda":
                copied = torch.cuda.Event()
                copied.record()
        ids = [batch.requests[row].request_id for row in rows]
        return LaunchedStep(
            batch=batch,
            request_ids=ids,
            places=batch.reserve_tokens(rows),
            tokens=host,
            copied=copied,
            logprobs={ids[index]: entry for index, entry in logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            watch=self._watch,
            first_broken=self._watch.first if self._watch is not None else None,
            timeout_s=self._parallel.timeout_s,
        )

    def _next_tokens(
        self, logits: Tensor, rows: np.ndarray, bitmasks: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[int, TokenLogprobs]]:
        """What the last stage samples, on all stages, for the next step to read; the same with
        broken ones marked, as the last stage knows them; and logprobs. The tensor-parallel ranks
        of a stage have the same logits, and so draw the same tokens."""
        stages = self._parallel.pipeline
        if not stages.is_last:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
            tokens = stages.broadcast(tokens, stages.size - 1)
            return tokens, tokens, {}
        settings = self._sampling_batch(rows, bitmasks)
        logits = widened(logits, settings, self._ops)
        tokens, logprobs = sample(logits, settings, self._ops)
        return stages.broadcast(tokens, stages.size - 1), mark_broken(logits, tokens), logprobs

    def _update_batch(self, step: Step) -> None:
        for request_id in step.dropped:
            self.batch.drop(request_id)
            self._prompt_logprobs.drop(request_id)
        for admission in step.admitted:
            request = admission.request
            self.batch.add(request, admission.num_computed_tokens)
            self._prompt_logprobs.add(request)
        restored = [(a.state_from, a.request.request_id) for a in step.admitted if a.state_from]
        copy_states(self._state_layers, [(slot, self.batch.state_slot(i)) for slot, i in restored])
        for request_id, blocks in step.new_blocks.items():
            self.batch.append_blocks(request_id, blocks)

    def _sampling_batch(self, rows: np.ndarray, bitmasks: dict[str, Tensor]) -> SamplingBatch:
        batch = self.batch
        edits = (
            self._edits(index, rows[index], batch.requests[rows[index]])
            for index in np.flatnonzero(batch.may_edit_logits[rows]).tolist()
        )
        num_logprobs = {}
        for index in np.flatnonzero(batch.wants_logprobs[rows]).tolist():
            count = batch.requests[rows[index]].sampling.logprobs
            assert count is not None
            num_logprobs[index] = count
        return SamplingBatch(
            temperature=batch.temperature[rows],
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            seeds=batch.seeds[rows],
            indices=batch.num_tokens[rows] - batch.num_prompt[rows],
            edits=[edit for edit in edits if edit is not None],
            num_logprobs=num_logprobs,
            bitmasks=self._bitmasks(rows, bitmasks),
        )

    def _edits(self, index: int, row: int, request: Request) -> RowEdits | None:
        s = request.sampling
        num_prompt, num_tokens = self.batch.num_prompt[row], self.batch.num_tokens[row]
        holds_back = num_tokens - num_prompt < s.min_tokens
        if not (s.penalises or s.logit_bias or holds_back):
            return None
        tokens = self.batch.token_ids[row]
        return RowEdits(
            row=index,
            logit_bias=s.logit_bias,
            banned=tuple(request.stop_token_ids) if holds_back else (),
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            history=tokens[:num_tokens],
            output=tokens[num_prompt:num_tokens],
        )

    def _bitmasks(self, rows: np.ndarray, bitmasks: dict[str, Tensor]) -> dict[int, Tensor]:
        """By place among `rows`, for requests that follow a grammar."""
        ids = (self.batch.requests[row].request_id for row in rows) if bitmasks else ()
        return {index: bitmasks[name] for index, name in enumerate(ids) if name in bitmasks}
