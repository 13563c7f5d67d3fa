"""Llama and its like (SmolLM2, ...): plain attention and a gated MLP."""

from functools import partial

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention
from vllm.architectures.fields import Fields


def _attention(fields: Fields, layer: int) -> Attention:
    bias = fields.flag("attention_bias")
    return attention(fields, AttentionKind(qkv_bias=bias, output_bias=bias))


DEFAULTS = CAUSAL_LM | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


ARCHITECTURES = (
    Architecture(
        "llama",
        ("LlamaForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=gated_mlp),
        DEFAULTS
        | {
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        nullable=frozenset({"head_dim", "num_key_value_heads"}),
        family="Llama, SmolLM2",
    ),
)
