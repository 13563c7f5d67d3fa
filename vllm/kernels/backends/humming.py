"""humming-kernels: weight-only GEMM of a library that compiles on this machine, at the first call
of a size all that any number of tokens needs.

The weight is laid out anew, in no more memory than the checkpoint's. Scales of rows and of groups
are kept in the type of the activations, which may round them; one scale for all rows and those of
blocks in float32. Written for the library's public interface, and not run on hardware
(tests/kernels/gpu/test_humming.py).
"""

from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm.formats.scales import Scales
from vllm.kernels.backends import shared
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.problem import LinearProblem, Problem
from vllm.kernels.select.reason import Reason
from vllm.kernels.select.spec import KernelSpec
from vllm.platforms.libraries import LibraryTrial, find_nvcc

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm.kernels.interface import LinearKernel, LinearTensors

# Columns that share a scale: at least so many, and a power of two, as tiles of columns are.
_LEAST_GROUP = 32


def _columns_per_scale(problem: Problem) -> list[Reason]:
    assert isinstance(problem, LinearProblem)
    columns = problem.weight.block[1]
    is_taken = columns >= _LEAST_GROUP and columns & (columns - 1) == 0
    text = f"groups of {columns} columns, and it takes a power of two from {_LEAST_GROUP} on"
    return shared.shape_reasons((problem.format == "int4-group" and not is_taken, text))


_Spec = partial(
    KernelSpec,
    backend="humming",
    family="linear",
    devices=shared.FROM_SM80,
    dtypes=shared.HALF,
    libs=(("humming", "0.1.19"),),
    compiles="humming",
    n_align=128,  # of its tiles on sm_90; 64 elsewhere
    k_align=64,
    weight_layouts=("humming",),
)

SPECS = (
    _Spec(
        formats=frozenset({"fp8-tensor", "fp8-channel", "nvfp4", "int4-group"}),
        scales=(("*", Scales.ACTIVATION),),
        check=_columns_per_scale,
    ),
    # Powers of two of the range that bf16 has.
    _Spec(formats=frozenset({"mxfp4"}), dtypes=frozenset({"bf16"})),
    # Its scales are of whole blocks.
    _Spec(
        formats=frozenset({"fp8-block"}),
        blocks=frozenset({(128, 128)}),
        scales=(("*", Scales.FLOAT32),),
        k_align=128,
    ),
)

_NUM_LOCKS = 2048  # int32 zeros that thread blocks of one product wait for each other by
_E4M3_NAN = 0x7F


def linear(problem: LinearProblem, tensors: "LinearTensors", winner: Candidate) -> "LinearKernel":
    """Lays the weight out; each call multiplies x [M, K] as it is."""
    from vllm.ops.block_fit import fitted_kernel
    from vllm.ops.scale_rounding import requantised
    from vllm.utils.torch_utils import dtype_of

    dtype = dtype_of(problem.dtype)

    def make(tensors: "LinearTensors") -> "LinearKernel":
        return _make(requantised(tensors, winner.scales, dtype), dtype)

    return fitted_kernel(tensors, winner.fit, make)


def _make(tensors: "LinearTensors", dtype: "torch.dtype") -> "LinearKernel":
    forward: Any = import_module("humming.forward").humming_forward
    schema: Any = import_module("humming.schema").HummingWeightSchema
    lay_out: Any = import_module("humming.transform").prepare_and_transform_humming_tensors
    bias, device = tensors.bias, tensors.weight.device
    description, stored = describe(tensors, dtype)
    n, k = tensors.weight.shape[0], tensors.weight.shape[1] * (2 if tensors.is_packed else 1)
    config, laid_out = lay_out(
        stored, n, k, schema(**description), torch_dtype=dtype, device=device
    )
    # Of this layer alone: others may run beside it on another stream.
    laid_out["locks"] = laid_out["weight"].new_zeros(_NUM_LOCKS)

    def apply(x: "Tensor") -> "Tensor":
        if x.shape[0] == 0:
            return x.new_empty(0, n)
        out: Tensor = forward(config, x.contiguous(), **laid_out)
        return out if bias is None else out.add_(bias)

    return apply


def describe(
    tensors: "LinearTensors", dtype: "torch.dtype"
) -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """What the library is told of a weight (fields of its HummingWeightSchema), and its tensors.

    weight: int32 [N, K * bits / 32], the first column in the lowest bits; scales as the checkpoint
    has them, those of rows and groups in `dtype`, which holds them (`requantised`).
    """
    import torch

    from vllm.ops.packed_weights import pack_int32
    from vllm.ops.scale_rounding import unit_of

    packed = tensors.weight.contiguous().view(torch.uint8)
    stored = {"weight": packed.view(torch.int32)}
    rows, columns = tensors.format.block
    description: dict[str, Any]
    if tensors.format.element == "mxfp4":
        assert tensors.scales is not None
        stored["weight_scale"] = tensors.scales.contiguous().view(torch.float8_e8m0fnu)
        description = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0"}
        description |= {"weight_scale_type": "group", "weight_scale_group_size": 32}
        return description, stored
    if tensors.format.element == "nvfp4":
        assert tensors.scales is not None
        stored["weight_scale"] = tensors.scales.contiguous()
        description = {"b_dtype": "float4e2m1", "bs_dtype": "float8e4m3"}
        description |= {"weight_scale_type": "group", "weight_scale_group_size": 16}
        description["weight_scale_2_type"], stored["weight_scale_2"] = _global(tensors, dtype)
        return description, stored
    if tensors.format.element == "int4":
        description = {"b_dtype": "uint4", "weight_scale_type": "group"}
        description["weight_scale_group_size"] = columns
        if tensors.zero_points is not None:  # packed along rows; without, codes are less 8
            description["has_zero_point"] = True
            stored["zero_point"] = pack_int32(tensors.zero_points.T.contiguous()).T.contiguous()
    else:
        if bool(((packed & _E4M3_NAN) == _E4M3_NAN).any()):
            raise ValueError("the weight holds NaN; the checkpoint is corrupt, fetch it again")
        description = {"b_dtype": "float8e4m3", "weight_scale_type": "channel"}
    if tensors.format.scale == "block":
        assert tensors.scales is not None
        description |= {"weight_scale_type": "block", "weight_scale_group_size_n": rows}
        description["weight_scale_group_size"] = columns
        return description, stored | {"weight_scale": tensors.scales.contiguous()}
    scales = tensors.row_scales()
    assert scales is not None
    if description["weight_scale_type"] == "channel" and bool((scales == scales[0]).all()):
        description["weight_scale_type"] = "tensor"
        return description, stored | {"weight_scale": scales[0].contiguous()}
    # In `dtype`; what all are multiples of is a second scale, in float32.
    unit = unit_of(scales, dtype)
    stored["weight_scale"] = (scales / unit).to(dtype).contiguous()
    description["bs_dtype"] = str(dtype).removeprefix("torch.")
    if unit != 1:
        description["weight_scale_2_type"] = "tensor"
        stored["weight_scale_2"] = scales.new_full((1,), unit)
    return description, stored


def _global(tensors: "LinearTensors", dtype: "torch.dtype") -> "tuple[str, Tensor]":
    """The type of NVFP4's second scale, and it: one in float32 for all shards, or one per row in
    `dtype`."""
    import torch

    factors = tensors.global_scales
    assert factors is not None
    if bool((factors == factors[0]).all()):
        return "tensor", factors[:1].float().contiguous()
    shards = torch.tensor(tensors.shard_rows, device=factors.device)
    return "channel", factors.repeat_interleave(shards).to(dtype)


# ---------------------------------------------------------------- trial


def _try(humming: ModuleType, archs: tuple[str, ...]) -> None:
    """Compiles one kernel and compares its product on the GPU; raises what goes wrong.

    Without nvcc a product may still come from the library's cache, and the next size would fail.
    """
    if find_nvcc() is None:
        raise RuntimeError("it compiles with nvcc, which is not here: put it on PATH or CUDA_HOME")
    import torch

    from vllm.formats.weight_format import WeightFormat
    from vllm.kernels.interface import LinearTensors

    n, k, device = 128, 128, torch.device("cuda")
    codes = torch.arange(n * k, device=device).view(n, k)
    weight = (codes % 15 - 7).to(torch.float8_e4m3fn)
    scales = torch.exp2((torch.arange(n, device=device) % 5).float() - 2)[:, None]
    tensors = LinearTensors(WeightFormat("fp8", "channel"), weight, (n,), scales)
    x = ((torch.arange(4 * k, device=device) % 5).view(4, k) - 2).bfloat16()
    found = _make(tensors, x.dtype)(x)
    expected = (x.double() @ (weight.double() * scales).T).to(x.dtype)
    if not torch.equal(found, expected):
        raise RuntimeError("its product of small whole numbers is wrong")


# Its first product compiles for longer than trials usually take.
TRIALS = {"humming": LibraryTrial(_try, seconds=240.0)}
