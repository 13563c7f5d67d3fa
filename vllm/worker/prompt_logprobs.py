"""Logprobs of prompt tokens, collected over the chunks of a prompt."""

from collections.abc import Callable
from itertools import chain

import numpy as np
from torch import Tensor

from vllm.core.outputs import TokenLogprobs
from vllm.core.request import Request
from vllm.worker.input_batch import InputBatch
from vllm.worker.input_buffers import to_device
from vllm.worker.sampler import gather_logprobs

# Rows of logits at once: prompt length times vocabulary can be gigabytes.
MOST_PROMPT_ROWS = 64


class PromptLogprobs:
    """Partial prompt logprobs by request; false where no request asks for them. compute_logits: of
    hidden states [S, hidden], on the last pipeline stage; None on the others."""

    def __init__(self, batch: InputBatch, compute_logits: Callable[[Tensor], Tensor] | None):
        self._batch = batch
        self._compute_logits = compute_logits
        self._entries: dict[str, list[TokenLogprobs]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def request_ids(self) -> frozenset[str]:
        """Of prompts that are not complete."""
        return frozenset(self._entries)

    def add(self, request: Request) -> None:
        if request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0:
            self._entries[request.request_id] = []

    def drop(self, request_id: str) -> None:
        self._entries.pop(request_id, None)

    def take(
        self,
        hidden: Tensor,
        rows: np.ndarray,
        ends: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
    ) -> dict[str, list[TokenLogprobs]]:
        """Adds the logprobs of a step with hidden states [T, hidden]; returns those of complete
        prompts. ends: end of each request's `counts` tokens in the step; starts: position of the
        first of them in the request."""
        finished: dict[str, list[TokenLogprobs]] = {}
        if not self._entries:
            return finished
        for row, end, count, start in zip(rows, ends, counts, starts):
            request = self._batch.requests[row]
            entries = self._entries.get(request.request_id)
            if entries is None:
                continue
            num_prompt = request.num_prompt_tokens
            first, last = end - count, end - count + min(count, num_prompt - 1 - start)
            targets = self._batch.token_ids[row, start + 1 : start + 1 + last - first]
            entries += self._predicted(hidden[first:last], targets, request)
            if start + count >= num_prompt:
                finished[request.request_id] = self._entries.pop(request.request_id)
        return finished

    def _predicted(
        self, hidden: Tensor, targets: np.ndarray, request: Request
    ) -> list[TokenLogprobs]:
        if self._compute_logits is None:
            return []
        count = request.sampling.prompt_logprobs
        assert count is not None
        tokens = to_device(targets.astype(np.int64), hidden.device)
        return list(
            chain.from_iterable(
                gather_logprobs(self._compute_logits(h), t, [count] * len(t))
                for h, t in zip(hidden.split(MOST_PROMPT_ROWS), tokens.split(MOST_PROMPT_ROWS))
                if len(t)
            )
        )
