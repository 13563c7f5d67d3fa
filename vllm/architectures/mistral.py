"""Mistral (in older models with a sliding window in every layer), Ministral 3, the multimodal
Mistral 3 around either (Devstral Small 2, Mistral Small 3.x), or around Mistral 4 (Small 4), and
Large 3. The last two have latent attention and experts by softmax scores. Queries of Ministral 3
and later grow with their position."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import TEXT_IN_MULTIMODAL, Architecture, Composite
from vllm.architectures.build import AttentionKind, MoENames, attention, decoder, gated_mlp
from vllm.architectures.decoder import (
    Attention,
    Decoder,
    FeedForward,
    LatentAttention,
    QueryScaling,
)
from vllm.architectures.deepseek_v3 import COMMON, NULLABLE, experts, latent_attention, mla_decoder
from vllm.architectures.fields import Fields
from vllm.architectures.llama import DEFAULTS
from vllm.architectures.router import Router
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace


def _attention(fields: Fields, layer: int) -> Attention:
    window = fields.optional("sliding_window", 0)
    return attention(
        fields, AttentionKind(window=window, query_scaling=_query_scaling(fields.rope()))
    )


def _query_scaling(rope: Mapping[str, Any]) -> QueryScaling | None:
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScaling(beta, length) if beta and length else None


def _rope_defaults(
    fields: Mapping[str, Any], theta: float, factor: float, original: int
) -> dict[str, Any]:
    return {
        "type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        "max_position_embeddings": fields["max_position_embeddings"],
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }


# ---------------------------------------------------------------- Small 4 and Large 3

_SHARE = "partial_rotary_factor"


def _decoder(fields: Fields, scaling: Callable[[Fields], QueryScaling | None]) -> Decoder:
    """scaling: of queries."""
    found = mla_decoder(fields, _feed_forward, partial(_scaled, scaling=scaling(fields)))
    rope, rotated = dict(found.ropes[""]), found.rotary_head_dim
    # Of whole heads, of which latent attention rotates a part that has its own size.
    head_dim = rotated + fields.size("qk_nope_head_dim")
    share = rope.pop(_SHARE, rotated / head_dim)
    if round(head_dim * share) != rotated:
        raise CheckpointError(
            f"{fields.source}: {_SHARE} = {share!r} in rope_parameters rotates "
            f"{round(head_dim * share)} of {head_dim} columns of a head, but qk_rope_head_dim = "
            f"{rotated}: it takes {rotated / head_dim}, or nothing"
        )
    return replace(found, ropes={"": rope})


def _scaled(fields: Fields, layer: int, scaling: QueryScaling | None) -> LatentAttention:
    return fields.once(
        ("scaled", scaling),
        lambda: replace(latent_attention(fields, layer), query_scaling=scaling),
    )


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0):
        return gated_mlp(fields)
    return experts(fields, partial(_router, fields), MoENames())


def _router(fields: Fields, num_experts: int, top_k: int) -> Router:
    for field, only in (("n_group", 1), ("scoring_func", "softmax")):
        if (given := fields.get(field)) not in (None, only):
            raise CheckpointError(
                f"{fields.source}: {field} = {given!r} is not supported for this model: it takes "
                f"{only!r}"
            )
    return Router(
        num_experts,
        top_k,
        renormalise=fields.flag("norm_topk_prob", True),
        routed_scale=fields.number("routed_scaling_factor", 1.0),
    )


def _scaling_of_large(fields: Fields) -> QueryScaling | None:
    """Of the field llama_4_scaling: null, or its beta and original_max_position_embeddings."""
    given = fields.get("llama_4_scaling")
    if given is None:
        return None
    values = given if isinstance(given, Mapping) else {}
    own = Fields(values, {}, f"{fields.source}: llama_4_scaling")
    beta = own.positive("beta", 0.0)
    return QueryScaling(beta, own.size("original_max_position_embeddings"))


def _rope_of_large(fields: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """As given; apply_scale false means that YaRN changes frequencies, and neither cos and sin nor
    scores."""
    if rope.get("apply_scale") is False:
        return rope | {"attention_factor": 1.0, "mscale_all_dim": 0}
    return rope


def _rope_of_small(fields: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    rotated = fields["qk_rope_head_dim"]
    return {_SHARE: rotated / (rotated + fields["qk_nope_head_dim"])} | _rope_of_large(fields, rope)


_LATENT: dict[str, Any] = COMMON | {
    "vocab_size": 131072,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
        rope_defaults=partial(_rope_defaults, theta=1e6, factor=16.0, original=16384),
        family="Mistral3",
    ),
    Architecture(
        "mistral4",
        ("Mistral4ForCausalLM",),
        partial(_decoder, scaling=lambda fields: _query_scaling(fields.rope())),
        _LATENT
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 1048576,
            "pad_token_id": 11,
        },
        nullable=NULLABLE,
        renamed_fields={"num_local_experts": "n_routed_experts"},
        rope_defaults=partial(_rope_defaults, theta=1e4, factor=128.0, original=8192),
        rope=_rope_of_small,
        family="Mistral Small 4",
    ),
    Architecture(
        "mistral_large3",
        ("MistralLarge3ForCausalLM",),
        partial(_decoder, scaling=_scaling_of_large),
        _LATENT
        | {
            "hidden_size": 7168,
            "intermediate_size": 16384,
            "moe_intermediate_size": 4096,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 294912,
            "scoring_func": "softmax",
        },
        nullable=NULLABLE,
        rope=_rope_of_large,
        skipped_tensors=(
            "vision_encoder.",
            "vision_language_adapter.",
            "patch_merger.",
            "pre_mm_projector_norm.",
        ),
        is_in_transformers=False,
        family="Mistral Large 3, text only, in the layout of Hugging Face",
    ),
    Composite(
        "mistral3",
        ("Mistral3ForConditionalGeneration",),
        ("mistral", "ministral3", "mistral4"),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "multi_modal_projector."),
        renamed_tensors=TEXT_IN_MULTIMODAL,
        family="Mistral3",
        notice="Mistral3: serving the text model; images are not supported",
    ),
)
