"""GLM-4.5, 4.6 and 4.7: partly rotated heads, the first layers dense, then experts by sigmoid
scores beside a shared one. A layer of multi-token prediction follows."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import (
    AttentionKind,
    attention,
    decoder,
    gated_mlp,
    numbered_mtp,
)
from vllm.architectures.decoder import Attention, FeedForward, NormKind
from vllm.architectures.deepseek_v3 import V3_ROUTER, experts
from vllm.architectures.fields import Fields
from vllm.architectures.router import sigmoid_router


def _attention(fields: Fields, layer: int) -> Attention:
    qk_norm: NormKind | None = "rms" if fields.flag("use_qk_norm") else None
    bias = fields.flag("attention_bias")
    return attention(fields, AttentionKind(qkv_bias=bias, qk_norm=qk_norm))


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0):
        return gated_mlp(fields)
    return experts(fields, partial(sigmoid_router, fields), V3_ROUTER)


ARCHITECTURES = (
    Architecture(
        "glm4_moe",
        ("Glm4MoeForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=_feed_forward),
        CAUSAL_LM
        | {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        # The name that transformers 5 gives it.
        renamed_fields={"num_local_experts": "n_routed_experts"},
        partial_rotary_factor=0.5,
        has_mtp_layers=True,
        describe_mtp=partial(numbered_mtp, mixer=_attention, feed_forward=_feed_forward),
        family="GLM-4.5, 4.6 and 4.7",
    ),
)
