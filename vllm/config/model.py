"""Which model is served, and what its own files say about it."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vllm.architectures.architecture import Architecture, Checkpointed
from vllm.architectures.decoder import Decoder
from vllm.architectures.registry import served, text_architecture, ties_embeddings
from vllm.config.hf_config import plain_config, read_config
from vllm.config.hf_overrides import blaming, check_architecture, check_effect, with_overrides
from vllm.errors import CheckpointError, ConfigError
from vllm.kernels.report.question import dtype_of
from vllm.machine import Device
from vllm.platforms.installed import installed_device
from vllm.utils.dataclasses import dataclass, field, replace
from vllm.utils.hub import read_json_object, resolve_model

DTYPES = ("auto", "float32", "bfloat16", "float16")
_LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_NEEDED_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "vocab_size", "max_position_embeddings")  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """A resolved model. `ModelConfig.load` makes one from what a user gives.

    path: folder of the checkpoint. hf_config: what config.json says, with the names and defaults
    of transformers; hf_text_config its text part. dtype: of activations, "float32", "bfloat16" or
    "float16". max_model_len: tokens of a request; where no one gave it, it yields to the size of
    the KV cache. quantization: the method that was asked for, None to follow the checkpoint.
    generation: what generation_config.json holds. decoder: what the text model is made of.
    """

    model: str = ""
    tokenizer: str = ""
    path: Path = Path()
    served_model_name: tuple[str, ...] = ()
    hf_config: Any = None
    hf_text_config: Any = None
    dtype: str = "float32"
    max_model_len: int = 0
    is_max_model_len_given: bool = False
    quantization: str | None = None
    load_format: str = "auto"
    trust_remote_code: bool = False
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    debug_numerics: bool = False
    seed: int = 0
    generation: dict[str, Any] = field(default_factory=dict)
    decoder: Decoder | None = None

    @property
    def model_type(self) -> str:
        """`model_type` of the text model: what model rules are written against."""
        return getattr(self.hf_text_config, "model_type", "")

    @property
    def is_dummy(self) -> bool:
        """Whether weights are random, whatever the folder holds."""
        return self.load_format == "dummy"

    @property
    def stored_dtype(self) -> str | None:
        """Of weights that are not quantised, as config.json has it."""
        return _stored_dtype(self.hf_config)

    @property
    def vocab_size(self) -> int:
        return int(self.hf_text_config.vocab_size)

    @property
    def has_recurrent_states(self) -> bool:
        """Whether layers keep a state of each request instead of its keys and values."""
        return self.decoder is not None and self.decoder.has_recurrent_states

    @property
    def architecture(self) -> Checkpointed:
        """The first of the classes that config.json names and the engine runs."""
        return served(self.architectures)

    @property
    def slot_name(self) -> Callable[[str], str | None]:
        """As of the architecture, for this number of layers."""
        decoder = self.decoder
        num_layers = len(decoder.layers) if decoder is not None else None
        drafts = decoder is not None and decoder.mtp is not None
        return partial(self.architecture.slot_name, num_layers=num_layers, drafts=drafts)

    def with_mtp(self) -> "ModelConfig":
        """With the checkpoint's layer of multi-token prediction; ConfigError where it has none."""
        source = str(self.path / "config.json")
        return replace(self, decoder=_decoder(source, self.hf_config, with_mtp=True))

    def ties_embeddings(self, tensors: Iterable[str]) -> bool:
        """Whether the output projection is the embedding's weight. tensors: names of those that the
        checkpoint has."""
        return ties_embeddings(self.hf_config.to_dict(), self.architecture, tensors)

    @property
    def architectures(self) -> list[str]:
        return list(getattr(self.hf_config, "architectures", None) or [])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids, of generation_config.json first and config.json else."""
        configs = (self.hf_text_config, self.hf_config)
        places = [self.generation.get("eos_token_id")]
        places += [getattr(config, "eos_token_id", None) for config in configs]
        given = next((ids for ids in places if ids is not None), None)
        return frozenset(token for token in _as_list(given) if 0 <= token < self.vocab_size)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        tokenizer: str | None = None,
        revision: str | None = None,
        served_model_name: str | list[str] | None = None,
        dtype: str = "auto",
        device: Device | None = None,
        max_model_len: int | None = None,
        quantization: str | None = None,
        load_format: str = "auto",
        trust_remote_code: bool = False,
        skip_tokenizer_init: bool = False,
        enforce_eager: bool = False,
        debug_numerics: bool = False,
        hf_overrides: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> "ModelConfig":
        """Reads the model's config files; ConfigError or CheckpointError says what is wrong.

        device: what it is to run on, None for what this machine has.
        """
        path = resolve_model(model, revision, weights=load_format != "dummy")
        overrides = hf_overrides or {}
        with blaming(overrides):
            hf_config = load_hf_config(path, trust_remote_code, overrides)
            decoder = _decoder(_source(path, overrides), hf_config)
        text_config = hf_config.get_text_config()
        defaults = path / "generation_config.json"
        generation = read_json_object(defaults) if defaults.exists() else {}
        for ids in (generation.get("eos_token_id"), getattr(text_config, "eos_token_id", None)):
            _check_eos(path, ids)
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"--seed {seed} is out of range: it takes -2**63 to 2**63 - 1")
        names = [served_model_name] if isinstance(served_model_name, str) else served_model_name
        if names and not all(name.strip() for name in names):
            raise ConfigError("--served-model-name '': it takes names that are not empty")
        return cls(
            model=model,
            tokenizer=str(_tokenizer_folder(tokenizer) if tokenizer else path),
            path=path,
            served_model_name=tuple(dict.fromkeys(names or [model])),
            hf_config=hf_config,
            hf_text_config=text_config,
            dtype=_resolve_dtype(str(dtype), hf_config, device or installed_device()),
            max_model_len=_resolve_max_model_len(max_model_len, text_config),
            is_max_model_len_given=max_model_len is not None,
            quantization=quantization,
            load_format=load_format,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=skip_tokenizer_init,
            enforce_eager=enforce_eager or debug_numerics,
            debug_numerics=debug_numerics,
            seed=seed,
            generation=generation,
            decoder=decoder,
        )


def load_hf_config(path: Path, trust_remote_code: bool, overrides: dict[str, Any]) -> Any:
    """The config of a folder, with `overrides` put over config.json. ConfigError for an override
    that would have no effect, or only a part of one."""
    raw = read_json_object(path / "config.json")
    if "model_type" not in raw:
        raise CheckpointError(f"{path / 'config.json'} has no model_type: not a language model")
    merged, final = with_overrides(raw, overrides)
    _check_kinds(_source(path, overrides), merged)
    config = read_config(merged)
    architecture = served(merged.get("architectures") or []) if config is None or final else None
    if config is None:
        config = _read_by_transformers(path, raw, trust_remote_code, final)
    if architecture is not None:
        check_architecture(merged["model_type"], architecture, final)
    check_effect(config, final)
    return config


def with_hf_overrides(raw: dict[str, Any], overrides: dict[str, Any], name: str) -> dict[str, Any]:
    """The config.json of any model with `overrides` put over it, as `load_hf_config` does it and
    with the same errors; what only transformers can read is not checked for effect."""
    merged, final = with_overrides(raw, overrides)
    if "model_type" not in merged:
        return merged
    _check_kinds(f"{name} with --hf-overrides", merged)
    config = read_config(merged)
    if config is not None:
        with suppress(CheckpointError):  # a class that is not served is reported with its layers
            architecture = served(merged.get("architectures") or [])
            check_architecture(merged["model_type"], architecture, final)
        check_effect(config, final)
    return merged


def _decoder(source: str, config: Any, with_mtp: bool = False) -> Decoder:
    """What the text model is made of, by the class that config.json names."""
    named = served(getattr(config, "architectures", None) or [])
    text = config.get_text_config()
    architecture = named if isinstance(named, Architecture) else text_architecture(text.model_type)
    if architecture is None:
        raise CheckpointError(
            f"{source}: text models of type {text.model_type!r} are not supported"
        )
    fields = text.to_dict()
    for name in _NEEDED_SIZES:
        # transformers raises for attributes that differ by layer.
        if fields.get(name) is None and getattr(text, name, None) is None:
            raise CheckpointError(
                f"{source}: model_type {text.model_type!r} has no {name}, which the architecture "
                f"that it names needs: one of the two is wrong"
            )
    return architecture.decoder(fields, source, with_mtp)


def _source(path: Path, overrides: dict[str, Any]) -> str:
    """Where a field of the config comes from, for messages."""
    return f"{path / 'config.json'}{' with --hf-overrides' if overrides else ''}"


def _tokenizer_folder(tokenizer: str) -> Path:
    try:
        return resolve_model(tokenizer, weights=False)
    except CheckpointError as error:
        raise CheckpointError(f"--tokenizer {tokenizer}: {error}") from error


def _as_list(ids: Any) -> list[Any]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _check_eos(path: Path, ids: Any) -> None:
    if not all(isinstance(token, int) for token in _as_list(ids)):
        raise CheckpointError(
            f"{path}: eos_token_id = {ids!r} in config.json or generation_config.json: it takes a "
            f"token id or a list of them"
        )


def _check_kinds(source: str, raw: dict[str, Any]) -> None:
    """Refuses fields of the wrong kind that are read before anything else looks at them."""
    if not isinstance(raw["model_type"], str):
        raise CheckpointError(f"{source}: model_type = {raw['model_type']!r} is no name")
    quantization, names = raw.get("quantization_config"), raw.get("architectures") or []
    if quantization is not None and not isinstance(quantization, dict):
        raise CheckpointError(f"{source}: quantization_config = {quantization!r} is no JSON object")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{source}: architectures = {names!r} is no list of names")


def _read_by_transformers(
    path: Path, raw: dict[str, Any], trust_remote_code: bool, overrides: dict[str, Any]
) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _apply_overrides(config, overrides)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, OSError) as error:
        raise CheckpointError(
            f"{_source(path, overrides)} (model_type {raw['model_type']!r}) cannot be read: {error}"
        ) from error
    except Exception as error:  # transformers validates with exception classes of its own
        if "Validation" not in type(error).__name__:
            raise
        raise CheckpointError(f"{_source(path, overrides)} is not valid: {error}") from error
    return plain_config(config.to_dict()) if _is_of_layers(config.get_text_config()) else config


def _is_of_layers(text: Any) -> bool:
    """Whether it raises for fields whose values layers do not share, as a rank would that reads all
    fields."""
    try:
        for name in text.to_dict():
            getattr(text, name, None)
    except Exception as error:
        if "PerLayer" not in type(error).__name__:
            raise
        return True
    return False


def _apply_overrides(config: Any, overrides: dict[str, Any]) -> None:
    for key, value in overrides.items():
        current = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(current, "to_dict"):
            _apply_overrides(current, value)
        elif isinstance(value, dict) and isinstance(current, dict):
            setattr(config, key, current | value)
        else:
            setattr(config, key, value)


def _resolve_dtype(dtype: str, config: Any, device: Device) -> str:
    asked = dtype.removeprefix("torch.")
    return _LONG_NAMES[dtype_of(asked, {"dtype": _stored_dtype(config)}, device)]


def _stored_dtype(config: Any) -> str | None:
    """A multimodal config may have it outside of its text part alone."""
    found = (getattr(part, "dtype", None) for part in (config.get_text_config(), config))
    return next((str(dtype).removeprefix("torch.") for dtype in found if dtype is not None), None)


def _resolve_max_model_len(asked: int | None, config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    limit = config.max_position_embeddings
    if rope.get("rope_type") == "yarn" and rope.get("original_max_position_embeddings"):
        limit = max(limit, int(rope["factor"] * rope["original_max_position_embeddings"]))
    if asked is None:
        return int(config.max_position_embeddings)
    if not 0 < asked <= limit:
        raise ConfigError(
            f"--max-model-len {asked} is out of range: this model takes 1 to {limit} tokens "
            f"(max_position_embeddings of its config.json)"
        )
    return asked
