"""Qwen2 and Qwen2.5: Llama with biased QKV and, in some layers of some models, a window."""

from vllm.architectures.architecture import Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention, Decoder
from vllm.architectures.fields import Fields
from vllm.architectures.windows import DENSE, layer_types, window_of


def _describe(fields: Fields) -> Decoder:
    return decoder(fields, _attention, gated_mlp)


def _attention(fields: Fields, layer: int) -> Attention:
    return attention(fields, AttentionKind(qkv_bias=True, window=window_of(fields, layer)))


ARCHITECTURES = (
    Architecture(
        "qwen2",
        ("Qwen2ForCausalLM",),
        _describe,
        DENSE,
        nullable=frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
        layer_types=layer_types,
        derives_layer_types=("max_window_layers",),
    ),
)
