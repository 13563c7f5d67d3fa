"""One comparison with the reference for each kernel of this build: the probe of a start
(`vllm/worker/kernel_probes.py`), for a problem of the kernel's format.

Of every activation scheme that checkpoints of a format allow: a linear layer or experts with odd
sizes per rank, or whole ones where the kernel takes no others. Attention and cache writes of every
element type of the cache, the delta rule in every type of activations. Where nothing compiles for
long: shards that begin inside a scale block in the other direction, and a sliding window, too.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.default_order import DEFAULT_ORDER
from vllm.kernels.numerics import WrongResultError
from vllm.kernels.problems import expert_act
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
)
from vllm.kernels.select.select import select
from vllm.kernels.select.spec import KernelSpec
from vllm.kernels.selection import Selection
from vllm.machine import Device, Libs
from vllm.platforms.child import requests
from vllm.worker.kernel_probes import NUM_TOKENS, Probe, probe_of

# The activation schemes that checkpoints of a format allow; weights without codes: none.
SCHEMES = {
    "fp8-block": (ActScheme.DYNAMIC_GROUP128,),
    "fp8-tensor": (ActScheme.STATIC_TENSOR, ActScheme.DYNAMIC_TOKEN),
    "fp8-channel": (ActScheme.DYNAMIC_TOKEN, ActScheme.DYNAMIC_TENSOR),
    "mxfp8": (ActScheme.MXFP8_GROUP32,),
    "mxfp4": (ActScheme.NONE,),
    "nvfp4": (ActScheme.NVFP4_GROUP16,),
    "int4-group": (ActScheme.NONE, ActScheme.DYNAMIC_TOKEN),
    "int8-channel": (ActScheme.DYNAMIC_TOKEN_INT8, ActScheme.STATIC_TENSOR_INT8),
}
FLOATS = ("bf16", "fp16", "fp32")
# Shards of 128 rows, or columns, and a half, which begin inside scale blocks; and whole weights.
ROWS = {"n": 576 + 192 + 192, "k": 1024, "parts": (576, 192, 192), "cut_n": 2, "bias": True}
COLUMNS = {"n": 768, "k": 576, "cut_k": 2}
WHOLE = {"n": 768, "k": 1024}
EXPERTS = {"num_experts": 16, "top_k": 4, "hidden": 640}
CUT_EXPERTS = EXPERTS | {"intermediate": 704, "cut": 2}
WHOLE_EXPERTS = EXPERTS | {"intermediate": 384, "cut_experts": 2}
HEADS = (28, 4, 128)
RULE_HEADS = (4, 8, 128, 128)
MAMBA2_HEADS = 6, 2, 40, 72
WINDOW = 70
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Kernel:
    """name: `family/backend/format`."""

    name: str
    spec: KernelSpec

    @property
    def format(self) -> str:
        return self.name.rpartition("/")[2]

    def probes(self, device: Device, libs: Libs) -> list[Probe]:
        """ValueError with the reasons where the kernel cannot serve here."""
        libs = replace(libs, quarantined=frozenset())
        selection = Selection(device, libs, Policy())
        found: dict[str, Probe] = {}
        reasons: list[str] = []
        for problems in self._problems():
            for problem in problems:
                decision = select(problem, device, libs, Policy(), registry.specs(self.spec.family))
                own = next(c for c in decision.candidates if c.backend == self.spec.backend)
                if not own.reasons:
                    probe = probe_of(decision, own, selection, self._num_tokens(), BLOCK_SIZE)
                    # Schemes that the kernel does not tell apart make one probe.
                    found[f"{own.act} {probe.problem} {problem.block_fit(False)}"] = probe
                    break
                reasons = reasons or [reason.text for reason in own.reasons]
        if not found:
            raise ValueError("; ".join(reasons))
        return [*found.values()]

    @property
    def _is_soon_compiled(self) -> bool:
        """Not by nvcc, which takes from ten seconds to a minute for another size or window."""
        return self.spec.compiles in ("", "triton")

    def _num_tokens(self) -> tuple[int, ...]:
        most = self.spec.max_tokens or max(NUM_TOKENS)
        return tuple(sorted({min(count, most) for count in NUM_TOKENS}))

    def _problems(self) -> Iterator[list[Problem]]:
        """Of each list, the first that the kernel takes is compared."""
        dtype = self.format if self.format in FLOATS else "bf16"
        if self.spec.family == "attention":
            for window in (0, WINDOW) if self._is_soon_compiled else (0,):
                yield [AttentionProblem(*HEADS, self.format, dtype, window)]
        elif self.spec.family == "kv_quant":
            yield [KVQuantProblem(*HEADS[1:], self.format, dtype)]
        elif self.spec.family == "delta_rule":
            for own in sorted(self.spec.dtypes):
                yield [DeltaRuleProblem(*RULE_HEADS, own)]
        elif self.spec.family == "mamba2":
            for own in sorted(self.spec.dtypes):
                yield [Mamba2Problem(*MAMBA2_HEADS, own)]
        else:
            size = "[128]" if self.format.endswith("-group") else ""
            weight = WeightFormat.parse(self.format + size)
            for scheme in SCHEMES.get(self.format, (ActScheme.NONE,)):
                act = tuple(dict.fromkeys((scheme, ActScheme.NONE)))
                yield from self._products({"weight": weight, "act": act, "dtype": dtype})

    def _products(self, of_format: dict[str, Any]) -> Iterator[list[Problem]]:
        if self.spec.family == "moe":
            of_format |= {"act": expert_act(of_format["weight"], of_format["act"])}
            yield [MoEProblem(**size, **of_format) for size in (CUT_EXPERTS, WHOLE_EXPERTS)]
            return
        of_format["m_range"] = 1, self._num_tokens()[-1]
        yield [LinearProblem(**size, **of_format) for size in (ROWS, COLUMNS, WHOLE)]
        if self.format == "fp8-block" and self._is_soon_compiled:
            yield [LinearProblem(**COLUMNS, **of_format)]


def kernels() -> dict[str, Kernel]:
    """By name, those of this package that have code."""
    return {
        name: Kernel(name, spec)
        for family, backends in DEFAULT_ORDER.items()
        for spec in registry.specs(family)
        if spec.backend in backends and registry.has_code(spec)
        for name in (f"{family}/{spec.backend}/{kind}" for kind in sorted(spec.formats))
    }


# ---------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """kind: `passed`, `wrong` (another result), `failed` (anything else that a kernel does),
    `absent` (it cannot serve here) or `not run`. text: the largest error, or why."""

    kind: str
    text: str
    seconds: float = 0.0


def serve(channel: Connection, device: Device, libs: Libs) -> None:
    """Answers names with outcomes, until one is not passed: it may leave the GPU unusable."""
    torch.set_num_threads(1)
    known = kernels()
    with torch.inference_mode():
        for name in requests(channel):
            channel.send(outcome_of(known[name], device, libs))


def outcome_of(kernel: Kernel, device: Device, libs: Libs) -> Outcome:
    begin = time.monotonic()

    def ended(kind: str, text: str) -> Outcome:
        return Outcome(kind, " ".join(text.split())[:300], time.monotonic() - begin)

    try:
        probes = kernel.probes(device, libs)
    except ValueError as error:
        return ended("absent", str(error))
    errors = []
    for probe in probes:
        try:
            errors.append(probe.prepared()())
            if device.kind == "cuda":
                torch.cuda.synchronize()
        except WrongResultError as error:
            return ended("wrong", f"{probe.problem}: {error}")
        except Exception as error:  # whatever a kernel raises
            return ended("failed", f"{probe.problem}: {type(error).__name__}: {error}")
    return ended("passed", f"relative error {max(errors):.1e}")


# ---------------------------------------------------------------- wrong ones


def _wrong_product(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any) -> Any:
        kernel = make(*given)
        return lambda *inputs: kernel(*inputs) * 1.03

    return made


def _wrong_attention(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any) -> Any:
        kernel = make(*given)
        attend = kernel._attend
        kernel._attend = lambda *inputs, **bounds: attend(*inputs, **bounds) * 1.03
        return kernel

    return made


def _wrong_writer(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(problem: KVQuantProblem) -> Any:
        write = make(problem)
        return lambda k, v, *places: write(k * 1.03, v, *places)

    return made


# By family: what makes of a backend's maker one whose kernels are wrong by 3 %.
WRONG = {
    "linear": _wrong_product,
    "moe": _wrong_product,
    "attention": _wrong_attention,
    "kv_quant": _wrong_writer,
    "delta_rule": _wrong_product,
    "mamba2": _wrong_product,
}
