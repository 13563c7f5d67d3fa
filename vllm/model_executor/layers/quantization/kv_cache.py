"""Scales of an FP8 KV cache, as checkpoints that were calibrated for one store them."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm.model_executor.layers.quantization.utils.scales import write_scales
from vllm.model_executor.weights import FLOATS, Slot
from vllm.ops.paged_attention import PagedAttention


class Fp8KVCacheMethod:
    """scales: what K and V of a layer are divided by in an FP8 cache, `k_scale` and `v_scale`; only
    those that the checkpoint has. Without them that is 1."""

    def __init__(self) -> None:
        self.scales: dict[str, float] = {}

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Of the attention layer `prefix`; a checkpoint may lack them."""
        return {
            f"{prefix}.{name}": Slot((), FLOATS, self._keep(name), is_optional=True)
            for name in ("k_scale", "v_scale")
        }

    def _keep(self, name: str) -> Callable[[Tensor], None]:
        place = torch.empty((), device="cpu")
        write = write_scales(place, may_be_zero=False)

        def keep(tensor: Tensor) -> None:
            write(tensor)
            self.scales[name] = float(place)

        return keep

    def apply(self, kernel: PagedAttention) -> None:
        """Only a cache in FP8 has scales."""
        if kernel.problem.format == "fp8" and self.scales:
            kernel.k_scale = self.scales.get("k_scale", 1.0)
            kernel.v_scale = self.scales.get("v_scale", 1.0)
