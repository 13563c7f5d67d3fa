"""RMSNorm, alone or with the residual addition before it."""

import torch
from torch import Tensor, nn

from vllm.architectures.decoder import NormKind
from vllm.distributed.groups import Addend, PartialSum, own_part, total
from vllm.kernels.activations import Activation, Reader, UnaddedRows
from vllm.model_executor.context import ModelContext
from vllm.model_executor.weights import FLOATS, Slot, empty_parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32."""

    def __init__(self, ctx: ModelContext, prefix: str, size: int):
        super().__init__()
        self.prefix = prefix
        self.eps = ctx.decoder.rms_norm_eps
        self.ops = ctx.ops
        self.weight = empty_parameter(size, dtype=torch.float32)

    def slots(self) -> dict[str, Slot]:
        slot = Slot(tuple(self.weight.shape), FLOATS, self._write)
        return {f"{self.prefix}.weight": slot}

    def _write(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Addend, residual: Tensor, reader: Reader | None = None) -> Activation:
        """residual += x in place, then the norm of residual, which may overwrite x.

        reader: what alone reads the norm, and may want it quantised.
        """
        quant = reader and reader.input_quant(residual.shape[0])
        if isinstance(x, PartialSum) or (isinstance(x, UnaddedRows) and quant):
            normed = x.add_rms_norm(residual, self.weight, self.eps, quant)
            if normed is not None:
                return normed
        x = total(x)
        if quant:
            return quant.add_rms_norm(x, residual, self.weight, self.eps)
        self.ops.fused_add_rms_norm(x, residual, self.weight, self.eps)
        return x


class ZeroCentredRMSNorm(RMSNorm):
    """The checkpoint holds the difference of the weight to 1."""

    def _write(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight).add_(1.0)


class UnweightedRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps): its weight of ones is not in the checkpoint."""

    def __init__(self, ctx: ModelContext, prefix: str, size: int):
        super().__init__(ctx, prefix, size)
        self.weight.data.fill_(1.0)

    def slots(self) -> dict[str, Slot]:
        return {}


class RouterNorm(RMSNorm):
    """Of what a router reads: its weight is hidden ** -0.5 times the tensor `prefix`."""

    def slots(self) -> dict[str, Slot]:
        return {self.prefix: Slot(tuple(self.weight.shape), FLOATS, self._write)}

    def _write(self, weight: Tensor) -> None:
        self.weight.data.copy_(weight).mul_(len(weight) ** -0.5)


NORMS: dict[NormKind, type[RMSNorm]] = {
    "rms": RMSNorm,
    "rms_zero_centred": ZeroCentredRMSNorm,
    "rms_unweighted": UnweightedRMSNorm,
}


class ResidualNorms:
    """The norms around a mixer or a feed-forward, None for none, and what its output is multiplied
    by before it is added to the residual."""

    def __init__(self, before: RMSNorm | None, after: RMSNorm | None, multiplier: float):
        self._before, self._after, self._multiplier = before, after, multiplier

    def read(self, x: Addend, residual: Tensor, reader: Reader) -> Activation:
        """residual += x in place, and what `reader` reads of it."""
        if self._before is not None:
            return self._before.add(x, residual, reader)
        residual += total(x)
        quant = reader.input_quant(residual.shape[0])
        return quant.quantise(residual) if quant else residual

    def written(self, x: Addend) -> Addend:
        """What is to be added to the residual, in place of x."""
        if self._after is not None:
            x = self._after(total(x))
        if self._multiplier != 1:
            x = x if isinstance(x, PartialSum) else total(x)
            own_part(x).mul_(self._multiplier)
        return x
