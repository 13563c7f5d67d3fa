"""Mixtral: Mistral with experts in every layer."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, MoENames, attention, decoder, dim, moe
from vllm.architectures.decoder import Attention, MoE
from vllm.architectures.fields import Fields
from vllm.architectures.router import Router

_NAMES = MoENames(moe="block_sparse_moe", parts=("w1", "w3", "w2"), inner="intermediate_size")


def _attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(window=fields.optional("sliding_window", 0)))


def _feed_forward(fields: Fields, layer: int) -> MoE:
    return fields.once("moe", lambda: _moe(fields))


def _moe(fields: Fields) -> MoE:
    """A softmax over the logits of the chosen experts is one over all, renormalised."""
    return moe(
        fields,
        dim(fields, "num_local_experts"),
        lambda count, top_k: Router(count, top_k, renormalise=True),
        names=_NAMES,
    )


ARCHITECTURES = (
    Architecture(
        "mixtral",
        ("MixtralForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=_feed_forward),
        CAUSAL_LM
        | {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        nullable=frozenset({"head_dim", "num_key_value_heads", "sliding_window"}),
        renamed_fields={"num_experts": "num_local_experts"},
        rope_theta=1000000.0,
        family="Mixtral",
    ),
)
