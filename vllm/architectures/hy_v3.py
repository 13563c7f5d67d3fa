"""Hunyuan 3 (Hy3): the first layers dense, then experts by sigmoid scores with a correction bias
beside shared ones, and an RMSNorm over each head of q and k. Layers of multi-token prediction
follow and are skipped."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    MoENames,
    attention,
    decoder,
    dim,
    gated_mlp,
    moe,
    shared_experts,
)
from vllm.architectures.decoder import Attention, Decoder, FeedForward, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.errors import CheckpointError

_NAMES = MoENames(gate="router.gate", correction_bias="expert_bias")
# Fields of published configs that transformers does not read, and what all these models have.
_ALWAYS = {
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
}
_KINDS = ("dense", "sparse")


def _describe(fields: Fields) -> Decoder:
    fields.allow_only(_ALWAYS)
    kinds = fields.entries("mlp_layer_types", str) or _mlp_layer_types(fields.given)
    if len(kinds) != fields.size("num_hidden_layers") or {*kinds} - {*_KINDS}:
        raise CheckpointError(
            f"{fields.source}: mlp_layer_types = {str(kinds)[:80]}: it takes dense or sparse for "
            f"each of num_hidden_layers = {fields.size('num_hidden_layers')} layers"
        )

    def feed_forward(fields: Fields, layer: int) -> FeedForward:
        if kinds[layer] == "dense":
            return gated_mlp(fields)
        return fields.once("moe", lambda: _moe(fields))

    return decoder(fields, _attention, feed_forward)


def _attention(fields: Fields, layer: int) -> Attention:
    bias = fields.flag("attention_bias")
    return attention(fields, AttentionKind(qkv_bias=bias, output_bias=bias, qk_norm="rms"))


def _moe(fields: Fields) -> MoE:
    router = partial(
        Router,
        renormalise=True,
        scoring="sigmoid",
        has_correction_bias=True,
        routed_scale=fields.number("router_scaling_factor", 1.0),
    )
    shared = shared_experts(fields, "num_shared_experts", "mlp.shared_mlp")
    return moe(fields, dim(fields, "num_experts"), router, shared, names=_NAMES)


def _mlp_layer_types(fields: Mapping[str, Any]) -> list[str]:
    num_dense = fields.get("first_k_dense_replace")
    num_dense = 1 if num_dense is None else num_dense
    return [_KINDS[layer >= num_dense] for layer in range(fields["num_hidden_layers"])]


def _derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["mlp_layer_types"] is not None:
        return {}
    return {"mlp_layer_types": _mlp_layer_types(fields)}


ARCHITECTURES = (
    Architecture(
        "hy_v3",
        ("HYV3ForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 120832,
            "hidden_size": 4096,
            "intermediate_size": 13312,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "enable_moe_fp32_combine": True,
            "mlp_layer_types": None,
        },
        # The name that transformers 5 knows it by too.
        renamed_fields={"num_local_experts": "num_experts"},
        derived_fields=_derived,
        rope_theta=11158840.0,
        has_mtp_layers=True,
        family="Hunyuan 3 (Hy3), without layers of multi-token prediction",
    ),
)
