"""Drafts by prompt lookup: what followed the last tokens earlier."""

from collections.abc import Sequence

import numpy as np

from vllm.config.speculative import SpeculativeConfig
from vllm.worker.drafts import Drafter, Proposals
from vllm.worker.input_batch import InputBatch


def propose(tokens: np.ndarray, most: int, shortest: int, longest: int) -> list[int]:
    """Up to `most` tokens that may follow `tokens` [n]: those after an earlier place with the same
    last tokens, as many as match up to `longest`, and `shortest` at least. Of several such places,
    the last one that enough tokens follow."""
    end = len(tokens) - 1
    places = np.flatnonzero(tokens[:end] == tokens[end])
    found = places[:0]
    for size in range(1, longest + 1):
        if not len(places):
            break
        if size >= shortest:
            found = places
        places = places[places >= size]
        places = places[tokens[places - size] == tokens[end - size]]
    if not len(found):
        return []
    whole = np.searchsorted(found, end - most, side="right")
    start = found[whole - 1 if whole else 0] + 1
    proposed: list[int] = tokens[start : start + most].tolist()
    return proposed


class NgramDrafter(Drafter):
    def __init__(self, config: SpeculativeConfig, batch: InputBatch):
        self._config, self._batch = config, batch

    def propose(self, request_ids: Sequence[str], most: int) -> Proposals:
        config, batch, drafts = self._config, self._batch, {}
        rows = [batch.row_of.get(request_id) for request_id in request_ids] if most else []
        for request_id, row in zip(request_ids, rows):
            if row is None or batch.wants_pooling[row]:
                continue
            tokens = batch.token_ids[row, : batch.num_tokens[row]]
            draft = propose(tokens, most, config.prompt_lookup_min, config.prompt_lookup_max)
            if draft:
                drafts[request_id] = draft
        return Proposals(drafts)
