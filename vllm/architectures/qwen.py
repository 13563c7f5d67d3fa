"""Qwen2 and Qwen2.5: Llama with biased QKV. Qwen3, dense and with experts: no such bias, but an
RMSNorm over each head of q and k before the rotation. In some models some layers have a window."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, dim, gated_mlp, moe
from vllm.architectures.decoder import Attention, FeedForward, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router


def _qwen2_attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(qkv_bias=True, window=_window(fields, layer)))


def _qwen3_attention(fields: Fields, layer: int) -> Attention:
    return _normed_attention(fields, _window(fields, layer))


def _qwen3_moe_attention(fields: Fields, layer: int) -> Attention:
    """All layers slide or none does."""
    slides = fields.flag("use_sliding_window")
    return _normed_attention(fields, fields.optional("sliding_window", 0) if slides else 0)


def _normed_attention(fields: Fields, window: int) -> Attention:
    bias = fields.flag("attention_bias")
    return attention(
        fields, AttentionKind(qkv_bias=bias, output_bias=bias, window=window, qk_norm="rms")
    )


def _window(fields: Fields, layer: int) -> int:
    """Layers from max_window_layers on slide, unless layer_types says which do; 0 for others."""
    if not fields.flag("use_sliding_window"):
        return 0
    window = fields.optional("sliding_window", 0)
    kind = fields.layer_kind(layer)
    is_late = layer >= fields.optional("max_window_layers", 0, lowest=0)
    return window if kind == "sliding_attention" or (kind is None and is_late) else 0


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    """Of a config that lacks them, with what is assumed where it says nothing."""
    num_layers = fields["num_hidden_layers"]
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else num_layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    is_sparse = (layer + 1) % fields.optional("decoder_sparse_step", 1) == 0
    if layer in fields.entries("mlp_only_layers", int) or not is_sparse:
        return gated_mlp(fields)
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    renormalises = fields.flag("norm_topk_prob")
    return moe(fields, dim(fields, "num_experts"), lambda n, k: Router(n, k, renormalises))


_DEFAULTS = CAUSAL_LM | {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_DENSE = _DEFAULTS | {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_DERIVED: dict[str, Any] = {
    "nullable": frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
    "layer_types": _layer_types,
    "derives_layer_types": ("max_window_layers",),
}


ARCHITECTURES = (
    Architecture(
        "qwen2",
        ("Qwen2ForCausalLM",),
        partial(decoder, mixer=_qwen2_attention, feed_forward=gated_mlp),
        _DENSE,
        family="Qwen2",
        **_DERIVED,
    ),
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        partial(decoder, mixer=_qwen3_attention, feed_forward=gated_mlp),
        _DENSE | {"head_dim": 128, "attention_bias": False},
        family="Qwen3",
        **_DERIVED,
    ),
    Architecture(
        "qwen3_moe",
        ("Qwen3MoeForCausalLM",),
        partial(decoder, mixer=_qwen3_moe_attention, feed_forward=_feed_forward),
        _DEFAULTS
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
        family="Qwen3 mixture of experts",
    ),
)
