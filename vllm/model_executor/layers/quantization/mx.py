"""Linear layers and experts of MXFP8 and MXFP4 checkpoints: E4M3 or E2M1, and a UE8M0 scale byte
per 32 columns."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from vllm.model_executor.layers.linear import StoredWeight
from vllm.model_executor.layers.quantization.method import QuantizedLinearMethod
from vllm.model_executor.weights import Slot, copy_into
from vllm.utils.fp8 import UE8M0_NAN

# Exponents of random weights: with random codes, by how many a byte holds, they are of the usual
# spread.
_EXAMPLES = {1: 127 - 12, 2: 127 - 7}


class MxLinearMethod(QuantizedLinearMethod):
    """Scales stay bytes; kernels widen them to float32 as they lay the weight out."""

    def shard_slots(self, layer: StoredWeight, index: int, rows: slice) -> dict[str, Slot]:
        weight, scale = layer.weight.data[rows], layer.scales.data[rows]
        place, names = layer.places[index], self.stored.names
        codes = self.format.description.codes_per_byte
        group = self.format.columns_per_scale(place.num_columns)
        scales = place.slot(
            (1, group), (torch.uint8, torch.float8_e8m0fnu), _write_exponents(scale)
        )
        example = _EXAMPLES[codes]
        return {
            names.weight: place.slot((1, codes), (weight.dtype,), copy_into(weight)),
            names.scale: replace(
                scales, example=lambda: torch.full(scales.shape, example, dtype=torch.uint8)
            ),
        }


def _write_exponents(target: Tensor) -> Callable[[Tensor], None]:
    """A writer of UE8M0 bytes; ValueError for the one that is NaN."""

    def write(tensor: Tensor) -> None:
        exponents = tensor.contiguous().view(torch.uint8)
        if bool((exponents == UE8M0_NAN).any()):
            raise ValueError(
                f"scales must be UE8M0 exponents of 0 to {UE8M0_NAN - 1}; it holds {UE8M0_NAN}, "
                f"which is NaN: the checkpoint is corrupt, fetch or quantise it again"
            )
        target.copy_(exponents)

    return write
