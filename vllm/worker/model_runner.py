"""Runs the model: from a step of the scheduler to the next token of each request."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.engine.request import Request, TokenLogprobs
from vllm.engine.scheduler import Step
from vllm.kernels.selection import Selection
from vllm.model_executor.context import ForwardBatch
from vllm.model_executor.model_loader import load_model
from vllm.ops import usable_ops
from vllm.ops.paged_attention import AttentionBatch
from vllm.worker.input_batch import InputBatch
from vllm.worker.kv_cache import allocate_kv_cache, fit_max_model_len
from vllm.worker.sampler import RowEdits, SamplingBatch, gather_logprobs, sample

# Rows of logits made at once for prompt logprobs: a prompt times a vocabulary can be gigabytes.
_PROMPT_LOGITS_ROWS = 64


@dataclass(slots=True)
class StepResult:
    """tokens: the next token by request. logprobs: by request, where asked for.

    prompt_logprobs: by request, once, with the step that completes the prompt; the first token
    of a prompt has none.
    """

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


class ModelRunner:
    """The model with its KV cache and the batch it works on."""

    def __init__(self, config: VllmConfig, selection: Selection):
        with torch.inference_mode():
            self.model = load_model(config, selection)
            self.num_blocks = allocate_kv_cache(self.model, config)
        self.config = config = fit_max_model_len(config, self.num_blocks)
        self.batch = InputBatch(
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            config.cache_config.block_size,
        )
        self._ops = usable_ops()
        self._prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def execute(self, step: Step, bitmasks: dict[str, Tensor]) -> StepResult:
        """Computes a step. bitmasks: allowed tokens of requests that follow a grammar."""
        with torch.inference_mode(), self._cores_for_kernels():
            return self._execute(step, bitmasks)

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

    def _execute(self, step: Step, bitmasks: dict[str, Tensor]) -> StepResult:
        self._update_batch(step)
        rows = np.array([self.batch.row_of[i] for i in step.num_tokens], np.int64)
        counts = np.fromiter(step.num_tokens.values(), np.int64, len(rows))
        starts = self.batch.num_computed[rows]
        hidden = self.model(self._forward_batch(rows, counts, starts))
        ends = np.cumsum(counts)
        self.batch.num_computed[rows] = starts + counts
        prompt_logprobs = self._report_prompts(hidden, rows, ends, counts, starts)
        complete = np.flatnonzero(self.batch.num_computed[rows] == self.batch.num_tokens[rows])
        if len(complete) == 0:
            return StepResult({}, prompt_logprobs=prompt_logprobs)
        sampled_rows = rows[complete]
        logits = self.model.compute_logits(hidden[torch.from_numpy(ends[complete] - 1)])
        tokens, logprobs = sample(logits, self._sampling_batch(sampled_rows, bitmasks), self._ops)
        self.batch.append_tokens(sampled_rows, tokens)
        ids = [self.batch.requests[row].request_id for row in sampled_rows]
        return StepResult(
            dict(zip(ids, tokens.tolist())),
            {ids[index]: entry for index, entry in logprobs.items()},
            prompt_logprobs,
        )

    def _update_batch(self, step: Step) -> None:
        for request_id in step.dropped:
            self.batch.drop(request_id)
            self._prompt_logprobs.pop(request_id, None)
        for admission in step.admitted:
            request = admission.request
            self.batch.add(request, admission.num_computed_tokens)
            if request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0:
                self._prompt_logprobs[request.request_id] = []
        for request_id, blocks in step.new_blocks.items():
            self.batch.append_blocks(request_id, blocks)

    def _forward_batch(
        self, rows: np.ndarray, counts: np.ndarray, starts: np.ndarray
    ) -> ForwardBatch:
        batch, size = self.batch, self.batch.block_size
        query_start_loc = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        token_rows = np.repeat(rows, counts)
        num_tokens = len(token_rows)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], counts)
        slots = batch.block_table[token_rows, positions // size].astype(np.int64) * size
        seq_lens = starts + counts
        max_blocks = -(-int(seq_lens.max()) // size)
        return ForwardBatch(
            input_ids=torch.from_numpy(batch.token_ids[token_rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            attention=AttentionBatch(
                query_start_loc=torch.from_numpy(query_start_loc),
                seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
                block_tables=torch.from_numpy(batch.block_table[rows, :max_blocks]),
                slot_mapping=torch.from_numpy(slots + positions % size),
            ),
        )

    def _sampling_batch(self, rows: np.ndarray, bitmasks: dict[str, Tensor]) -> SamplingBatch:
        batch = self.batch
        requests = [batch.requests[row] for row in rows]
        return SamplingBatch(
            temperature=batch.temperature[rows],
            top_k=batch.top_k[rows],
            top_p=batch.top_p[rows],
            min_p=batch.min_p[rows],
            seeds=batch.seeds[rows],
            indices=batch.num_tokens[rows] - batch.num_prompt[rows],
            edits=[
                edit
                for index, request in enumerate(requests)
                if (edit := self._edits(index, rows[index], request)) is not None
            ],
            num_logprobs={
                index: request.sampling.logprobs
                for index, request in enumerate(requests)
                if request.sampling.logprobs is not None
            },
            bitmask=_stack_bitmasks(requests, bitmasks),
        )

    def _edits(self, index: int, row: int, request: Request) -> RowEdits | None:
        s = request.sampling
        num_prompt, num_tokens = self.batch.num_prompt[row], self.batch.num_tokens[row]
        holds_back = num_tokens - num_prompt < s.min_tokens
        penalises = (
            s.repetition_penalty != 1.0 or s.presence_penalty != 0 or s.frequency_penalty != 0
        )
        if not (penalises or s.logit_bias or holds_back):
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

    def _report_prompts(
        self,
        hidden: Tensor,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
    ) -> dict[str, list[TokenLogprobs]]:
        """Logprobs of the prompt tokens that this step's positions predict."""
        finished = {}
        if not self._prompt_logprobs:
            return finished
        for row, end, count, start in zip(rows, ends, counts, starts):
            request = self.batch.requests[row]
            entries = self._prompt_logprobs.get(request.request_id)
            if entries is None:
                continue
            num_prompt = request.num_prompt_tokens
            first, last = end - count, end - count + min(count, num_prompt - 1 - start)
            targets = self.batch.token_ids[row, start + 1 : start + 1 + last - first]
            entries += self._prompt_entries(hidden[first:last], targets, request)
            if start + count >= num_prompt:
                finished[request.request_id] = self._prompt_logprobs.pop(request.request_id)
        return finished

    def _prompt_entries(
        self, hidden: Tensor, targets: np.ndarray, request: Request
    ) -> list[TokenLogprobs]:
        count = request.sampling.prompt_logprobs
        assert count is not None
        tokens = torch.from_numpy(targets.astype(np.int64))
        pieces = zip(hidden.split(_PROMPT_LOGITS_ROWS), tokens.split(_PROMPT_LOGITS_ROWS))
        return list(
            chain.from_iterable(
                gather_logprobs(self.model.compute_logits(h), t, [count] * len(t))
                for h, t in pieces
                if len(t)
            )
        )


def _stack_bitmasks(requests: list[Request], bitmasks: dict[str, Tensor]) -> Tensor | None:
    """One row per request; all tokens allowed where there is no grammar."""
    if not bitmasks:
        return None
    everything = torch.full_like(next(iter(bitmasks.values())), -1)
    return torch.stack([bitmasks.get(r.request_id, everything) for r in requests])
