"""--hf-overrides: put over config.json before anything is derived, and refused where they would
have no effect or only a part of one."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.architectures.architecture import Architecture, Checkpointed
from vllm.architectures.fields import CORRECT_FILE
from vllm.architectures.registry import composite, known, text_architecture
from vllm.config.hf_config import ROPE_NEEDS
from vllm.errors import CheckpointError, ConfigError, did_you_mean

_OF_FILE = re.compile(r"^(\S*config\.json|\S+)( with --hf-overrides)?( is not valid)?: ")
_ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_EVERY_TYPE = ("rope_type", "rope_theta", "partial_rotary_factor")
_ROPE_MAY_HAVE = {  # besides what it needs
    "llama3": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "attention_factor", "truncate", "llama_4_scaling_beta"),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
}  # fmt: skip
_EVERY_MODEL = ("model_type", "architectures", "quantization_config", "eos_token_id",
                "tie_word_embeddings")  # fmt: skip
_EVERY_TEXT = (*_EVERY_MODEL, "dtype", "head_dim", *_ROPE_FIELDS)


def with_overrides(
    raw: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json with `overrides` over it; and of these what each field became, under the name
    that the result has it by. ConfigError names what was given and what is accepted."""
    if not overrides:
        return dict(raw), {}
    if unknown := [key for key in overrides if "." in key]:
        raise ConfigError(f"--hf-overrides takes a JSON object, nested for subconfigs: {unknown}")
    model_type = overrides.get("model_type", raw.get("model_type"))
    whole = composite(model_type)
    if whole is None:
        names = overrides.get("architectures", raw.get("architectures"))
        architecture = _architecture(model_type, names)
        if architecture is None or not architecture.is_served:
            # Which the engine refuses later, by its own name.
            final = {name: _nested(raw, overrides, name) for name in overrides}
            return {**raw, **final}, final
        return _text_with_overrides(raw, overrides, architecture)
    given_text = overrides.get("text_config")
    own_text = raw.get("text_config")
    own_text = own_text if isinstance(own_text, Mapping) else {}
    text_type = {**own_text, **(given_text if isinstance(given_text, Mapping) else {})}
    text = _architecture(text_type.get("model_type", whole.text_types[0]), None)
    text_fields = _fields_of(text) if text else ()
    for name in overrides:
        if name not in (*_EVERY_MODEL, "text_config") and name in text_fields:
            raise ConfigError(
                f"--hf-overrides {name} has no effect on model_type {whole.model_type}: it belongs "
                f'to the text model; give {{"text_config": {{"{name}": ...}}}}'
            )
    _check_names(overrides, (*_EVERY_MODEL, "text_config"), whole.model_type)
    final = {name: _nested(raw, overrides, name) for name in overrides if name != "text_config"}
    merged = {**raw, **final}
    if given_text is not None and text is not None:
        if not isinstance(given_text, Mapping):
            raise ConfigError(
                f"--hf-overrides text_config = {given_text!r}: it takes a JSON object"
            )
        merged["text_config"], final["text_config"] = _text_with_overrides(
            own_text, given_text, text, "text_config."
        )
    return merged, final


def _architecture(model_type: object, hf_architectures: object) -> Architecture | None:
    """Of the type; of a type that is not known, of the first class that is."""
    if isinstance(model_type, str) and (found := text_architecture(model_type)) is not None:
        return found
    names = hf_architectures if isinstance(hf_architectures, list) else []
    for one in known().values():
        if isinstance(one, Architecture) and set(one.hf_architectures) & {*map(str, names)}:
            return one
    return None


def _text_with_overrides(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], architecture: Architecture, at: str = ""
) -> tuple[dict[str, Any], dict[str, Any]]:
    """at: where in --hf-overrides these are, for messages."""
    _check_names(overrides, _fields_of(architecture), architecture.model_type, at)
    raw, given = (_with_our_names(fields, architecture) for fields in (raw, overrides))
    rope = {name: given.pop(name) for name in _ROPE_FIELDS if name in given}
    final = {name: _nested(raw, given, name) for name in given}
    merged = {**raw, **final}
    for name in architecture.derives_layer_types:
        if name in given and merged.get("layer_types") is not None:
            raise ConfigError(
                f"--hf-overrides {at}{name} has no effect: the config lists {at}layer_types, which "
                f"that would only derive; override {at}layer_types instead"
            )
    if rope:
        found = _rope_with_overrides(merged, rope, architecture, at)
        for name in _ROPE_FIELDS:
            merged.pop(name, None)
        merged["rope_parameters"] = final["rope_parameters"] = found
    return merged, final


def _with_our_names(fields: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    ours = architecture.our_fields(fields)
    if "torch_dtype" in ours:
        old = ours.pop("torch_dtype")
        ours["dtype"] = ours.get("dtype") or old
    return ours


def _nested(raw: Mapping[str, Any], given: Mapping[str, Any], name: str) -> Any:
    """An object over an object replaces what it names alone."""
    own, value = raw.get(name), given[name]
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        return {**own, **value}
    return value


def _fields_of(architecture: Architecture) -> tuple[str, ...]:
    others = (*architecture.derives_layer_types, *architecture.renamed_fields, "torch_dtype")
    return (*architecture.defaults, *_EVERY_TEXT, *others)


def _check_names(
    given: Mapping[str, Any], accepted: Iterable[str], model_type: str, at: str = ""
) -> None:
    accepted = dict.fromkeys(accepted)
    for name, value in given.items():
        if name not in accepted:
            raise ConfigError(
                f"--hf-overrides {at}{name} has no effect on model_type {model_type}: leave it out"
                f"{did_you_mean(name, accepted)}; accepted: {', '.join(sorted(accepted))}"
            )
        if value == {}:
            raise ConfigError(f"--hf-overrides {at}{name} = {{}} changes nothing: leave it out")


def _rope_with_overrides(
    raw: Mapping[str, Any], given: Mapping[str, Any], architecture: Architecture, at: str
) -> dict[str, Any]:
    """rope_parameters of config.json, however it spells them, with those of `given` over them.

    Another rope_type replaces all parameters of the one before; rope_theta and
    partial_rotary_factor stay unless they are given.
    """
    if architecture.layer_ropes is not None:
        raise ConfigError(
            f"--hf-overrides {at}{next(iter(given))}: each type of layers of model_type "
            f"{architecture.model_type} has its own rotation, which cannot be overridden; change "
            f"config.json in a copy of the checkpoint"
        )
    own = _own_rope(raw, architecture)
    new = _given_rope(given, at)
    before = own.get("rope_type", "default")
    kind = new.get("rope_type", before)
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        raise ConfigError(
            f"--hf-overrides {at}rope_parameters.rope_type = {kind!r} is unknown: it takes "
            f"{', '.join(ROPE_NEEDS)}{did_you_mean(str(kind), ROPE_NEEDS)}"
        )
    accepted = (*_ROPE_EVERY_TYPE, *ROPE_NEEDS[kind], *_ROPE_MAY_HAVE.get(kind, ()))
    for name in new:
        if name not in accepted:
            raise ConfigError(
                f"--hf-overrides {at}rope_parameters.{name} has no effect with rope_type {kind}: "
                f"it takes {', '.join(accepted)}{did_you_mean(name, accepted)}"
            )
    kept = own if kind == before else {n: own[n] for n in _ROPE_EVERY_TYPE[1:] if n in own}
    found = kept | {"rope_type": kind} | new
    if missing := sorted({*ROPE_NEEDS[kind]} - found.keys()):
        raise ConfigError(
            f"--hf-overrides {at}rope_parameters: rope_type {kind} needs {', '.join(missing)}"
        )
    return found


def _own_rope(raw: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    stored = raw.get("rope_scaling") or raw.get("rope_parameters")
    if not isinstance(stored, Mapping):
        stored = architecture.rope_defaults({**architecture.defaults, **raw})
    own = dict(stored)
    for name in ("rope_theta", "partial_rotary_factor"):
        if raw.get(name) is not None:
            own.setdefault(name, raw[name])
    if "type" in own:
        own.setdefault("rope_type", own.pop("type"))
    return own


def _given_rope(given: Mapping[str, Any], at: str) -> dict[str, Any]:
    objects = [name for name in ("rope_parameters", "rope_scaling") if name in given]
    if len(objects) > 1:
        raise ConfigError(
            f"--hf-overrides gives both {at}rope_parameters and {at}rope_scaling, two names of one "
            f"thing: give {at}rope_parameters"
        )
    new: dict[str, Any] = {}
    for name in objects:
        value = {"rope_type": "default"} if given[name] is None else given[name]
        if not isinstance(value, Mapping) or not value:
            raise ConfigError(f"--hf-overrides {at}{name} = {value!r}: it takes a JSON object")
        new |= value
    if "type" in new:
        new.setdefault("rope_type", new.pop("type"))
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in given and new.setdefault(name, given[name]) != given[name]:
            raise ConfigError(
                f"--hf-overrides gives {at}{name} = {given[name]!r} and {new[name]!r} in "
                f"{at}{objects[0]}: give one"
            )
    return new


@contextmanager
def blaming(overrides: Mapping[str, Any]) -> Iterator[None]:
    """ConfigError for an error of a config that names a field which an override gave: that is to
    be corrected, not config.json."""
    try:
        yield
    except CheckpointError as error:
        named = [n for n in _names(overrides) if re.search(rf"\b{re.escape(n)}\b", str(error))]
        if not named:
            raise
        text = _OF_FILE.sub("", str(error)).removesuffix(CORRECT_FILE)
        raise ConfigError(
            f"--hf-overrides: {text}; give another {named[0]}, or leave it out"
        ) from error


def _names(overrides: Mapping[str, Any]) -> list[str]:
    """Of fields, those of an object before its own."""
    nested = (_names(value) for value in overrides.values() if isinstance(value, Mapping))
    return [name for names in (*nested, overrides) for name in names]


def check_effect(config: Any, final: Mapping[str, Any], at: str = "") -> None:
    """ConfigError where the config that was read does not say what an override wants."""
    for name, value in final.items():
        found = getattr(config, name, None)
        if name == "text_config":
            check_effect(found, value, "text_config.")
        elif name == "max_window_layers" and config.sliding_window is None:
            raise ConfigError(
                f"--hf-overrides {at}{name} = {value!r} has no effect: the config has no sliding "
                f"window; override {at}use_sliding_window and {at}sliding_window too"
            )
        elif name not in ("dtype", "quantization_config", "full_attention_interval"):
            wanted = value if isinstance(value, Mapping) else {name: value}
            got = found if isinstance(value, Mapping) else {name: found}
            for part, each in wanted.items():
                if each is not None and (got or {}).get(part) != each:
                    raise ConfigError(
                        f"--hf-overrides {at}{name} = {value!r} has no effect: by other fields of "
                        f"the config it is {found!r}"
                    )


def check_architecture(model_type: str, served: Checkpointed, final: Mapping[str, Any]) -> None:
    """ConfigError where `architectures` or `model_type` was overridden and the two disagree."""
    is_asked = "architectures" in final or "model_type" in final
    if is_asked and model_type in known() and model_type != served.model_type:
        raise ConfigError(
            f"--hf-overrides: architecture {served.hf_architectures[0]} is of model_type "
            f"{served.model_type}, but the config's model_type is {model_type}: override both"
        )
