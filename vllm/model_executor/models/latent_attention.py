"""Multi-head latent attention (MLA): one cached latent for each token, shared by all heads."""

import dataclasses

from torch import Tensor, nn

from vllm.architectures.decoder import LatentAttention as LatentAttentionSpec
from vllm.kernels.activations import Activation, InputQuant
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.latent_attention import AbsorbedUpProjection, MLAAttention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear, linear_layer
from vllm.model_executor.layers.query_scaling import ScaledQueries
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

# Of the norms of latents, whatever rms_norm_eps says: that of DeepSeek's and transformers' models.
_LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """x [T, hidden] -> [T, heads * value_dim] for `writer`. prefix: of the decoder layer.

    Scores are q_nope . (W_k c) + q_rope . k_rope for the latent c of a key. They are computed as
    (W_k^T q_nope) . c + q_rope . k_rope, and results as W_v times the weighted sum of latents, for
    prompts and decodes alike.
    """

    def __init__(
        self, ctx: ModelContext, prefix: str, spec: LatentAttentionSpec, rotary: RotaryEmbedding
    ):
        super().__init__()
        self.rotary, self.ops, self.spec = rotary, ctx.ops, spec
        self.kv_a_proj = linear_layer(ctx, prefix, spec.kv_a_proj)
        self.q_proj = linear_layer(ctx, prefix, spec.q_proj)
        self.kv_b_proj = AbsorbedUpProjection(ctx, prefix, spec)
        self.o_proj = linear_layer(ctx, prefix, spec.o_proj)
        self.attn = MLAAttention(ctx, prefix, spec.attn)
        self.num_heads = spec.attn.heads.per_rank(ctx.parallel.tensor.size)
        self.latent_dim = spec.kv_b_proj.inputs.size
        self.scaled = ScaledQueries(ctx, spec.query_scaling)
        self.kv_a_layernorm = self._norm(ctx, prefix, "kv_a_layernorm", self.latent_dim)
        self.q_a_layernorm: RMSNorm | None = None
        if spec.q_lora_rank:
            self.q_a_layernorm = self._norm(ctx, prefix, "q_a_layernorm", spec.q_lora_rank)

    def _norm(self, ctx: ModelContext, prefix: str, name: str, size: int) -> RMSNorm:
        norm = RMSNorm(ctx, f"{prefix}{self.spec.name}.{name}", size)
        norm.eps = _LATENT_EPS
        return norm

    @property
    def reader(self) -> "Linear | LatentAttention":
        """What reads the input; this module where both projections do."""
        return self.kv_a_proj if self.spec.q_lora_rank else self

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How the larger projection wants it quantised; floats stay beside unless the other one
        wants it likewise."""
        quant = self.q_proj.input_quant(num_tokens)
        if quant is None or quant == self.kv_a_proj.input_quant(num_tokens):
            return quant
        return dataclasses.replace(quant, keeps_source=True)

    @property
    def writer(self) -> Linear:
        """The layer that reads the output, and whose own is to be added to the residual."""
        return self.o_proj

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        q, latents = self._queries_and_latents(x)
        keys, parts = latents.unsqueeze(1), (self.spec.nope_dim, self.spec.rope_dim)
        q_nope, q_rope = q.split(parts, 2)
        self.ops.rotary_embedding(
            batch.positions,
            q_rope,
            keys[..., self.latent_dim :],
            self.rotary.cos_sin_cache,
            not self.spec.is_interleaved,
        )
        absorbed = q.new_empty(*q.shape[:2], latents.shape[1])
        absorbed[..., self.latent_dim :] = q_rope
        self.ops.linear_heads(q_nope, self.kv_b_proj.of_keys, absorbed[..., : self.latent_dim])
        mixed = self.attn(self.scaled(absorbed, batch.positions), latents, batch)
        return self.ops.linear_heads(mixed, self.kv_b_proj.of_values).flatten(1)

    def _queries_and_latents(self, x: Activation) -> tuple[Tensor, Tensor]:
        """[T, heads, nope_dim + rope_dim], and latents, normed, with the part of keys that is still
        to be rotated, [T, latent_dim + rope_dim]."""
        if self.q_a_layernorm is not None:
            rank = self.spec.q_lora_rank
            down = self.kv_a_proj(x)
            q, latents = self.q_proj(self.q_a_layernorm(down[:, :rank])), down[:, rank:]
        else:
            q = self.q_proj(x)
            floats = x if isinstance(x, Tensor) or x.source is None else x.source
            latents = self.kv_a_proj(floats)
        own = latents[:, : self.latent_dim]
        self.ops.rms_norm(own, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps, out=own)
        return q.view(q.shape[0], self.num_heads, -1), latents
