"""What `vllm kernels explain` is asked, from texts to values: a chip, libraries, a layer.

Nothing here looks at a GPU or imports torch: any chip can be asked about on any machine.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.formats.registry import formats
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.evidence.tables import Chip
from vllm.kernels.report.text_report import EXPECTED_TOKENS
from vllm.kernels.select.problem import AttentionProblem, LinearProblem, Problem
from vllm.machine import CHIPS, NATIVE, Device, Lib, Libs, arch_key

CPUS = ("cpu", "cpu:portable", "cpu:avx2", "cpu:avx512", "cpu:avx512_bf16")
# GPUs of one architecture that measurements tell apart: multiprocessors, and GB/s or 0 where that
# does not matter. The architecture alone means the first. Of a series the model without a suffix.
_NUMBERS = {
    "sm_89": {
        "l40s": (142, 864),
        "l20": (92, 864),
        "l4": (58, 300),
        "6000ada": (142, 960),
        "4090": (128, 1008),
        "4080": (76, 717),
        "4070": (46, 504),
        "4060": (24, 272),
    },
    "sm_90": {"h100": (132, 3352), "h200": (132, 4814), "h20": (78, 0)},
    "sm_120": {
        "pro6000": (188, 0),
        "5090": (170, 0),
        "5080": (84, 0),
        "5070": (48, 0),
        "5060": (30, 0),
    },
}
GPUS = {
    gpu: Chip(Device.parse(arch), *numbers)
    for arch, gpus in _NUMBERS.items()
    for gpu, numbers in gpus.items()
}

# Published memory bandwidth in GB/s of GPUs that measurements do not tell apart by it.
_BANDWIDTHS = {
    "v100": 900, "t4": 320, "a100": 2039, "a800": 2039, "a30": 933, "a10": 600, "a40": 696,
    "a6000": 768, "l40": 864, "h800": 3352, "h20": 4000, "b200": 8000, "gb200": 8000,
    "b300": 8000, "gb300": 8000, "thor": 273, "5090": 1792, "5080": 960, "5070": 672,
    "5060": 448, "pro6000": 1792, "gb10": 273, "spark": 273,
}  # fmt: skip

_SERIES = tuple(f"{number}0" for number in range(1, 10))
_NO_NAME = (
    r"nvidia|geforce|tesla|quadro|rtx|jetson|agx|dgx|ti|super|blackwell|workstation|server|edition"
    r"|generation|sxm\d?|\d+gb|hbm\d?e?|nvl\d+"
)

DTYPES = {
    "float32": "fp32", "float": "fp32", "fp32": "fp32",
    "bfloat16": "bf16", "bf16": "bf16",
    "float16": "fp16", "half": "fp16", "fp16": "fp16",
}  # fmt: skip
KV_FORMATS = {**DTYPES, "fp8": "fp8", "fp8_e4m3": "fp8"}

# A format with scale blocks and one that packs its codes, for examples.
BLOCKS = next(kind for kind, known in formats().items() if known.num_sizes == 2)
PACKED = next(kind for kind, known in formats().items() if known.codes_per_byte > 1)
LAYER_SYNTAX = (
    f"FORMAT:NxK[:M], such as {BLOCKS}:4096x7168, {BLOCKS}:8192+512+512x4096 (merged parts), "
    f"{BLOCKS}:18432/32x7168 (rows over 32 ranks), {PACKED}:4096x7168:1,64 (1 to 64 tokens); or "
    f"attention:HEADS/KV_HEADSxDIM[:CACHE], such as attention:32/8x128:fp8"
)
_ATTENTION = r"attention:(?P<heads>\d+)/(?P<kv_heads>\d+)x(?P<dim>\d+)(?::(?P<cache>\w+))?"
_LAYER = (
    r"(?P<format>[^:]+):(?P<n>\d+(?:\+\d+)*)(?:/(?P<cut_n>\d+))?x(?P<k>\d+)(?:/(?P<cut_k>\d+))?"
    r"(?::(?P<m>\d+(?:,\d+)*))?"
)


# ---------------------------------------------------------------- chip and libraries


def device_of(text: str) -> Device:
    """The chip `text` names. ConfigError for one that does not exist."""
    named = [name for gpus in CHIPS.values() for name in gpu_names(gpus)]
    try:
        device = Device.parse(_arch_of_gpu(text) or text)
    except ConfigError:
        device = None
    if device is None or (device.capability and device.arch not in CHIPS):
        asked = text.lower().removeprefix("cuda:")
        hint = did_you_mean(
            asked, [*CPUS, *CHIPS, *map(str.lower, named), *map(_plain_name, named)]
        )
        chips = ", ".join(f"{chip} ({gpus})" for chip, gpus in CHIPS.items())
        raise ConfigError(
            f"--device {text!r}: unknown chip; it takes {', '.join(CPUS)}, one of these, "
            f"or a GPU's name: {chips}{hint}"
        )
    return device


def _arch_of_gpu(text: str) -> str | None:
    """The architecture of the GPU that `text` names, as CHIPS does: `b200`, `RTX 5090`, `spark`."""
    asked = _plain_name(text)
    for arch, gpus in CHIPS.items():
        if asked in map(_plain_name, gpu_names(gpus)):
            return arch
    return None


def gpu_names(gpus: str) -> Iterator[str]:
    """The names in a row of CHIPS; `RTX 50xx` stands for 5010 to 5090."""
    for name in gpus.split(", "):
        numbers = _SERIES if name.endswith("xx") else ("",)
        yield from (name.removesuffix("xx") + number for number in numbers)


def _plain_name(gpu: str) -> str:
    """Without words that people and drivers add or leave out: `NVIDIA A100-SXM4-80GB` is a100."""
    words = re.findall("[a-z0-9]+", gpu.lower())
    name = "".join(word for word in words if not re.fullmatch(_NO_NAME, word))
    return re.sub("^(nvidia|geforce|rtx|jetson|dgx)+", "", name)


def libs_of(text: str, device: Device) -> Libs:
    """`all`, or torch, triton, our native kernels and those that `text` names with versions."""
    every = _every_lib(device)
    if text == "all":
        return Libs.of(every.values())
    libs = {name: every[name] for name in ("torch", "triton", NATIVE)}
    if text != "none":
        for item in text.split(","):
            lib = parse_lib(item.strip())
            if lib.name not in every:
                raise ConfigError(
                    f"--libs {text!r}: unknown library {lib.name!r}: it takes {', '.join(every)} "
                    f"(each with ==VERSION if wanted), or all, or none"
                    f"{did_you_mean(lib.name, [*every, 'all', 'none'])}"
                )
            libs[lib.name] = lib
    return Libs.of(libs.values())


def parse_lib(text: str) -> Lib:
    """From `deep_gemm=2.6+sm120`, `flashinfer==0.6.13`, `deep_gemm=broken: its error`."""
    name, _, rest = text.partition("=")
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError(
            f"{text!r} is no library: it takes a name with an optional version and what it "
            f"carries, as deep_gemm==2.6+sm120"
        )
    if rest.startswith("broken:"):
        return Lib(name, broken=rest.removeprefix("broken:").strip())
    version, *items = rest.lstrip("=").split("+")
    archs = tuple(item for item in items if ":" not in item)
    return Lib(name, version, archs, builds=tuple(item for item in items if ":" in item))


def chip_of(text: str, device: Device) -> Chip:
    """`device`, which `text` names, with the numbers that measurements depend on: those of the GPU
    that it names, or of the first of that architecture."""
    named = GPUS.get(_plain_name(text))
    return named or next((c for c in GPUS.values() if c.device == device), Chip(device))


def published_bandwidth(text: str, device: Device) -> tuple[str, int]:
    """(GPU, GB/s) of the GPU that `text` names, or of the first one with that architecture.
    ConfigError where none is published, as for CPUs."""
    names = [_plain_name(text), *map(_plain_name, gpu_names(CHIPS.get(device.arch, "")))]
    for name in names:
        chip = GPUS.get(name)
        rate = _BANDWIDTHS.get(name) or (chip.memory_gb_per_s if chip is not None else 0)
        if rate:
            return name, rate
    raise ConfigError(
        f"--device {text!r}: no memory bandwidth is published for it; give --bandwidth GB/S"
    )


def _every_lib(device: Device) -> dict[str, Lib]:
    """Every library that a kernel asks for, of any version, with the code that serves the chip."""
    specs = registry.all_specs()
    names = {"torch", *(name for spec in specs for name, _ in spec.libs)}
    archs: dict[str, set[str]] = {NATIVE: {arch for spec in specs for arch in spec.native_archs}}
    for spec in specs:
        for chips, name, arch in (*spec.carries, *spec.prebuilt):
            if chips in (device.family, device.arch):
                archs.setdefault(name, set()).add(arch)
    return {
        name: Lib(name, archs=tuple(sorted(archs.get(name, ()), key=arch_key)))
        for name in sorted(names)
    }


# ---------------------------------------------------------------- layers and types


def layer_of(text: str, dtype: str) -> tuple[str, Problem]:
    """A linear layer or attention from LAYER_SYNTAX, with its name. Sizes before `/` of a linear
    layer are of all ranks."""
    if match := re.fullmatch(_ATTENTION, text, re.ASCII):
        return text, _attention_of(text, match, dtype)
    match = None if text.startswith("attention:") else re.fullmatch(_LAYER, text)
    if match is None:
        raise ConfigError(f"--layer {text!r} is not readable: it takes {LAYER_SYNTAX}")
    weight = WeightFormat.parse(match["format"])
    cut_n, cut_k = int(match["cut_n"] or 1), int(match["cut_k"] or 1)
    parts = tuple(_shard(text, int(part), cut_n) for part in match["n"].split("+"))
    tokens = [int(m) for m in (match["m"] or "").split(",") if m]
    k = _shard(text, int(match["k"]), cut_k)
    if 0 in (*parts, k, *tokens):
        raise ConfigError(f"--layer {text!r}: sizes and token counts are 1 or more")
    problem = LinearProblem(
        n=sum(parts),
        k=k,
        weight=weight,
        act=weight.description.act,
        dtype=dtype,
        parts=parts if len(parts) > 1 else (),
        cut_n=cut_n,
        cut_k=cut_k,
        m_range=(min(tokens), max(tokens)) if tokens else EXPECTED_TOKENS,
    )
    return text, problem


def _attention_of(text: str, match: re.Match[str], dtype: str) -> AttentionProblem:
    heads, kv_heads, dim = (int(match[name]) for name in ("heads", "kv_heads", "dim"))
    if 0 in (heads, kv_heads, dim) or heads % kv_heads:
        raise ConfigError(
            f"--layer {text!r}: heads are a multiple of KV heads, and all sizes 1 or more"
        )
    cache = _named(f"--layer {text!r}: cache", match["cache"] or dtype, KV_FORMATS)
    return AttentionProblem(heads, kv_heads, dim, cache, dtype)


def _shard(text: str, size: int, ranks: int) -> int:
    if ranks < 1 or size % ranks:
        raise ConfigError(f"--layer {text!r}: {size} cannot be cut into {ranks} equal shards")
    return size // ranks


def dtype_of(asked: str, config: Mapping[str, Any], device: Device) -> str:
    """Of activations: `fp32`, `bf16` or `fp16`. For `auto` fp32 on the CPU, whose float32
    arithmetic is the fastest; elsewhere fp16 for a checkpoint that is stored so, and bf16."""
    if asked != "auto":
        return _named("--dtype", asked, DTYPES)
    if device.kind == "cpu":
        return "fp32"
    stored = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return "fp16" if stored == "float16" else "bf16"


def kv_format_of(asked: str, dtype: str) -> str:
    return dtype if asked == "auto" else _named("--kv-cache-dtype", asked, KV_FORMATS)


def _named(source: str, text: str, known: dict[str, str]) -> str:
    name = text.removeprefix("torch.")
    if name not in known:
        raise ConfigError(
            f"{source} {text!r} is unknown: it takes auto, {', '.join(known)}"
            f"{did_you_mean(name, ['auto', *known])}"
        )
    return known[name]
