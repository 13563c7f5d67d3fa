"""MiniMax-M2 and 2.1 to 2.5: experts by sigmoid scores in every layer, partly rotated heads, and
RMSNorm over all heads of q, and of k, together."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, MoENames, attention, decoder, dim, moe
from vllm.architectures.decoder import Attention, Decoder, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import sigmoid_router
from vllm.errors import CheckpointError

# Fields of published configs that transformers does not read, and what all these models have.
_ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
_NAMES = MoENames(
    moe="block_sparse_moe",
    correction_bias="e_score_correction_bias",
    parts=("w1", "w3", "w2"),
    inner="intermediate_size",
)


def _describe(fields: Fields) -> Decoder:
    fields.allow_only(_ALWAYS)
    if others := {*fields.entries("attn_type_list", int)} - {1}:
        raise CheckpointError(
            f"{fields.source}: attn_type_list holds {min(others)}: it takes 1 (full attention) in "
            f"every layer"
        )
    return decoder(fields, _attention, _feed_forward)


def _attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(qk_norm="rms", qk_norm_span="projection"))


def _feed_forward(fields: Fields, layer: int) -> MoE:
    return fields.once(
        "moe",
        lambda: moe(
            fields, dim(fields, "num_local_experts"), partial(sigmoid_router, fields), names=_NAMES
        ),
    )


ARCHITECTURES = (
    Architecture(
        "minimax_m2",
        ("MiniMaxM2ForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "bos_token_id": 200034,
            "eos_token_id": 200020,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
        },
        renamed_fields={"num_experts": "num_local_experts"},
        rope_theta=5000000.0,
        has_rotary_dim=True,
        has_mtp_layers=True,
        family="MiniMax-M2",
    ),
)
