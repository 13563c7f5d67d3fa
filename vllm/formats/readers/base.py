"""What readers of quantisation configs have in common.

No torch here: which format a layer has, and with it every kernel choice, resolves without it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vllm.errors import CheckpointError, ConfigError
from vllm.formats.act_scheme import ActScheme
from vllm.formats.readers.cache_scales import cache_scale_name
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.utils.dataclasses import dataclass, replace

LayerFormat = tuple[WeightFormat, tuple[ActScheme, ...]]
"""How a layer's weight is stored, and the activation schemes allowed with it, in order of
preference."""


# Codes of 4 bits in an int32. Of GPTQ with 8 bits it holds 4; columns are held to the same.
_PACKED = 8
_KEEP = "; list the layer as not quantised"
_STATIC = {ActScheme.STATIC_TENSOR, ActScheme.NVFP4_GROUP16, ActScheme.STATIC_TENSOR_INT8}


@dataclass(frozen=True)
class TensorNames:
    """The last parts of the names of a quantised layer's tensors in a checkpoint.

    is_divisor: global scales and input scales divide instead of multiplying. packing: the layout in
    which codes and zero points are packed into int32; "" for those that are not: codes of 8 bits,
    and two codes of 4 bits a byte.
    """

    weight: str = "weight"
    scale: str = "weight_scale"
    input_scale: str = "input_scale"
    global_scale: str = ""
    zero_point: str = ""
    is_divisor: bool = False
    packing: str = ""


@dataclass(frozen=True)
class StoredLayer:
    """How a checkpoint stores the weights that one layer is made of.

    weight: each of them. act: the activation schemes allowed, in order of preference. num_weights:
    how many are merged. is_quantized: False for floats that are quantised while loading.
    is_reordered: groups are of columns that need not lie together; `g_idx` [columns] has the group
    of each.
    """

    weight: WeightFormat
    act: tuple[ActScheme, ...]
    names: TensorNames = TensorNames()
    num_weights: int = 1
    has_zero_points: bool = False
    is_quantized: bool = True
    is_reordered: bool = False

    @property
    def format(self) -> WeightFormat:
        """Of the layer, once its weights are merged."""
        merged = self.weight.description.merged_kind
        return WeightFormat.of(merged) if merged and self.num_weights > 1 else self.weight

    def misfit(self, rows: Sequence[int], columns: int, is_cut: bool = False) -> str:
        """Why shards of so many rows each, and of so many columns, cannot be stored so; "" where
        they can. is_cut: other ranks have the other columns."""
        group = self.weight.columns_per_scale(columns)
        if self.weight.description.has_groups and columns % group:
            return f"{columns} columns are not whole groups of {group}, each with a scale{_KEEP}"
        if self.is_reordered and is_cut:
            return (
                "its columns are in activation order (desc_act), and ranks would share groups of "
                "them; serve it with --tensor-parallel-size 1 (--pipeline-parallel-size takes "
                "several GPUs), or take a checkpoint with desc_act false"
            )
        odd = [n for n in rows if n % _PACKED] if self.names.packing == "awq" else []
        if odd:
            return f"{odd[0]} rows cannot be packed by {_PACKED}, as in AWQ's layout{_KEEP}"
        if self.names.packing.startswith("gptq") and columns % _PACKED:
            return f"{columns} columns cannot be packed by {_PACKED}, as in GPTQ's layout{_KEEP}"
        return ""

    @property
    def has_input_scale(self) -> bool:
        return not _STATIC.isdisjoint(self.act)

    def __str__(self) -> str:
        act = self.act[0]
        return str(self.weight) + (f" with {act} activations" if act is not ActScheme.NONE else "")


def merged(names: Sequence[str], stored: Sequence[StoredLayer | None]) -> StoredLayer | None:
    """Of one layer made of the weights `names`, each stored so; CheckpointError where they
    differ."""
    if stored.count(stored[0]) < len(stored):
        each = (f"{name} {f'as {one}' if one else 'not quantised'}"
                for name, one in zip(names, stored))  # fmt: skip
        raise CheckpointError(
            f"quantization_config stores {', '.join(each)}: they are computed as one layer and "
            f"must be stored alike"
        )
    return stored[0] and of_weights(stored[0], len(names))


@lru_cache(maxsize=256)
def of_weights(stored: StoredLayer, num_weights: int) -> StoredLayer:
    """One layer of so many weights that are each stored so."""
    return replace(stored, num_weights=num_weights)


class QuantizationConfig(ABC):
    """How a checkpoint's weights are quantised, and which layers are not.

    use_deep_gemm: None is automatic, True and False are decided; model_rule: the reason, where the
    model rule decided (VllmConfig). can_use_deep_gemm: its weights are of DeepGEMM's format.
    exact_scales: how it is known that their scales are powers of two; "" where it is not.
    has_cache_scales: calibrated scales of the KV cache, where there are any, are for an FP8 one.
    quantized_layers: entries of its lists of those, each of which the model must have a layer for.
    tells_experts_apart: by name, so that experts of one layer might differ.
    """

    name: str
    is_checkpoint_quantized: bool
    can_use_deep_gemm: bool = False
    use_deep_gemm: bool | None = None
    model_rule: str = ""
    exact_scales: str = ""
    has_cache_scales: bool = True
    quantized_layers: tuple[str, ...] = ()
    tells_experts_apart: bool = True

    @classmethod
    @abstractmethod
    def from_checkpoint(cls, config: dict[str, Any]) -> "QuantizationConfig":
        """From `quantization_config` of config.json; CheckpointError for what is not supported."""

    @classmethod
    def at_load(cls) -> "QuantizationConfig":
        """For a checkpoint that is not quantised: quantise while loading."""
        raise ConfigError(f"--quantization {cls.name} needs a checkpoint that is quantised so")

    @abstractmethod
    def stored_layer(self, names: Sequence[str]) -> StoredLayer | None:
        """Of one layer made of the checkpoint weights `names`; None for one not quantised.

        CheckpointError where only a part of a merged layer is quantised.
        """

    def layer_format(self, names: Sequence[str]) -> LayerFormat | None:
        layer = self.stored_layer(names)
        return None if layer is None else (layer.format, layer.act)

    def requant_error(self, weight: WeightFormat) -> float | None:
        """Of bringing a weight of the checkpoint to UE8M0 scales: 0 where its scales are powers of
        two already, None where it is not known."""
        is_exact = self.exact_scales and weight.description.rounded_scales is Scales.UE8M0
        return 0.0 if is_exact else None

    def slot_name(self, name: str) -> str | None:
        """Our name for a checkpoint tensor that other tools name differently; None for one that
        is not needed."""
        found = cache_scale_name(name)
        return None if found != name and not self.has_cache_scales else found
