"""Qwen3.5, dense and with experts, alone or as part of a multimodal model: gated delta-net layers,
and every few of them one of gated full attention."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture, Checkpointed, Composite
from vllm.architectures.build import (
    AttentionKind,
    attention,
    decoder,
    dim,
    gated_mlp,
    gated_mlp_of,
    moe,
    separate_mtp,
)
from vllm.architectures.decoder import (
    Attention,
    DeltaNet,
    DeltaRule,
    FeedForward,
    MoE,
    MTPSpec,
)
from vllm.architectures.fields import Fields
from vllm.architectures.kv_cache import RecurrentStateSpec
from vllm.architectures.router import Router
from vllm.architectures.sharding import Dim, LinearSpec, Part, linear
from vllm.errors import CheckpointError, did_you_mean

_LAYER_TYPES = ("linear_attention", "full_attention")


def mixer(fields: Fields, layer: int, is_interleaved: bool = False) -> Attention | DeltaNet:
    """is_interleaved: as of `_delta_net`."""
    is_full = (layer + 1) % fields.optional("full_attention_interval", _INTERVAL) == 0
    kind = fields.layer_kind(layer) or _LAYER_TYPES[is_full]
    if kind not in _LAYER_TYPES:
        raise CheckpointError(
            f"{fields.source}: layer_types[{layer}] = {kind!r}: it takes {', '.join(_LAYER_TYPES)}"
            f"{did_you_mean(kind, _LAYER_TYPES)}"
        )
    if kind == "linear_attention":
        return fields.once("delta_net", lambda: _delta_net(fields, is_interleaved))
    return _gated_attention(fields)


def _gated_attention(fields: Fields) -> Attention:
    if not fields.flag("attn_output_gate", True):
        raise CheckpointError(
            f"{fields.source}: attn_output_gate = False is not supported: it takes true"
        )
    bias = fields.flag("attention_bias")
    return attention(
        fields,
        AttentionKind(qkv_bias=bias, output_bias=bias, is_gated=True, qk_norm="rms_zero_centred"),
    )


def mtp(fields: Fields, feed_forward: Callable[[Fields, int], FeedForward]) -> MTPSpec:
    """A layer of full attention, and of the feed-forward of the last layer."""
    last = fields.size("num_hidden_layers") - 1
    return separate_mtp(fields, _gated_attention(fields), feed_forward(fields, last))


def _delta_net(fields: Fields, is_interleaved: bool) -> DeltaNet:
    """is_interleaved: the projections are stored as two weights, whose rows lie together by key
    head: of each its q, its k, and v and z of its value heads; b and a of them."""
    hidden = dim(fields, "hidden_size")
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    keys = dim(fields, "linear_num_key_heads", key_dim)
    values = dim(fields, "linear_num_value_heads", value_dim)
    if values.count % keys.count:
        raise CheckpointError(
            f"{fields.source}: linear_num_value_heads = {values.count} is not a multiple of "
            f"linear_num_key_heads = {keys.count}"
        )
    one_each = Dim("linear_num_value_heads", values.count)
    channels = keys, keys, values
    qkvz: tuple[Part, ...] = Part("in_proj_qkv", channels), Part("in_proj_z", (values,))
    ba: tuple[Part, ...] = Part("in_proj_b", (one_each,)), Part("in_proj_a", (one_each,))
    if is_interleaved:
        heads = Dim("linear_num_key_heads", keys.count)
        qkvz = (Part("in_proj_qkvz", (*channels, values), heads),)
        ba = (Part("in_proj_ba", (one_each, one_each), heads),)
    taps = fields.optional("linear_conv_kernel_dim", 4)
    states = RecurrentStateSpec(channels, taps, values, key_dim, value_dim)
    return DeltaNet(
        "linear_attn",
        LinearSpec("linear_attn.in_proj_qkvz", qkvz, hidden, "column"),
        LinearSpec("linear_attn.in_proj_ba", ba, hidden, "column"),
        linear("linear_attn.out_proj", hidden, values, "row"),
        DeltaRule("linear_attn.delta_rule", keys, states),
    )


def _feed_forward(fields: Fields, layer: int) -> MoE:
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    """Weights of a token's experts always add up to one: there is no such field, whatever a
    config.json says."""
    shared = dim(fields, "shared_expert_intermediate_size")
    return moe(
        fields,
        dim(fields, "num_experts"),
        lambda count, top_k: Router(count, top_k, renormalise=True),
        gated_mlp_of(fields, "mlp.shared_expert", shared),
        is_shared_gated=True,
    )


def layer_types(fields: Mapping[str, Any]) -> list[str]:
    interval = fields.get("full_attention_interval", _INTERVAL)
    if type(interval) is not int or interval < 1:
        raise CheckpointError(
            f"config.json: full_attention_interval = {interval!r} is no positive whole number"
        )
    return [_LAYER_TYPES[(i + 1) % interval == 0] for i in range(fields["num_hidden_layers"])]


_INTERVAL = 4
_DEFAULTS = CAUSAL_LM | {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
# Text models are stored alone or as part of a multimodal one, with vision and the layers of
# multi-token prediction.
_CHECKPOINTS: dict[str, Any] = {
    "skipped_tensors": ("visual.", "mtp."),
    "renamed_tensors": (("model.language_model.", "model."),),
}


def _models(
    names: tuple[str, str, str],
    feed_forward: Callable[[Fields, int], FeedForward],
    defaults: Any,
) -> tuple[Checkpointed, ...]:
    """The text model, and the multimodal one around it. names: model_type, the start of its
    classes, family."""
    name, hf_name, family = names
    text = Architecture(
        f"{name}_text",
        (f"{hf_name}ForCausalLM",),
        partial(decoder, mixer=mixer, feed_forward=feed_forward, norm="rms_zero_centred"),
        _DEFAULTS | defaults,
        nullable=frozenset({"layer_types"}),
        layer_types=layer_types,
        derives_layer_types=("full_attention_interval",),
        partial_rotary_factor=0.25,
        # GSM8K falls by 4 to 12 points when FP8 weights are re-quantised to the UE8M0 scales that
        # DeepGEMM needs on capability family 100 (0.74 against 0.78 to 0.79, B200, 1,319 questions,
        # 5-shot).
        ue8m0_requant_loses_accuracy=True,
        family=family,
        describe_mtp=partial(mtp, feed_forward=feed_forward),
        **_CHECKPOINTS,
    )
    whole = Composite(
        name,
        (f"{hf_name}ForConditionalGeneration",),
        (text.model_type,),
        notice="Qwen3.5: serving the text model; images are not supported, and weights for vision "
        "are skipped",
        family=family,
        **_CHECKPOINTS,
    )
    return text, whole


_DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_MOE = {
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}
_MOE_FAMILY = "Qwen3.5 mixture of experts"

ARCHITECTURES = (
    *_models(("qwen3_5", "Qwen3_5", "Qwen3.5"), gated_mlp, _DENSE),
    *_models(("qwen3_5_moe", "Qwen3_5Moe", _MOE_FAMILY), _feed_forward, _MOE),
)
