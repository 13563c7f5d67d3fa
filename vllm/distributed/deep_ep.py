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
from vllm.kernels.interface import MoEKernel

# Low latency reserves a slot per token of every rank at every expert, so it is for decoding.
MAX_LOW_LATENCY_TOKENS = 256
_UE8M0_BIAS = 127
_BYTES_PER_INT32 = 4

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

    Where the expert kernel takes UE8M0 scales, tokens are sent as FP8 with packed UE8M0 scales:
    half the bytes, and the kernel's quantisation reproduces the same values. Steps of more than
    MAX_LOW_LATENCY_TOKENS per rank use allgather_reducescatter.
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
        is_packed = self.experts.takes_ue8m0
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            x,
            ids,
            MAX_LOW_LATENCY_TOKENS,
            self.experts.num_experts,
            use_fp8=is_packed,
            round_scale=is_packed,
            use_ue8m0=is_packed,
        )
        blocks = widen_packed_ue8m0(*received, x.dtype) if is_packed else received
        num_own, size, hidden = blocks.shape
        own_ids = expert_of_places(counts, size)
        alone = torch.ones(num_own * size, 1, dtype=torch.float32, device=x.device)
        results = kernel(blocks.view(-1, hidden), alone, own_ids.view(-1, 1))
        combined, _, _ = self._buffer.low_latency_combine(
            results.view(num_own, size, hidden), ids, weights, handle
        )
        return combined


def widen_packed_ue8m0(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """q float8_e4m3fn [E, M, hidden], scales int32 [E, M, hidden / 512] -> [E, M, hidden].

    Each int32 holds the exponents of four groups of 128 columns, the first in its lowest byte. An
    E4M3 value times a power of two is exact in bfloat16.
    """
    shifts = torch.arange(0, 8 * _BYTES_PER_INT32, 8, dtype=torch.int32, device=scales.device)
    exponents = (scales.unsqueeze(-1) >> shifts & 0xFF).flatten(-2) - _UE8M0_BIAS
    wide = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    groups = q.to(dtype).unflatten(-1, (wide.shape[-1], -1))
    return (groups * wide.to(dtype).unsqueeze(-1)).flatten(-2)


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
