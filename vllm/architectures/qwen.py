"""Qwen2 and Qwen2.5: Llama with biased QKV; Qwen1.5 and Qwen2 with experts too. Qwen3, dense and
with experts: no such bias, but an RMSNorm over each head of q and k before the rotation. In some
models some layers have a window."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    attention,
    decoder,
    dim,
    gated_mlp,
    gated_mlp_of,
    moe,
)
from vllm.architectures.decoder import Attention, FeedForward, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router


def _qwen2_attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(qkv_bias=True, window=_window(fields, layer)))


def _qwen2_moe_attention(fields: Fields, layer: int) -> Attention:
    """Every second of the first max_window_layers slides, unless layer_types says which do."""
    kind = fields.layer_kind(layer)
    is_early = layer < fields.optional("max_window_layers", 0, lowest=0) and layer % 2 == 0
    slides = kind == "sliding_attention" or (kind is None and is_early)
    is_used = slides and fields.flag("use_sliding_window")
    window = fields.optional("sliding_window", 0) if is_used else 0
    return attention(fields, AttentionKind(qkv_bias=fields.flag("qkv_bias", True), window=window))


def _qwen3_attention(fields: Fields, layer: int) -> Attention:
    return normed_attention(fields, _window(fields, layer))


def _qwen3_moe_attention(fields: Fields, layer: int) -> Attention:
    """All layers slide or none does."""
    slides = fields.flag("use_sliding_window")
    return normed_attention(fields, fields.optional("sliding_window", 0) if slides else 0)


def normed_attention(fields: Fields, window: int = 0) -> Attention:
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


def _alternating_layer_types(fields: Mapping[str, Any]) -> list[str]:
    """As `_qwen2_moe_attention` has it."""
    last = fields["max_window_layers"] if fields["use_sliding_window"] else 0
    return [
        "sliding_attention" if i < last and i % 2 == 0 else "full_attention"
        for i in range(fields["num_hidden_layers"])
    ]


def feed_forward(fields: Fields, layer: int, make_moe: Callable[[Fields], MoE]) -> FeedForward:
    is_sparse = (layer + 1) % fields.optional("decoder_sparse_step", 1) == 0
    if layer in fields.entries("mlp_only_layers", int) or not is_sparse:
        return gated_mlp(fields)
    return fields.once("moe", lambda: make_moe(fields))


def _moe(fields: Fields) -> MoE:
    return moe(fields, dim(fields, "num_experts"), partial(_router, fields))


def moe_with_shared_expert(fields: Fields) -> MoE:
    inner = dim(fields, "shared_expert_intermediate_size")
    shared = gated_mlp_of(fields, "mlp.shared_expert", inner)
    router = partial(_router, fields)
    return moe(fields, dim(fields, "num_experts"), router, shared, is_shared_gated=True)


def _router(fields: Fields, num_experts: int, top_k: int) -> Router:
    return Router(num_experts, top_k, fields.flag("norm_topk_prob"))


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
_EXPERTS = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
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
        "qwen2_moe",
        ("Qwen2MoeForCausalLM",),
        partial(
            decoder,
            mixer=_qwen2_moe_attention,
            feed_forward=partial(feed_forward, make_moe=moe_with_shared_expert),
        ),
        _DEFAULTS
        | _EXPERTS
        | {
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_window_layers": 28,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "layer_types": None,
        },
        nullable=_DERIVED["nullable"] | {"mlp_only_layers"},
        layer_types=_alternating_layer_types,
        derives_layer_types=("max_window_layers",),
        no_window=0,
        family="Qwen1.5 and Qwen2 mixture of experts",
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
        partial(
            decoder,
            mixer=_qwen3_moe_attention,
            feed_forward=partial(feed_forward, make_moe=_moe),
        ),
        _DEFAULTS
        | _EXPERTS
        | {
            "intermediate_size": 6144,
            "num_key_value_heads": 4,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        nullable=frozenset({"sliding_window", "mlp_only_layers"}),
        # Published configs have the name that transformers had before version 5.
        renamed_fields={"num_local_experts": "num_experts"},
        family="Qwen3 mixture of experts",
    ),
)
