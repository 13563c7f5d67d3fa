"""EXAONE 4: norms behind the blocks and none before them, and an RMSNorm over each head of q and k.
In models with sliding windows the layers that see everything do not rotate q and k."""

from collections.abc import Mapping
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, Decoder, LayerNorms
from vllm.architectures.fields import Fields
from vllm.utils.dataclasses import replace

_NORMS = LayerNorms("", "post_attention_layernorm", "", "post_feedforward_layernorm")


def _describe(fields: Fields) -> Decoder:
    return replace(decoder(fields, _attention, gated_mlp), layer_norms=_NORMS)


def _attention(fields: Fields, layer: int) -> Attention:
    window, kind = fields.optional("sliding_window", 0), fields.layer_kind(layer)
    if kind is None and window:
        period = _period(fields.get("sliding_window_pattern"))
        kind = "sliding_attention" if (layer + 1) % period else "full_attention"
    own = window if kind == "sliding_attention" else 0
    rope = None if window and not own else ""
    return attention(fields, AttentionKind(window=own, qk_norm="rms", rope=rope))


def _period(pattern: Any) -> int:
    """Of `LLLG`, or of a number."""
    if isinstance(pattern, str) and pattern:
        return len(pattern)
    return pattern if type(pattern) is int and pattern > 0 else 4


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    period = fields["sliding_window_pattern"]
    layers = range(fields["num_hidden_layers"])
    return ["sliding_attention" if (i + 1) % period else "full_attention" for i in layers]


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window_pattern": 0} if fields["sliding_window"] is None else {}


ARCHITECTURES = (
    Architecture(
        "exaone4",
        ("Exaone4ForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
        },
        nullable=frozenset({"sliding_window", "layer_types"}),
        layer_types=_layer_types,
        derived_fields=_derived,
        family="EXAONE 4",
    ),
)
