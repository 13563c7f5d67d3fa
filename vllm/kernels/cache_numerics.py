"""Whether attention over a paged KV cache, and what writes that cache, compute what they should.

Keys and values of a few requests lie in shuffled pages, with NaN wherever no key of theirs is. The
reference is float32 over keys and values as the cache stores them. The engine compares a backend
before it serves for the first time on a machine (`vllm/worker/kernel_probes.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.architectures.decoder import CHUNKED, SINKS
from vllm.kernels import registry
from vllm.kernels.device_ops import usable_ops
from vllm.kernels.numerics import (
    MAX_ERROR,
    WrongResultError,
    checked_error,
    max_error,
    poison_memory,
)
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.ops import torch_ops
from vllm.ops.paged_attention import AttentionBatch, CacheTarget, HostBatch, PagedAttention
from vllm.utils.fp8 import FP8_MAX
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_of

# Scales of K and of V in an FP8 cache; others have none.
_FP8_SCALES = (0.03, 0.05)
# Sizes of the channels of K and V spread over so many octaves.
_OCTAVES = 3.0
# Scores of a standard deviation of about 2: some keys count much, and none for all.
_QUERY_SIZE = 1.5
# Larger windows are not reached: their keys alone would take the memory of a small model.
_MOST_WINDOW = 4096
# Logits of sinks: about that of the keys that count.
_SINKS = 2.0
# Which requests a step has (`_requests`): kernels for prompts with decodes, for decodes and for a
# prompt alone may be different ones; and those for a few new tokens of each, as draft tokens are.
_STEPS = ((0, 1, 2, 3, 4), (2, 3, 4), (0,), (3, 4, 5))
_IN_PAGES = "in the unused places of pages"


def _requests(window: int) -> tuple[tuple[int, int], ...]:
    """(new tokens, keys) of each: a later part of a prompt, a whole prompt, decodes, the last of
    which is long enough for kernels that cut keys into parts, and a token with a draft token, whose
    keys end with a part of one key. Some have more keys than the window."""
    more = window if window <= _MOST_WINDOW else 0
    return (37, 101 + more), (33, 33), (1, 1), (1, 67), (1, 293 + more), (2, 257 + more)


def attention_comparison(
    problem: AttentionProblem, backend: str, block_size: int, device: torch.device
) -> Callable[[], float]:
    """What makes the kernel, calls it, and returns the largest relative error of a request;
    WrongResultError where that is too large. The reference is computed before that."""
    pages = _Pages(problem, block_size, device)
    steps = [[pages.requests[index] for index in step] for step in _STEPS]

    def run() -> float:
        kernel: PagedAttention = registry.backend(backend).attention(problem, None)
        kernel.k_cache, kernel.v_cache = _caches(pages.cache)
        kernel.k_scale, kernel.v_scale = pages.scales
        kernel.sinks = pages.sinks
        return max(_step_error(kernel, pages, step) for step in steps)

    return run


def _step_error(kernel: PagedAttention, pages: "_Pages", step: "Sequence[_Request]") -> float:
    problem, limit = kernel.problem, max_error(kernel.problem)
    qkv = torch.cat([request.qkv for request in step])
    q, k, v = qkv.split((problem.num_heads, problem.num_kv_heads, problem.num_kv_heads), 1)
    poison_memory(qkv, qkv.numel())
    out = kernel(q, k, v, pages.batch(step)).float()
    lengths = [len(request.qkv) for request in step]
    if len(out) != sum(lengths):
        raise WrongResultError(f"the result for {sum(lengths)} tokens has {len(out)} rows")
    return max(
        checked_error(own, request.expected, limit, request.name, _IN_PAGES)
        for own, request in zip(out.split(lengths), step)
    )


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int = 0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    is_chunked: bool = False,
) -> Tensor:
    """float32 [T, heads, head_dim] of the last T positions q [T, heads, head_dim], with float32 k
    and v [keys, kv heads, head_dim] of all. window, softcap: 0 for none. sinks: float32 [heads],
    logits of keys without values. scale: None for head_dim ** -0.5. is_chunked: a query sees the
    keys of its own chunk of `window` positions."""
    num_new, dim = len(q), q.shape[2]
    by_kv_head = q.float().view(num_new, k.shape[1], -1, dim)
    scores = torch.einsum("qhgd,khd->hgqk", by_kv_head, k) * (scale or dim**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(k), device=k.device)
    behind = position[len(k) - num_new :, None] - position
    limit = position[len(k) - num_new :, None] % window + 1 if is_chunked else window
    is_seen = (behind >= 0) & ((behind < limit) | (window == 0))
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if sinks is not None:
        added = sinks.view(*scores.shape[:2], 1, 1).expand(-1, -1, num_new, -1)
        scores = torch.cat([scores, added], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hgqk,khd->qhgd", weights, v).reshape(q.shape)


# ---------------------------------------------------------------- writes

_NUM_WRITTEN, _NUM_SKIPPED, _NUM_POSITIONS = 41, 3, 512
_EPS = 1e-6
_Rows = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


def write_comparison(
    problem: KVQuantProblem, backend: str, block_size: int, device: torch.device
) -> Callable[[], float]:
    """The same for a kernel that writes K and V. One that rotates K on its way (`CacheWriter`) does
    so with norms of q and k, and without."""
    case = _Writes(problem, block_size, device)

    def run() -> float:
        writer = registry.backend(backend).kv_quant(problem)
        if writer is not None:
            return case.error(
                lambda rows, cache: writer(*rows[1:], *_caches(cache), case.slots, *case.scales),
                case.as_given,
            )
        rotate = usable_ops(device.type).rotary_into_cache

        def rotated(norms: tuple[Tensor, Tensor] | None) -> "_WriteCall":
            def call(rows: _Rows, cache: PagedAttention) -> None:
                target = CacheTarget(rows[2], *_caches(cache), case.slots, *case.scales)
                rotate(case.positions, *rows[:2], target, case.cos_sin, norms, _EPS)

            return call

        return max(
            case.error(rotated(None), case.rotated), case.error(rotated(case.norms), case.normed)
        )

    return run


_WriteCall = Callable[[_Rows, PagedAttention], None]


class _Writes:
    """Tokens of which some have no place in the cache. as_given, rotated, normed: the float32 rows
    that a kernel computes which does nothing else, which rotates, and with norms before that."""

    def __init__(self, problem: KVQuantProblem, block_size: int, device: torch.device):
        heads, dim = problem.num_kv_heads, problem.head_dim
        self._problem, self._block_size, self._device = problem, block_size, device
        self._attention = AttentionProblem(heads, heads, dim, problem.format, problem.dtype)
        draw = _Draw(dim, dtype_of(problem.dtype), device)
        self.scales = _scales(problem.format)
        self._qkv = draw.vectors(_NUM_WRITTEN + _NUM_SKIPPED, 4 * heads)
        self._qkv[..., 0] *= 30  # an FP8 cache saturates
        self._num_pages = cdiv(len(self._qkv), block_size) + 1
        self.slots = draw.shuffled(self._num_pages * block_size)[: len(self._qkv)]
        self.slots[:_NUM_SKIPPED] = -1
        self.positions = draw.shuffled(_NUM_POSITIONS)[: len(self._qkv)]
        angles = torch.outer(torch.arange(_NUM_POSITIONS), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
        self.norms = draw.channels() + 0.5, draw.channels() + 0.5
        self.as_given, self.rotated, self.normed = (self._wide_rows() for _ in range(3))
        q, k, _ = self.rotated
        torch_ops.rotary_embedding(self.positions, q, k, self.cos_sin)
        q, k, _ = self.normed
        torch_ops.qk_norm_rotary(self.positions, q, k, *self.norms, self.cos_sin, _EPS)

    def _rows(self) -> _Rows:
        heads = self._problem.num_kv_heads
        q, k, v = self._qkv.clone().split((2 * heads, heads, heads), 1)
        return q, k, v

    def _wide_rows(self) -> _Rows:
        q, k, v = self._rows()
        return q.float(), k.float(), v.float()

    def error(self, call: _WriteCall, expected: _Rows) -> float:
        """The largest relative error, after a call with the rows and caches of NaN."""
        problem, dtype = self._problem, dtype_of(self._problem.format)
        cache = _poisoned_cache(self._attention, self._num_pages, self._block_size, self._device)
        rows = self._rows()
        call(rows, cache)
        limit = MAX_ERROR[problem.dtype]
        errors = [checked_error(rows[0].float(), expected[0], limit, "q", _IN_PAGES)]
        written = self.slots[_NUM_SKIPPED:]
        places = written // self._block_size, written % self._block_size
        stored = zip("KV", cache.by_token(), self.scales, expected[1:])
        for name, tensor, scale, wide in stored:
            right = _encoded(wide[_NUM_SKIPPED:], scale, dtype).float()
            found = _bits(tensor)[places].view(dtype).float()
            limit = max_error(problem)
            errors.append(checked_error(found, right, limit, f"stored {name}", _IN_PAGES))
            _bits(tensor)[places] = -1
            if not bool((_bits(tensor) == -1).all()):
                raise WrongResultError(f"{name} was written to places of no token")
        return max(errors)


def _caches(cache: PagedAttention) -> tuple[Tensor, Tensor]:
    return cache.k_cache, cache.v_cache


# ---------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """qkv: of its new tokens, [T, heads + 2 kv heads, head_dim], as a projection gives it.
    expected: float32 [T, heads, head_dim]. pages: int64, where its keys lie."""

    qkv: Tensor
    expected: Tensor
    pages: Tensor
    num_keys: int

    @property
    def name(self) -> str:
        return f"{len(self.qkv)} new tokens of {self.num_keys}"


class _Pages:
    """Random requests whose keys and values the cache has."""

    def __init__(self, problem: AttentionProblem, block_size: int, device: torch.device):
        self._problem, self._block_size = problem, block_size
        self._draw = _Draw(problem.head_dim, dtype_of(problem.dtype), device)
        self.scales = _scales(problem.format)
        self.sinks = self._draw.sinks(problem.num_heads) if problem.variant == SINKS else None
        sizes = _requests(problem.sliding_window)
        counts = [cdiv(keys, block_size) for _, keys in sizes]
        num_pages = sum(counts) + 1
        self.cache = _poisoned_cache(problem, num_pages, block_size, device)
        shuffled = self._draw.shuffled(num_pages)
        self._unused = shuffled[-1]
        self.requests = [
            self._request(new, keys, own)
            for (new, keys), own in zip(sizes, shuffled[:-1].split(counts))
        ]

    def _request(self, num_new: int, num_keys: int, pages: Tensor) -> _Request:
        problem, dtype = self._problem, dtype_of(self._problem.format)
        position = torch.arange(num_keys, device=pages.device)
        places = pages[position // self._block_size], position % self._block_size
        new, wide = [], []
        for cache, scale in zip(self.cache.by_token(), self.scales):
            given = self._draw.vectors(num_keys, problem.num_kv_heads)
            stored = _encoded(given.float(), scale, dtype)
            _bits(cache)[places] = _bits(stored)
            new.append(given[num_keys - num_new :])
            wide.append(stored.float() * scale)
        q = self._draw.queries(num_new, problem.num_heads)
        # The same scores whatever they are scaled with.
        q *= problem.head_dim**-0.5 / problem.softmax_scale
        k, v = wide
        options = (
            self.sinks, problem.softmax_scale, problem.softcap, problem.variant == CHUNKED
        )  # fmt: skip
        expected = attention_reference(q, k, v, problem.sliding_window, *options)
        return _Request(torch.cat([q, *new], 1), expected, pages, num_keys)

    def batch(self, requests: Sequence[_Request]) -> AttentionBatch:
        """Of a step with these requests. Unused entries of the block tables are a page of NaN."""
        sizes = [(len(request.qkv), request.num_keys) for request in requests]
        pages = [request.pages for request in requests]
        return batch_of(sizes, pages, self._unused, self._block_size)


def batch_of(
    requests: Sequence[tuple[int, int]], pages: Sequence[Tensor], unused: Tensor, block_size: int
) -> AttentionBatch:
    """Of a step of requests (new tokens, keys), whose keys lie in `pages`, int64 each. unused: the
    page that stands in entries of the block tables which no request reads."""
    lengths, seq_lens = (list(column) for column in zip(*requests))
    tables = unused.int().repeat(len(requests), max(map(len, pages)) + 1)
    slots = []
    for table, own, new, keys in zip(tables, pages, lengths, seq_lens):
        table[: len(own)] = own
        position = torch.arange(keys - new, keys, device=tables.device)
        slots.append(own[position // block_size] * block_size + position % block_size)
    starts = [0, *np.cumsum(lengths).tolist()]

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=tables.device)

    return AttentionBatch(
        query_start_loc=int32(starts),
        seq_lens=int32(seq_lens),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        state_slots=int32([0] * len(requests)),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
        host=HostBatch(np.array(starts), np.array(seq_lens), tables.cpu().numpy()),
    )


class _Draw:
    """Random vectors of heads, [tokens, heads, head_dim], with channels of different sizes."""

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device):
        self._generator = torch.Generator(device).manual_seed(0)
        self._dtype, self._device = dtype, device
        self._head_dim = head_dim
        self._sizes = torch.exp2((self.channels() - 0.5) * _OCTAVES)

    def channels(self) -> Tensor:
        """float32 [head_dim] from 0 to 1."""
        return torch.rand(self._head_dim, generator=self._generator, device=self._device)

    def vectors(self, num_tokens: int, num_heads: int) -> Tensor:
        return (self._normal(num_tokens, num_heads) * self._sizes).to(self._dtype)

    def queries(self, num_tokens: int, num_heads: int) -> Tensor:
        return (self._normal(num_tokens, num_heads) * _QUERY_SIZE).to(self._dtype)

    def _normal(self, num_tokens: int, num_heads: int) -> Tensor:
        shape = num_tokens, num_heads, self._head_dim
        return torch.randn(shape, generator=self._generator, device=self._device)

    def sinks(self, num_heads: int) -> Tensor:
        """float32 [heads]."""
        drawn = torch.randn(num_heads, generator=self._generator, device=self._device)
        return (drawn + 1) * _SINKS

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self._device)


def _scales(cache_format: str) -> tuple[float, float]:
    return _FP8_SCALES if cache_format == "fp8" else (1.0, 1.0)


def _poisoned_cache(
    problem: AttentionProblem, num_pages: int, block_size: int, device: torch.device
) -> PagedAttention:
    """Caches as the engine allocates them, full of NaN: all bits set, in every type."""
    cache = PagedAttention(torch_ops.paged_attention, None, problem)
    cache.allocate(num_pages, block_size, device)
    for tensor in (cache.k_cache, cache.v_cache):
        _bits(tensor).fill_(-1)
    return cache


def _encoded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """float32 x as a cache of that type stores it."""
    if dtype == torch.float8_e4m3fn:
        x = (x / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _bits(x: Tensor) -> Tensor:
    """A view: torch cannot store to places of E4M3 on every device."""
    return x.view(_INTEGERS[x.itemsize])
