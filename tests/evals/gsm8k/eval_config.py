"""One YAML file per model: how it is served, and what it should score."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from vllm.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """model_name None: the demo model. accuracy_threshold None: the score is reported, not judged;
    else the model fails below accuracy_threshold - tolerance. env: variables of the server."""

    model_name: str | None
    accuracy_threshold: float | None
    tolerance: float | None = None
    num_questions: int = 1319
    num_fewshot: int = 5
    max_tokens: int = 256
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    startup_max_wait_seconds: int = 1200

    def judge(self, accuracy: float) -> str | None:
        """What is wrong with this score; None for nothing, or where there is no threshold."""
        if self.accuracy_threshold is None or self.tolerance is None:
            return None
        least = self.accuracy_threshold - self.tolerance
        if accuracy >= least:
            return None
        return (
            f"accuracy {accuracy:.4f} is below {least:.4f} "
            f"({self.accuracy_threshold} less the tolerance of {self.tolerance})"
        )


_KINDS: dict[str, tuple[type, ...]] = {
    "model_name": (str, type(None)),
    "accuracy_threshold": (float, type(None)),
    "tolerance": (float, type(None)),
    "num_questions": (int,),
    "num_fewshot": (int,),
    "max_tokens": (int,),
    "server_args": (list,),
    "env": (dict,),
    "startup_max_wait_seconds": (int,),
}


def read_config(path: Path) -> EvalConfig:
    """ConfigError naming the file and the key that is wrong."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold keys and values, not {type(content).__name__}")
    for key, value in content.items():
        _check(path, str(key), value)
    for key in ("model_name", "accuracy_threshold"):
        if key not in content:
            raise ConfigError(f"{path} lacks {key}; null is a value too")
    if (content["accuracy_threshold"] is None) != (content.get("tolerance") is None):
        raise ConfigError(f"{path}: accuracy_threshold and tolerance go together")
    return EvalConfig(**content | {"server_args": tuple(content.get("server_args", ()))})


def _check(path: Path, key: str, value: Any) -> None:
    known = [f.name for f in fields(EvalConfig)]
    if key not in known:
        raise ConfigError(f"{path}: unknown key {key}{did_you_mean(key, known)}")
    is_right = isinstance(value, _KINDS[key]) and not isinstance(value, bool)
    texts = [*value, *value.values()] if isinstance(value, dict) else value
    if is_right and key in ("server_args", "env"):
        is_right = all(isinstance(text, str) for text in texts)
    if not is_right:
        kinds = " or ".join(kind.__name__.replace("NoneType", "null") for kind in _KINDS[key])
        of_texts = " of texts (quote numbers)" if key in ("server_args", "env") else ""
        raise ConfigError(f"{path}: {key} takes {kinds}{of_texts}, not {value!r}")
    is_share = key in ("accuracy_threshold", "tolerance") and value is not None
    if is_share and not 0 <= value <= 1:
        raise ConfigError(f"{path}: {key} takes a share from 0 to 1, not {value}")


def read_list(path: Path) -> list[Path]:
    """The configs that a list names, one per line, by their file names in configs/; `#` begins a
    comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    except OSError as error:
        raise ConfigError(f"--config-list-file {path} cannot be read: {error}") from error
    configs = [FOLDER / line for line in lines if line]
    if not configs:
        raise ConfigError(f"--config-list-file {path} names no config")
    for config in configs:
        if not config.is_file():
            raise ConfigError(f"{path} names {config.name}, which is not in {FOLDER}")
    return configs
