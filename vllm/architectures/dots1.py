"""dots.llm1: Qwen3's attention, the first layers dense, then experts by sigmoid scores beside
shared ones. Some layers may have a window."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM, Architecture
from vllm.architectures.build import decoder, gated_mlp
from vllm.architectures.decoder import Attention, FeedForward
from vllm.architectures.deepseek_v3 import V3_ROUTER, experts
from vllm.architectures.fields import Fields
from vllm.architectures.qwen import normed_attention
from vllm.architectures.router import sigmoid_router


def _attention(fields: Fields, layer: int) -> Attention:
    """Layers from max_window_layers on slide, unless layer_types says which do."""
    kind, window = fields.layer_kind(layer), fields.optional("sliding_window", 0)
    first = fields.optional("max_window_layers", 0, lowest=0)
    slides = kind == "sliding_attention" or (kind is None and layer >= first)
    return normed_attention(fields, window if slides else 0)


def _feed_forward(fields: Fields, layer: int) -> FeedForward:
    if layer < fields.optional("first_k_dense_replace", 0, lowest=0):
        return gated_mlp(fields)
    return experts(fields, partial(sigmoid_router, fields, renormalises=False), V3_ROUTER)


def _layer_types(fields: Mapping[str, Any]) -> list[str]:
    num_layers = fields["num_hidden_layers"]
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else num_layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


ARCHITECTURES = (
    Architecture(
        "dots1",
        ("Dots1ForCausalLM",),
        partial(decoder, mixer=_attention, feed_forward=_feed_forward),
        CAUSAL_LM
        | {
            "vocab_size": 152064,
            "hidden_size": 4608,
            "intermediate_size": 10944,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": None,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "layer_types": None,
        },
        nullable=frozenset(
            {
                *("num_key_value_heads", "sliding_window", "layer_types", "n_shared_experts"),
                *("n_routed_experts", "num_experts_per_tok"),
            }
        ),
        layer_types=_layer_types,
        # The name that transformers 5 gives it.
        renamed_fields={"num_local_experts": "n_routed_experts"},
        family="dots.llm1",
    ),
)
