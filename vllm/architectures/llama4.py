"""Llama 4, alone or inside multimodal checkpoints: layers that rotate q and k and see their own
chunk of positions, and every few of them one that does not rotate and sees all. One expert for each
token beside a shared one, in all layers or in every second.

The router's sigmoid multiplies what the chosen expert reads, not what it gives.
"""

from collections.abc import Mapping
from typing import Any

from vllm.architectures.architecture import (
    CAUSAL_LM,
    TEXT_IN_MULTIMODAL,
    Architecture,
    Composite,
)
from vllm.architectures.build import (
    AttentionKind,
    MoENames,
    attention,
    decoder,
    dim,
    gated_mlp_of,
    moe,
)
from vllm.architectures.decoder import CHUNKED, Attention, Decoder, FeedForward, MoE, QueryScaling
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_NAMES = MoENames(moe="feed_forward", gate="router", inner="intermediate_size")
# They rotate without changing the length of q and k, so that the norm may come before or after.
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3")


def _describe(fields: Fields) -> Decoder:
    kind = fields.rope().get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{fields.source}: rope_type {kind!r} is not supported in Llama 4: it takes "
            f"{', '.join(_ROPE_TYPES)}"
        )
    return replace(decoder(fields, _attention, _feed_forward), is_neox=False)


def _attention(fields: Fields, layer: int) -> Attention:
    bias, rotates = fields.flag("attention_bias"), _rotates(fields, layer)
    kind = AttentionKind(qkv_bias=bias, output_bias=bias, rope="" if rotates else None)
    if rotates and fields.flag("use_qk_norm", True):
        kind = replace(kind, qk_norm="rms_unweighted")
    if not rotates and fields.flag("attn_temperature_tuning", True):
        # transformers counts positions from 1.
        scaling = QueryScaling(fields.number("attn_scale", 0.1), fields.size("floor_scale"), 1)
        kind = replace(kind, query_scaling=scaling)
    chunk = fields.optional("attention_chunk_size", 0)
    if _type_of(fields, layer, rotates) == _CHUNKED and chunk:
        kind = replace(kind, variant=CHUNKED, window=chunk)
    return attention(fields, kind)


def _rotates(fields: Fields, layer: int) -> bool:
    listed = fields.entries("no_rope_layers", int)
    if not listed:
        return (layer + 1) % fields.optional("no_rope_layer_interval", 4) != 0
    if layer >= len(listed):
        raise CheckpointError(
            f"{fields.source}: no_rope_layers has {len(listed)} entries: it takes one for each of "
            f"num_hidden_layers = {fields.size('num_hidden_layers')} layers, 0 where q and k are "
            f"not rotated"
        )
    return bool(listed[layer])


def _type_of(fields: Fields, layer: int, rotates: bool) -> str:
    kind = fields.layer_kind(layer) or (_CHUNKED if rotates else _FULL)
    if kind not in (_CHUNKED, _FULL):
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes {_CHUNKED} or {_FULL}"
        )
    return kind


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    step = fields.optional("interleave_moe_layer_step", 1)
    is_sparse = (layer + 1) % step == 0
    if fields.get("moe_layers") is not None:
        is_sparse = layer in fields.entries("moe_layers", int)
    if is_sparse:
        return fields.once("moe", lambda: _moe(fields))
    inner = dim(fields, "intermediate_size_mlp")
    return fields.once("mlp", lambda: gated_mlp_of(fields, "feed_forward", inner))


def _moe(fields: Fields) -> MoE:
    if (top_k := fields.size("num_experts_per_tok")) != 1:
        raise CheckpointError(
            f"{fields.source}: num_experts_per_tok = {top_k} is not supported in Llama 4: it takes "
            f"1, as the input of an expert is scaled for each token and expert"
        )
    shared = gated_mlp_of(fields, "feed_forward.shared_expert", dim(fields, "intermediate_size"))
    return moe(
        fields,
        dim(fields, "num_local_experts"),
        lambda count, top_k: Router(
            count, top_k, renormalise=False, scoring="sigmoid", scales_inputs=True
        ),
        shared,
        names=_NAMES,
    )


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    layers, found = range(fields["num_hidden_layers"]), dict[str, Any]()
    if not fields["no_rope_layers"]:
        interval = fields["no_rope_layer_interval"]
        found["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in layers]
    if fields["moe_layers"] is None:
        step = fields["interleave_moe_layer_step"]
        found["moe_layers"] = [*layers[step - 1 :: step]]
    return found


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    has_chunks = fields["attention_chunk_size"] is not None
    return [_CHUNKED if rotates and has_chunks else _FULL for rotates in fields["no_rope_layers"]]


ARCHITECTURES = (
    Architecture(
        "llama4_text",
        ("Llama4ForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "attention_bias": False,
        },
        nullable=frozenset({"attention_chunk_size", "layer_types"}),
        layer_types=_layer_types,
        derived_fields=_derived,
        rope_theta=500000.0,
        family="Llama 4",
    ),
    Composite(
        "llama4",
        ("Llama4ForConditionalGeneration",),
        ("llama4_text",),
        skipped_tensors=("vision_model.", "multi_modal_projector."),
        renamed_tensors=TEXT_IN_MULTIMODAL,
        notice="Llama 4: serving the text model; images are not supported, and weights for vision "
        "are skipped",
        family="Llama 4",
    ),
)
