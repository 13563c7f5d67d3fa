"""Hunyuan: dense models, and those with experts by softmax scores beside a shared one in every
layer. An RMSNorm over each head of q and k follows the rotation."""

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
    gated_mlp_of,
    heads_of,
    moe,
)
from vllm.architectures.decoder import Attention, Decoder, FeedForward, MoE, Rope
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

# Fields of published configs that transformers does not read, and what all these models have.
_ALWAYS = {"use_qk_norm": True, "use_cla": False, "mlp_bias": False}
_ALWAYS_OF_EXPERTS = {
    "use_mixed_mlp_moe": True,
    "num_shared_expert": 1,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
}
_NAMES = MoENames(gate="gate.wg", top_k="moe_topk", inner="intermediate_size")
# Numbers that published configs give for each layer.
_LISTS = ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert")


def _describe(fields: Fields, feed_forward: Any = gated_mlp) -> Decoder:
    """feed_forward: of layer i."""
    fields.allow_only(_ALWAYS)
    if feed_forward is not gated_mlp:
        fields.allow_only(_ALWAYS_OF_EXPERTS)
    made = decoder(fields, _attention, feed_forward)
    return replace(made, ropes={"": _with_alpha(fields, made.ropes[""])})


def _attention(fields: Fields, layer: int) -> Attention:
    bias = fields.flag("attention_bias")
    kind = AttentionKind(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="rms",
        norms_rotated=True,
        qk_norm_names=("query_layernorm", "key_layernorm"),
    )
    return attention(fields, kind)


def _with_alpha(fields: Fields, rope: Rope) -> Rope:
    """NTK-aware scaling by a fixed alpha, which configs call dynamic: a larger base."""
    alpha = rope.get("alpha")
    if rope.get("rope_type") != "dynamic" or not alpha:
        return rope
    head_dim = heads_of(fields)[2]
    if type(alpha) not in (int, float) or not 0 < alpha < float("inf") or head_dim < 4:
        raise CheckpointError(
            f"{fields.source}: alpha = {alpha!r} in rope_parameters for heads of {head_dim}: it "
            f"takes a number above 0, and heads of at least 4"
        )
    theta = rope["rope_theta"] * alpha ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": theta}


# ---------------------------------------------------------------- with experts


def _describe_experts(fields: Fields) -> Decoder:
    flat = {**fields.given, **{name: _one_of(fields, name) for name in _LISTS}}
    given = {name: value for name, value in flat.items() if value is not None}
    own = Fields(given, _DEFAULTS, fields.source)
    inner = own.size("intermediate_size")
    if own.optional("moe_intermediate_size", inner) != inner:
        raise CheckpointError(
            f"{own.source}: moe_intermediate_size = {own.get('moe_intermediate_size')} is not "
            f"supported: it takes intermediate_size = {inner}, of experts and shared one alike"
        )
    return _describe(own, _feed_forward)


def _one_of(fields: Fields, name: str) -> Any:
    """The number that is given, or that a list has for every layer; None for none."""
    given = fields.get(name)
    if not isinstance(given, list):
        return given
    entries = fields.entries(name, int)
    if len({*entries}) != 1 or len(entries) < fields.size("num_hidden_layers"):
        raise CheckpointError(
            f"{fields.source}: {name} = {str(given)[:80]} is not supported: it takes one number, "
            f"or a list that has it for each of num_hidden_layers = "
            f"{fields.size('num_hidden_layers')} layers"
        )
    return entries[0]


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    shared = gated_mlp_of(fields, "mlp.shared_mlp", dim(fields, "intermediate_size"))
    router = partial(Router, renormalise=True)
    return moe(fields, dim(fields, "num_experts"), router, shared, names=_NAMES)


_DEFAULTS: Mapping[str, Any] = CAUSAL_LM | {
    "vocab_size": 290943,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "eod_token_id": 3,
    "attention_bias": False,
}
_NULLABLE = frozenset({"num_key_value_heads", "head_dim"})
ARCHITECTURES = (
    Architecture(
        "hunyuan_v1_dense",
        ("HunYuanDenseV1ForCausalLM",),
        _describe,
        _DEFAULTS,
        nullable=_NULLABLE,
        family="Hunyuan, dense",
    ),
    Architecture(
        "hunyuan_v1_moe",
        ("HunYuanMoEV1ForCausalLM",),
        _describe_experts,
        _DEFAULTS,
        # The names that transformers 5 knows them by too.
        renamed_fields={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
        is_read_by_transformers=True,
        family="Hunyuan mixture of experts",
    ),
)
