"""All architectures: the built-in ones, and those of packages with the entry point
`vllm.architectures`, whose value is one Architecture or Composite, or a tuple of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.architectures.architecture import Architecture, Checkpointed, Composite
from vllm.architectures.decoder import Decoder
from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.utils.entry_points import extensions

_BUILT_IN = (
    "llama", "llama4", "mistral", "qwen", "qwen3_vl", "qwen3_5", "qwen3_next", "deepseek_v3",
    "afmoe", "dots1", "glm4_moe", "hunyuan_v1", "hy_v3", "mimo_v2", "minimax_m2", "mixtral",
    "olmo2", "olmoe", "gpt_oss", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma4", "glm",
    "granite", "phi3", "seed_oss", "smollm3", "nemotron_h",
)  # fmt: skip
ENTRY_POINTS = "vllm.architectures"
_registered: dict[str, Checkpointed] = {}


@cache
def known() -> dict[str, Checkpointed]:
    """By model_type, text models first. ConfigError names a package whose entry point is wrong."""
    found: list[Checkpointed] = []
    for name in _BUILT_IN:
        found += import_module(f"vllm.architectures.{name}").ARCHITECTURES
    for name, value in extensions(ENTRY_POINTS).items():
        more = value if isinstance(value, tuple) else (value,)
        if wrong := [entry for entry in more if not isinstance(entry, Checkpointed)]:
            raise ConfigError(
                f"entry point {name!r} of {ENTRY_POINTS} gives {wrong[0]!r}: it takes an "
                f"Architecture, a Composite, or a tuple of them"
            )
        found += more
    found += _registered.values()
    found.sort(key=lambda one: isinstance(one, Composite))
    return {one.model_type: one for one in found}


class ModelRegistry:
    """The architectures that the engine serves, by the class that config.json names."""

    @staticmethod
    def get_supported_archs() -> set[str]:
        return {*_served_classes()}

    @staticmethod
    def register_model(model_arch: str, model: object) -> None:
        """Adds `model`, an Architecture or Composite, to this process; a server reads those of
        installed packages. ConfigError for a class of another engine."""
        if not isinstance(model, Checkpointed) or model_arch not in model.hf_architectures:
            raise ConfigError(
                f"register_model({model_arch!r}, {model!r}): it takes an Architecture that has "
                f"{model_arch!r} among its hf_architectures, not a model class; see "
                f'"Add a model" in CONTRIBUTING.md'
            )
        _registered[model.model_type] = model
        known.cache_clear()


def model_types() -> tuple[str, ...]:
    return tuple(known())


def text_architecture(model_type: str) -> Architecture | None:
    """None for a type that is not known, or of a multimodal model."""
    found = known().get(model_type)
    return found if isinstance(found, Architecture) else None


def composite(model_type: object) -> Composite | None:
    found = known().get(model_type) if isinstance(model_type, str) else None
    return found if isinstance(found, Composite) else None


def served(hf_architectures: Sequence[str]) -> Checkpointed:
    """The first of the classes that the engine runs; CheckpointError names all of those."""
    classes = _served_classes()
    for name in hf_architectures:
        if name in classes:
            return classes[name]
    given = ", ".join(hf_architectures) or "none (config.json has no architectures)"
    raise CheckpointError(
        f"architecture {given} is not supported; supported: {', '.join(classes)}"
        f"{did_you_mean(given, classes)}"
    )


def _served_classes() -> dict[str, Checkpointed]:
    return {name: one for one in known().values() if one.is_served
            for name in one.hf_architectures}  # fmt: skip


def is_described(config: Mapping[str, Any]) -> bool:
    """Whether the type of the text model is known, whether or not the engine serves it.
    CheckpointError for what is no config."""
    if not isinstance(config, Mapping) or config.get("model_type") is None:
        _checked_type(config, "config.json")
    whole = composite(config["model_type"])
    if whole is None:
        return text_architecture(str(config["model_type"])) is not None
    nested = config.get("text_config")
    inner = nested.get("model_type") if isinstance(nested, Mapping) else None
    return inner is None or text_architecture(str(inner)) is not None


def is_served(config: Mapping[str, Any]) -> bool:
    """Of a described model: whether the engine runs the type and, where it is named, the class."""
    architecture = text_architecture(text_config(config)["model_type"])
    if architecture is None or not architecture.is_served:
        return False
    names = config.get("architectures")
    is_named = isinstance(names, list) and bool(names)
    return not is_named or any(str(name) in _served_classes() for name in names or ())


def unserved_hint(name: str) -> str:
    return did_you_mean(name, known())


def model_type(config: Mapping[str, Any]) -> str:
    """`model_type` of the text model: what model rules are written against."""
    return str(text_config(config)["model_type"])


def describe(
    config: Mapping[str, Any], tensors: Iterable[str] = (), with_mtp: bool = False
) -> Decoder:
    """The decoder of a config.json as read. tensors: names of those that the checkpoint has, as far
    as they are at hand. with_mtp: also what drafts tokens; ConfigError where it has nothing.
    CheckpointError names the field that is wrong."""
    text = text_config(config)
    architecture = text_architecture(text["model_type"])
    assert architecture is not None
    decoder = architecture.decoder(text, with_mtp=with_mtp)
    is_tied = ties_embeddings(config, known()[config["model_type"]], tensors)
    return decoder.with_tied_head() if is_tied else decoder


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model: of a multimodal one its nested `text_config`.

    Always names a `model_type` and, where either level does, the `dtype` of the weights.
    CheckpointError for what is no config, or of a model_type that is not known.
    """
    whole = composite(_checked_type(config, "config.json"))
    if whole is None:
        return dict(config)
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        given = "nothing" if nested is None else type(nested).__name__
        raise CheckpointError(
            f"config.json: model_type {whole.model_type!r} needs text_config, a JSON object, not "
            f"{given}"
        )
    stored = dtype_field(nested) or dtype_field(config)
    own_dtype = {"dtype": stored} if stored else {}
    text = {"model_type": whole.text_types[0], **nested} | own_dtype
    inner = _checked_type(text, "text_config of config.json")
    if text_architecture(inner) is None:
        texts = [name for name, one in known().items() if isinstance(one, Architecture)]
        raise _unknown_type("text_config of config.json", inner, texts)
    return text


def ties_embeddings(
    config: Mapping[str, Any], whole: Checkpointed, tensors: Iterable[str] = ()
) -> bool:
    """Whether the output projection is the embedding's weight: where config.json says so, and the
    checkpoint of `whole` has no weight of its own for it among its `tensors`."""
    outer = composite(config["model_type"])
    parts = [config] if outer is None or outer.decides_ties else [config, text_config(config)]
    said = (part.get("tie_word_embeddings", _ties(part["model_type"])) for part in parts)
    return any(said) and all(whole.slot_name(name) != "lm_head.weight" for name in tensors)


def _ties(name: str) -> bool:
    """What is assumed of a model_type whose config.json does not say it."""
    found = known().get(name)
    if isinstance(found, Composite):
        return found.ties_embeddings
    return isinstance(found, Architecture) and bool(found.defaults.get("tie_word_embeddings"))


def dtype_field(config: Mapping[str, Any]) -> Any:
    """`torch_dtype` is how transformers before version 5 wrote it."""
    return config.get("dtype") or config.get("torch_dtype")


def _checked_type(config: Mapping[str, Any], where: str) -> str:
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{where} holds {type(config).__name__}, not a JSON object")
    name = config.get("model_type")
    if name is None:
        raise CheckpointError(f"{where} has no model_type: not a language model")
    if not isinstance(name, str) or name not in known():
        raise _unknown_type(where, name, known())
    return name


def _unknown_type(where: str, name: object, names: Iterable[str]) -> Exception:
    return CheckpointError(
        f"{where}: model_type {name!r} is not supported: it takes {', '.join(names)}"
        f"{did_you_mean(str(name), names)}"
    )


# ---------------------------------------------------------------- examples

# The part of public config.json files that decides kernels. Lists of modules that are not quantised
# are shortened to the last parts of their names, which mean the same layers.
_EXAMPLES = Path(__file__).parent / "examples"


@cache
def builtin_names() -> dict[str, str]:
    """Short names of models whose kernels can be listed without a download, and their names on the
    Hugging Face hub."""
    return {file.stem: _example(file)["hub_name"] for file in sorted(_EXAMPLES.glob("*.json"))}


def builtin_config(name: str) -> dict[str, Any] | None:
    """The config of such a model, by its short or its hub name in any case; None for others."""
    for short, hub_name in builtin_names().items():
        if name.lower() in (short.lower(), hub_name.lower()):
            config: dict[str, Any] = _example(_EXAMPLES / f"{short}.json")["config"]
            return config
    return None


def _example(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found
