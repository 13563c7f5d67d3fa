"""The layers of any checkpoint, whether the engine serves it or not, for `vllm kernels explain`.

They come from the description of the architecture, else from the shapes of the tensors where those
are at hand, else from the fields of config.json alone.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from vllm.architectures.decoder import CHUNKED, SINKS, SOFTCAP, CachedAttention, Item
from vllm.architectures.registry import (
    describe,
    dtype_field,
    is_described,
    is_served,
    text_config,
    unserved_hint,
)
from vllm.errors import CheckpointError
from vllm.utils.dataclasses import dataclass
from vllm.utils.safetensors_files import TensorShape

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_NESTED = 8


@dataclass(frozen=True)
class Layers:
    """text: the config of the text model. items: (prefix of its name, item) of all that asks for a
    kernel. notes: what the reader should know of where they come from."""

    text: Mapping[str, Any]
    items: tuple[tuple[str, Item], ...]
    is_served: bool = True
    notes: tuple[str, ...] = ()


def layers_of(
    config: Mapping[str, Any],
    tensors: Callable[[], Mapping[str, TensorShape]] = dict,
    names: Collection[str] = (),
) -> Layers:
    """tensors: those of the checkpoint by name, asked for where no description is; empty where they
    are not at hand. names: of those that are at hand anyway. CheckpointError for what is no config,
    or says too little."""
    if is_described(config):
        text, items = text_config(config), tuple(describe(config, names).items())
        if is_served(config):
            return Layers(text, items)
        names = ", ".join(map(str, config.get("architectures") or ())) or text["model_type"]
        notes = [f"{names} is not served by this engine"]
        return Layers(text, items, False, (*notes, *_attention_notes(items)))
    return _unserved(config, tensors())


def _unserved(config: Mapping[str, Any], tensors: Mapping[str, TensorShape]) -> Layers:
    from vllm.architectures import stored_layers, unserved
    from vllm.architectures.unserved_fields import UnservedFields

    text, places = _text_of(config)
    fields = UnservedFields(text)
    quantization = config.get("quantization_config") or text.get("quantization_config")
    name, is_known = str(text["model_type"]), is_described(text)
    try:
        if is_known:
            name, source = (
                str(config["model_type"]),
                f"its layers are those of its {name} text model",
            )
            items, left_out = list(describe(text).items()), list[str]()
        elif tensors:
            source = "its layers are those of its safetensors headers"
            items, left_out = stored_layers.layers_of(
                fields, tensors, stored_layers.packing_of(quantization)
            )
        else:
            source = (
                "its layers are read from the usual fields of config.json, not from its weights"
            )
            items, left_out = unserved.layers_of(fields)
    except CheckpointError as error:
        raise CheckpointError(
            f"model_type {name!r} is not served by this engine{unserved_hint(name)}, and its "
            f"layers cannot be told: {error}"
        ) from error
    if not items:
        raise CheckpointError(f"model_type {name!r}: no layer is found in its safetensors headers")
    notes = [f"{name} is not served by this engine; {source}"]
    left_out += [f"what {key} describes" for key in places]
    if left_out:
        notes.append(f"left out: {'; '.join(left_out)}")
    if not (tensors or is_known) and (unread := fields.unread()):
        notes.append(f"fields of config.json that are not taken into account: {', '.join(unread)}")
    return Layers(text, tuple(items), False, (*notes, *_attention_notes(items)))


def _attention_notes(items: Any) -> tuple[str, ...]:
    variants = dict.fromkeys(item.variant for _, item in items if isinstance(item, CachedAttention))
    others = [one for one in variants if one not in ("", CHUNKED, SINKS, SOFTCAP)]
    return tuple(f"there is no kernel for attention with {variant} here" for variant in others)


def _text_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config of the text model, and the fields beside it that describe other models."""
    text, others = dict(config), list[str]()
    for _ in range(_MAX_NESTED):
        nested = next((n for n in _TEXT_CONFIGS if isinstance(text.get(n), Mapping)), None)
        if nested is None:
            break
        others += [
            key
            for key, value in text.items()
            if key.endswith("_config") and key not in (nested, "quantization_config")
            and isinstance(value, Mapping) and value.get("model_type")
        ]  # fmt: skip
        outer = {"model_type": text["model_type"], "dtype": dtype_field(text)}
        inner: Mapping[str, Any] = text[nested]
        text = {**outer, **{k: v for k, v in inner.items() if v is not None or k not in outer}}
    if type(text["model_type"]) is not str:
        raise CheckpointError(f"config.json: model_type = {text['model_type']!r} is no name")
    return text, others
