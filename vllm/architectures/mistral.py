"""Mistral (in older models with a sliding window in every layer), Ministral 3, and the multimodal
Mistral 3 around either (Devstral Small 2, Mistral Small 3.x)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import TEXT_IN_MULTIMODAL, Architecture, Composite
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, QueryScaling
from vllm.architectures.fields import Fields
from vllm.architectures.llama import DEFAULTS


def _attention(fields: Fields, layer: int) -> Attention:
    window = fields.optional("sliding_window", 0, lowest=0)
    return attention(
        fields, AttentionKind(window=window, query_scaling=_query_scaling(fields.rope()))
    )


def _query_scaling(rope: Mapping[str, Any]) -> QueryScaling | None:
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScaling(beta, length) if beta and length else None


def _rope_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": fields["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


ARCHITECTURES = (
    Architecture(
        "mistral",
        ("MistralForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=gated_mlp),
        DEFAULTS
        | {
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        nullable=frozenset({"head_dim", "sliding_window"}),
        family="Mistral",
    ),
    Architecture(
        "ministral3",
        ("Ministral3ForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=gated_mlp),
        DEFAULTS
        | {
            "vocab_size": 131072,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 11,
            "sliding_window": None,
        },
        nullable=frozenset({"sliding_window"}),
        rope_defaults=_rope_defaults,
        family="Mistral3",
    ),
    Composite(
        "mistral3",
        ("Mistral3ForConditionalGeneration",),
        ("mistral", "ministral3"),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "multi_modal_projector."),
        renamed_tensors=TEXT_IN_MULTIMODAL,
        family="Mistral3",
        notice="Mistral3: serving the text model; images are not supported",
    ),
)
