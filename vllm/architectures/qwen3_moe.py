"""Qwen3 mixture of experts: Qwen3's attention, and in most layers routed experts for the MLP."""

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, dim, gated_mlp, moe
from vllm.architectures.decoder import Attention, Decoder, FeedForward, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.architectures.windows import WINDOWED


def _describe(fields: Fields) -> Decoder:
    return decoder(fields, _attention, _feed_forward)


def _attention(fields: Fields, layer: int) -> Attention:
    """All layers slide or none does."""
    bias = fields.flag("attention_bias")
    window = fields.optional("sliding_window", 0) if fields.flag("use_sliding_window") else 0
    return attention(
        fields, AttentionKind(qkv_bias=bias, output_bias=bias, window=window, qk_norm="rms")
    )


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    is_sparse = (layer + 1) % fields.optional("decoder_sparse_step", 1) == 0
    if layer in fields.entries("mlp_only_layers", int) or not is_sparse:
        return gated_mlp(fields)
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    renormalises = fields.flag("norm_topk_prob")
    return moe(fields, dim(fields, "num_experts"), lambda n, k: Router(n, k, renormalises))


ARCHITECTURES = (
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        _describe,
        WINDOWED
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        nullable=frozenset({"sliding_window", "mlp_only_layers"}),
        # Published configs have the name that transformers had before version 5.
        renamed_fields={"num_local_experts": "num_experts"},
    ),
)
