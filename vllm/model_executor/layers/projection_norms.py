"""RMSNorm of q and of k over all heads of the projection together, on all ranks."""

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import Attention
from vllm.architectures.sharding import Dim
from vllm.model_executor.context import ModelContext
from vllm.model_executor.weights import FLOATS, Slot, copy_into, empty_parameter


class ProjectionNorms(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight for q [T, heads, head_dim] and k [T, kv heads, head_dim],
    in place; the mean is over all heads, of which each rank has its own.

    The ranks add up their squares in float32: [T, 2] numbers, once for both.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: Attention):
        super().__init__()
        assert spec.qk_norm == "rms", spec.qk_norm
        self.group, self.ops, self.eps = ctx.parallel.tensor, ctx.ops, ctx.decoder.rms_norm_eps
        self.prefix = prefix + spec.name
        self.dims = {"q_norm": spec.attn.heads, "k_norm": spec.attn.cache.kv_heads}
        self.q_norm, self.k_norm = (
            empty_parameter(self._own(dim).stop - self._own(dim).start, dtype=torch.float32)
            for dim in self.dims.values()
        )

    def _own(self, dim: Dim) -> slice:
        return slice(*dim.span(self.group.rank, self.group.size))

    def slots(self) -> dict[str, Slot]:
        slots = {}
        for name, dim in self.dims.items():
            write = copy_into(getattr(self, name).data)
            region = () if self.group.size == 1 else (self._own(dim),)
            slots[f"{self.prefix}.{name}.weight"] = Slot((dim.size,), FLOATS, write, region)
        return slots

    def forward(self, q: Tensor, k: Tensor) -> None:
        pairs = (q.flatten(1), self.q_norm), (k.flatten(1), self.k_norm)
        if self.group.size == 1:
            for x, weight in pairs:
                self.ops.rms_norm(x, weight, self.eps, out=x)
            return
        # A KV head that several ranks have counts once: it is a share of each of their means.
        sizes = [len(weight) * self.group.size for _, weight in pairs]
        means = [x.float().square().sum(1) / size for (x, _), size in zip(pairs, sizes)]
        scales = (self.group.all_reduce(torch.stack(means)) + self.eps).rsqrt()
        for (x, weight), scale in zip(pairs, scales):
            x.copy_(x.float() * scale[:, None] * weight)
