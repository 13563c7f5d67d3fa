"""Attention over the paged cache: its variants as the description of the layer says."""

from torch import Tensor, nn
from torch.nn.functional import pad

from vllm.architectures.decoder import Attention as AttentionSpec
from vllm.kernels.activations import Activation, InputQuant
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import NORMS
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.layers.projection_norms import ProjectionNorms
from vllm.model_executor.layers.query_scaling import ScaledQueries
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.ops.paged_attention import CacheTarget


class SelfAttention(nn.Module):
    """x [T, hidden] -> [T, heads * head_dim] for `writer`. prefix: of the decoder layer. unrotated:
    a rotation by angles of 0, which kernels that norm and rotate heads take for norms alone."""

    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        spec: AttentionSpec,
        rotary: RotaryEmbedding,
        unrotated: RotaryEmbedding,
    ):
        super().__init__()
        self.rotary, self.unrotated, self.ops = rotary, unrotated, ctx.ops
        self.head_dim = spec.attn.cache.head_dim
        size = ctx.parallel.tensor.size
        self.num_heads = spec.attn.heads.per_rank(size)
        self.num_kv_heads = spec.attn.cache.kv_heads.per_rank(size)
        self.is_gated = spec.is_gated
        self.qkv_proj = linear_layer(ctx, prefix, spec.qkv_proj)
        self.gate_proj: Linear | None = None
        if spec.gate_proj is not None:
            self.gate_proj = linear_layer(ctx, prefix, spec.gate_proj)
        self.o_proj = linear_layer(ctx, prefix, spec.o_proj)
        self.attn = Attention(ctx, prefix, spec.attn)
        self.has_qk_norm = spec.qk_norm is not None and spec.qk_norm_span == "head"
        self.joint_norm: ProjectionNorms | None = None
        if spec.qk_norm is not None and spec.qk_norm_span == "projection":
            self.joint_norm = ProjectionNorms(ctx, prefix, spec)
        elif spec.qk_norm is not None:
            norm = NORMS[spec.qk_norm]
            self.q_norm, self.k_norm = (
                norm(ctx, f"{prefix}{spec.name}.{name}", self.head_dim)
                for name in spec.qk_norm_names
            )
        self.norms_rotated = spec.norms_rotated
        self.v_norm: nn.Module | None = None
        if spec.v_norm is not None:
            self.v_norm = NORMS[spec.v_norm](ctx, f"{prefix}{spec.name}.v_norm", self.head_dim)
        self.k_is_v = spec.k_is_v
        self.value_dim, self.v_scale = spec.value_dim, spec.v_scale
        self.scaled = ScaledQueries(ctx, spec.query_scaling)

    @property
    def reader(self) -> "Linear | SelfAttention":
        """The layer that reads the input, and alone does; this module, which does not want it
        quantised, where a gate reads it too."""
        return self.qkv_proj if self.gate_proj is None else self

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """Of readers that are all given floats."""
        return None

    @property
    def writer(self) -> Linear:
        """The layer that reads the output, and whose own is to be added to the residual."""
        return self.o_proj

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        q, k, v = self._heads(self.qkv_proj(x))
        gate: Tensor | None = None
        if self.is_gated:
            q, gate = q[:, 0::2], q[:, 1::2]
        elif self.gate_proj is not None:
            gate = self.gate_proj(x).unflatten(1, (self.num_heads, -1))
        y = self._attend(q, k, v, batch)
        if self.value_dim:
            y = y.unflatten(1, (self.num_heads, -1))[..., : self.value_dim].flatten(1)
        if gate is not None:
            self.ops.mul_sigmoid(y.unflatten(1, (self.num_heads, -1)), gate)
        return y

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, head_dim], and k and v [T, kv heads, head_dim], of [T, n]."""
        values: Tensor | None = None
        if self.value_dim:
            num_columns = self.num_kv_heads * self.value_dim
            qkv, values = qkv[:, :-num_columns], qkv[:, -num_columns:]
        heads = qkv.unflatten(1, (-1, self.head_dim))
        counts = [self.num_heads * (1 + self.is_gated), self.num_kv_heads]
        if values is None and not self.k_is_v:
            q, k, v = heads.split([*counts, self.num_kv_heads], dim=1)
            return q, k, v if self.v_scale == 1 else v * self.v_scale
        q, k = heads.split(counts, dim=1)
        if values is None:
            return q, k, k
        wide = values.unflatten(1, (self.num_kv_heads, -1)) * self.v_scale
        return q, k, pad(wide, (0, self.head_dim - self.value_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch) -> Tensor:
        if self.v_norm is not None:
            v = self.v_norm(v)
        elif self.k_is_v:
            v = k.clone()
        target = self.attn.target(v, batch)
        self._rotate(q, k, batch.positions, target)
        return self.attn(self.scaled(q, batch.positions), k, v, batch)

    def _rotate(self, q: Tensor, k: Tensor, positions: Tensor, target: CacheTarget | None) -> None:
        """Positions into q [T, heads, head_dim] and k, in place, after their norms or before them.
        With a target K goes there instead, and V too."""
        if self.joint_norm is not None:
            self.joint_norm(q, k)
        if not self.has_qk_norm:
            return self.rotary(positions, q, k, target)
        norms, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        rotary = self.rotary
        if self.norms_rotated:
            rotary(positions, q, k)
            rotary = self.unrotated
        cache, is_neox = rotary.cos_sin_cache, rotary.is_neox
        if target is None:
            self.ops.qk_norm_rotary(positions, q, k, *norms, cache, eps, is_neox)
        else:
            self.ops.rotary_into_cache(positions, q, k, target, cache, norms, eps, is_neox)
        return None
