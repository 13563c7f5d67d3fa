"""The tokenizer of a model, through transformers."""

import json
from pathlib import Path
from typing import Any

from vllm.config.model import ModelConfig
from vllm.errors import CheckpointError, ConfigError


def import_transformers() -> None:
    """As far as `load_tokenizer` needs it."""
    from transformers import AutoTokenizer  # noqa: F401


def load_tokenizer(config: ModelConfig) -> Any:
    """A transformers tokenizer; CheckpointError when the folder has none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer,
            trust_remote_code=config.trust_remote_code,
            config=_plain_config(Path(config.tokenizer)),
        )
    except Exception as error:  # transformers raises many kinds for files it cannot use
        raise CheckpointError(
            f"no tokenizer can be loaded from {config.tokenizer} "
            f"({type(error).__name__}: {str(error).strip()[:300]}); give one with --tokenizer, or "
            f"serve token ids with --skip-tokenizer-init"
        ) from error


def _plain_config(folder: Path) -> Any:
    """A config with all that AutoTokenizer reads of it where tokenizer_config.json names a class:
    the model's type. None where it needs the model's own config.

    Making that one imports torch's compiler, sympy and accelerate, if they are installed.
    """
    from transformers import PreTrainedConfig

    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        if not tokenizer.get("tokenizer_class") or "auto_map" in {**tokenizer, **model}:
            return None
        kept = ("tokenizer_class", "model_name")
        plain = PreTrainedConfig(**{name: model[name] for name in kept if name in model})
        plain.model_type, plain.name_or_path = model["model_type"], str(folder)
        return plain
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **options: Any,
) -> Any:
    """A transformers tokenizer by folder or hub name. tokenizer_mode: auto, hf, or slow for that
    without Rust. options: for AutoTokenizer. ConfigError for another mode."""
    from transformers import AutoTokenizer

    if tokenizer_mode not in ("auto", "hf", "slow"):
        raise ConfigError(f"tokenizer_mode {tokenizer_mode!r}: it takes auto, hf or slow")
    if tokenizer_mode == "slow":
        options["use_fast"] = False
    return AutoTokenizer.from_pretrained(
        tokenizer_name, trust_remote_code=trust_remote_code, revision=revision, **options
    )
