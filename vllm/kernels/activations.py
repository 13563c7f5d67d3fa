"""Inputs of kernels that are quantised before the kernel: by whom, and in which layout.

A kernel that takes FP8 groups says so by `input_quant`. What makes its input (a norm, the
activation of an MLP) then quantises in the same pass over memory, and hands over the result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from vllm.kernels.interface import BatchedMoEKernel, LinearKernel, MoEKernel
from vllm.ops.fp8_quant import (
    GROUP_SIZE,
    ScaleLayout,
    empty_groups,
    per_token_group_fp8_quant,
    rms_norm_group_quant,
    silu_and_mul_group_quant,
)
from vllm.utils.fp8 import MIN_AMAX


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """q: float8_e4m3fn [M, K]. scales: of its groups of 128 columns, laid out as was asked for."""

    q: Tensor
    scales: Tensor
    dtype: torch.dtype
    """Of what was quantised, and so of the output."""
    source: Tensor | None = None
    """What was quantised, where it was to be kept."""

    @property
    def shape(self) -> torch.Size:
        return self.q.shape


Activation: TypeAlias = Tensor | QuantizedInput
"""x [M, K], as floats or quantised in the way the kernel asked for."""


def source_of(x: Activation) -> Tensor:
    """The floats of an input that was to be kept when it was quantised."""
    source = x if isinstance(x, Tensor) else x.source
    assert source is not None
    return source


@dataclass(frozen=True, slots=True)
class InputQuant:
    """Groups of 128 columns, scales in `layout`; rounded up to powers of two where `use_ue8m0`.
    keeps_source: for a reader with layers besides that take floats."""

    layout: ScaleLayout
    use_ue8m0: bool = False
    keeps_source: bool = False

    def quantise(self, x: Tensor) -> QuantizedInput:
        results = per_token_group_fp8_quant(x, layout=self.layout, use_ue8m0=self.use_ue8m0)
        return QuantizedInput(*results, x.dtype, x if self.keeps_source else None)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> QuantizedInput:
        """residual += x, in place; then the norm of residual."""
        normed = torch.empty_like(x) if self.keeps_source else None
        scale_form = self.layout, self.use_ue8m0
        results = rms_norm_group_quant(x, weight, eps, residual, *scale_form, normed)
        return QuantizedInput(*results, x.dtype, normed)

    def sum_and_norm(
        self, sums: "FusedAllReduce", x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> QuantizedInput:
        """residual += the sum of x over the ranks, in place; then the norm of residual."""
        normed = torch.empty_like(x) if self.keeps_source else None
        q, scales, is_ue8m0 = empty_groups(x, x.shape[1], self.layout, self.use_ue8m0)
        results = normed, q, scales, GROUP_SIZE, MIN_AMAX, is_ue8m0
        sums.add_rms_norm_quant(x, residual, weight, eps, *results)
        return QuantizedInput(q, scales[: x.shape[0]], x.dtype, normed)

    def silu_and_mul(self, x: Tensor) -> QuantizedInput:
        """silu(x[:, :K]) * x[:, K:] for x [M, 2 K]. Nobody reads its floats."""
        assert not self.keeps_source
        return QuantizedInput(*silu_and_mul_group_quant(x, self.layout, self.use_ue8m0), x.dtype)


class FusedAllReduce(Protocol):
    """An all-reduce that runs together with what reads the sum, in one kernel.

    x [n, dim] is this rank's addend and is overwritten. residual += the sum, rounded, in place.
    """

    def takes(self, x: Tensor) -> bool:
        """Whether the all-reduce supports x's shape and dtype."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """x = the RMSNorm of residual."""

    def can_quantise(self) -> bool: ...

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *results: Any
    ) -> None:
        """Quantises the RMSNorm of residual. results: what `rms_norm_fp8_quant_group` takes after
        eps."""
        ...


class UnaddedRows(ABC):
    """[T, n] whose parts a kernel has left apart: who reads it adds them up."""

    @abstractmethod
    def total(self) -> Tensor:
        """The sums [T, n]."""

    @abstractmethod
    def plus(self, x: Tensor) -> "UnaddedRows":
        """With x [T, n] as one part more."""

    @abstractmethod
    def add_rms_norm(
        self, residual: Tensor, weight: Tensor, eps: float, quant: InputQuant
    ) -> QuantizedInput | None:
        """residual += the sums, in place; then the norm of residual, quantised, in one kernel. None
        where there is none for such scales."""


def unadded(kernel: MoEKernel, x: Activation, weights: Tensor, ids: Tensor) -> Tensor | UnaddedRows:
    """What experts compute, left apart where their kernel can do so (by a method `unadded`)."""
    leave_apart = getattr(kernel, "unadded", None)
    if leave_apart is None or x.shape[0] == 0:
        return kernel(x, weights, ids)
    result: Tensor | UnaddedRows = leave_apart(x, weights, ids)
    return result


@dataclass(frozen=True, slots=True)
class QuantizingKernel:
    """A linear kernel whose product takes a quantised input; what comes as floats it quantises, or
    leaves to `of_floats`, where that does both in one launch."""

    quant: InputQuant
    multiply: Callable[[QuantizedInput], Tensor]
    of_floats: Callable[[Tensor], Tensor] | None = None

    def input_quant(self, num_tokens: int) -> InputQuant:
        return self.quant

    def __call__(self, x: Activation) -> Tensor:
        if isinstance(x, Tensor):
            return self.of_floats(x) if self.of_floats else self.multiply(self.quant.quantise(x))
        return self.multiply(x)


@dataclass(frozen=True, slots=True)
class ReorderedInput:
    """A linear kernel whose weight has its columns in another order than x. It takes x as floats:
    what quantises x before the layer would do so in x's own order. columns: int64 [K], of x."""

    kernel: LinearKernel
    columns: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernel(x.index_select(1, self.columns))


@dataclass(frozen=True, slots=True)
class KernelByTokens:
    """One kernel for each range of M. parts: (largest M, kernel), ascending; None for no limit.
    Kernels of experts take the router's choice besides.

    M is a number of the host, so a captured graph holds one of the kernels and no branch.
    """

    parts: Sequence[tuple[int | None, LinearKernel | MoEKernel]]

    @property
    def dense(self) -> Any:
        """The DenseKernel of most tokens, if it is one: all that the kernels do is to multiply with
        its weight; for who can do more at once."""
        return getattr(self.parts[-1][1], "dense", None)

    def kernel(self, num_tokens: int) -> LinearKernel | MoEKernel:
        return next(k for limit, k in self.parts if limit is None or num_tokens <= limit)

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        return input_quant(self.kernel(num_tokens), num_tokens)

    def unadded(self, x: Activation, weights: Tensor, ids: Tensor) -> Tensor | UnaddedRows:
        experts: Any = self.kernel(x.shape[0])
        return unadded(experts, x, weights, ids)

    def __call__(self, x: Activation, *routing: Tensor) -> Tensor:
        return self.kernel(x.shape[0])(x, *routing)


def batched(kernel: MoEKernel) -> BatchedMoEKernel | None:
    """The kernel for blocks of quantised tokens; None where it takes none. Of a split that is the
    part for the most tokens: blocks have room for those of all ranks."""
    taker: Any = kernel.parts[-1][1] if isinstance(kernel, KernelByTokens) else kernel
    return taker if hasattr(taker, "from_quantized") else None


@dataclass(frozen=True, slots=True)
class KernelWhenReady:
    """One kernel for the numbers of tokens that it is compiled for, another for the rest.

    is_ready: does not change between asking for `input_quant` and the call.
    """

    compiled: LinearKernel
    ahead_of_time: LinearKernel
    is_ready: Callable[[int], bool]

    def kernel(self, num_tokens: int) -> LinearKernel:
        return self.compiled if self.is_ready(num_tokens) else self.ahead_of_time

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        return input_quant(self.kernel(num_tokens), num_tokens)

    def __call__(self, x: Activation) -> Tensor:
        return self.kernel(x.shape[0])(x)


class Reader(Protocol):
    """What alone reads the output of a norm or of an activation."""

    def input_quant(self, num_tokens: int) -> InputQuant | None:
        """How it wants that many rows quantised; None for floats."""


def input_quant(kernel: LinearKernel | MoEKernel | None, num_tokens: int) -> InputQuant | None:
    """How `kernel` wants `num_tokens` rows quantised; None for one that takes floats."""
    asks = getattr(kernel, "input_quant", None)
    return None if asks is None else asks(num_tokens)
