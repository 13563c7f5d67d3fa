"""Gemma 2 and 3, the latter also inside multimodal checkpoints: four norms in a layer, sliding
windows in most layers, embeddings scaled by the root of their size, and gates of GELU. Scores and
logits of Gemma 2 are soft-capped; the two kinds of layers of Gemma 3 have their own rotation."""

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

_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")


def _describe_gemma2(fields: Fields) -> Decoder:
    softcap = fields.positive("attn_logit_softcapping", 0.0)
    return _describe(fields, AttentionKind(softcap=softcap), period=2)


def _describe_gemma3(fields: Fields) -> Decoder:
    period = fields.optional("sliding_window_pattern", 6)
    made = _describe(fields, AttentionKind(qk_norm="rms_zero_centred"), period)
    layers = tuple(
        replace(one, mixer=replace(one.mixer, rope=_type_of(fields, i, period)))
        for i, one in enumerate(made.layers)
    )
    return replace(made, layers=layers, ropes=ropes(fields, heads_of(fields)[2], _LAYER_TYPES))


def _describe(fields: Fields, kind: AttentionKind, period: int) -> Decoder:
    """period: the last of so many layers sees everything, where layer_types does not say it."""
    if fields.flag("use_bidirectional_attention"):
        raise CheckpointError(
            f"{fields.source}: use_bidirectional_attention = true is not supported: it takes false "
            f"or null (causal attention)"
        )
    bias = fields.flag("attention_bias")
    scale = fields.positive("query_pre_attn_scalar", 256) ** -0.5
    kind = replace(kind, qkv_bias=bias, output_bias=bias, scale=scale)
    window = fields.optional("sliding_window", 0)

    def mixer(fields: Fields, layer: int) -> Attention:
        is_sliding = _type_of(fields, layer, period) == _SLIDING
        return attention(fields, replace(kind, window=window if is_sliding else 0))

    return replace(
        decoder(fields, mixer, gated_mlp, "rms_zero_centred"),
        layer_norms=LayerNorms(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        embedding_multiplier=fields.size("hidden_size") ** 0.5,
        final_logit_softcapping=fields.positive("final_logit_softcapping", 0.0),
    )


def _type_of(fields: Fields, layer: int, period: int) -> str:
    kind = fields.layer_kind(layer) or (_SLIDING if (layer + 1) % period else _FULL)
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes "
            f"{' or '.join(_LAYER_TYPES)}"
        )
    return kind


def _layer_types(fields: Mapping[str, Any], period: int) -> list[str]:
    return [_SLIDING if (i + 1) % period else _FULL for i in range(fields["num_hidden_layers"])]


def _layer_ropes(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What older configs spread over rope_theta, rope_scaling and rope_local_base_freq."""
    given = raw.get("rope_parameters") or {}
    found = {kind: dict(given.get(kind) or {}) for kind in _LAYER_TYPES}
    found[_FULL].update(raw.get("rope_scaling") or {})
    found[_FULL].setdefault("rope_theta", raw.get("rope_theta", 1000000.0))
    found[_SLIDING].setdefault("rope_theta", raw.get("rope_local_base_freq", 10000.0))
    return {**given, **found}


_GEMMA = {name: value for name, value in CAUSAL_LM.items() if name != "hidden_act"} | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_NULLABLE = frozenset(
    {
        *("sliding_window", "layer_types", "final_logit_softcapping", "attn_logit_softcapping"),
        "use_bidirectional_attention",
    }
)

ARCHITECTURES = (
    Architecture(
        "gemma2",
        ("Gemma2ForCausalLM",),
        _describe_gemma2,
        _GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "use_bidirectional_attention": None,
        },
        nullable=_NULLABLE,
        layer_types=lambda fields: _layer_types(fields, 2),
        family="Gemma 2",
    ),
    Architecture(
        "gemma3_text",
        ("Gemma3ForCausalLM",),
        _describe_gemma3,
        _GEMMA
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        nullable=_NULLABLE,
        layer_types=lambda fields: _layer_types(fields, fields.get("sliding_window_pattern", 6)),
        derives_layer_types=("sliding_window_pattern",),
        layer_ropes=_layer_ropes,
        omits_sizes=True,
        family="Gemma 3",
    ),
    Composite(
        "gemma3",
        ("Gemma3ForConditionalGeneration",),
        ("gemma3_text",),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "multi_modal_projector."),
        renamed_tensors=TEXT_IN_MULTIMODAL,
        notice="Gemma3: serving the text model; images are not supported",
        family="Gemma 3",
    ),
)
