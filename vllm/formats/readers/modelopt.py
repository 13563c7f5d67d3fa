"""NVIDIA ModelOpt checkpoints: NVFP4 and FP8 with one scale a tensor."""

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.errors import CheckpointError
from vllm.formats import fp8_tensor, nvfp4
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames
from vllm.formats.readers.cache_scales import has_fp8_cache_scales
from vllm.formats.readers.layer_names import LayerNames, layers_listed
from vllm.formats.weight_format import WeightFormat

# quant_algo -> its format, and the activation schemes that it allows, in order of preference.
_ALGORITHMS = {
    "NVFP4": (nvfp4.FORMAT, nvfp4.FORMAT.act),
    "W4A16_NVFP4": (nvfp4.FORMAT, (ActScheme.NONE,)),
    "FP8": (fp8_tensor.FORMAT, (ActScheme.STATIC_TENSOR, ActScheme.NONE)),
}
_NAMES = TensorNames(global_scale="weight_scale_2")


class ModelOptConfig(QuantizationConfig):
    """quant_algo: one for all quantised layers. exclude_modules: layers that are not quantised.

    The DeepGEMM rule has nothing to say here.
    """

    name = "modelopt"
    is_checkpoint_quantized = True
    algorithms: ClassVar[tuple[str, ...]] = tuple(_ALGORITHMS)

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
        group = fields.get("group_size", nvfp4.GROUP)
        if group not in (None, nvfp4.GROUP):
            raise CheckpointError(
                f"ModelOpt group_size {group!r} is not supported: it takes {nvfp4.GROUP}"
            )
        excluded = layers_listed(fields, "ignore", "exclude_modules")
        made = cls(str(fields.get("quant_algo")), excluded)
        cache_scheme = fields.get("kv_cache_quant_algo") or fields.get("kv_cache_scheme")
        made.has_cache_scales = has_fp8_cache_scales(cache_scheme)
        return made

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        if self._excluded.covers(names):
            return None
        stored, act = _ALGORITHMS[self.quant_algo]
        return StoredLayer(WeightFormat.of(stored.kind), act, _NAMES, len(names))


class ModelOptNvFp4Config(ModelOptConfig):
    """`--quantization modelopt_fp4`: a ModelOpt checkpoint that is to be one of NVFP4."""

    name = "modelopt_fp4"
    algorithms = ("NVFP4", "W4A16_NVFP4")
