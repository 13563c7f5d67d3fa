"""Layers of multi-head latent attention: the attention itself, and its absorbed up-projection."""

from typing import Any

import torch
from torch import Tensor

from vllm.architectures.decoder import LatentAttention
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import StoredWeight, UnquantizedLinearMethod
from vllm.model_executor.layers.sharding import Place
from vllm.ops.packed_weights import dequantised


class MLAAttention(Attention):
    """q [T, heads, head_dim] and latents [T, head_dim] -> [T, heads, value_dim]; every
    tensor-parallel rank has the latents of all tokens, and some of the heads."""

    def forward(self, q: Tensor, latents: Tensor, batch: ForwardBatch) -> Tensor:  # type: ignore[override]
        return self.kernel(q, latents, batch.groups[self.group])


class AbsorbedUpProjection(StoredWeight):
    """kv_b_proj, of which latents become keys and values of each head. It is multiplied into
    queries and results instead, once for each of their tokens and not for each key.

    of_keys: [heads, nope_dim, latent], of_values: [heads, latent, value_dim], in the type of
    activations, as the operations of the device pack them. A quantised weight is widened to them:
    exact but for rounding to that type, which the ledger states. Activations that meet it are not
    quantised.
    """

    def __init__(self, ctx: ModelContext, prefix: str, spec: LatentAttention):
        group, projection = ctx.parallel.tensor, spec.kv_b_proj
        shards = projection.shards(prefix, group.rank, group.size)
        method = ctx.quant_methods.linear_method([name for name, _ in shards])
        super().__init__(
            prefix + projection.name,
            [(name, Place.of(region)) for name, region in shards],
            group,
            method or UnquantizedLinearMethod(ctx.weight_dtype),
        )
        self.method.create_weights(self)
        self.dtype, self.ops, self.ledger = ctx.dtype, ctx.ops, ctx.selection.ledger
        self.num_heads = spec.attn.heads.per_rank(group.size)
        self.sizes = spec.nope_dim, spec.value_dim
        self.of_keys: Any = None
        self.of_values: Any = None

    def make_kernel(self) -> None:
        """Lays the weight out; the parameters go."""
        wide = dequantised(self.method.tensors(self))
        rounded = wide.to(self.dtype)
        if self.method.format.is_quantized:
            change = (rounded.float() - wide).abs()
            error = float(change.norm() / wide.norm().clamp(min=torch.finfo(torch.float32).tiny))
            transform = f"{self.method.format} -> {self.dtype}, absorbed".replace("torch.", "")
            largest = float(change.max())
            self.ledger.record(self.prefix, transform, error, largest, largest == 0)
        for name in list(self._parameters):
            delattr(self, name)
        heads = rounded.view(self.num_heads, sum(self.sizes), -1)
        keys, values = heads.split(self.sizes, 1)
        self.of_keys = self.ops.pack_heads(keys.contiguous())
        self.of_values = self.ops.pack_heads(values.transpose(1, 2).contiguous())
