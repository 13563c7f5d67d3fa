"""Seed-OSS: Llama whose biases are those of q, k and v."""

from functools import partial

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention
from vllm.architectures.fields import Fields
from vllm.architectures.llama import DEFAULTS


def _attention(fields: Fields, layer: int) -> Attention:
    biases = fields.flag("attention_bias", True), fields.flag("attention_out_bias")
    return attention(fields, AttentionKind(*biases))


ARCHITECTURES = (
    Architecture(
        "seed_oss",
        ("SeedOssForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=gated_mlp),
        DEFAULTS
        | {
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
        nullable=frozenset({"head_dim", "num_key_value_heads"}),
        family="Seed-OSS",
    ),
)
