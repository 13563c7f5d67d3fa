"""Llama, and the decoder that its relatives vary: SmolLM2, Llama 3 and their like."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm.distributed.groups import Addend
from vllm.kernels.activations import Activation
from vllm.model_executor.context import ForwardBatch, ModelContext
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.embedding import Embedding, LMHead
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import Linear, merged_linear, plain_linear
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.sharding import Part, head_shares
from vllm.model_executor.layers.stage import Elsewhere, Hidden
from vllm.ops.paged_attention import CacheTarget


class LlamaMLP(nn.Module):
    """inner: rows of its gate and of its up projection; None: what the config says of all MLPs."""

    def __init__(self, ctx: ModelContext, prefix: str, inner: int | None = None):
        super().__init__()
        config = ctx.hf_config
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = merged_linear(
            ctx, f"{prefix}.gate_up_proj", hidden, parts, bias, cut="rows"
        )
        self.act = SiluAndMul(ctx)
        self.down_proj = plain_linear(
            ctx, f"{prefix}.down_proj", inner, hidden, bias, cut="columns"
        )

    @property
    def reader(self) -> Linear:
        """The layer that reads the input, and alone does."""
        return self.gate_up_proj

    @property
    def writer(self) -> Linear:
        """The layer whose output is that of this one."""
        return self.down_proj

    def forward(self, x: Activation) -> Addend:
        return self.down_proj(self.act(self.gate_up_proj(x), self.down_proj))


class LlamaAttention(nn.Module):
    """Relatives override `qkv_bias`, `output_bias`, `sliding_window` and `shape_qk`.

    heads_per_query: heads of q_proj for each query head: 2 where a gate follows each query.
    """

    heads_per_query: ClassVar[int] = 1

    def __init__(self, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding):
        super().__init__()
        config = ctx.hf_config
        self.head_dim = rotary.head_dim
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.rotary = rotary
        q_size, kv_size = num_heads * self.head_dim, num_kv_heads * self.head_dim
        parts = [
            Part("q_proj", q_size * self.heads_per_query),
            Part("k_proj", kv_size, num_heads=num_kv_heads),
            Part("v_proj", kv_size, num_heads=num_kv_heads),
        ]
        self.qkv_proj = merged_linear(
            ctx, f"{prefix}.qkv_proj", config.hidden_size, parts, self.qkv_bias(config), cut="rows"
        )
        self.o_proj = plain_linear(
            ctx,
            f"{prefix}.o_proj",
            q_size,
            config.hidden_size,
            self.output_bias(config),
            cut="columns",
        )
        window = self.sliding_window(config, layer)
        group = ctx.parallel.tensor
        self.num_heads, self.num_kv_heads = head_shares(num_heads, num_kv_heads, group)
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

    def shape_qk(
        self, q: Tensor, k: Tensor, positions: Tensor, target: CacheTarget | None
    ) -> tuple[Tensor, Tensor]:
        """Positions into q [T, heads, head_dim] and k; may work in place. With a target K goes
        there instead, and V too."""
        self.rotary(positions, q, k, target)
        return q, k

    @property
    def reader(self) -> Linear:
        """The layer that reads the input, and alone does."""
        return self.qkv_proj

    @property
    def writer(self) -> Linear:
        """The layer that reads the output, and whose own is to be added to the residual."""
        return self.o_proj

    def forward(self, x: Activation, batch: ForwardBatch) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q, k = self.shape_qk(q, k, batch.positions, self.attn.target(v, batch))
        return self.attn(q, k, v, batch)


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
        self.input_layernorm = parts.norm(ctx, f"{prefix}.input_layernorm", hidden)
        self.mixer = parts.mixer(ctx, prefix, layer, rotary)
        post_attention = f"{prefix}.post_attention_layernorm"
        self.post_attention_layernorm = parts.norm(ctx, post_attention, hidden)
        self.mlp = parts.feed_forward(ctx, f"{prefix}.mlp", layer)
        for part in (self.mixer, self.mlp):
            if (writer := getattr(part, "writer", None)) is not None:
                writer.leaves_sum = True  # to the norm that comes next

    def forward(
        self, x: Addend, residual: Tensor, batch: ForwardBatch, rows: Tensor | None = None
    ) -> tuple[Addend, Tensor]:
        """Adds x to residual (in place) on the way; returns what is to be added to it next, and it.

        rows: those that go on once the tokens are mixed; None for all.
        """
        # A reader with layers besides that take floats has these kept beside what is quantised.
        reader = getattr(self.mixer, "reader", None)
        mixed = self.mixer(self.input_layernorm.add(x, residual, reader), batch)
        if rows is not None:
            mixed, residual = mixed[rows], residual[rows]
        x = self.mixer.writer(mixed)
        reader = getattr(self.mlp, "reader", None)
        return self.mlp(self.post_attention_layernorm.add(x, residual, reader)), residual


class LlamaModel(nn.Module):
    def __init__(self, ctx: ModelContext, prefix: str, parts: type["LlamaForCausalLM"]):
        super().__init__()
        config = ctx.hf_config
        head_dim = getattr(config, "head_dim", None)
        rotary = RotaryEmbedding(ctx, head_dim or config.hidden_size // config.num_attention_heads)
        self.pipeline, self.hidden = ctx.parallel.pipeline, Hidden(ctx)
        is_first, is_last = self.pipeline.is_first, self.pipeline.is_last
        name = f"{prefix}.embed_tokens"
        if is_first or (is_last and ctx.ties_embeddings):
            self.embed_tokens = Embedding(ctx, name, config.vocab_size, config.hidden_size)
        else:
            self.embed_tokens = Elsewhere(name)
        self.own_layers = ctx.parallel.layers(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(ctx, f"{prefix}.layers.{i}", i, rotary, parts)
            if i in self.own_layers
            else Elsewhere(f"{prefix}.layers.{i}")
            for i in range(config.num_hidden_layers)
        )
        name = f"{prefix}.norm"
        self.norm = parts.norm(ctx, name, config.hidden_size) if is_last else Elsewhere(name)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states of `batch.read_rows` after the last norm; of an earlier stage, what it sent
        on."""
        if self.pipeline.is_first:
            x = self.embed_tokens(batch.input_ids)
        else:
            x = self.hidden.receive(batch)
        residual = torch.zeros_like(x)
        *others, last = self.own_layers
        for index in others:
            x, residual = self.layers[index](x, residual, batch)
        # Later layers mix all tokens; after the very last of them nobody does.
        rows = batch.read_rows if self.pipeline.is_last else None
        x, residual = self.layers[last](x, residual, batch, rows)
        if not self.pipeline.is_last:
            return self.hidden.send(x, residual)
        return self.norm.add(x, residual)


class LlamaForCausalLM(nn.Module):
    """Relatives override what their layers are made of: `attention` or all of `mixer`, `norm` and
    `feed_forward`."""

    attention: ClassVar[type[LlamaAttention]] = LlamaAttention
    norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, ctx: ModelContext):
        super().__init__()
        self.model = LlamaModel(ctx, "model", type(self))
        if ctx.parallel.pipeline.is_last:
            config = ctx.hf_config
            self.lm_head = LMHead(
                ctx, "lm_head", config.vocab_size, config.hidden_size, self.model.embed_tokens
            )
        else:
            self.lm_head = Elsewhere("lm_head")

    @classmethod
    def mixer(
        cls, ctx: ModelContext, prefix: str, layer: int, rotary: RotaryEmbedding
    ) -> nn.Module:
        """(x [T, hidden], batch) -> [T, n] for its `writer`: what mixes tokens in a layer."""
        return cls.attention(ctx, f"{prefix}.self_attn", layer, rotary)

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
        """hidden [S, hidden size] -> [S, vocab], in the model's type."""
        return self.lm_head(hidden)
