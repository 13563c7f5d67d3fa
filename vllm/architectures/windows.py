"""Sliding windows of some layers, as Qwen's configs say which, and what all of those assume."""

from collections.abc import Mapping
from typing import Any

from vllm.architectures.architecture import CAUSAL_LM
from vllm.architectures.fields import Fields

WINDOWED = CAUSAL_LM | {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
DENSE = WINDOWED | {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}


def window_of(fields: Fields, layer: int) -> int:
    """Layers from max_window_layers on slide, unless layer_types says which do; 0 for others."""
    if not fields.flag("use_sliding_window"):
        return 0
    window = fields.optional("sliding_window", 0)
    kind = fields.layer_kind(layer)
    is_late = layer >= fields.optional("max_window_layers", 0, lowest=0)
    return window if kind == "sliding_attention" or (kind is None and is_late) else 0


def layer_types(fields: Mapping[str, Any]) -> list[str]:
    """Of a config that lacks them, with what is assumed where it says nothing."""
    num_layers = fields["num_hidden_layers"]
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else num_layers
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
