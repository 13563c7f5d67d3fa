"""Ernie 4.5 with experts: the first layers dense, then experts by softmax scores with a correction
bias, beside shared ones. It rotates adjacent columns as pairs, as the dense models do."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    MoENames,
    attention,
    decoder,
    dim,
    gated_mlp_of,
    moe,
)
from vllm.architectures.decoder import Attention, Decoder, FeedForward, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.architectures.sharding import Dim
from vllm.utils.dataclasses import replace

_BIAS = "mlp.moe_statics.e_score_correction_bias"
_NAMES = MoENames(top_k="moe_k")


def _describe(fields: Fields) -> Decoder:
    return replace(decoder(fields, _attention, _feed_forward), is_neox=False)


def _attention(fields: Fields, layer: int) -> Attention:
    bias = fields.flag("use_bias")
    return attention(fields, AttentionKind(qkv_bias=bias, output_bias=bias))


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    last = fields.optional("moe_layer_end_index", -1, lowest=-1)
    is_due = (layer + 1) % fields.optional("moe_layer_interval", 1) == 0
    is_before = layer < fields.optional("moe_layer_start_index", 1, lowest=0)
    if is_due and not is_before and (last < 0 or layer <= last):
        return fields.once("moe", lambda: _moe(fields))
    inner, bias = dim(fields, "intermediate_size"), fields.flag("use_bias")
    return fields.once("mlp", lambda: gated_mlp_of(fields, "mlp", inner, bias))


def _moe(fields: Fields) -> MoE:
    count, bias = dim(fields, "moe_num_experts"), fields.flag("use_bias")
    router = partial(Router, renormalise=True, has_correction_bias=True)
    made = moe(fields, count, router, names=_NAMES)
    if num_shared := fields.optional("moe_num_shared_experts", 0, lowest=0):
        size = num_shared * fields.size("moe_intermediate_size")
        inner = Dim("moe_num_shared_experts * moe_intermediate_size", size)
        shared = gated_mlp_of(fields, "mlp.shared_experts", inner, bias)
        made = replace(made, shared_expert=shared)
    return replace(made, correction_bias=(_BIAS, (1, count.count)))


ARCHITECTURES = (
    Architecture(
        "ernie4_5_moe",
        ("Ernie4_5_MoeForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 103424,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "use_bias": False,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        nullable=frozenset({"num_key_value_heads", "use_bias"}),
        derived_fields=lambda fields: (
            {"moe_layer_end_index": fields["num_hidden_layers"] - 1}
            if fields["moe_layer_end_index"] == -1
            else {}
        ),
        # The names that transformers 5 knows them by too.
        renamed_fields={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        rope_theta=500000.0,
        # Layers of multi-token prediction.
        skipped_tensors=("mtp_",),
        family="Ernie 4.5 mixture of experts",
    ),
)
