"""Qwen3 dense: no QKV bias, but an RMSNorm over each head of q and k before the rotation."""

from vllm.architectures.architecture import Architecture, Example
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


_QWEN3_8B_FP8 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}

ARCHITECTURES = (
    Architecture(
        "qwen3",
        ("Qwen3ForCausalLM",),
        _describe,
        DENSE | {"head_dim": 128, "attention_bias": False},
        nullable=frozenset({"num_key_value_heads", "sliding_window", "layer_types"}),
        layer_types=layer_types,
        derives_layer_types=("max_window_layers",),
        examples={"Qwen3-8B-FP8": Example("Qwen/Qwen3-8B-FP8", _QWEN3_8B_FP8)},
    ),
)
