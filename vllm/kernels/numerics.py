"""Whether a kernel computes what it should: random weights of a problem, a reference, an error.

The tuner compares a kernel before it times it, and the engine before a backend serves for the first
time on a machine (`vllm/worker/kernel_probes.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.activations import input_quant
from vllm.kernels.backends import emulation
from vllm.kernels.backends.shared import expert_activation
from vllm.kernels.interface import LinearKernel, LinearTensors, MoEKernel, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import (
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
)
from vllm.ops import int8, nvfp4, torch_ops
from vllm.ops.block_fit import padded_experts, padded_tensors
from vllm.ops.packed_weights import element_values
from vllm.ops.scale_rounding import requantised
from vllm.utils import fp8
from vllm.utils.torch_utils import dtype_of

# Largest relative Frobenius error against the reference, by output dtype: it covers the rounding of
# the output and of activations halfway between two FP8 values.
MAX_ERROR = {"bf16": 8e-3, "fp16": 2e-3, "fp32": 2e-4}
# Experts round twice more, what is between their products and the sum over experts.
_MOE_ROUNDINGS = 2
# Where what is between the products, or what a cache stores, is quantised, an error of relative
# size e there moves the share e / step of the codes to the next number, each by a step: a relative
# error of sqrt(e * step). The steps are those of normal E4M3 and E2M1 numbers, as shares of the
# mean number between them.
_STEPS = {ActScheme.NVFP4_GROUP16: 2**-1 / 1.44}
_E4M3_STEP = 2**-3 / 1.44
# By how much more than that one token may be off, of which few codes are: right kernels reached
# 1.06 times it (Triton's experts of 128x768x2048, M = 1, H100).
_FEW_CODES = 1.3
# Most by which the result may be too large or too small as a whole. Roundings go either way and do
# not add up to that, so that this is sharper than the error where codes move by a step.
MAX_GAIN_ERROR = 1e-2

# Of recurrences with activations of 16 bits, whose products may have the digits of TF32.
_MAX_ERROR_OF_TF32 = 4e-3

# Rows of NaN behind the input: a kernel that reads past its end has NaN in its output.
_NUM_POISONED_ROWS = 160


class WrongResultError(Exception):
    """The kernel's result differs from the reference."""


def max_error(problem: Problem, act: ActScheme | None = None) -> float:
    """Of a kernel for the problem that quantises activations by `act`."""
    limit = MAX_ERROR[problem.dtype]
    if isinstance(problem, KVQuantProblem) and problem.format == "fp8":
        return float((limit * _E4M3_STEP) ** 0.5)
    if isinstance(problem, DeltaRuleProblem | Mamba2Problem) and problem.dtype != "fp32":
        return max(limit, _MAX_ERROR_OF_TF32)
    if not isinstance(problem, MoEProblem):
        return limit
    if act in (None, ActScheme.NONE):
        return _MOE_ROUNDINGS * limit
    return _FEW_CODES * float((limit * _STEPS.get(act, _E4M3_STEP)) ** 0.5)


# ---------------------------------------------------------------- cases


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One kernel's problem with a random weight and inputs. x: [tokens and poisoned rows, K]."""

    problem: LinearProblem
    candidate: Candidate
    tensors: LinearTensors
    x: Tensor

    @classmethod
    def of(
        cls, problem: LinearProblem, candidate: Candidate, device: torch.device, max_tokens: int
    ) -> "LinearCase":
        x = _inputs(problem, problem.k, device, max_tokens)
        return cls(problem, candidate, random_tensors(problem, device), x)

    def expected(self, num_tokens: int) -> Tensor:
        """float32 [M, N]."""
        return reference(self.candidate, self.tensors, self.x[:num_tokens])

    def error(self, kernel: LinearKernel, num_tokens: int, expected: Tensor) -> float:
        """Relative error of the kernel over `tensors`; WrongResultError for a large one or NaN."""
        limit = max_error(self.problem, self.candidate.act)
        x = _poisoned(self.x, num_tokens, max(self.problem.n, self.problem.k))
        return _worst_error(kernel, kernel, x, expected, limit)


@dataclass(frozen=True, slots=True)
class MoECase:
    """The same of experts. x: [tokens and poisoned rows, hidden]."""

    problem: MoEProblem
    candidate: Candidate
    tensors: MoETensors
    x: Tensor

    @classmethod
    def of(
        cls, problem: MoEProblem, candidate: Candidate, device: torch.device, max_tokens: int
    ) -> "MoECase":
        tensors = random_experts(problem, device)
        return cls(
            problem, candidate, tensors, _inputs(problem, problem.hidden, device, max_tokens)
        )

    def expected(self, num_tokens: int) -> Tensor:
        """float32 [T, hidden]."""
        given = self.x[:num_tokens], *self._routing(num_tokens)
        return reference_experts(self.problem, self.candidate, self.tensors, *given)

    def error(self, kernel: MoEKernel, num_tokens: int, expected: Tensor) -> float:
        """As of a LinearCase. Tokens choose among all experts of the problem; those of other ranks
        are -1."""
        problem, routing = self.problem, self._routing(num_tokens)
        limit = max_error(problem, self.candidate.act)
        x = _poisoned(self.x, num_tokens, problem.top_k * max(problem.hidden, problem.intermediate))
        return _worst_error(lambda given: kernel(given, *routing), kernel, x, expected, limit)

    def _routing(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """weights float32 and ids int64 [T, top_k]; every token has an expert on this rank."""
        device, problem = self.x.device, self.problem
        generator = torch.Generator(device).manual_seed(num_tokens)
        shape = num_tokens, problem.num_experts
        odds = torch.rand(shape, generator=generator, device=device)
        own = self.tensors.num_experts
        here = torch.arange(num_tokens, device=device)
        odds[here, here % own] += 1
        shares, ids = odds.topk(problem.top_k, 1)
        return shares / shares.sum(1, keepdim=True), torch.where(ids < own, ids, -1)


def _inputs(
    problem: LinearProblem | MoEProblem, columns: int, device: torch.device, max_tokens: int
) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    shape = max_tokens + _NUM_POISONED_ROWS, columns
    x = torch.randn(shape, generator=generator, device=device)
    return x.to(dtype_of(problem.dtype))


def _poisoned(x: Tensor, num_tokens: int, num_columns: int) -> Tensor:
    """The first rows of x, with NaN behind them and in memory that the allocator is likely to
    return next, for outputs and scales."""
    x = x[: num_tokens + _NUM_POISONED_ROWS].clone()
    x[num_tokens:] = float("nan")
    poison_memory(x, num_tokens * num_columns)
    return x[:num_tokens]


def poison_memory(like: Tensor, num_elements: int) -> None:
    """Leaves NaN in memory that the allocator is likely to return next for up to `num_elements`."""
    for size in (num_elements // part for part in (1, 2, 32)):
        torch.full((size + 1,), float("nan"), device=like.device, dtype=like.dtype)


def _worst_error(
    call: Callable[[Any], Tensor], kernel: Any, x: Tensor, expected: Tensor, limit: float
) -> float:
    """Of a call with floats, and of one with x as the layer before quantises it for the kernel."""
    quant = input_quant(kernel, x.shape[0])
    given = [x] if quant is None else [x, quant.quantise(x)]
    what = f"M = {len(expected)}", "beside x"
    return max(checked_error(call(one).float(), expected, limit, *what) for one in given)


def checked_error(out: Tensor, expected: Tensor, limit: float, what: str, poisoned: str) -> float:
    """The relative error; WrongResultError for one above the limit, or another size as a whole.

    what: which result. poisoned: where NaN was that a kernel must not read.
    """
    if out.shape != expected.shape:
        shapes = f"{list(out.shape)} and not {list(expected.shape)}"
        raise WrongResultError(f"the result for {what} is {shapes}")
    if not bool(torch.isfinite(out).all()):
        place = ", ".join(map(str, (~torch.isfinite(out)).nonzero()[0].tolist()))
        raise WrongResultError(f"NaN or infinity at [{place}] for {what}, with NaN {poisoned}")
    error = float((out - expected).norm() / expected.norm())
    if not error <= limit:
        raise WrongResultError(f"relative error {error:.2e} for {what}, more than {limit:.0e}")
    gain = float((out * expected).sum() / expected.square().sum())
    if not abs(gain - 1) <= MAX_GAIN_ERROR:
        raise WrongResultError(f"relative error {error:.2e} for {what}, and {gain:.4f} of the size")
    return error


# ---------------------------------------------------------------- reference


def reference(candidate: Candidate, tensors: LinearTensors, x: Tensor) -> Tensor:
    """x [M, K] times the weight in float32, with activations rounded as the kernel rounds them."""
    if tensors.is_cut and _pads(candidate):
        # Groups of activations begin where the padded weight does.
        padded, kept = padded_tensors(tensors)
        before = tensors.column_offset
        after = padded.weight.shape[1] - tensors.weight.shape[1] - before
        bias, padded.bias = padded.bias, None
        out = reference(candidate, padded, pad(x, (before, after))).index_select(1, kept)
        return out if bias is None else out + bias
    if candidate.rescales:
        tensors = requantised(tensors, candidate.scales, x.dtype)
    packed = torch_ops.pack_linear(element_values(tensors), tensors.row_scales(), tensors.block_k)
    rounded: Tensor = emulation.rounding(candidate, tensors)(x)
    out = rounded @ packed.dequantize().T
    return out if tensors.bias is None else out + tensors.bias


def _pads(candidate: Candidate) -> bool:
    """Whether the kernel takes a weight that begins inside a block with zeros before it."""
    emulations = {spec.backend for spec in emulation.SPECS}
    is_padded = candidate.fit is not None and candidate.fit.how == "padded"
    return is_padded or candidate.backend in emulations


def reference_experts(
    problem: MoEProblem,
    candidate: Candidate,
    tensors: MoETensors,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
) -> Tensor:
    """[T, hidden] in float32, as a MoEKernel computes it; what is between the two products is
    rounded to the problem's type, and then as the kernel rounds activations."""
    dtype = dtype_of(problem.dtype)
    is_cut = tensors.row_offset or tensors.column_offset
    if is_cut and _pads(candidate):
        tensors = padded_experts(tensors)
    activate = expert_activation(problem, torch_ops)
    total = torch.zeros_like(x, dtype=torch.float32)
    for index in range(tensors.num_experts):
        rows, places = torch.where(ids == index)
        if rows.numel():
            gate_up, down = tensors.expert(index)
            between = reference(candidate, gate_up, x[rows]).to(dtype)
            out = reference(candidate, down, activate(between))
            total.index_add_(0, rows, out * weights[rows, places, None])
    return total


# ---------------------------------------------------------------- weights

# Of static activation schemes: with these, a multiple of 6 is the largest value, the most of a
# Gaussian of 2^30 numbers.
_INPUT_SCALES = {
    ActScheme.STATIC_TENSOR: 6 / fp8.FP8_MAX,
    ActScheme.NVFP4_GROUP16: 6 / (nvfp4.E4M3_MAX * nvfp4.E2M1_MAX),
    ActScheme.STATIC_TENSOR_INT8: 6 / int8.INT8_MAX,
}
# What is between the products of experts is the product of two numbers.
_BETWEEN = 6.0
# Deviation of codes: those of 4 bits are uniform.
_CODE_SIZES = {"float8_e4m3fn": 100.0, "int8": 32.0, "uint8": 4.0}
# Scales are spread over so many octaves.
_OCTAVES = 3.0


def random_tensors(problem: LinearProblem, device: torch.device, seed: int = 0) -> LinearTensors:
    """A random weight of the problem's format, as a checkpoint stores it: elements of the size
    1 / sqrt(K), and scales log-uniform over octaves. Of a problem that ranks share it is the second
    rank's part, which may begin inside a scale block."""
    make = _Weights(problem.weight, device, seed)
    parts = problem.parts or (problem.n,)
    block = problem.weight.block if problem.weight.scale == "block" else (1, 1)
    offsets = tuple(n % block[0] if problem.cut_n > 1 else 0 for n in parts)
    column_offset = problem.k % block[1] if problem.cut_k > 1 else 0
    found = make.stored((), parts, problem.k, offsets, column_offset)
    scheme = next((act for act in problem.act if act in _INPUT_SCALES), None)
    if scheme is not None:
        found["input_scale"] = torch.tensor(_INPUT_SCALES[scheme], device=device)
    if problem.bias:
        found["bias"] = make.normal((problem.n,))
    return LinearTensors(
        problem.weight,
        shard_rows=parts,
        row_offsets=offsets if any(offsets) else (),
        column_offset=column_offset,
        **found,
    )


def random_experts(problem: MoEProblem, device: torch.device, seed: int = 0) -> MoETensors:
    """The same for the experts of one rank."""
    make = _Weights(problem.weight, device, seed)
    own, inner = problem.num_experts // problem.cut_experts, problem.intermediate
    first = problem.num_first_parts
    block = problem.weight.block if problem.weight.scale == "block" else (1, 1)
    row_offset, column_offset = (inner % size if problem.cut > 1 else 0 for size in block)
    stacks = {
        "gate_up": make.stored((own,), (inner,) * first, problem.hidden, (row_offset,) * first),
        "down": make.stored((own,), (problem.hidden,), inner, (0,), column_offset),
    }
    found: dict[str, Any] = {}
    scheme = next((act for act in problem.act if act in _INPUT_SCALES), None)
    for (stack, stored), num_shards, size in zip(stacks.items(), (first, 1), (1.0, _BETWEEN)):
        found[stack] = stored.pop("weight")
        found |= {f"{stack}_{name}": tensor for name, tensor in stored.items()}
        if scheme is not None:
            scale = size * _INPUT_SCALES[scheme]
            found[f"{stack}_input_scales"] = torch.full((own, num_shards), scale, device=device)
        if problem.bias:
            found[f"{stack}_bias"] = make.normal(found[stack].shape[:2])
    return MoETensors(problem.weight, row_offset=row_offset, column_offset=column_offset, **found)


class _Weights:
    """Draws stored tensors of one weight format."""

    def __init__(self, weight: WeightFormat, device: torch.device, seed: int):
        self._weight, self._device = weight, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def stored(
        self,
        stacked: tuple[int, ...],
        shard_rows: tuple[int, ...],
        num_columns: int,
        offsets: tuple[int, ...],
        column_offset: int = 0,
    ) -> dict[str, Tensor]:
        """By its field in LinearTensors. stacked: () for a layer, (experts,) for experts. offsets:
        of each shard's first row in its scale block."""
        description = self._weight.description
        dtypes = {tensor.one_per: tensor.dtype for tensor in description.tensors}
        size = num_columns**-0.5 / _CODE_SIZES.get(dtypes["code"], 1.0)
        has_factors = "shard" in dtypes
        whole = tuple(n + offset for n, offset in zip(shard_rows, offsets))
        shapes = self._weight.shapes(shard_rows, num_columns)
        grid = self._weight.scale_shape(whole, num_columns + column_offset)
        found = {}
        for tensor in description.tensors:
            if tensor.is_optional:
                continue
            own = grid if tensor.one_per == "scale" else shapes[tensor.name]
            dtype, shape = getattr(torch, tensor.dtype), (*stacked, *own)
            if tensor.one_per == "code":
                values = self._codes(tensor.dtype, shape, 1.0 if "scale" in dtypes else size)
            elif tensor.one_per == "scale" and tensor.dtype == "uint8":
                powers = fp8.ceil_to_power_of_two(self._log_uniform(shape, size))
                values = fp8.ue8m0_encode(powers)
            elif tensor.one_per == "scale" and has_factors:
                values = self._log_uniform(shape, nvfp4.E4M3_MAX / 2 ** (_OCTAVES / 2))
            elif tensor.one_per == "scale":
                values = self._log_uniform(shape, size)
            else:
                values = self._log_uniform(shape, size * 2 ** (_OCTAVES / 2) / nvfp4.E4M3_MAX)
            found[tensor.name] = values.to(dtype)
        return found

    def _codes(self, dtype: str, shape: tuple[int, ...], size: float) -> Tensor:
        """size: of the elements of a weight without scales."""
        if len(shape) > 2:  # experts one by one: all of them as floats take four times the memory
            stored = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            for one in stored:
                one.copy_(self._codes(dtype, shape[1:], size))
            return stored
        if dtype == "uint8":
            return torch.randint(0, 256, shape, generator=self._generator, device=self._device)
        deviation = _CODE_SIZES.get(dtype)
        if deviation is None:
            return self.normal(shape) * self._log_uniform((*shape[:-1], 1), size)
        most = fp8.FP8_MAX if dtype == "float8_e4m3fn" else 127
        return (self.normal(shape) * deviation).clamp_(-most, most)

    def _log_uniform(self, shape: tuple[int, ...], centre: float) -> Tensor:
        drawn = torch.rand(shape, generator=self._generator, device=self._device)
        return torch.exp2((drawn - 0.5) * _OCTAVES) * centre

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)
