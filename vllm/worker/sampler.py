"""Sampling. A row's result depends on that row alone, never on the batch.

Random numbers are a function of (seed, index of the output token): no state is kept between steps,
and a preempted request continues with the same text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from vllm.core.outputs import TokenLogprobs
from vllm.worker.input_buffers import to_device


@dataclass(slots=True)
class RowEdits:
    """Logit edits of one row. history: prompt and output tokens; output: output tokens."""

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
    """Sampling parameters of S rows of logits.

    temperature, top_p, min_p: float32 [S] (temperature 0 is greedy); top_k: int64 [S], 0 for off.
    seeds: uint64 [S]; indices: int64 [S], output tokens so far. num_logprobs: by row, how many
    of the likeliest tokens to report, -1 for all. bitmasks: by row that follows a grammar or may
    have some tokens alone, those, int32 [ceil(vocab / 32)]. named: by row, tokens whose
    log-probabilities to report too.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    indices: np.ndarray
    edits: list[RowEdits] = field(default_factory=list)
    num_logprobs: dict[int, int] = field(default_factory=dict)
    bitmasks: dict[int, Tensor] = field(default_factory=dict)
    named: dict[int, list[int]] = field(default_factory=dict)


def widened(logits: Tensor, batch: SamplingBatch, ops: ModuleType) -> Tensor:
    """The logits in the dtype that `sample` uses: float32, unless `ops` takes theirs and no edit
    applies. To inspect what was sampled from, pass the result to `sample`."""
    is_edited = bool(batch.bitmasks or batch.edits)
    return logits.float() if is_edited or logits.dtype not in ops.LOGIT_DTYPES else logits


def sample(
    logits: Tensor, batch: SamplingBatch, ops: ModuleType
) -> tuple[Tensor, dict[int, TokenLogprobs]]:
    """logits [S, vocab] (float32 ones are changed in place) -> tokens int64 [S], logprobs by row.

    Logits of any type are edited and reported as float32. The tokens are on the device of the
    logits; nothing waits for them unless logprobs are wanted.
    """
    reported = sorted(batch.num_logprobs)
    raw = logits[reported] if reported else None
    logits = widened(logits, batch, ops)
    if batch.bitmasks:
        ban_others(logits, batch.bitmasks)
    if batch.edits:
        _apply_edits(logits, batch.edits)
    numbers = uniforms(batch.seeds, batch.indices)
    draws, top_k, temperature, top_p, min_p = _on_device(
        (numbers, batch.top_k, batch.temperature, batch.top_p, batch.min_p), logits.device
    )
    tokens = ops.sample_tokens(logits, temperature, top_k, top_p, min_p, draws).to(logits.device)
    if raw is None:
        return tokens, {}
    counts = [batch.num_logprobs[row] for row in reported]
    entries = dict(zip(reported, gather_logprobs(raw, tokens[reported], counts)))
    if batch.named:
        _add_named(entries, raw, reported, batch.named)
    return tokens, entries


def _add_named(
    entries: dict[int, TokenLogprobs],
    raw: Tensor,
    reported: list[int],
    named: dict[int, list[int]],
) -> None:
    """Adds the tokens that rows name to their entries. raw: logits [reported rows, vocab]."""
    for place, row in enumerate(reported):
        if row not in named:
            continue
        logprobs = torch.log_softmax(raw[place], dim=-1, dtype=torch.float32)
        values = logprobs[to_device(np.array(named[row], np.int64), raw.device)]
        ranks = (logprobs > values[:, None]).sum(dim=1) + 1
        entry = entries[row]
        entry.token_ids += named[row]
        entry.logprobs += values.tolist()
        entry.named_ranks = ranks.tolist()


def ban_others(logits: Tensor, bitmasks: dict[int, Tensor]) -> None:
    """-inf in rows of logits [S, vocab] for tokens whose bit is 0: bit t % 32 of word t // 32 of a
    bitmask int32 [words] says whether token t is allowed, as xgrammar fills it in. Its own function
    for this compiles a kernel at the first call on a GPU, while all requests wait."""
    device, vocab = logits.device, logits.shape[1]
    rows = to_device(np.fromiter(bitmasks, np.int64), device)
    octets = to_device(torch.stack([*bitmasks.values()]).numpy(), device).view(torch.uint8)
    assert vocab <= 8 * octets.shape[1]
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    is_banned = (octets.unsqueeze(-1) & bits).flatten(1)[:, :vocab] == 0
    logits.index_copy_(0, rows, logits[rows].masked_fill(is_banned, -torch.inf))


def _on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as tensors, moved by one copy; wider dtypes first, for alignment."""
    packed = to_device(np.concatenate([array.view(np.uint8) for array in arrays]), device)
    pieces = packed.split([array.nbytes for array in arrays])
    return [piece.view(torch.from_numpy(array).dtype) for piece, array in zip(pieces, arrays)]


def gather_logprobs(logits: Tensor, tokens: Tensor, counts: list[int]) -> list[TokenLogprobs]:
    """Log-probabilities of `tokens` [S] and of the counts[i] likeliest ones of each row; of all
    tokens for a count of -1."""
    counts = [logits.shape[1] if count < 0 else count for count in counts]
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
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
    """Uniform numbers in [0, 1), float64: output number `indices` of splitmix64 seeded `seeds`
    (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)."""
    z = seeds + (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: np.ndarray = (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _apply_edits(logits: Tensor, edits: Sequence[RowEdits]) -> None:
    """In place, for float32 logits [S, vocab]; without host synchronisation."""
    vocab = logits.shape[1]
    if (found := _places(logits, edits, lambda edit: _repeated(edit, vocab))) is not None:
        rows, tokens, penalty = found
        values = logits[rows, tokens]
        values = torch.where(values > 0, values / penalty, values * penalty)
        logits.index_put_((rows, tokens), values)
    for changes_of in (_penalties, _biases):
        if (found := _places(logits, edits, changes_of)) is not None:
            rows, tokens, change = found
            logits.index_put_((rows, tokens), logits[rows, tokens] + change)
    if (found := _places(logits, edits, _bans)) is not None:
        rows, tokens, ban = found
        before = logits[rows, tokens]
        logits.index_put_((rows, tokens), ban)
        # A complete grammar allows nothing else.
        is_hopeless = logits.isneginf().all(1)[rows]
        logits.index_put_((rows, tokens), torch.where(is_hopeless, before, ban))


_Changes = tuple[np.ndarray, np.ndarray | float]
"""Tokens of a row, each once, and a number for each or for all."""


def _repeated(edit: RowEdits, vocab: int) -> _Changes | None:
    if edit.history is None or edit.repetition_penalty == 1.0:
        return None
    is_there = np.zeros(vocab, np.bool_)  # a third of the time that sorting takes
    is_there[edit.history] = True
    return np.flatnonzero(is_there), edit.repetition_penalty


def _penalties(edit: RowEdits) -> _Changes | None:
    if edit.output is None or not (edit.presence_penalty or edit.frequency_penalty):
        return None
    tokens, counts = np.unique(edit.output, return_counts=True)
    return tokens, -(edit.presence_penalty + edit.frequency_penalty * counts)


def _biases(edit: RowEdits) -> _Changes | None:
    biases = edit.logit_bias
    return (np.array([*biases]), np.array([*biases.values()])) if biases else None


def _bans(edit: RowEdits) -> _Changes | None:
    return (np.unique(edit.banned), -np.inf) if edit.banned else None


def _places(
    logits: Tensor, edits: Sequence[RowEdits], changes_of: Callable[[RowEdits], _Changes | None]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows and tokens int64 [places] and numbers float32 [places] of all changes; None for none."""
    changes = [(edit.row, changed) for edit in edits if (changed := changes_of(edit)) is not None]
    rows = [np.full(len(tokens), row, np.int64) for row, (tokens, _) in changes]
    places = [tokens.astype(np.int64) for _, (tokens, _) in changes]
    numbers = [np.broadcast_to(value, len(tokens)) for _, (tokens, value) in changes]
    if not sum(map(len, places)):
        return None
    whole = np.concatenate(rows), np.concatenate(places), np.concatenate(numbers, dtype=np.float32)
    first, second, third = _on_device(whole, logits.device)
    return first, second, third
