"""NVIDIA ModelOpt checkpoints: NVFP4 and FP8 with one scale a tensor.

No torch here: the configuration, and with it every kernel choice, resolves without it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.errors import CheckpointError
from vllm.formats.weight_format import ActScheme, WeightFormat
from vllm.model_executor.layers.quantization import (
    LayerFormat,
    LayerNames,
    QuantizationConfig,
    has_fp8_cache_scales,
    layers_listed,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.linear import LinearMethod

# quant_algo -> the activation schemes that it allows, best liked first.
_ACT_SCHEMES = {
    "NVFP4": (ActScheme.NVFP4_GROUP16, ActScheme.NONE),
    "W4A16_NVFP4": (ActScheme.NONE,),
    "FP8": (ActScheme.STATIC_TENSOR, ActScheme.NONE),
}
_NVFP4_GROUP = 16


class ModelOptConfig(QuantizationConfig):
    """quant_algo: one for all quantised layers. exclude_modules: layers that are not quantised.

    The DeepGEMM rule has nothing to say here.
    """

    name = "modelopt"
    is_checkpoint_quantized = True
    algorithms: ClassVar[tuple[str, ...]] = tuple(_ACT_SCHEMES)

    def __init__(self, quant_algo: str, exclude_modules: Sequence[str] = ()):
        if quant_algo not in self.algorithms:
            raise CheckpointError(
                f"ModelOpt quant_algo {quant_algo!r} is not supported by --quantization "
                f"{self.name}: it takes {', '.join(self.algorithms)}"
            )
        self.quant_algo = quant_algo
        self.exclude_modules = tuple(exclude_modules)
        self._excluded = LayerNames(["lm_head", *self.exclude_modules])

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "ModelOptConfig":
        # hf_quant_config.json holds the same, nested, and with older names.
        nested = config.get("quantization")
        fields = nested if isinstance(nested, dict) else config
        group = fields.get("group_size", _NVFP4_GROUP)
        if group not in (None, _NVFP4_GROUP):
            raise CheckpointError(
                f"ModelOpt group_size {group!r} is not supported: it takes {_NVFP4_GROUP}"
            )
        excluded = layers_listed(fields, "ignore", "exclude_modules")
        made = cls(str(fields.get("quant_algo")), excluded)
        cache_scheme = fields.get("kv_cache_quant_algo") or fields.get("kv_cache_scheme")
        made.has_cache_scales = has_fp8_cache_scales(cache_scheme)
        return made

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        if self._excluded.covers(names):
            return None
        schemes = _ACT_SCHEMES[self.quant_algo]
        if self.quant_algo != "FP8":
            return WeightFormat("nvfp4"), schemes
        # Shards keep their own scales when merged: re-scaling to a common one would lose bits.
        return WeightFormat("fp8", "tensor" if len(names) == 1 else "channel"), schemes

    def linear_method(self, names: Sequence[str]) -> "LinearMethod | None":
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod
        from vllm.model_executor.layers.quantization.nvfp4 import MODELOPT, Nvfp4LinearMethod

        found = self.layer_format(names)
        if found is None:
            return None
        weight, schemes = found
        if self.quant_algo == "FP8":
            config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="static")
            return Fp8LinearMethod(config, weight, schemes)
        return Nvfp4LinearMethod(MODELOPT, schemes)


class ModelOptNvFp4Config(ModelOptConfig):
    """`--quantization modelopt_fp4`: a ModelOpt checkpoint that is to be one of NVFP4."""

    name = "modelopt_fp4"
    algorithms = ("NVFP4", "W4A16_NVFP4")
