"""Models, and the registry of their architectures under the name that plug-ins know."""

from vllm.architectures.registry import ModelRegistry

__all__ = ["ModelRegistry"]
