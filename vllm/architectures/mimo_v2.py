"""MiMo-V2-Flash: heads of values narrower than those of keys, and in most layers a window, sinks,
and twice as many heads of keys and values. The first layer is dense, the others have experts by
sigmoid scores. Layers of multi-token prediction are skipped."""

from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp, heads_of, ropes
from vllm.architectures.decoder import SINKS, Attention, Decoder, FeedForward
from vllm.architectures.deepseek_v3 import V3_ROUTER, experts
from vllm.architectures.fields import Fields
from vllm.architectures.router import sigmoid_router
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")
# Fields of published configs that transformers does not read, and what all these models have.
_ALWAYS = {
    "scoring_func": "sigmoid",
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}
# And those that say of layers with windows what another field says of all.
_AS_OTHERS = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


def _describe(fields: Fields) -> Decoder:
    always = _ALWAYS | {name: fields.get(other) for name, other in _AS_OTHERS.items()}
    for name, value in always.items():
        if fields.get(name) not in (None, value):
            raise CheckpointError(
                f"{fields.source}: {name} = {fields.get(name)!r} is not supported: it takes "
                f"{value!r}"
            )
    head_dim, value_dim = fields.size("head_dim"), fields.size("v_head_dim")
    if value_dim > head_dim:
        raise CheckpointError(
            f"{fields.source}: v_head_dim = {value_dim} is more than head_dim = {head_dim}"
        )
    num_kv_heads = fields.optional("swa_num_key_value_heads", 2 * heads_of(fields)[1])
    in_windows = Fields({**fields.given, "num_key_value_heads": num_kv_heads}, {}, fields.source)

    def mixer(fields: Fields, layer: int) -> Attention:
        slides = _type_of(fields, layer) == _SLIDING
        return _attention(in_windows if slides else fields, slides)

    made = decoder(fields, mixer, _feed_forward)
    return replace(made, ropes=ropes(_with_ropes(fields), head_dim, _LAYER_TYPES))


def _attention(fields: Fields, slides: bool) -> Attention:
    # transformers and the published code see the query's own key and so many before it.
    window = fields.optional("sliding_window_size", fields.optional("sliding_window", 129) - 1) + 1
    kind = AttentionKind(
        qkv_bias=fields.flag("attention_bias"),
        window=window if slides else 0,
        variant=SINKS if slides else "",
        sinks="attention_sink_bias",
        rope=_SLIDING if slides else _FULL,
        value_dim=fields.size("v_head_dim"),
        v_scale=fields.positive("attention_value_scale", 1.0),
    )
    return attention(fields, kind)


def _type_of(fields: Fields, layer: int) -> str:
    """Of layer_types, or of hybrid_layer_pattern, which has 1 for a window."""
    kind: Any = fields.layer_kind(layer)
    pattern = fields.entries("hybrid_layer_pattern", int)
    if kind is None and layer < len(pattern):
        kind = _SLIDING if pattern[layer] else _FULL
    elif kind is None:
        kind = _FULL if layer == 0 or (layer + 1) % 6 == 0 else _SLIDING
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes {_SLIDING} or {_FULL}"
        )
    return str(kind)


def _with_ropes(fields: Fields) -> Fields:
    """With rope_parameters of each type of layers, also of configs that spread them."""
    if fields.get("rope_parameters") is not None:
        return fields
    share = fields.number("partial_rotary_factor", 0.334)
    thetas = {_FULL: ("rope_theta", 5e6), _SLIDING: ("swa_rope_theta", 1e4)}
    made = {
        kind: {"rope_theta": fields.number(*theta), "partial_rotary_factor": share}
        for kind, theta in thetas.items()
    }
    return Fields({**fields.given, "rope_parameters": made}, {}, fields.source)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    kinds = fields.entries("mlp_layer_types", str)
    is_sparse = kinds[layer] == "sparse" if layer < len(kinds) else layer > 0
    if not kinds and layer < len(listed := fields.entries("moe_layer_freq", int)):
        is_sparse = bool(listed[layer])
    if not is_sparse:
        return gated_mlp(fields)
    return experts(fields, partial(sigmoid_router, fields), V3_ROUTER)


ARCHITECTURES = (
    Architecture(
        "mimo_v2_flash",
        ("MiMoV2FlashForCausalLM",),
        _describe,
        CAUSAL_LM | {"attention_bias": False, "v_head_dim": 128, "attention_value_scale": 0.707},
        renamed_fields={
            "num_local_experts": "n_routed_experts",
            "layernorm_epsilon": "rms_norm_eps",
        },
        is_read_by_transformers=True,
        skipped_tensors=("mtp.",),
        family="MiMo-V2-Flash, without layers of multi-token prediction",
    ),
)
