"""Small problems by which a kernel is compared with the reference before it serves.

Linear layers and experts: the sizes of a layer modulo 256 rows and 512 columns, so that odd sizes
and alignments of shards stay. A linear kernel that is compiled at run time has the layer's own
sizes: others would be compiled for the probe alone. Attention and recurrences: the layer's own
heads, of attention its window and pages, and short requests.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm.architectures.kv_cache import MLA
from vllm.kernels import registry
from vllm.kernels.cache_numerics import attention_comparison, write_comparison
from vllm.kernels.delta_numerics import delta_rule_comparison
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.jit.ready import running, stand_in
from vllm.kernels.latent_numerics import latent_attention_comparison, latent_write_comparison
from vllm.kernels.make_kernel import make_linear, make_moe
from vllm.kernels.mamba2_numerics import mamba2_comparison
from vllm.kernels.numerics import LinearCase, MoECase
from vllm.kernels.select import eligibility
from vllm.kernels.select.decision import Candidate, Decision, Record
from vllm.kernels.select.problem import (
    AttentionProblem,
    DeltaRuleProblem,
    KVQuantProblem,
    LinearProblem,
    Mamba2Problem,
    MoEProblem,
    Problem,
    WeightProblem,
)
from vllm.kernels.select.reason import DEFAULT_ORDER
from vllm.kernels.select.spec import KernelSpec
from vllm.kernels.selection import Selection
from vllm.utils.math_utils import round_up
from vllm.version import __version__

_ROWS, _COLUMNS = 256, 512
# Small and odd ones, on either side of tiles.
NUM_TOKENS = (1, 5, 33, 130)


@dataclass(frozen=True)
class Probe:
    """name: what its result depends on. num_tokens: of the calls of a linear layer or of experts.
    block_size: tokens of a page of a KV cache. layers: those that the kernel was chosen for, with
    what a failure of each is filed under."""

    name: str
    problem: Problem
    candidate: Candidate
    decision: Decision
    num_tokens: tuple[int, ...] = ()
    block_size: int = 0
    layers: dict[str, str] = field(default_factory=dict)

    def prepared(self) -> Callable[[], float]:
        """What makes the kernel, calls it and returns the largest relative error; WrongResultError
        for a result that differs from the reference. The reference is computed here, so that
        nothing of it is blamed on the kernel."""
        problem, backend = self.problem, self.candidate.backend
        device = torch.device(self.decision.device.kind)
        of_pages = self.block_size, device
        if isinstance(problem, AttentionProblem):
            compare = (
                latent_attention_comparison if problem.variant == MLA else attention_comparison
            )
            return compare(problem, backend, *of_pages)
        if isinstance(problem, KVQuantProblem):
            check = latent_write_comparison if problem.variant == MLA else write_comparison
            return check(problem, backend, *of_pages)
        if isinstance(problem, DeltaRuleProblem):
            return delta_rule_comparison(problem, backend, device)
        if isinstance(problem, Mamba2Problem):
            return mamba2_comparison(problem, backend, device)
        return self._products(problem, device)

    def _products(self, problem: WeightProblem, device: torch.device) -> Callable[[], float]:
        candidate, most = self.candidate, max(self.num_tokens)
        alone = Decision(
            problem, self.decision.device, candidate.backend, DEFAULT_ORDER, (candidate,)
        )
        case: Any
        if isinstance(problem, MoEProblem):
            case = MoECase.of(problem, candidate, device, most)
        else:
            case = LinearCase.of(problem, candidate, device, most)
        expected = {num_tokens: case.expected(num_tokens) for num_tokens in self.num_tokens}

        def run() -> float:
            kernel: Any = (make_moe if problem.family == "moe" else make_linear)(
                alone, case.tensors
            )
            errors: list[float] = [case.error(kernel, *call) for call in expected.items()]
            return max(errors)

        return run


def probes_of(records: Iterable[Record], selection: Selection, block_size: int) -> list[Probe]:
    """One for each kernel of the decisions, each part of a split and each fallback, with each small
    problem; with the smallest layer for a kernel that is compiled for its sizes. block_size: tokens
    of a page of the KV cache."""
    found: dict[object, Probe] = {}
    for layer, decision in sorted(records, key=lambda record: _size(record[1])):
        if decision.is_emulated:
            continue
        for candidate, num_tokens in _kernels(decision):
            spec = registry.spec_of(decision, candidate.backend)
            assert spec is not None
            if spec.is_emulation and not registry.code_version(spec.backend):
                continue  # ours is the reference
            probe = probe_of(decision, candidate, selection, num_tokens, block_size)
            key: object = probe.name
            small, own = probe.problem, probe.candidate
            if spec.compiles and isinstance(small, LinearProblem):
                key = own.backend, own.act, own.scales, small.weight, small.dtype, num_tokens
            found.setdefault(key, probe).layers[layer] = decision.problem.size_key
    return list(found.values())


def probe_of(
    decision: Decision,
    candidate: Candidate,
    selection: Selection,
    num_tokens: tuple[int, ...],
    block_size: int,
) -> Probe:
    """Of one kernel of a decision."""
    spec = registry.spec_of(decision, candidate.backend)
    assert spec is not None
    version = version_of(spec, selection.libs, selection.device)
    code = f"{selection.device} vllm {__version__} {candidate.backend} {version}"
    problem = decision.problem
    if isinstance(problem, DeltaRuleProblem | Mamba2Problem):
        return Probe(f"{code}: {problem}", problem, candidate, decision)
    if isinstance(problem, AttentionProblem | KVQuantProblem):
        name = f"{code}: {problem}, pages of {block_size}"
        return Probe(name, problem, candidate, decision, block_size=block_size)
    small = probe_problem(problem, spec, max(num_tokens))
    fit = small.block_fit(spec.refines)
    candidate = replace(candidate, reasons=(), parts=(), fit=fit, requant=None)
    tokens = ",".join(map(str, num_tokens))
    name = f"{code}: {_name(small, candidate)} M {tokens}"
    return Probe(name, small, candidate, decision, num_tokens)


def _size(decision: Decision) -> int:
    problem = decision.problem
    return problem.n * problem.k if isinstance(problem, LinearProblem) else 0


def _kernels(decision: Decision) -> Iterator[tuple[Candidate, tuple[int, ...]]]:
    """Every kernel that computes some numbers of tokens now, with those to try."""
    by_name = {candidate.backend: candidate for candidate in decision.candidates}
    low = 1
    for limit, name in decision.parts:
        high = limit or low + max(NUM_TOKENS)
        counts = sorted({min(low - 1 + count, high) for count in NUM_TOKENS})
        other = stand_in(decision, name)
        for candidate in (by_name[name], other):
            own = [c for c in counts if candidate and running(decision, c) == candidate.backend]
            if candidate is not None and own:
                yield candidate, tuple(own)
        low = high + 1


def probe_problem(problem: WeightProblem, spec: KernelSpec, max_tokens: int) -> WeightProblem:
    """A small problem that the kernel takes; the problem itself where it takes no smaller one."""
    if isinstance(problem, LinearProblem):
        problem = replace(problem, requant_error=None, m_range=(1, max_tokens))
    else:
        problem = replace(problem, requant_error=None)
    if spec.compiles and isinstance(problem, LinearProblem):
        return problem
    smaller = [_small(problem)]
    if isinstance(problem, MoEProblem):
        smaller.append(_few_experts(problem))
    taken = (
        small
        for small in smaller
        if not eligibility.problem_reasons(spec, small, small.block_fit(spec.refines))
    )
    return next(taken, problem)


def _small(problem: WeightProblem) -> WeightProblem:
    """With the sizes modulo those of a probe."""
    if isinstance(problem, LinearProblem):
        parts = tuple(n % _ROWS + _ROWS for n in problem.parts)
        n = sum(parts) or problem.n % _ROWS + _ROWS
        return replace(problem, n=n, k=problem.k % _COLUMNS + _COLUMNS, parts=parts)
    return replace(
        _few_experts(problem),
        hidden=problem.hidden % _COLUMNS + _COLUMNS,
        intermediate=problem.intermediate % _ROWS + _ROWS,
    )


def _few_experts(problem: MoEProblem) -> MoEProblem:
    """More than a token has, in fours, as some kernels take them."""
    few = round_up(problem.top_k + 1, 4)
    own = min(problem.num_experts // problem.cut_experts, few)
    return replace(problem, num_experts=own * problem.cut_experts)


def _name(problem: WeightProblem, candidate: Candidate) -> str:
    """Everything that random weights and their rounding depend on."""
    if isinstance(problem, LinearProblem):
        cuts = problem.cut_n > 1, problem.cut_k > 1
    else:
        cuts = problem.cut > 1, problem.cut_experts > 1
    cut = "".join(" cut" if one else " whole" for one in cuts)
    acts = f"{candidate.act or 'none'} of {','.join(problem.act)}"
    scales = candidate.scales or "any"
    return f"{problem}{cut}, activations {acts}, scales {scales}"
