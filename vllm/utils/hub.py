"""From what a user names to a folder with a model in it, or to single files of one."""

import json
import re
from pathlib import Path
from typing import Any

from vllm.errors import CheckpointError, ConfigError, VllmError
from vllm.utils.files import is_regular, kind_of
from vllm.utils.safetensors_files import TensorShape

# Everything serving needs; never code, pickles or other frameworks' weights.
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt")
# And what libraries read of a folder beside that.
_READ = (*_WANTED, "*.py", "*.tiktoken")
_UNWANTED = ("original/*", "consolidated*", "onnx/*")


def resolve_model(model: str, revision: str | None = None, weights: bool = True) -> Path:
    """The local folder `model`, or a snapshot of that name on the Hugging Face hub.

    The hub is asked only when no such folder exists. Raises CheckpointError when neither does.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"--revision {revision} names a version on the hub, but {model} is a folder here, "
                f"which has one version: leave it out"
            )
        check_files(path)
        return path
    if path.exists():
        raise CheckpointError(
            f"{model} is a file; give the folder that holds config.json and *.safetensors"
        )
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(
            f"model {model!r} is neither a folder here nor a hub name such as Qwen/Qwen3-8B-FP8"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [p for p in _WANTED if weights or p != "*.safetensors"]
    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"cannot fetch {model!r} from the Hugging Face hub ({first_line(error)}); check the "
            f"name and the network, set HF_TOKEN for a gated model, or give a local folder"
        ) from error


def check_files(folder: Path) -> None:
    """CheckpointError for a FIFO, a device, a socket or a folder in place of a file of a model:
    whoever opens one waits for its other end, or reads without an end."""
    for place in (folder, folder / "additional_chat_templates"):
        for pattern in _READ:
            for path in place.glob(pattern):
                check_regular(path, CheckpointError)


def check_regular(path: Path, error: type[VllmError]) -> None:
    """`error` for what is there and no regular file."""
    if path.exists() and not is_regular(path):
        raise error(f"{path} is {kind_of(path)}, no regular file; fetch the checkpoint again")


def local_model(model: str, revision: str | None = None) -> Path | None:
    """The folder that `resolve_model` will find; None where it would have to ask the hub first."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def is_hub_name(model: str) -> bool:
    """Whether it has the form `organisation/name`; `../x` and `a/..` do not."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model, re.ASCII) is not None


def hub_file(model: str, name: str) -> Path | None:
    """One file of a model on the hub, a copy in the local cache first; None where the model has no
    such file. CheckpointError where it cannot be fetched."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        if isinstance(cached := try_to_load_from_cache(model, name), str):
            return Path(cached)
        return Path(hf_hub_download(model, name))
    except RemoteEntryNotFoundError:
        return None
    except LocalEntryNotFoundError as error:
        raise _unfetched(model, name, "it is not in the local cache, and the hub is out of reach"
                         ) from error  # fmt: skip
    except (HTTPError, OSError, ValueError) as error:
        raise _unfetched(model, name, first_line(error)) from error


def hub_headers(model: str) -> dict[str, TensorShape]:
    """By name, from the headers of the safetensors files of a model on the hub; {} where it has no
    such files. CheckpointError where they cannot be fetched."""
    from huggingface_hub import get_safetensors_metadata
    from huggingface_hub.errors import (
        HTTPError,  # of its HTTP library: no connection is no OSError
        NotASafetensorsRepoError,
        SafetensorsParsingError,
    )

    try:
        files = get_safetensors_metadata(model).files_metadata.values()
    except NotASafetensorsRepoError:
        return {}
    except (HTTPError, OSError, ValueError, SafetensorsParsingError) as error:
        raise _unfetched(model, "*.safetensors", first_line(error)) from error
    return {
        name: TensorShape(info.dtype, tuple(info.shape))
        for file in files
        for name, info in file.tensors.items()
    }


def _unfetched(model: str, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of {model!r} cannot be fetched from the Hugging Face hub ({why}): give a local "
        f"folder, or run `hf download {model} {name}` where there is a network; set HF_TOKEN for a "
        f"gated model"
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def read_json_object(path: Path, error: type[VllmError] = CheckpointError) -> dict[str, Any]:
    """What a JSON file of a model folder holds; `error` for one that is missing or corrupt."""
    check_regular(path, error)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        why = "not a Hugging Face model folder"
        if path.name == "config.json" and (path.parent / "params.json").exists():
            why = (
                "params.json and consolidated*.safetensors are Mistral's own layout, which is not "
                "read; take a checkpoint of the model in the layout of Hugging Face, which has a "
                "config.json"
            )
        raise error(f"{path.parent} has no {path.name}: {why}") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} is not readable JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path} holds {type(content).__name__}, not a JSON object")
    return content
