"""DeepGEMM for its callers: whether it serves here, the scales it takes, its GEMMs and layouts.

Nothing here imports torch before a tensor is at hand: a process without torch may ask whether
DeepGEMM is supported (not as far as it can see) and gets an answer.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.architectures.architecture import Architecture
from vllm.architectures.registry import known
from vllm.formats.act_scheme import ActScheme
from vllm.formats.scales import Scales
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.platforms.libraries import library_state
from vllm.utils.math_utils import cdiv, round_up

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vllm.utils.fp8 import per_block_cast_to_fp8 as per_block_cast_to_fp8

LINEAR = next(spec for spec in registry.specs("linear") if spec.backend == "deep_gemm")
# The smallest problem that DeepGEMM serves wherever it serves anything.
_SMALLEST = LinearProblem(
    LINEAR.n_align,
    LINEAR.k_align,
    WeightFormat.parse(*LINEAR.formats),
    (ActScheme.DYNAMIC_GROUP128,),
)


def __getattr__(name: str) -> Any:
    if name == "_DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES":
        return excluded_model_types()
    if name == "per_block_cast_to_fp8":
        from vllm.utils import fp8

        return fp8.per_block_cast_to_fp8
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# ---------------------------------------------------------------- whether it serves here


@cache
def excluded_model_types() -> frozenset[str]:
    """Text models that lose accuracy when their FP8 weights are re-quantised to the UE8M0 scales
    that DeepGEMM takes on Blackwell; their own files say what was measured. Upstream's name of the
    set is an attribute of this module too. Found when asked for: it imports every architecture."""
    return frozenset(
        name
        for name, one in known().items()
        if isinstance(one, Architecture) and one.ue8m0_requant_loses_accuracy
    )


def is_deep_gemm_supported() -> bool:
    """Whether this chip has kernels, the library works, and VLLM_USE_DEEP_GEMM is not 0.

    Knows nothing of models: what a model should use is the selector's business.
    """
    if envs.VLLM_USE_DEEP_GEMM is False:
        return False
    return _candidate(Policy()) is not None


def is_deep_gemm_e8m0_used() -> bool:
    """Whether DeepGEMM would get power-of-two scales on this chip.

    Hopper takes float32 unless VLLM_USE_DEEP_GEMM_E8M0=1. Families 100 and 120 take UE8M0 alone,
    so with VLLM_USE_DEEP_GEMM_E8M0=0 DeepGEMM serves nothing there.
    """
    return DeepGemmQuantScaleFMT.from_oracle() is not DeepGemmQuantScaleFMT.FLOAT32


def should_auto_disable_deep_gemm(model_type: str | None, device: Device | None = None) -> bool:
    """Whether the model rule keeps DeepGEMM from this model: a listed type, where DeepGEMM takes
    UE8M0 scales (families 100 and 120).

    Hopper takes float32 scales and loses nothing. device: None for the current one.
    """
    if model_type not in excluded_model_types():
        return False
    return dict(LINEAR.scales).get((device or current_device()).family) is Scales.UE8M0


def should_use_deepgemm_for_fp8_linear(
    output_dtype: "torch.dtype", weight: "Tensor", supports_deep_gemm: bool | None = None
) -> bool:
    """Whether DeepGEMM's dense GEMM takes this weight [N, K] and gives this output dtype.

    supports_deep_gemm: None asks `is_deep_gemm_supported`.
    """
    import torch

    if supports_deep_gemm is None:
        supports_deep_gemm = is_deep_gemm_supported()
    return (
        supports_deep_gemm
        and output_dtype == torch.bfloat16
        and weight.dtype == torch.float8_e4m3fn
        and weight.shape[0] % LINEAR.n_align == 0
        and weight.shape[1] % LINEAR.k_align == 0
    )


class DeepGemmQuantScaleFMT(Enum):
    """The form of block scales handed to DeepGEMM; values are those of `Candidate.scales`.

    FLOAT32: float32 values. FLOAT32_CEIL_UE8M0: a float32 tensor of powers of two, rounded up.
    UE8M0: four exponent bytes packed in an int32.
    """

    FLOAT32 = Scales.FLOAT32.value
    FLOAT32_CEIL_UE8M0 = Scales.FLOAT32_CEIL_UE8M0.value
    UE8M0 = Scales.UE8M0.value

    @classmethod
    def from_oracle(cls) -> "DeepGemmQuantScaleFMT":
        """What DeepGEMM gets on this chip under the variables that are set; FLOAT32 without it."""
        if not is_deep_gemm_supported():
            return cls.FLOAT32
        candidate = _candidate(Policy(e8m0=envs.VLLM_USE_DEEP_GEMM_E8M0))
        return cls.FLOAT32 if candidate is None else cls(candidate.scales)


def _candidate(policy: Policy) -> Candidate | None:
    """DeepGEMM, as the selector finds it on this machine for a problem it takes; None where it
    does not serve."""
    device = current_device()
    if device.kind == "cpu":
        return None  # nothing to import a GPU library for
    lib = library_state("deep_gemm")
    libs = Libs.of([lib] if lib is not None else [])
    candidate = select(_SMALLEST, device, libs, policy, (LINEAR,)).candidates[0]
    return None if candidate.reasons else candidate


def current_device() -> Device:
    """The GPU of this process; the CPU where torch is absent or hidden."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return Device("cpu")
    capability = current_platform.get_device_capability()
    return Device("cuda", capability) if capability is not None else Device("cpu")


# ---------------------------------------------------------------- its GEMMs

Scaled = tuple["Tensor", "Tensor"]
"""A float8_e4m3fn tensor and its scales in the layout that the chip needs."""


def fp8_gemm_nt(a: Scaled, b: Scaled, out: "Tensor") -> None:
    """out [M, N] = a [M, K] @ b [N, K].T in bfloat16. RuntimeError without a usable DeepGEMM."""
    _library_gemm("fp8_gemm_nt")(a, b, out)


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled, b: Scaled, out: "Tensor", m_indices: "Tensor"
) -> None:
    """out[i] = a[i] @ b[m_indices[i]].T for a [M, K], b [E, N, K].

    m_indices: int32 [M], constant within runs of `get_mk_alignment_for_contiguous_layout()` rows;
    -1 skips a row.
    """
    _library_gemm("m_grouped_fp8_gemm_nt_contiguous")(a, b, out, m_indices)


def fp8_m_grouped_gemm_nt_masked(
    a: Scaled, b: Scaled, out: "Tensor", masked_m: "Tensor", expected_m: int
) -> None:
    """out[e, :masked_m[e]] = a[e, :masked_m[e]] @ b[e].T for a [E, M, K], b [E, N, K].

    masked_m: int32 [E]; expected_m: a guess at its mean, which decides the tiling.
    """
    names = ("fp8_m_grouped_gemm_nt_masked", "m_grouped_fp8_gemm_nt_masked")
    _library_gemm(*names)(a, b, out, masked_m, expected_m)


@cache
def get_mk_alignment_for_contiguous_layout() -> list[int]:
    """[M, K] to which each group of a contiguous grouped GEMM must be padded."""
    size = _library_function("get_mk_alignment_for_contiguous_layout")()
    return [size, size]


@cache
def _library_gemm(*names: str) -> Callable[..., None]:
    # On Hopper the library would otherwise round float32 scales to powers of two.
    takes_float32 = dict(LINEAR.scales).get(current_device().family) == Scales.FLOAT32
    return partial(_library_function(*names), disable_ue8m0_cast=takes_float32)


def _library_function(*names: str) -> Callable[..., Any]:
    """The function of the library, which has had several names in its life."""
    lib = library_state("deep_gemm")
    if lib is None:
        raise RuntimeError(
            "DeepGEMM is not installed: pip install sgl-deep-gemm, or let the selector choose "
            "another kernel"
        )
    if lib.broken:
        raise RuntimeError(
            f"DeepGEMM is installed but does not work ({lib.broken}): install a version built for "
            f"this torch, or let the selector choose another kernel"
        )
    library = import_module("deep_gemm")
    for name in names:
        if hasattr(library, name):
            function: Callable[..., Any] = getattr(library, name)
            return function
    raise RuntimeError(f"DeepGEMM {lib.version} has no {' or '.join(names)}: upgrade it")


# ---------------------------------------------------------------- layouts of scales


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """The least number of elements >= x that fills whole 16-byte units, as TMA strides must."""
    return round_up(x, 16 // element_size)


def get_col_major_tma_aligned_tensor(x: "Tensor") -> "Tensor":
    """The same values [..., M, G], M running fastest, with padded stride: (1, aligned M).

    Padding is zeros.
    """
    *batch, num_rows, num_columns = x.shape
    aligned = get_tma_aligned_size(num_rows, x.element_size())
    storage = x.new_zeros(*batch, num_columns, aligned)
    storage[..., :num_rows] = x.transpose(-1, -2)
    return storage[..., :num_rows].transpose(-1, -2)


def pack_ue8m0(scales: "Tensor") -> "Tensor":
    """Float32 powers of two [..., M, G] -> int32 [..., M, ceil(G / 4)], M running fastest.

    Byte i of word j is the biased exponent of scale 4 j + i; bytes past G are 0. ValueError for a
    scale that is not a power of two from 2^-127 to 2^127.
    """
    import torch

    bits = scales.contiguous().view(torch.int32)
    smallest, mantissa = 0x00400000, 0x007FFFFF  # 2^-127 is subnormal: no implied leading bit
    is_normal = (bits & mantissa == 0) & (bits >= 1 << 23) & (bits < 255 << 23)
    wrong = ~(is_normal | (bits == smallest))
    if bool(wrong.any()):
        raise ValueError(
            f"UE8M0 holds powers of two alone, and {int(wrong.sum())} of {scales.numel()} scales "
            f"are not, such as {scales[wrong][0].item()!r}: re-quantise the weight with "
            f"requant_weight_ue8m0_inplace first"
        )
    return pack_exponents(scales)


def pack_exponents(scales: "Tensor") -> "Tensor":
    """pack_ue8m0 of powers of two or NaN (byte 255), unchecked: for a check the host would have to
    wait for the device at every layer."""
    import torch

    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4))
    return get_col_major_tma_aligned_tensor(exponents.view(torch.int32))


def transform_sf_into_required_layout(
    sf: "Tensor",
    mn: int,
    k: int,
    recipe: Sequence[int] = (1, 128, 128),
    num_groups: int | None = None,
    is_sfa: bool = False,
    disable_ue8m0_cast: bool = False,
    arch: Device | None = None,
) -> "Tensor":
    """Float32 scales of an [mn, k] operand, as DeepGEMM reads them on a chip.

    sf: [ceil(mn / rows), ceil(k / columns)], after [num_groups] where that is given. recipe:
    rows of a scale block for activations (is_sfa), rows for weights, columns; or (rows, columns).
    arch: the chip, None for the current one.

    On 9.0 scales of single rows come back MN-major and TMA-aligned, and those of larger blocks
    unchanged. Families 100 and 120 get a scale per row, four exponents packed in an int32
    (`pack_ue8m0`); disable_ue8m0_cast keeps Hopper's form, which their GEMMs refuse. Layouts:
    README of DeepGEMM, "Notices". ValueError for another shape, dtype or chip.
    """
    *row_sizes, columns = recipe
    rows = row_sizes[0 if is_sfa else -1]
    _check_scales(sf, (mn, k), (rows, columns), num_groups)
    arch = arch or current_device()
    form = dict(LINEAR.scales).get(arch.family)
    if form is None:
        known = ", ".join(sorted(LINEAR.devices))
        raise ValueError(f"DeepGEMM has no scale layout for {arch}: it runs on {known}")
    if form == Scales.UE8M0 and not disable_ue8m0_cast:
        return pack_ue8m0(sf.repeat_interleave(rows, -2)[..., :mn, :])
    return get_col_major_tma_aligned_tensor(sf) if rows == 1 else sf


def _check_scales(
    sf: "Tensor", sizes: tuple[int, int], block: tuple[int, int], num_groups: int | None
) -> None:
    import torch

    grid = [cdiv(size, step) for size, step in zip(sizes, block)]
    expected = grid if num_groups is None else [num_groups, *grid]
    if list(sf.shape) != expected or sf.dtype != torch.float32:
        raise ValueError(
            f"scales of {sizes[0]}x{sizes[1]} by blocks of {block[0]}x{block[1]} are float32 of "
            f"shape {expected}, not {str(sf.dtype).removeprefix('torch.')} of {list(sf.shape)}"
        )


def calc_diff(x: "Tensor", y: "Tensor") -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>) in float64: 0 for equal tensors, whatever their scale."""
    x, y = x.double(), y.double()
    squares = float((x * x + y * y).sum())
    return 1 - 2 * float((x * y).sum()) / squares if squares else 0.0
