"""OLMo 2 and 3: norms behind the blocks and none before them, and an RMSNorm over all heads of q,
and of k, together. OLMo 3 has sliding windows in most layers, whose rotation is not scaled."""

from collections.abc import Mapping
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    attention,
    decoder,
    gated_mlp,
    heads_of,
    ropes,
)
from vllm.architectures.decoder import Attention, Decoder, LayerNorms
from vllm.architectures.fields import Fields
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_NORMS = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")
_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")
_THETA = 500000.0


def _describe(fields: Fields) -> Decoder:
    return replace(decoder(fields, _attention, gated_mlp), layer_norms=_NORMS)


def _describe_windowed(fields: Fields) -> Decoder:
    made = decoder(fields, _windowed_attention, gated_mlp)
    own = ropes(fields, heads_of(fields)[2], _LAYER_TYPES)
    return replace(made, layer_norms=_NORMS, ropes=own)


def _attention(fields: Fields, layer: int, window: int = 0, rope: str = "") -> Attention:
    bias = fields.flag("attention_bias")
    kind = AttentionKind(bias, bias, window, qk_norm="rms", qk_norm_span="projection", rope=rope)
    return attention(fields, kind)


def _windowed_attention(fields: Fields, layer: int) -> Attention:
    kind = fields.layer_kind(layer) or (_SLIDING if (layer + 1) % 4 else _FULL)
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes {_SLIDING} or {_FULL}"
        )
    window = fields.optional("sliding_window", 0) if kind == _SLIDING else 0
    return _attention(fields, layer, window, kind)


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    return [_SLIDING if (i + 1) % 4 else _FULL for i in range(fields["num_hidden_layers"])]


def _layer_ropes(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """rope_theta and rope_scaling of older configs are those of the layers that see everything."""
    given = raw.get("rope_parameters") or {}
    found = {kind: dict(given.get(kind) or {}) for kind in _LAYER_TYPES}
    found[_FULL].update(raw.get("rope_scaling") or {})
    found[_FULL].setdefault("rope_theta", raw.get("rope_theta", _THETA))
    found[_SLIDING].setdefault("rope_theta", _THETA)
    return {**given, **found}


_DEFAULTS = CAUSAL_LM | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 1,
    "eos_token_id": 50279,
    "attention_bias": False,
}
ARCHITECTURES = (
    Architecture(
        "olmo2",
        ("Olmo2ForCausalLM",),
        _describe,
        _DEFAULTS,
        nullable=frozenset({"num_key_value_heads"}),
        family="OLMo 2",
    ),
    Architecture(
        "olmo3",
        ("Olmo3ForCausalLM",),
        _describe_windowed,
        _DEFAULTS | {"sliding_window": 4096, "layer_types": None},
        nullable=frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
        layer_types=_layer_types,
        layer_ropes=_layer_ropes,
        rope_theta=_THETA,
        family="OLMo 3",
    ),
)
