"""Gemma 4, alone or inside multimodal checkpoints: Gemma 3's norms and windows; layers that see
everything have larger heads and fewer of keys, which are their values too before norm and rotation.
A number multiplies what a layer gives. In some models experts stand beside the MLP of every layer.
"""

from collections.abc import Mapping

from vllm.architectures.activation import activation
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
    dim,
    gated_mlp,
    heads_of,
    ropes,
)
from vllm.architectures.decoder import (
    Attention,
    Decoder,
    ExpertsSpec,
    FeedForward,
    LayerNorms,
    MLPBesideExperts,
)
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router, checked
from vllm.architectures.sharding import linear
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import replace

_SLIDING, _FULL = _LAYER_TYPES = ("sliding_attention", "full_attention")
# Of models that are not served.
_ABSENT = ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")


def _describe(fields: Fields) -> Decoder:
    for name in _ABSENT:
        if fields.get(name):
            raise CheckpointError(
                f"{fields.source}: {name} = {fields.get(name)!r} is not supported: it takes 0 or "
                f"false (Gemma 4 31B and 26B-A4B have no such layers)"
            )
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise CheckpointError(
            f"{fields.source}: use_bidirectional_attention = "
            f"{fields.get('use_bidirectional_attention')!r} is not supported: it takes null, or "
            f"vision (of images alone)"
        )
    everywhere = _of_full_layers(fields)

    def mixer(fields: Fields, layer: int) -> Attention:
        slides = _type_of(fields, layer) == _SLIDING
        return _attention(fields if slides else everywhere, slides)

    made = decoder(fields, mixer, _feed_forward)
    return replace(
        made,
        layer_norms=LayerNorms(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        ropes={
            **ropes(fields, heads_of(fields)[2], (_SLIDING,)),
            **ropes(everywhere, heads_of(everywhere)[2], (_FULL,)),
        },
        embedding_multiplier=made.hidden_size**0.5,
        final_logit_softcapping=fields.positive("final_logit_softcapping", 0.0),
        layer_scalar="layer_scalar",
    )


def _of_full_layers(fields: Fields) -> Fields:
    """The fields with the heads of layers that see everything: as published, or as transformers
    writes them, layer by layer."""
    found = [{"head_dim": fields.optional("global_head_dim", 512)}]
    num_heads = fields.get("num_global_key_value_heads")
    if fields.flag("attention_k_eq_v") and num_heads is not None:
        found[0]["num_key_value_heads"] = num_heads
    if (listed := fields.get("per_layer_config")) is not None:
        layers = {str(i) for i in range(fields.size("num_hidden_layers"))
                  if _type_of(fields, i) == _FULL}  # fmt: skip
        is_known = isinstance(listed, Mapping) and {str(i) for i in listed} == layers
        found = [*listed.values()] if is_known else []
    names = {"head_dim", "num_key_value_heads"}
    if not found or any(not isinstance(one, Mapping) or one.keys() - names for one in found):
        raise CheckpointError(
            f"{fields.source}: per_layer_config = {str(listed)[:80]}: it takes head_dim and "
            f"num_key_value_heads of every {_FULL} layer, and of no other"
        )
    if any(one != found[0] for one in found):
        raise CheckpointError(
            f"{fields.source}: per_layer_config = {str(listed)[:80]}: it takes the same numbers "
            f"for every {_FULL} layer"
        )
    return Fields({**fields.given, **found[0]}, {}, fields.source)


def _attention(fields: Fields, slides: bool) -> Attention:
    bias = fields.flag("attention_bias")
    kind = AttentionKind(
        qkv_bias=bias,
        output_bias=bias,
        window=fields.optional("sliding_window", 512) if slides else 0,
        qk_norm="rms",
        rope=_SLIDING if slides else _FULL,
        scale=1.0,
        v_norm="rms_unweighted",
        k_is_v=not slides and fields.flag("attention_k_eq_v"),
    )
    return attention(fields, kind)


def _type_of(fields: Fields, layer: int) -> str:
    kind = fields.layer_kind(layer) or (_SLIDING if (layer + 1) % 6 else _FULL)
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes "
            f"{' or '.join(_LAYER_TYPES)}"
        )
    return kind


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    mlp = gated_mlp(fields)
    if not fields.flag("enable_moe_block"):
        return mlp
    return fields.once("experts", lambda: _beside_experts(fields))


def _beside_experts(fields: Fields) -> MLPBesideExperts:
    count, hidden = dim(fields, "num_experts"), dim(fields, "hidden_size")
    top_k, inner = fields.size("top_k_experts"), dim(fields, "moe_intermediate_size")
    if top_k > count.count:
        raise CheckpointError(
            f"{fields.source}: top_k_experts = {top_k} is more than num_experts = {count.count}"
        )
    router = checked(fields, lambda: Router(count.count, top_k, renormalise=True))
    gate = replace(linear("router.proj", count, hidden, "replicated"), may_quantize=False)
    return MLPBesideExperts(
        gated_mlp(fields),
        gate,
        ExpertsSpec("experts", count, router, hidden.size, inner, activation(fields)),
        router_norm="router.scale",
        expert_scale="router.per_expert_scale",
        after_mlp="post_feedforward_layernorm_1",
        before_experts="pre_feedforward_layernorm_2",
        after_experts="post_feedforward_layernorm_2",
    )


ARCHITECTURES = (
    Architecture(
        "gemma4_text",
        ("Gemma4ForCausalLM",),
        _describe,
        {name: value for name, value in CAUSAL_LM.items() if name != "hidden_act"}
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
        },
        is_read_by_transformers=True,
        family="Gemma 4 31B and 26B-A4B",
    ),
    Composite(
        "gemma4",
        ("Gemma4ForConditionalGeneration",),
        ("gemma4_text",),
        ties_embeddings=True,
        skipped_tensors=("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio."),
        renamed_tensors=TEXT_IN_MULTIMODAL,
        notice="Gemma 4: serving the text model; images and sound are not supported",
        family="Gemma 4 31B and 26B-A4B",
    ),
)
