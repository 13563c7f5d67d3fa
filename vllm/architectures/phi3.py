"""Phi-3, Phi-3.5 and Phi-4: Llama whose checkpoints hold q, k and v as one weight, and gate and
up as another. Long-context models scale their rotation by LongRoPE; some rotate a part of each
head."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import AttentionKind, attention, decoder, gated_mlp
from vllm.architectures.decoder import Attention
from vllm.architectures.fields import Fields


def _attention(fields: Fields, layer: int) -> Attention:
    window = fields.optional("sliding_window", 0)
    return attention(fields, AttentionKind(window=window, is_merged=True))


def _rope(fields: Mapping[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """LongRoPE had other names, and has the length of pre-training from outside of it."""
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    if rope["rope_type"] == "longrope":
        rope["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    return rope


ARCHITECTURES = (
    Architecture(
        "phi3",
        ("Phi3ForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=partial(gated_mlp, is_merged=True)),
        CAUSAL_LM
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
            "pad_token_id": 32000,
            "sliding_window": None,
        },
        nullable=frozenset({"num_key_value_heads", "sliding_window"}),
        rope=_rope,
        partial_rotary_factor=1.0,
        family="Phi-3, Phi-3.5, Phi-4",
    ),
)
