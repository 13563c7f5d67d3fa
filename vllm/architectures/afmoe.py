"""AFMoE (Trinity): sliding windows in most layers, whose q and k alone are rotated; a gate of the
input multiplies what attention gives. Norms around both parts of a layer, the first layers dense,
then experts by sigmoid scores with a correction bias beside shared ones."""

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
    heads_of,
    moe,
    shared_experts,
)
from vllm.architectures.decoder import Attention, Decoder, FeedForward, LayerNorms, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")
_NAMES = MoENames(gate="router.gate", correction_bias="expert_bias")
_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
)
# Fields of published configs that transformers does not read, and what all these models have.
_ALWAYS = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
           "num_expert_groups": 1, "num_limited_groups": 1}  # fmt: skip


def _describe(fields: Fields) -> Decoder:
    fields.allow_only(_ALWAYS)
    made = decoder(fields, _attention, _feed_forward)
    multiplier = made.hidden_size**0.5 if fields.flag("mup_enabled") else 1.0
    return replace(made, layer_norms=_NORMS, embedding_multiplier=multiplier)


def _attention(fields: Fields, layer: int) -> Attention:
    period = fields.optional("global_attn_every_n_layers", 4)
    kind = fields.layer_kind(layer) or (_SLIDING if (layer + 1) % period else _FULL)
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes {_SLIDING} or {_FULL}"
        )
    bias, slides = fields.flag("attention_bias"), kind == _SLIDING
    own = AttentionKind(
        qkv_bias=bias,
        output_bias=bias,
        window=fields.optional("sliding_window", 0) if slides else 0,
        qk_norm="rms",
        rope="" if slides else None,
        gate=("gate_proj", heads_of(fields)[2]),
    )
    return attention(fields, own)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    if layer < fields.optional("num_dense_layers", 1, lowest=0):
        return gated_mlp(fields)
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    router = partial(
        Router,
        renormalise=True,
        scoring="sigmoid",
        has_correction_bias=True,
        routed_scale=fields.number("route_scale", 1.0),
    )
    shared = shared_experts(fields, "num_shared_experts")
    return moe(fields, dim(fields, "num_experts"), router, shared, names=_NAMES)


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    period = fields["global_attn_every_n_layers"]
    layers = range(fields["num_hidden_layers"])
    return [_SLIDING if (i + 1) % period else _FULL for i in layers]


ARCHITECTURES = (
    Architecture(
        "afmoe",
        ("AfmoeForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": None,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
            "layer_types": None,
            "mup_enabled": False,
        },
        nullable=frozenset({"num_key_value_heads", "head_dim", "sliding_window", "layer_types"}),
        layer_types=_layer_types,
        family="AFMoE: Trinity",
    ),
)
