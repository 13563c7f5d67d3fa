"""Architectures (as config.json names them) -> our model classes."""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from vllm.errors import CheckpointError

if TYPE_CHECKING:
    from vllm.model_executor.models.llama import LlamaForCausalLM

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}


def model_class(architectures: Sequence[str]) -> "type[LlamaForCausalLM]":
    """The class of the first supported architecture; CheckpointError names what is."""
    name = supported_architecture(architectures)
    module = import_module(f"vllm.model_executor.models.{_ARCHITECTURES[name]}")
    cls: type[LlamaForCausalLM] = getattr(module, name)
    return cls


def supported_architecture(architectures: Sequence[str]) -> str:
    """The first of them that there is a model for; CheckpointError for none. Without torch."""
    for name in architectures:
        if name in _ARCHITECTURES:
            return name
    given = ", ".join(architectures) or "none (config.json has no architectures)"
    raise CheckpointError(
        f"architecture {given} is not supported; supported: {', '.join(_ARCHITECTURES)}"
    )
