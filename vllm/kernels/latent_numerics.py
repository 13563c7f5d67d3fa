"""Whether attention over a paged cache of latents, and what writes that cache, compute what they
should: as `vllm/kernels/cache_numerics.py` does for keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.kernels import registry
from vllm.kernels.cache_numerics import batch_of
from vllm.kernels.numerics import WrongResultError, checked_error, max_error, poison_memory
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.ops.latent_attention import LatentPagedAttention, write_latents
from vllm.ops.paged_attention import AttentionBatch
from vllm.utils.fp8 import FP8_MAX
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_of

# (new tokens, keys) of requests: a later part of a prompt, a whole prompt, decodes, the last of
# which is long enough for kernels that cut keys into parts, and a token with draft tokens.
REQUESTS = ((37, 101), (33, 33), (1, 1), (1, 67), (1, 293), (3, 258))
# Which of them a step has: prompts with decodes, decodes, a prompt alone, and drafts with decodes.
_STEPS = ((0, 1, 2, 3, 4), (2, 3, 4), (0,), (3, 4, 5))
_FP8_SCALE = 0.03
# Scores of a standard deviation of about 2.
_QUERY_SIZE = 1.5
_NUM_WRITTEN, _NUM_SKIPPED = 41, 3
_IN_PAGES = "in the unused places of pages"
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """q [T, heads, head_dim] and latents [T, head_dim] of its new tokens; expected: float32
    [T, heads, value_dim]; pages: int64, where its latents lie."""

    q: Tensor
    latents: Tensor
    expected: Tensor
    pages: Tensor
    num_keys: int


def latent_attention_reference(q: Tensor, latents: Tensor, value_dim: int, scale: float) -> Tensor:
    """float32 [T, heads, value_dim] of the last T positions q [T, heads, head_dim], with float32
    latents [keys, head_dim] of all."""
    num_new, num_keys = len(q), len(latents)
    scores = torch.einsum("qhd,kd->hqk", q.float(), latents) * scale
    is_seen = torch.ones(num_new, num_keys, dtype=torch.bool, device=q.device)
    is_seen = is_seen.tril(num_keys - num_new)
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, latents[:, :value_dim])


def latent_attention_comparison(
    problem: AttentionProblem, backend: str, block_size: int, device: torch.device
) -> Callable[[], float]:
    """What makes the kernel, calls it, and returns the largest relative error of a request;
    WrongResultError where that is too large. The reference is computed before that."""
    case = LatentCase(problem, block_size, device)

    def run() -> float:
        kernel: LatentPagedAttention = registry.backend(backend).attention(problem, write_latents)
        return case.error(kernel)

    return run


class LatentCase:
    """Random requests whose latents lie in shuffled pages, with NaN wherever no token is."""

    def __init__(self, problem: AttentionProblem, block_size: int, device: torch.device):
        self.problem, self._block_size, self._device = problem, block_size, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.k_scale = _scale(problem.format)
        counts = [cdiv(keys, block_size) for _, keys in REQUESTS]
        num_pages = sum(counts) + 1
        self.cache = _poisoned((num_pages, block_size, problem.head_dim), problem.format, device)
        order = torch.randperm(num_pages, generator=self._generator, device=device)
        self._unused = order[-1]
        self.requests = [
            self._request(new, keys, pages)
            for (new, keys), pages in zip(REQUESTS, order[:-1].split(counts))
        ]

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)

    def _request(self, num_new: int, num_keys: int, pages: Tensor) -> _Request:
        problem, dtype = self.problem, dtype_of(self.problem.dtype)
        given = self._normal(num_keys, problem.head_dim).to(dtype)
        stored = _encoded(given.float(), self.k_scale, dtype_of(problem.format))
        position = torch.arange(num_keys - num_new, device=pages.device)
        places = pages[position // self._block_size], position % self._block_size
        _bits(self.cache)[places] = _bits(stored)[: num_keys - num_new]
        size = _QUERY_SIZE * problem.head_dim**-0.5 / problem.softmax_scale
        q = (self._normal(num_new, problem.num_heads, problem.head_dim) * size).to(dtype)
        wide = stored.float() * self.k_scale
        expected = latent_attention_reference(q, wide, problem.value_dim, problem.softmax_scale)
        return _Request(q, given[num_keys - num_new :], expected, pages, num_keys)

    def batch(self, requests: Sequence[_Request]) -> AttentionBatch:
        """Of a step with these requests."""
        sizes = [(len(request.q), request.num_keys) for request in requests]
        pages = [request.pages for request in requests]
        return batch_of(sizes, pages, self._unused, self._block_size)

    def error(self, kernel: LatentPagedAttention) -> float:
        """The largest relative error of the kernel, which writes the new latents first."""
        kernel.k_cache, kernel.k_scale = self.cache, self.k_scale
        return max(
            self._step_error(kernel, [self.requests[index] for index in step]) for step in _STEPS
        )

    def _step_error(self, kernel: LatentPagedAttention, step: Sequence[_Request]) -> float:
        q = torch.cat([request.q for request in step])
        latents = torch.cat([request.latents for request in step])
        poison_memory(q, q.numel())
        out = kernel(q, latents, self.batch(step)).float()
        lengths = [len(request.q) for request in step]
        if out.shape != (len(q), self.problem.num_heads, self.problem.value_dim):
            raise WrongResultError(f"the result for {len(q)} tokens has shape {list(out.shape)}")
        limit = max_error(self.problem)
        return max(
            checked_error(
                own, one.expected, limit, f"{len(own)} new tokens of {one.num_keys}", _IN_PAGES
            )
            for own, one in zip(out.split(lengths), step)
        )


def latent_write_comparison(
    problem: KVQuantProblem, backend: str, block_size: int, device: torch.device
) -> Callable[[], float]:
    """The same for a kernel that writes latents, of which some have no place in the cache."""
    generator = torch.Generator(device).manual_seed(0)
    dtype, dim = dtype_of(problem.format), problem.head_dim
    num_tokens = _NUM_WRITTEN + _NUM_SKIPPED
    latents = torch.randn(num_tokens, 2 * dim, generator=generator, device=device)
    latents[:, 0] *= 30  # an FP8 cache saturates
    given = latents.to(dtype_of(problem.dtype))[:, :dim]  # rows of a larger tensor
    num_pages = cdiv(num_tokens, block_size) + 1
    slots = torch.randperm(num_pages * block_size, generator=generator, device=device)[:num_tokens]
    slots[:_NUM_SKIPPED] = -1
    scale, limit = _scale(problem.format), max_error(problem)
    expected = _encoded(given.float(), scale, dtype).float()[_NUM_SKIPPED:]

    def run() -> float:
        cache = _poisoned((num_pages, block_size, dim), problem.format, device)
        registry.backend(backend).kv_quant(problem)(given, cache, slots, scale)
        rows, written = _bits(cache).view(-1, dim), slots[_NUM_SKIPPED:]
        found = rows[written].view(dtype).float()
        error = checked_error(found, expected, limit, "stored latents", _IN_PAGES)
        rows[written] = -1
        if not bool((rows == -1).all()):
            raise WrongResultError("latents were written to places of no token")
        return error

    return run


def _scale(cache_format: str) -> float:
    return _FP8_SCALE if cache_format == "fp8" else 1.0


def _encoded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """float32 x as a cache of that type stores it."""
    if dtype == torch.float8_e4m3fn:
        x = (x / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def _poisoned(shape: tuple[int, ...], cache_format: str, device: torch.device) -> Tensor:
    """Full of NaN: all bits set, in every type."""
    cache = torch.empty(shape, dtype=dtype_of(cache_format), device=device)
    _bits(cache).fill_(-1)
    return cache


def _bits(x: Tensor) -> Tensor:
    """A view: torch cannot store to places of E4M3 on every device."""
    return x.view(_INTEGERS[x.itemsize])
