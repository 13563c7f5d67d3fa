"""DeepEP all2all backends (github.com/deepseek-ai/DeepEP), where the library is installed.

Not run on hardware yet: they need GPUs with NVLink or RDMA between them.
"""

from typing import Any

import torch
from torch import Tensor

from vllm.distributed.all2all import AllGatherReduceScatter, Experts, PerRankAll2All
from vllm.distributed.groups import Addend
from vllm.distributed.parallel import Parallel
from vllm.errors import ConfigError
from vllm.formats.scales import Scales
from vllm.kernels.activations import batched
from vllm.kernels.interface import BatchedMoEKernel, MoEKernel
from vllm.utils.math_utils import cdiv

# Low latency reserves a slot per token of every rank at every expert, so it is for decoding.
MAX_LOW_LATENCY_TOKENS = 256
# Tokens are sent in FP8 where the experts' kernel takes them so, by the form of its scales: of what
# hidden must be a multiple, and how the library is asked. With powers of two its numbers are those
# of our quantisation (of groups with a value of 2^-14 or more: it takes amax to be 1e-4 at least).
# With float32 scales they are not: it multiplies by 448 / amax where we divide by amax / 448, and
# one E4M3 number in about 3,000 is the next one. There tokens are sent in bfloat16.
_FP8_DISPATCH: dict[str, tuple[int, dict[str, bool]]] = {
    Scales.UE8M0: (512, {"use_fp8": True, "round_scale": True, "use_ue8m0": True}),
    Scales.FLOAT32_CEIL_UE8M0: (128, {"use_fp8": True, "round_scale": True}),
}

# All layers share one buffer: they run one after the other.
_buffers: dict[str, Any] = {}


class DeepEPHighThroughput(PerRankAll2All):
    """`deepep_high_throughput`: sends a token once to every rank that holds one of its experts."""

    def __init__(self, parallel: Parallel, experts: Experts):
        super().__init__(parallel, experts)
        self._buffer = _buffer("high_throughput", _high_throughput_buffer, parallel, experts)

    def all2all(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        buffer = self._buffer
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            ids, self.experts.num_experts
        )
        # Returned expert ids are local; -1 for experts of other ranks.
        rows, own_ids, own_weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        combined, _, _ = buffer.combine(kernel(rows, own_weights, own_ids), handle)
        return combined


class DeepEPLowLatency(PerRankAll2All):
    """`deepep_low_latency`: a fixed-size buffer per expert; the host never learns the counts.

    Where the experts' kernel takes FP8 tokens in blocks (`BatchedMoEKernel`) with scales that are
    powers of two, they are sent so, which is half the bytes, and it gets them as they arrive. Steps
    of more than MAX_LOW_LATENCY_TOKENS per rank use allgather_reducescatter.
    """

    def __init__(self, parallel: Parallel, experts: Experts):
        super().__init__(parallel, experts)
        self._parallel = parallel
        self._long_steps = AllGatherReduceScatter(parallel, experts)
        self._buffer = _buffer("low_latency", _low_latency_buffer, parallel, experts)

    def __call__(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Addend:
        # All ranks must take the same branch.
        num_tokens = max(self._parallel.num_tokens_across_dp, default=len(x))
        if num_tokens > MAX_LOW_LATENCY_TOKENS * self._parallel.tensor.size:
            return self._long_steps(kernel, x, weights, ids)
        return super().__call__(kernel, x, weights, ids)

    def all2all(self, kernel: MoEKernel, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        takes_blocks = batched(kernel)
        fp8 = fp8_dispatch(takes_blocks, self.experts.hidden)
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x, ids, MAX_LOW_LATENCY_TOKENS, self.experts.num_experts, **(fp8 or {"use_fp8": False})
        )
        if takes_blocks is not None and fp8:
            # Scales arrive as the kernel reads them: rows run fastest.
            expected = self._rows_of_expert(*ids.shape)
            results = takes_blocks.from_quantized(*received, counts, expected)
        else:
            num_own, size, hidden = received.shape
            own_ids = expert_of_places(counts, size)
            alone = torch.ones(num_own * size, 1, dtype=torch.float32, device=x.device)
            results = kernel(received.view(-1, hidden), alone, own_ids.view(-1, 1))
            results = results.view(num_own, size, hidden)
        combined, _, _ = self._buffer.low_latency_combine(results, ids, weights, handle)
        return combined

    def _rows_of_expert(self, num_tokens: int, top_k: int) -> int:
        """The mean, as far as the host knows: of ranks without the numbers of others, as if all had
        `num_tokens`."""
        num_all = sum(self._parallel.num_tokens_across_dp) or num_tokens * self.ranks.size
        return max(1, cdiv(num_all * top_k, self.experts.num_experts))


def fp8_dispatch(kernel: BatchedMoEKernel | None, hidden: int) -> dict[str, bool]:
    """Arguments of `low_latency_dispatch` for FP8 tokens that the kernel takes as they arrive; {}
    where they are sent as they are."""
    columns, how = _FP8_DISPATCH.get(kernel.scales if kernel is not None else "", (1, {}))
    return how if hidden % columns == 0 else {}


def expert_of_places(counts: Tensor, size: int) -> Tensor:
    """Of `size` places for each expert, the first counts[e] are taken: int64 [E, size] of the
    expert's number where a place is taken and -1 elsewhere."""
    places = torch.arange(size, device=counts.device)
    experts = torch.arange(len(counts), device=counts.device).unsqueeze(1)
    return torch.where(places < counts.unsqueeze(1), experts, -1)


def _buffer(name: str, make: Any, parallel: Parallel, experts: Experts) -> Any:
    if name not in _buffers:
        try:
            import deep_ep
        except ImportError as error:
            raise ConfigError(
                f"VLLM_ALL2ALL_BACKEND=deepep_{name} needs DeepEP, which cannot be imported "
                f"({error}); install it (https://github.com/deepseek-ai/DeepEP) or take "
                f"allgather_reducescatter"
            ) from None
        _buffers[name] = make(deep_ep.Buffer, parallel.expert, experts)
    return _buffers[name]


def _high_throughput_buffer(cls: Any, group: Any, experts: Experts) -> Any:
    configs = cls.get_dispatch_config(group.size), cls.get_combine_config(group.size)
    row_bytes = 2 * experts.hidden
    return cls(
        group.handle,
        max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs),
        max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs),
    )


def _low_latency_buffer(cls: Any, group: Any, experts: Experts) -> Any:
    num_bytes = cls.get_low_latency_rdma_size_hint(
        MAX_LOW_LATENCY_TOKENS, experts.hidden, group.size, experts.num_experts
    )
    return cls(
        group.handle,
        0,
        num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=experts.num_experts // group.size,
    )
