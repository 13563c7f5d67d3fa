"""OLMoE: experts in every layer, and RMSNorm over all heads of q, and of k, together."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, MoENames, attention, decoder, dim, moe
from vllm.architectures.decoder import Attention, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router
from vllm.errors import CheckpointError


def _attention(fields: Fields, layer: int) -> Attention:
    if (limit := fields.get("clip_qkv")) is not None:
        raise CheckpointError(
            f"{fields.source}: clip_qkv = {limit!r} is not supported: it takes null"
        )
    bias = fields.flag("attention_bias")
    kind = AttentionKind(qkv_bias=bias, output_bias=bias, qk_norm="rms", qk_norm_span="projection")
    return attention(fields, kind)


def _feed_forward(fields: Fields, layer: int) -> MoE:
    renormalises = fields.flag("norm_topk_prob")
    return fields.once(
        "moe",
        lambda: moe(
            fields,
            dim(fields, "num_experts"),
            lambda count, top_k: Router(count, top_k, renormalises),
            names=MoENames(inner="intermediate_size"),
        ),
    )


ARCHITECTURES = (
    Architecture(
        "olmoe",
        ("OlmoeForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=_feed_forward),
        CAUSAL_LM
        | {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": None,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 1,
            "eos_token_id": 50279,
            "attention_bias": False,
            "clip_qkv": None,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
        },
        nullable=frozenset({"num_key_value_heads", "clip_qkv"}),
        renamed_fields={"num_local_experts": "num_experts"},
        family="OLMoE",
    ),
)
