"""What config.json says, read without transformers, whose import takes longer than many a load.

Names, values and what is assumed where the file says nothing are those of transformers' config
classes, which a test compares them with. A file that says anything unusual is not read here but by
transformers, which knows what it means or why it is wrong.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_CAUSAL: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "dtype": None,
    "architectures": None,
}
_LLAMA = _CAUSAL | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN = _CAUSAL | {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_DENSE = _QWEN | {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "layer_types": None,
}
_HYBRID = _CAUSAL | {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
}
# model_type -> what its config class assumes.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA
    | {
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": _LLAMA
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "ministral3": _LLAMA
    | {
        "vocab_size": 131072,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
        "sliding_window": None,
    },
    "qwen2": _QWEN_DENSE,
    "qwen3": _QWEN_DENSE | {"head_dim": 128, "attention_bias": False},
    "qwen3_moe": _QWEN
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": None,
    },
    "qwen3_5_text": _HYBRID
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": _HYBRID
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
    },
}
# model_type with a text_config -> types that may have, the first where it names none; whether
# its word embeddings are tied where it does not say.
COMPOSITES: dict[str, tuple[tuple[str, ...], bool]] = {
    "mistral3": (("mistral", "ministral3"), True),
    "qwen3_5": (("qwen3_5_text",), False),
    "qwen3_5_moe": (("qwen3_5_moe_text",), False),
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# Null in these means what is in the table or derived.
_NULLABLE = {
    "llama": {"head_dim", "num_key_value_heads"},
    "mistral": {"head_dim", "sliding_window"},
    "ministral3": {"sliding_window"},
    "qwen2": {"num_key_value_heads", "sliding_window", "layer_types"},
    "qwen3": {"num_key_value_heads", "sliding_window", "layer_types"},
    "qwen3_moe": {"sliding_window", "mlp_only_layers"},
    "qwen3_5_text": {"layer_types"},
    "qwen3_5_moe_text": {"layer_types"},
}
_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention"}
_ROPE_NEEDS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor"},
}
_MINISTRAL_ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class HFConfig(SimpleNamespace):
    """Fields as attributes, as a config of transformers has them."""

    def get_text_config(self) -> "HFConfig":
        """Of a multimodal model its text part."""
        text = getattr(self, "text_config", None)
        return text if isinstance(text, HFConfig) else self

    def to_dict(self) -> dict[str, Any]:
        fields = vars(self).items()
        return {name: v.to_dict() if isinstance(v, HFConfig) else v for name, v in fields}


class _Unusual(Exception):
    """Not for us to read."""


def read_config(raw: Mapping[str, Any]) -> HFConfig | None:
    """The config that transformers would make of a config.json; None where only it can tell."""
    model_type = raw["model_type"]
    try:
        if not isinstance(model_type, str) or "auto_map" in raw:
            return None
        if model_type in COMPOSITES:
            return _composite(raw, *COMPOSITES[model_type])
        return _text(raw) if model_type in DEFAULTS else None
    except _Unusual:
        return None


def _composite(raw: Mapping[str, Any], text_types: tuple[str, ...], is_tied: bool) -> HFConfig:
    given = raw.get("text_config")
    _require(isinstance(given, dict) and "auto_map" not in given)
    text = {"model_type": text_types[0], **(given or {})}
    _require(text["model_type"] in text_types)
    defaults = {"tie_word_embeddings": is_tied, "dtype": None, "architectures": None}
    fields = _with_defaults(raw, defaults, set())
    return HFConfig(**fields | {"text_config": _text(text)})


def _text(raw: Mapping[str, Any]) -> HFConfig:
    kind = raw["model_type"]
    known = DEFAULTS[kind]  # fields of other types in this file mean nothing
    fields = _with_defaults(_renamed(raw, kind), known, _NULLABLE[kind])
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    _require(0 < layers <= 1024 and heads > 0)
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if "head_dim" in known and fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // heads
    _require(kind != "llama" or fields["hidden_size"] % heads == 0)
    if "use_sliding_window" in known and not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if "mlp_only_layers" in known:
        fields["mlp_only_layers"] = fields["mlp_only_layers"] or []
        _require(all(type(layer) is int for layer in fields["mlp_only_layers"]))
    _require("layer_types" in known or "layer_types" not in raw)
    if "layer_types" in known:
        is_hybrid = "linear_num_key_heads" in known
        kinds = fields["layer_types"] or _layer_types(fields, is_hybrid)
        _require(all(type(k) is str and k in _LAYER_TYPES for k in kinds) and len(kinds) == layers)
        fields["layer_types"] = kinds
    fields["rope_parameters"] = _rope(raw, fields)
    for name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        fields.pop(name, None)
    return HFConfig(**fields)


def _renamed(raw: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """transformers 5 writes what published configs of this type call num_experts as
    num_local_experts."""
    if kind != "qwen3_moe" or "num_local_experts" not in raw:
        return raw
    _require("num_experts" not in raw)
    fields = dict(raw)
    return fields | {"num_experts": fields.pop("num_local_experts")}


def _with_defaults(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], nullable: set[str]
) -> dict[str, Any]:
    """All fields of `raw`, those of `defaults` of the type they have there."""
    fields = {**defaults, **raw}
    fields["dtype"] = fields["dtype"] or fields.pop("torch_dtype", None)
    fields.pop("torch_dtype", None)
    _require(fields["dtype"] is None or type(fields["dtype"]) is str)
    for name, default in defaults.items():
        value = fields[name]
        if name in _TOKENS or name == "dtype":
            continue
        if name in ("layer_types", "mlp_only_layers", "architectures"):
            _require(value is None or type(value) is list)
        elif value is None:
            _require(name in nullable)
        else:
            _require(type(value) is (int if default is None else type(default)))
    return fields


def _layer_types(fields: dict[str, Any], is_hybrid: bool) -> list[str]:
    layers = range(fields["num_hidden_layers"])
    if is_hybrid:
        interval = fields.pop("full_attention_interval", 4)
        _require(type(interval) is int and interval > 0)
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in layers]
    first = fields["max_window_layers"] if fields["sliding_window"] is not None else len(layers)
    return ["sliding_attention" if i >= first else "full_attention" for i in layers]


def _rope(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dictionary of what older configs spread over rope_theta, rope_scaling and
    partial_rotary_factor."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    longest = fields["max_position_embeddings"]
    if given is None and raw["model_type"] == "ministral3":
        given = _MINISTRAL_ROPE | {"max_position_embeddings": longest}
    given = {} if given is None else given
    _require(isinstance(given, dict) and _LAYER_TYPES.isdisjoint(given))
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), **given}
    factor = raw.get(
        "partial_rotary_factor",
        0.25 if "linear_num_key_heads" in DEFAULTS[raw["model_type"]] else None,
    )
    if factor is not None:
        rope.setdefault("partial_rotary_factor", factor)
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    _require(type(kind) is str and kind in _ROPE_NEEDS and _ROPE_NEEDS[kind] <= rope.keys())
    if kind in ("llama3", "yarn"):
        _require("original_max_position_embeddings" not in raw)
        rope.setdefault("original_max_position_embeddings", longest)
    for name in ("rope_theta", "partial_rotary_factor", *_ROPE_NEEDS[kind]):
        value = rope.get(name, 1.0)
        _require(type(value) in (int, float) and value > 0)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    _require(head_dim % 2 == 0)
    return rope


def _require(is_plain: bool) -> None:
    if not is_plain:
        raise _Unusual
