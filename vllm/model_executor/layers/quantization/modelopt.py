"""NVIDIA ModelOpt checkpoints in NVFP4: their format, for kernel choices; loading comes later."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.errors import CheckpointError
from vllm.kernels.problem import ActScheme, WeightFormat
from vllm.model_executor.layers.quantization import LayerFormat, LayerNames, QuantizationConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import Linear, LinearMethod


class ModelOptNvFp4Config(QuantizationConfig):
    """E2M1 weights with an E4M3 scale per 16 columns and a float32 global scale.

    exclude_modules: layers that are not quantised. The DeepGEMM rule has nothing to say here.
    """

    name = "modelopt"
    is_checkpoint_quantized = True

    def __init__(self, exclude_modules: Sequence[str] = ()):
        self.exclude_modules = tuple(exclude_modules)
        self._excluded = LayerNames(["lm_head", *self.exclude_modules])

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "ModelOptNvFp4Config":
        algorithm = config.get("quant_algo")
        if algorithm != "NVFP4":
            raise CheckpointError(
                f"ModelOpt quant_algo {algorithm!r} is not supported: it takes NVFP4"
            )
        return cls(config.get("ignore") or config.get("exclude_modules") or ())

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        if self._excluded.covers(names):
            return None
        return WeightFormat("nvfp4"), (ActScheme.NVFP4_GROUP16, ActScheme.NONE)

    def linear_method(self, layer: "Linear") -> "LinearMethod | None":
        raise CheckpointError(
            "NVFP4 checkpoints cannot be loaded by this version; `vllm kernels explain` tells "
            "which kernels would serve one"
        )
