"""From logits to tokens. A row's result depends on that row alone, never on the batch.

Random numbers are a function of (seed, index of the output token), so nothing has to be kept
between steps and a request that is preempted and computed anew continues with the same text.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm.engine.request import TokenLogprobs

# Filters look at this many of the likeliest tokens first; a row whose kept tokens do not lie
# within them is sorted whole.
_SHORT_LIST = 1024


@dataclass(slots=True)
class RowEdits:
    """Changes to the logits of one row. history: prompt and output tokens; output: output ones."""

    row: int
    logit_bias: dict[int, float] | None = None
    banned: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: np.ndarray | None = None
    output: np.ndarray | None = None


@dataclass(slots=True)
class SamplingBatch:
    """What S rows of logits are sampled with.

    temperature, top_p, min_p: float32 [S] (temperature 0 is greedy); top_k: int64 [S], 0 for off.
    seeds: uint64 [S]; indices: int64 [S], output tokens so far. num_logprobs: by row, how many
    of the likeliest tokens to report. bitmask: int32 [S, ceil(vocab / 32)] of allowed tokens.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray
    edits: list[RowEdits] = field(default_factory=list)
    num_logprobs: dict[int, int] = field(default_factory=dict)
    bitmask: Tensor | None = None


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[np.ndarray, dict[int, TokenLogprobs]]:
    """logits float32 [S, vocab] (changed in place) -> tokens int64 [S], logprobs by row."""
    reported = sorted(batch.num_logprobs)
    raw = logits[reported] if reported else None
    if batch.bitmask is not None:
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, batch.bitmask)
    for edit in batch.edits:
        _apply_edits(logits[edit.row], edit)
    tokens = np.empty(len(logits), np.int64)
    greedy = batch.temperature == 0
    if greedy.all():
        tokens[:] = logits.argmax(dim=-1).numpy()
    else:
        if greedy.any():
            tokens[greedy] = logits[torch.from_numpy(greedy)].argmax(dim=-1).numpy()
        _sample_randomly(logits, batch, ~greedy, tokens)
    if raw is None:
        return tokens, {}
    counts = [batch.num_logprobs[row] for row in reported]
    entries = gather_logprobs(raw, torch.from_numpy(tokens[reported]), counts)
    return tokens, dict(zip(reported, entries))


def gather_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [S] and of the counts[i] likeliest ones of each row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    taken = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > taken).sum(dim=1) + 1
    top = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    rows = zip(
        tokens.tolist(), taken[:, 0].tolist(), ranks.tolist(),
        top.indices.tolist(), top.values.tolist(), counts,
    )  # fmt: skip
    return [
        TokenLogprobs([token, *ids[:count]], [logprob, *values[:count]], rank)
        for token, logprob, rank, ids, values, count in rows
    ]


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Uniform numbers in [0, 1), float64: output number `indices` of splitmix64 seeded `seeds`.

    splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _apply_edits(row: Tensor, edit: RowEdits) -> None:
    if edit.history is not None and edit.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(edit.history).astype(np.int64))
        values, penalty = row[seen], edit.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if edit.output is not None and (edit.presence_penalty or edit.frequency_penalty):
        ids, counts = np.unique(edit.output, return_counts=True)
        penalty = edit.presence_penalty + edit.frequency_penalty * counts
        row[torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(penalty).to(row.dtype)
    for token, bias in (edit.logit_bias or {}).items():
        row[token] += bias
    if edit.banned:
        row[list(edit.banned)] = -torch.inf


def _sample_randomly(
    logits: Tensor, batch: SamplingBatch, rows: np.ndarray, tokens: np.ndarray
) -> None:
    draws = uniforms(batch.seeds, batch.indices)
    filtered = rows & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0))
    whole = np.flatnonzero(rows & ~filtered)
    if len(whole):
        scaled = _scaled(logits, batch, whole)
        tokens[whole] = _draw(torch.softmax(scaled, dim=-1), draws[whole])
    pending = np.flatnonzero(filtered)
    size = logits.shape[1]
    for length in (min(_SHORT_LIST, size), size):
        if len(pending) == 0:
            break
        top = _scaled(logits, batch, pending).topk(length, dim=-1)
        log_total = torch.logsumexp(_scaled(logits, batch, pending), dim=-1, keepdim=True)
        kept, complete = _filter(top.values, log_total, batch, pending)
        choice = torch.from_numpy(_draw(kept, draws[pending]))
        chosen = top.indices.gather(1, choice[:, None])[:, 0].numpy()
        done = complete.numpy() | (length == size)
        tokens[pending[done]] = chosen[done]
        pending = pending[~done]


def _scaled(logits: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
    return logits[torch.from_numpy(rows)] / torch.from_numpy(batch.temperature[rows])[:, None]


def _filter(
    values: Tensor, log_total: Tensor, batch: SamplingBatch, rows: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Probabilities of sorted logits `values` after top-k, then top-p, then min-p.

    Also tells, by row, whether everything that is kept lies within `values`. top-p counts the
    mass of what top-k left.
    """
    length = values.shape[1]
    top_k = torch.from_numpy(batch.top_k[rows])[:, None]
    top_p = torch.from_numpy(batch.top_p[rows])[:, None]
    min_p = torch.from_numpy(batch.min_p[rows])[:, None]
    inside_k = (top_k == 0) | (torch.arange(length) < top_k)
    values = values.masked_fill(~inside_k, -torch.inf)
    is_limited = (top_k > 0) & (top_k <= length)
    total = torch.where(is_limited, torch.logsumexp(values, dim=-1, keepdim=True), log_total)
    probabilities = torch.exp(values - total)
    before = probabilities.cumsum(dim=-1) - probabilities
    inside_p = (before < top_p) | (top_p >= 1)
    inside_min = probabilities >= min_p * probabilities[:, :1]
    kept = probabilities * (inside_p & inside_min)
    ends_inside = is_limited | ~inside_p[:, -1:] | ~inside_min[:, -1:]
    return kept, ends_inside[:, 0]


def _draw(weights: Tensor, draws: np.ndarray) -> np.ndarray:
    """Index i of each row with probability weights[i] / sum(weights), by inverting the sum."""
    sums = weights.cumsum(dim=-1)
    points = torch.from_numpy(draws.astype(np.float32))[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, points, right=True)[:, 0]
    # Rounding may carry a point up to the sum itself: take the last token that has weight.
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum(index, last).numpy()
