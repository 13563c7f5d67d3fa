"""Llama, and the decoder that its relatives vary: SmolLM2, Llama 3 and their like."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import Embedding, LMHead
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import merged_linear, plain_linear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class LlamaMLP(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str):
        super().__init__()
        config = ctx.hf_config
        hidden, inner = config.hidden_size, config.intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = merged_linear(ctx, f"{prefix}.gate_up_proj", hidden, parts, bias)
        self.act = SiluAndMul(ctx)
        self.down_proj = plain_linear(ctx, f"{prefix}.down_proj", inner, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    """Relatives override `qkv_bias`, `output_bias`, `sliding_window` and `shape_qk`."""

    def __init__(self, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        config = ctx.hf_config
        self.head_dim = rotary.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.rotary = rotary
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        parts = [("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)]
        self.qkv_proj = merged_linear(
            ctx, f"{prefix}.qkv_proj", config.hidden_size, parts, self.qkv_bias(config)
        )
        self.o_proj = plain_linear(
            ctx, f"{prefix}.o_proj", q_size, config.hidden_size, self.output_bias(config)
        )
        window = self.sliding_window(config, layer)
        self.attn = Attention(
            ctx, f"{prefix}.attn", self.num_heads, self.num_kv_heads, self.head_dim, window
        )

    @staticmethod
    def qkv_bias(config: Any) -> bool:
        return bool(getattr(config, "attention_bias", False))

    @staticmethod
    def output_bias(config: Any) -> bool:
        return bool(getattr(config, "attention_bias", False))

    @staticmethod
    def sliding_window(config: Any, layer: int) -> int:
        """Keys each query sees, itself included; 0 for all."""
        return 0

    def shape_qk(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions into q [T, heads, head_dim] and k; may work in place."""
        self.rotary(positions, q, k)
        return q, k

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.shape_qk(q, k, batch.positions)
        return self.o_proj(self.attn(q, k, v, batch))


class LlamaDecoderLayer(nn.Module):
    def __init__(
        self,
        ctx: ModelContext,
        prefix: str,
        layer: int,
        rotary: RotaryEmbedding,
        parts: type["LlamaForCausalLM"],
    ):
        super().__init__()
        hidden = ctx.hf_config.hidden_size
        self.input_layernorm = RMSNorm(ctx, f"{prefix}.input_layernorm", hidden)
        self.self_attn = parts.attention(ctx, f"{prefix}.self_attn", layer, rotary)
        self.post_attention_layernorm = RMSNorm(ctx, f"{prefix}.post_attention_layernorm", hidden)
        self.mlp = parts.feed_forward(ctx, f"{prefix}.mlp", layer)

    def forward(self, x: Tensor, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Adds x to residual (in place) on the way; returns what is to be added to it next."""
        x = self.self_attn(self.input_layernorm.add(x, residual), batch)
        return self.mlp(self.post_attention_layernorm.add(x, residual))


class LlamaModel(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str, parts: type["LlamaForCausalLM"]):
        super().__init__()
        config = ctx.hf_config
        head_dim = getattr(config, "head_dim", None)
        rotary = RotaryEmbedding(ctx, head_dim or config.hidden_size // config.num_attention_heads)
        self.embed_tokens = Embedding(
            ctx, f"{prefix}.embed_tokens", config.vocab_size, config.hidden_size
        )
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(ctx, f"{prefix}.layers.{i}", i, rotary, parts)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(ctx, f"{prefix}.norm", config.hidden_size)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        x = self.embed_tokens(batch.input_ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x = layer(x, residual, batch)
        return self.norm.add(x, residual)


class LlamaForCausalLM(nn.Module):
    """Relatives override what their layers are made of: `attention` and `feed_forward`."""

    attention: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, ctx: ModelContext):
        super().__init__()
        self.model = LlamaModel(ctx, "model", type(self))
        self.lm_head = LMHead(ctx, "lm_head", self.model.embed_tokens)

    @staticmethod
    def feed_forward(ctx: ModelContext, prefix: str, layer: int) -> nn.Module:
        """x [T, hidden] -> [T, hidden], of decoder layer `layer`."""
        return LlamaMLP(ctx, prefix)

    @staticmethod
    def slot_name(name: str) -> str | None:
        """The slot a checkpoint tensor belongs to; None for one that is not needed."""
        return None if name.endswith("rotary_emb.inv_freq") else name

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.model(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden size] -> float32 [S, vocab]."""
        return self.lm_head(hidden)
