"""Architectures (as config.json names them) -> our model classes."""

from collections.abc import Sequence
from importlib import import_module

from torch import nn

from vllm.errors import CheckpointError

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


def model_class(architectures: Sequence[str]) -> type[nn.Module]:
    """The class of the first supported architecture; CheckpointError names what is."""
    for name in architectures:
        if name in _ARCHITECTURES:
            module = import_module(f"vllm.model_executor.models.{_ARCHITECTURES[name]}")
            cls: type[nn.Module] = getattr(module, name)
            return cls
    given = ", ".join(architectures) or "none (config.json has no architectures)"
    raise CheckpointError(
        f"architecture {given} is not supported; supported: {', '.join(_ARCHITECTURES)}"
    )
