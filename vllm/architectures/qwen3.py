"""Qwen3 dense: no QKV bias, but an RMSNorm over each head of q and k before the rotation."""

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, Decoder
from vllm.architectures.fields import Fields
from vllm.architectures.windows import DENSE, layer_types, window_of


def _describe(fields: Fields) -> Decoder:
    return decoder(fields, _attention, gated_mlp)


def _attention(fields: Fields, layer: int) -> Attention:
    bias, window = fields.flag("attention_bias"), window_of(fields, layer)
    return attention(
        fields, AttentionKind(qkv_bias=bias, output_bias=bias, window=window, qk_norm="rms")
    )


ARCHITECTURES = (
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        _describe,
        DENSE | {"head_dim": 128, "attention_bias": False},
        nullable=frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
        layer_types=layer_types,
        derives_layer_types=("max_window_layers",),
    ),
)
