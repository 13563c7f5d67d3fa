"""Ernie 4.5, dense: Llama that rotates adjacent columns as pairs, with one flag for all biases."""

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, dim, gated_mlp_of
from vllm.architectures.decoder import Attention, Decoder, GatedMLP
from vllm.architectures.fields import Fields
from vllm.utils.dataclasses import replace


def _describe(fields: Fields) -> Decoder:
    return replace(decoder(fields, _attention, _mlp), is_neox=False)


def _attention(fields: Fields, layer: int) -> Attention:
    bias = fields.flag("use_bias")
    return attention(fields, AttentionKind(qkv_bias=bias, output_bias=bias))


def _mlp(fields: Fields, layer: int) -> GatedMLP:
    inner, bias = dim(fields, "intermediate_size"), fields.flag("use_bias")
    return fields.once("mlp", lambda: gated_mlp_of(fields, "mlp", inner, bias))


ARCHITECTURES = (
    Architecture(
        "ernie4_5",
        ("Ernie4_5ForCausalLM",),
        _describe,
        CAUSAL_LM
        | {
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
        nullable=frozenset({"head_dim", "num_key_value_heads", "use_bias"}),
        rope_theta=500000.0,
        family="Ernie 4.5, dense",
    ),
)
