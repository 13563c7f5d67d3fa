"""The tokenizer of a model, through transformers."""

from typing import Any

from vllm.config.model import ModelConfig
from vllm.errors import CheckpointError


def load_tokenizer(config: ModelConfig) -> Any:
    """A transformers tokenizer; CheckpointError when the folder has none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for files it cannot use
        raise CheckpointError(
            f"no tokenizer can be loaded from {config.tokenizer} "
            f"({type(error).__name__}: {str(error).strip()[:300]}); give one with --tokenizer, or "
            f"serve token ids with --skip-tokenizer-init"
        ) from error
