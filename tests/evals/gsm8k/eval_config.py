"""One YAML file per model: how it is served, and what it should score.

Keys are those of vLLM's `tests/evals/gsm8k/configs`, with its defaults.
"""

import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from vllm.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """model_name None: the demo model. accuracy_threshold None: the score is reported, not judged;
    else the model fails below accuracy_threshold - tolerance, by vLLM's rule of which number of an
    answer counts. server_args: texts, in YAML one text or a list. env: variables of the server."""

    model_name: str | None
    accuracy_threshold: float | None
    tolerance: float = 0.08
    num_questions: int = 1319
    num_fewshot: int = 5
    max_tokens: int = 256
    max_model_len: int | None = None
    server_args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    startup_max_wait_seconds: int = 1200

    @property
    def flags(self) -> list[str]:
        """Of `vllm serve`, the model's name excepted."""
        length = [] if self.max_model_len is None else ["--max-model-len", str(self.max_model_len)]
        return [*length, *self.server_args]

    def judge(self, accuracy: float) -> str | None:
        """What is wrong with this score; None for nothing, or where there is no threshold."""
        if self.accuracy_threshold is None:
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
    "tolerance": (float,),
    "num_questions": (int,),
    "num_fewshot": (int,),
    "max_tokens": (int,),
    "max_model_len": (int,),
    "server_args": (list, str),
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
    if content["accuracy_threshold"] is None and "tolerance" in content:
        raise ConfigError(f"{path}: a tolerance needs an accuracy_threshold")
    args = content.get("server_args", ())
    config = EvalConfig(
        **content | {"server_args": tuple(_words(path, args) if isinstance(args, str) else args)}
    )
    if config.max_model_len is not None and "--max-model-len" in config.server_args:
        raise ConfigError(f"{path}: max_model_len and --max-model-len in server_args: give one")
    return config


def _words(path: Path, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{path}: server_args cannot be split into words: {error}") from error


def _check(path: Path, key: str, value: Any) -> None:
    known = [f.name for f in fields(EvalConfig)]
    if key not in known:
        raise ConfigError(
            f"{path}: unknown key {key}{did_you_mean(key, known)}; known keys: {', '.join(known)}"
        )
    is_right = isinstance(value, _KINDS[key]) and not isinstance(value, bool)
    texts = [*value, *value.values()] if isinstance(value, dict) else value
    if is_right and key in ("server_args", "env") and not isinstance(value, str):
        is_right = all(isinstance(text, str) for text in texts)
    if not is_right:
        kinds = " or ".join(kind.__name__.replace("NoneType", "null") for kind in _KINDS[key])
        of_texts = " of texts (quote numbers)" if key in ("server_args", "env") else ""
        raise ConfigError(f"{path}: {key} takes {kinds}{of_texts}, not {value!r}")
    is_share = key in ("accuracy_threshold", "tolerance") and value is not None
    if is_share and not 0 <= value <= 1:
        raise ConfigError(f"{path}: {key} takes a share from 0 to 1, not {value}")


def read_list(path: Path) -> list[Path]:
    """The configs that a list names, one per line, by their paths in configs/; `#` begins a
    comment. A relative path is searched for beside this file too: vLLM's commands give
    `configs/models-blackwell.txt` from anywhere."""
    if not path.exists() and (FOLDER.parent / path).exists():
        path = FOLDER.parent / path
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
