"""Quantisation methods of checkpoints, by the `quant_method` of their config.json."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from vllm.config.model import ModelConfig
    from vllm.model_executor.layers.linear import Linear, LinearMethod


class QuantizationConfig(ABC):
    """How a checkpoint's weights are quantised, and which layers are not."""

    name: str
    is_checkpoint_quantized: bool

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "QuantizationConfig":
        """From `quantization_config` of config.json; CheckpointError for what is not supported."""

    @classmethod
    @abstractmethod
    def at_load(cls) -> "QuantizationConfig":
        """For a checkpoint that is not quantised: quantise while loading."""

    @abstractmethod
    def linear_method(self, layer: "Linear") -> "LinearMethod | None":
        """The method of one linear layer; None for a layer that is not quantised."""

    def slot_name(self, name: str) -> str:
        """Our name for a checkpoint tensor that other tools name differently."""
        return name


def _methods() -> dict[str, type[QuantizationConfig]]:
    from vllm.model_executor.layers.quantization.fp8_config import Fp8Config

    return {"fp8": Fp8Config}


def quantization_config_of(model_config: "ModelConfig") -> QuantizationConfig | None:
    """What the checkpoint says, or what `--quantization` asks for; None for neither."""
    methods = _methods()
    asked = model_config.quantization
    if asked is not None and asked not in methods:
        raise ConfigError(
            f"--quantization {asked!r} is unknown: it takes {', '.join(methods)}"
            f"{did_you_mean(asked, methods)}"
        )
    stored = _stored_config(model_config)
    if stored is None:
        return methods[asked].at_load() if asked else None
    name = stored.get("quant_method")
    if name not in methods:
        raise CheckpointError(
            f"{model_config.model}: quant_method {name!r} is not supported; it takes "
            f"{', '.join(methods)}, or a checkpoint that is not quantised"
        )
    if asked not in (None, name):
        raise ConfigError(
            f"--quantization {asked} contradicts the checkpoint, which is quantised as {name}; "
            f"leave the flag out"
        )
    return methods[name].from_checkpoint(stored)


def _stored_config(model_config: "ModelConfig") -> dict[str, Any] | None:
    for config in (model_config.hf_config, model_config.hf_text_config):
        stored = getattr(config, "quantization_config", None)
        if stored is not None:
            return dict(stored if isinstance(stored, dict) else stored.to_dict())
    return None
