"""From what a user names to a folder with a model in it."""

import json
from pathlib import Path
from typing import Any

from vllm.errors import CheckpointError, ConfigError, VllmError

# Everything serving needs; never code, pickles or other frameworks' weights.
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt")
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
        first_line = next(iter(str(error).strip().splitlines()), "")
        raise CheckpointError(
            f"cannot fetch {model!r} from the Hugging Face hub ({type(error).__name__}: "
            f"{first_line}); check the name and the network, set HF_TOKEN for a gated model, or "
            f"give a local folder"
        ) from error


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


def read_json_object(path: Path, error: type[VllmError] = CheckpointError) -> dict[str, Any]:
    """What a JSON file of a model folder holds; `error` for one that is missing or corrupt."""
    if path.exists() and not path.is_file():  # to open a pipe would wait for a writer
        raise error(f"{path} is no regular file; fetch the checkpoint again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path.parent} has no {path.name}: not a Hugging Face model folder") from None
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} is not readable JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path} holds {type(content).__name__}, not a JSON object")
    return content
