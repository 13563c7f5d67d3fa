"""Granite: Llama with multipliers of embeddings, scores, residuals and logits."""

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, Decoder
from vllm.architectures.fields import Fields
from vllm.architectures.llama import DEFAULTS
from vllm.utils.dataclasses import replace


def _describe(fields: Fields) -> Decoder:
    return replace(
        decoder(fields, _attention, gated_mlp),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
        logits_scaling=fields.positive("logits_scaling", 1.0),
    )


def _attention(fields: Fields, layer: int) -> Attention:
    bias, scale = fields.flag("attention_bias"), fields.positive("attention_multiplier", 1.0)
    return attention(fields, AttentionKind(qkv_bias=bias, output_bias=bias, scale=scale))


_DEFAULTS = {name: value for name, value in DEFAULTS.items() if name != "head_dim"}
ARCHITECTURES = (
    Architecture(
        "granite",
        ("GraniteForCausalLM",),
        _describe,
        _DEFAULTS
        | {
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        nullable=frozenset({"num_key_value_heads"}),
        family="Granite",
    ),
)
