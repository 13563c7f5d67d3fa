"""NVIDIA ModelOpt checkpoints: NVFP4, MXFP4, FP8 and MXFP8, for all layers or each its own."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm.errors import CheckpointError
from vllm.formats import fp8_block, fp8_tensor, mxfp4, mxfp8, nvfp4
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.base import QuantizationConfig, StoredLayer, TensorNames, merged
from vllm.formats.readers.cache_scales import has_fp8_cache_scales
from vllm.formats.readers.layer_names import LayerNames, layers_listed, tell_experts_apart
from vllm.formats.weight_format import WeightFormat

MIXED = "MIXED_PRECISION"
_NVFP4 = WeightFormat.of(nvfp4.FORMAT.kind)
_NVFP4_NAMES = TensorNames(global_scale="weight_scale_2")
_FP8_TENSOR = WeightFormat.of(fp8_tensor.FORMAT.kind)
_FP8_BLOCK = StoredLayer(
    WeightFormat.of(fp8_block.FORMAT.kind, fp8_block.BLOCK), fp8_block.FORMAT.act
)
# By quant_algo. FP8_PB_WO is ModelOpt's name of blocks, FP8_BLOCK_SCALES that of TensorRT-LLM.
_SCHEMES = {
    "NVFP4": StoredLayer(_NVFP4, nvfp4.FORMAT.act, _NVFP4_NAMES),
    "W4A16_NVFP4": StoredLayer(_NVFP4, (ActScheme.NONE,), _NVFP4_NAMES),
    "FP8": StoredLayer(_FP8_TENSOR, (ActScheme.STATIC_TENSOR, ActScheme.NONE)),
    "FP8_PB_WO": _FP8_BLOCK,
    "FP8_BLOCK_SCALES": _FP8_BLOCK,
    "MXFP8": StoredLayer(WeightFormat.of(mxfp8.FORMAT.kind), mxfp8.FORMAT.act),
    "MXFP4": StoredLayer(WeightFormat.of(mxfp4.FORMAT.kind), mxfp4.FORMAT.act),
}


class ModelOptConfig(QuantizationConfig):
    """quant_algo: one for all quantised layers. exclude_modules: layers that are not quantised."""

    name = "modelopt"
    is_checkpoint_quantized = True
    algorithms: ClassVar[tuple[str, ...]] = (*_SCHEMES, MIXED)

    def __init__(self, quant_algo: str, exclude_modules: Sequence[str] = ()):
        self.exclude_modules = tuple(exclude_modules)
        self._excluded = LayerNames(["lm_head", *self.exclude_modules])
        self.tells_experts_apart = tell_experts_apart(self.exclude_modules)
        self._scheme = _SCHEMES[quant_algo]
        self.can_use_deep_gemm = self._scheme is _FP8_BLOCK

    @classmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "ModelOptConfig":
        # hf_quant_config.json holds the same, nested, and with older names.
        nested = config.get("quantization")
        fields = nested if isinstance(nested, dict) else config
        algorithm = fields.get("quant_algo")
        if algorithm not in cls.algorithms:
            raise CheckpointError(
                f"ModelOpt quant_algo {algorithm!r} is not supported by --quantization "
                f"{cls.name}: it takes {', '.join(cls.algorithms)}"
            )
        excluded = layers_listed(fields, "ignore", "exclude_modules")
        if algorithm == MIXED:
            made: ModelOptConfig = ModelOptMixedConfig(fields.get("quantized_layers"), excluded)
        else:
            _check_group_size(fields, _SCHEMES[algorithm])
            made = cls(algorithm, excluded)
        cache_scheme = fields.get("kv_cache_quant_algo") or fields.get("kv_cache_scheme")
        made.has_cache_scales = has_fp8_cache_scales(cache_scheme)
        return made

    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        return merged(names, [self._stored(name) for name in names])

    def _stored(self, name: str) -> StoredLayer | None:
        return None if name in self._excluded else self._scheme

    def slot_name(self, name: str) -> str | None:
        """Scales of blocks have DeepSeek's name in some checkpoints."""
        return super().slot_name(name.replace(".weight_scale_inv", ".weight_scale"))


class ModelOptNvFp4Config(ModelOptConfig):
    """`--quantization modelopt_fp4`: a ModelOpt checkpoint that is to be one of NVFP4."""

    name = "modelopt_fp4"
    algorithms = ("NVFP4", "W4A16_NVFP4")


class ModelOptMixedConfig(ModelOptConfig):
    """quantized_layers: of each quantised layer, by its name or a glob, a quant_algo and, with it,
    the group_size. Layers that no entry names are not quantised."""

    name = "modelopt_mixed"
    algorithms = (MIXED,)

    def __init__(self, quantized_layers: Any, exclude_modules: Sequence[str] = ()):
        if not isinstance(quantized_layers, Mapping) or not quantized_layers:
            raise CheckpointError(
                f"ModelOpt {MIXED} needs quantized_layers, an object of layers with the quant_algo "
                f"of each; it is {quantized_layers!r}"
            )
        self.exclude_modules = tuple(exclude_modules)
        self._excluded = LayerNames(self.exclude_modules)
        named: dict[str, list[str]] = {}
        for layer, entry in quantized_layers.items():
            named.setdefault(_algorithm(layer, entry), []).append(layer)
        self._by_algorithm = {algorithm: LayerNames(layers) for algorithm, layers in named.items()}
        self.quantized_layers = tuple(quantized_layers)
        self.can_use_deep_gemm = any(_SCHEMES[a] is _FP8_BLOCK for a in self._by_algorithm)

    def _stored(self, name: str) -> StoredLayer | None:
        if name in self._excluded:
            return None
        found = [a for a, layers in self._by_algorithm.items() if name in layers]
        if len(found) > 1:
            raise CheckpointError(
                f"quantized_layers stores {name} as {' and as '.join(found)}: it takes one "
                f"quant_algo for a layer"
            )
        return _SCHEMES[found[0]] if found else None


def _algorithm(layer: str, entry: Any) -> str:
    """Of an entry of quantized_layers."""
    algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else None
    if not isinstance(algorithm, str) or algorithm not in _SCHEMES:
        raise CheckpointError(
            f"ModelOpt quant_algo {algorithm!r} of {layer} is not supported: it takes "
            f"{', '.join(_SCHEMES)}"
        )
    _check_group_size(entry, _SCHEMES[algorithm], f" of {layer}")
    return algorithm


def _check_group_size(fields: Any, scheme: StoredLayer, where: str = "") -> None:
    given = fields.get("group_size") if isinstance(fields, Mapping) else None
    # One scale for a weight, or a scale for all columns, has no group.
    size = scheme.weight.columns_per_scale(0)
    if given is not None and size and given != size:
        raise CheckpointError(
            f"ModelOpt group_size {given!r}{where} is not supported: it takes {size} for "
            f"{scheme.weight}"
        )
