"""MODEL of `vllm kernels explain`: a folder, a config.json, a built-in name, a name on the hub."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.architectures.decoder import Item
from vllm.architectures.sharding import LinearSpec
from vllm.errors import CheckpointError, ConfigError, did_you_mean
from vllm.kernels.problems import Quantization, quantisable
from vllm.kernels.report.layer_groups import compress
from vllm.utils.dataclasses import dataclass, field, replace
from vllm.utils.files import is_regular, kind_of
from vllm.utils.safetensors_files import TensorShape, stored_tensors

if TYPE_CHECKING:
    from vllm.formats.readers.unread import UnreadConfig

_INDEX = "model.safetensors.index.json"


@dataclass()
class ModelFiles:
    """What is read of a model. folder: where the rest of it may be; None for a file or a built-in
    model. is_on_hub: what is not in the folder can be fetched. notes: what could not be."""

    name: str
    config: dict[str, Any]
    folder: Path | None = None
    is_on_hub: bool = False
    notes: list[str] = field(default_factory=list)

    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config, or what an older ModelOpt checkpoint has beside config.json."""
        from vllm.formats.readers.registry import may_be_beside, modelopt_file

        text = self.config.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, Mapping) else None
        stored = self.config.get("quantization_config") or nested
        if stored is not None and not isinstance(stored, dict):
            raise CheckpointError(
                f"{self.name}: quantization_config = {stored!r} is no JSON object"
            )
        if self.folder is None or not may_be_beside(stored):
            return stored
        if not self.is_on_hub:
            return modelopt_file(self.folder) or stored
        fetched = self._fetch("hf_quant_config.json")
        return modelopt_file(fetched.parent) if fetched else stored

    def tensors(self) -> dict[str, TensorShape]:
        """Of the safetensors headers; {} where there are none."""
        if self.folder is None or self.local_folder is not None:
            return self.local_tensors()
        from vllm.utils.hub import hub_headers

        try:
            return hub_headers(self.name)
        except CheckpointError as error:
            self.notes.append(str(error))
            return {}

    def local_tensors(self) -> dict[str, TensorShape]:
        """The same where they are on this machine, {} elsewhere."""
        own = stored_tensors(self.local_folder) if self.local_folder is not None else ()
        return {one.name: TensorShape(one.dtype, one.shape) for one in own}

    @property
    def local_folder(self) -> Path | None:
        """Where the weights are on this machine; None where they are not, or not all."""
        is_here = self.folder is not None and (not self.is_on_hub or self._is_complete())
        return self.folder if is_here else None

    def _fetch(self, name: str) -> Path | None:
        from vllm.utils.hub import hub_file

        try:
            return hub_file(self.name, name)
        except CheckpointError as error:
            self.notes.append(f"{error}; without it the weights are taken as not quantised")
            return None

    def _is_complete(self) -> bool:
        """Whether the local cache holds every safetensors file of a model on the hub."""
        assert self.folder is not None
        if not (self.folder / _INDEX).is_file():
            return (self.folder / "model.safetensors").is_file()
        files = read_json(self.folder / _INDEX).get("weight_map")
        names = set(files.values()) if isinstance(files, dict) else set()
        return bool(names) and all((self.folder / str(name)).is_file() for name in names)


def find_model(model: str) -> ModelFiles:
    """ConfigError or CheckpointError for what is none of the four."""
    from vllm.architectures.registry import builtin_config, builtin_names
    from vllm.utils.hub import is_hub_name

    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(model, read_json(path / "config.json"), path)
    if path.is_file():
        return ModelFiles(model, read_json(path))
    config = builtin_config(model)
    if config is not None:
        return ModelFiles(model, config)
    if is_hub_name(model):
        return _on_hub(model)
    lower = (name.lower() for name in (*builtin_names(), *builtin_names().values()))
    raise ConfigError(
        f"model {model!r} is neither a folder or config.json here nor a built-in name "
        f"({', '.join(builtin_names())}) nor a name on the Hugging Face hub, such as "
        f"org/name{did_you_mean(model.lower(), lower)}"
    )


def _on_hub(model: str) -> ModelFiles:
    from vllm.utils.hub import hub_file

    file = hub_file(model, "config.json")
    if file is None:
        raise CheckpointError(
            f"{model!r} on the Hugging Face hub has no config.json: give the name of a model in "
            f"the format of transformers, or a folder with a config.json"
        )
    return ModelFiles(model, read_json(file), file.parent, is_on_hub=True)


def read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not is_regular(path):
        raise ConfigError(f"{path} is {kind_of(path)}, no regular file")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no {path.name}: not a Hugging Face model folder"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not a JSON object")
    return config


Items = tuple[tuple[str, Item], ...]


def taken_apart(items: Items, quantization: Quantization) -> Items:
    """Weights of a merged layer that are not all quantised alike are layers of their own."""
    found: list[tuple[str, Item]] = []
    for prefix, item in items:
        try:
            if isinstance(item, LinearSpec) and (names := quantisable(prefix, item)):
                quantization.layer_format(names)
            found.append((prefix, item))
        except CheckpointError:
            assert isinstance(item, LinearSpec)
            parent = item.name[: item.name.rfind(".") + 1]
            found += [
                (prefix, replace(item, name=parent + part.name, parts=(part,)))
                for part in item.parts
            ]
    return tuple(found)


def without_unread(items: Items, quantization: "UnreadConfig") -> tuple[Items, str, str]:
    """The layers that are not quantised; of those that are, why no kernel can be told, with what
    the reader said, and which they are."""
    is_unread = [
        bool(names := quantisable(prefix, item)) and quantization.is_quantised(names)
        for prefix, item in items
    ]
    kept = tuple(one for one, unread in zip(items, is_unread) if not unread)
    layers = [prefix + item.name for (prefix, item), unread in zip(items, is_unread) if unread]
    text = (
        f"{len(layers)} layers are stored as {quantization.format}, and there is no kernel for "
        f"them: {quantization.why}"
    )
    return kept, text, ", ".join(compress(layers))
