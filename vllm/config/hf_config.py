"""What config.json says, read without transformers, whose import takes longer than many a load.

Names, values and what is assumed where the file says nothing are those of transformers' config
classes, which a test compares them with. A file that says anything unusual is not read here but by
transformers, which knows what it means or why it is wrong.
"""

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.architectures.architecture import Architecture, Composite
from vllm.architectures.fields import ROPE_LISTS
from vllm.architectures.registry import composite, text_architecture
from vllm.errors import CheckpointError

_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
}
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ROPE_LISTS,
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


def plain_config(fields: Mapping[str, Any]) -> HFConfig:
    """Of the fields of a config of transformers."""
    text = fields.get("text_config")
    nested = {"text_config": HFConfig(**text)} if isinstance(text, Mapping) else {}
    return HFConfig(**{**fields, **nested})


class _Unusual(Exception):
    """Not for us to read."""


def read_config(raw: Mapping[str, Any]) -> HFConfig | None:
    """The config that transformers would make of a config.json; None where only it can tell."""
    model_type = raw["model_type"]
    try:
        if not isinstance(model_type, str):
            return None
        architecture, whole = text_architecture(model_type), composite(model_type)
        named = architecture or whole
        if "auto_map" in raw and (named is None or named.is_in_transformers):
            return None
        if whole is not None:
            return _composite(raw, whole)
        if architecture is None or architecture.is_read_by_transformers:
            return None
        return _text(raw, architecture) if architecture.is_served else None
    except (_Unusual, CheckpointError):
        return None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # a value that nothing can be derived from


def _composite(raw: Mapping[str, Any], whole: Composite) -> HFConfig:
    given = raw.get("text_config")
    _require(isinstance(given, dict) and not ("auto_map" in given and whole.is_in_transformers))
    text = {"model_type": whole.text_types[0], **(given or {})}
    _require(text["model_type"] in whole.text_types)
    architecture = text_architecture(text["model_type"])
    _require(architecture is not None and not architecture.is_read_by_transformers)
    defaults = {
        "tie_word_embeddings": whole.ties_embeddings, "dtype": None, "architectures": None
    }  # fmt: skip
    fields = _with_defaults(raw, defaults, ())
    return HFConfig(**fields | {"text_config": _text(text, architecture)})


def _text(raw: Mapping[str, Any], architecture: Architecture | None) -> HFConfig:
    assert architecture is not None
    known = architecture.defaults  # fields of other types in this file mean nothing
    for new, ours in architecture.renamed_fields.items():
        _require(not (new in raw and ours in raw))
    fields = _with_defaults(architecture.our_fields(raw), known, architecture.nullable)
    fields |= architecture.derived_fields(fields)
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    _require(0 < layers <= 1024 and heads > 0)
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    is_divided = raw.get("head_dim", known.get("head_dim")) is None and "kv_lora_rank" not in known
    _require(not is_divided or fields["hidden_size"] % heads == 0)
    if "head_dim" in known and fields["head_dim"] is None:
        fields["head_dim"] = fields["hidden_size"] // heads
    if "use_sliding_window" in known and not fields["use_sliding_window"]:
        fields["sliding_window"] = architecture.no_window
    if "mlp_only_layers" in known:
        fields["mlp_only_layers"] = fields["mlp_only_layers"] or []
        _require(all(type(layer) is int for layer in fields["mlp_only_layers"]))
    if "mlp_layer_types" in known and fields["mlp_layer_types"] is None:
        fields["mlp_layer_types"] = ["dense"] + ["sparse"] * (layers - 1)
    _require(architecture.layer_types is not None or "layer_types" not in raw)
    if architecture.layer_types is not None:
        kinds = fields["layer_types"]
        if not kinds:
            kinds = architecture.layer_types(fields)
            for name in set(architecture.derives_layer_types) - known.keys():
                fields.pop(name, None)
        _require(all(type(k) is str and k in _LAYER_TYPES for k in kinds) and len(kinds) == layers)
        fields["layer_types"] = kinds
    fields["rope_parameters"] = _rope(raw, fields, architecture)
    for name in ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"):
        fields.pop(name, None)
    return HFConfig(**fields)


def _with_defaults(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], nullable: Collection[str]
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
        if name in ("layer_types", "mlp_layer_types", "mlp_only_layers", "moe_layers",
                    "no_rope_layers", "architectures"):  # fmt: skip
            _require(value is None or type(value) is list)
        elif value is None:
            _require(name in nullable)
        else:
            _require(type(value) is (int if default is None else type(default)))
    return fields


def _rope(
    raw: Mapping[str, Any], fields: Mapping[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """One flat dictionary of what older configs spread over rope_theta, rope_scaling and
    partial_rotary_factor."""
    head_dim = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    head_dim = head_dim or fields["hidden_size"] // fields["num_attention_heads"]
    _require(head_dim % 2 == 0)
    if architecture.layer_ropes is not None:
        _require("rope_scaling" not in raw or isinstance(raw["rope_scaling"], dict | None))
        ropes = architecture.layer_ropes(raw)
        _require(isinstance(ropes, dict) and ropes.keys() <= _LAYER_TYPES)
        return {kind: _one_rope(raw, fields, rope, architecture) for kind, rope in ropes.items()}
    given = raw.get("rope_scaling") or raw.get("rope_parameters")
    given = architecture.rope_defaults(fields) if given is None else given
    _require(isinstance(given, dict) and _LAYER_TYPES.isdisjoint(given))
    rope = {"rope_theta": raw.get("rope_theta", architecture.rope_theta), **given}
    factor = architecture.partial_rotary_factor
    if architecture.has_rotary_dim and raw.get("rotary_dim") is not None:
        _require(type(raw["rotary_dim"]) is int)
        factor = raw["rotary_dim"] / head_dim
    factor = raw.get("partial_rotary_factor", factor)
    if factor is not None:
        rope.setdefault("partial_rotary_factor", factor)
    return _one_rope(raw, fields, rope, architecture)


def _one_rope(
    raw: Mapping[str, Any],
    fields: Mapping[str, Any],
    rope: dict[str, Any],
    architecture: Architecture,
) -> dict[str, Any]:
    _require(type(rope.setdefault("rope_type", rope.get("type", "default"))) is str)
    rope = architecture.rope(fields, rope)
    kind = rope["rope_type"]
    _require(kind in ROPE_NEEDS and rope.keys() >= {*ROPE_NEEDS[kind]})
    if kind in ("llama3", "yarn", "longrope"):
        is_own = "original_max_position_embeddings" in architecture.defaults
        _require(is_own or "original_max_position_embeddings" not in raw)
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    for name in {"rope_theta", "partial_rotary_factor", *ROPE_NEEDS[kind]} - {*ROPE_LISTS}:
        value = rope.get(name, 1.0)
        _require(type(value) in (int, float) and value > 0)
    return rope


def _require(is_plain: object) -> None:
    if not is_plain:
        raise _Unusual
