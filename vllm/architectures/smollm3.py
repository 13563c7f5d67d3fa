"""SmolLM3: Llama some of whose layers do not rotate q and k."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention
from vllm.architectures.fields import Fields
from vllm.architectures.llama import DEFAULTS
from vllm.errors import CheckpointError


def _attention(fields: Fields, layer: int) -> Attention:
    bias, window = fields.flag("attention_bias"), 0
    if fields.flag("use_sliding_window") and fields.layer_kind(layer) == "sliding_attention":
        window = fields.optional("sliding_window", 0)
    rope = "" if _rotates(fields, layer) else None
    return attention(
        fields, AttentionKind(qkv_bias=bias, output_bias=bias, window=window, rope=rope)
    )


def _rotates(fields: Fields, layer: int) -> bool:
    listed = fields.entries("no_rope_layers", int)
    if not listed:
        return (layer + 1) % fields.optional("no_rope_layer_interval", 4) != 0
    if len(listed) != fields.size("num_hidden_layers"):
        raise CheckpointError(
            f"{fields.source}: no_rope_layers has {len(listed)} entries: it takes one for each of "
            f"num_hidden_layers = {fields.size('num_hidden_layers')} layers, 0 where q and k are "
            f"not rotated"
        )
    return bool(listed[layer])


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["no_rope_layers"] is not None:
        return {}
    interval = fields["no_rope_layer_interval"]
    layers = range(fields["num_hidden_layers"])
    return {"no_rope_layers": [int((layer + 1) % interval != 0) for layer in layers]}


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    has_windows = fields["use_sliding_window"] and fields["sliding_window"] is not None
    return [
        "sliding_attention" if has_windows and not rotates else "full_attention"
        for rotates in fields["no_rope_layers"]
    ]


_DEFAULTS = {name: value for name, value in DEFAULTS.items() if name != "head_dim"}
ARCHITECTURES = (
    Architecture(
        "smollm3",
        ("SmolLM3ForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=gated_mlp),
        _DEFAULTS
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "pad_token_id": 128004,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        nullable=frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
        layer_types=_layer_types,
        derived_fields=_derived,
        rope_theta=2000000.0,
        family="SmolLM3",
    ),
)
