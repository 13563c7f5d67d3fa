"""Generated problems for every backend that computes experts, and what each must give.

Memory that is handed out is filled with NaN (integers: with their largest) before a kernel gets
it, so whatever is read without having been written shows.
"""

import random
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from vllm.architectures.decoder import SWIGLUOAI
from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.activations import Activation, input_quant
from vllm.kernels.interface import LinearTensors, MoEKernel, MoETensors
from vllm.kernels.select.decision import Candidate
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.select.select import select
from vllm.machine import Device, Libs
from vllm.ops import torch_ops
from vllm.utils.torch_utils import dtype_of

GROUP = 128
NUM_TOKENS = (1, 2, 3, 8, 31, 64, 130, 300, 1000, 8192)
ROUTINGS = ("even", "uneven", "few experts", "one expert", "other ranks")
# Of ||y - wanted|| / ||wanted||: intermediate results in half precision; where they are quantised
# after that, some are rounded to the next E4M3 number instead.
TOLERANCES = {ActScheme.NONE: 0.008, ActScheme.DYNAMIC_GROUP128: 0.03}
WORST_TOKEN = 2.5  # times the tolerance


@dataclass(frozen=True)
class Case:
    """hidden and intermediate are whole scale blocks in some cases and not in others."""

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    weight: str
    num_tokens: int
    routing: str
    seed: int
    swiglu_limit: float = 0.0

    @property
    def problem(self) -> MoEProblem:
        weight = WeightFormat.parse(self.weight)
        act = (ActScheme.NONE,)
        if weight.is_quantized:
            of_token = (ActScheme.DYNAMIC_TOKEN,) if weight.scale != "block" else ()
            act = (*of_token, ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
        sizes = (self.num_experts, self.top_k, self.hidden, self.intermediate)
        problem = MoEProblem(*sizes, weight, act, dtype="bf16")
        if not self.swiglu_limit:
            return problem
        limit = self.swiglu_limit
        return replace(problem, activation=SWIGLUOAI, swiglu_limit=limit, bias=True)

    def __str__(self) -> str:
        sizes = f"{self.num_experts}x{self.intermediate}x{self.hidden}-top{self.top_k}"
        biased = "-swigluoai" if self.swiglu_limit else ""
        return f"{self.weight}-{sizes}-{self.num_tokens}-{self.routing}{biased}"


def generate(count: int, seed: int = 0) -> list[Case]:
    """The first so many of an endless list; each number of tokens and each routing comes often, and
    biased experts with a clamped activation in every fourth."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        num_experts = draw.choice((1, 3, 16, 40))
        top_k = min(num_experts, draw.choice((1, 2, 8)))
        hidden, inner = draw.choice(((256, 128), (384, 256), (272, 144), (512, 192)))
        weight = ("fp8-block", "fp8-channel", "bf16", "fp8-block", "fp8-tensor", "bf16")[i % 6]
        tokens, routing = NUM_TOKENS[i % len(NUM_TOKENS)], ROUTINGS[(i + i // 10) % len(ROUTINGS)]
        limit = 0.7 if i % 4 == 1 else 0.0
        cases.append(Case(num_experts, top_k, hidden, inner, weight, tokens, routing, i, limit))
    return cases


# ---------------------------------------------------------------- who takes it


def judged(case: Case, device: Device, libs: Libs) -> dict[str, Candidate]:
    """Every backend, with all that speaks against it."""
    libs = Libs(libs.libs | {registry.built()})
    decision = select(case.problem, device, libs, Policy(), registry.specs("moe", device.family))
    return {c.backend: c for c in decision.candidates}


def candidates(case: Case, device: Device, libs: Libs) -> dict[str, Candidate]:
    """The backends that have code for the case and nothing to say against it."""
    return {name: c for name, c in judged(case, device, libs).items() if not c.reasons}


# ---------------------------------------------------------------- what goes in


class Inputs:
    def __init__(self, case: Case, device: str):
        torch.manual_seed(case.seed)
        self.case = case
        self.tensors = _experts(case, device)
        widths = 2 * case.intermediate, case.hidden
        self.biases = [torch.zeros(case.num_experts, width, device=device) for width in widths]
        if case.swiglu_limit:
            self.biases = [torch.randn_like(bias) for bias in self.biases]
            self.tensors.gate_up_bias, self.tensors.down_bias = self.biases
        self.x = torch.randn(case.num_tokens, case.hidden, device=device).bfloat16()
        self.ids = _routed(case).to(device)
        shares = torch.rand(case.num_tokens, case.top_k, device=device) + 0.1
        self.weights = shares / shares.sum(1, keepdim=True)

    def make(self, winner: Candidate) -> MoEKernel:
        """Backends leave what they are given as it is."""
        kernel: MoEKernel = registry.backend(winner.backend).moe(
            self.case.problem, self.tensors, winner
        )
        return kernel

    def expected(self, act: ActScheme | None) -> Tensor:
        """In float32, with activations rounded as the scheme says."""
        rounded = _rounded if act is ActScheme.DYNAMIC_GROUP128 else Tensor.float
        out = torch.zeros(self.x.shape, device=self.x.device)
        x = rounded(self.x)
        for expert in range(self.tensors.num_experts):
            tokens, places = (self.ids == expert).nonzero(as_tuple=True)
            if len(tokens) == 0:
                continue
            gate_up, down = (_wide(part) for part in self.tensors.expert(expert))
            gate, up = (x[tokens] @ gate_up.T + self.biases[0][expert]).chunk(2, 1)
            if limit := self.case.swiglu_limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
                inner = rounded(gate * torch.sigmoid(1.702 * gate) * up)
            else:
                inner = rounded(torch.nn.functional.silu(gate) * up)
            y = inner @ down.T + self.biases[1][expert]
            out.index_add_(0, tokens, y * self.weights[tokens, places][:, None])
        return out


def _experts(case: Case, device: str) -> MoETensors:
    weight = case.problem.weight

    def stacked(shard_rows: tuple[int, ...], columns: int) -> tuple[Tensor, Tensor | None]:
        values = torch.randn(case.num_experts, sum(shard_rows), columns, device=device)
        if not weight.is_quantized:
            return (values / columns**0.5).to(dtype_of(weight.element)), None
        grid = (case.num_experts, *weight.scale_shape(shard_rows, columns))
        scales = torch.rand(grid, device=device) + 0.5
        return (30 * values).to(torch.float8_e4m3fn), scales / 30 / columns**0.5

    gate_up, gate_up_scales = stacked((case.intermediate,) * 2, case.hidden)
    down, down_scales = stacked((case.hidden,), case.intermediate)
    return MoETensors(weight, gate_up, down, gate_up_scales, down_scales)


def _routed(case: Case) -> Tensor:
    """Experts of each token, all different; -1 for those of other ranks."""
    odds = torch.rand(case.num_tokens, case.num_experts)
    if case.routing == "uneven":
        odds = odds ** (1 + torch.arange(case.num_experts))
    if case.routing == "few experts":
        odds[:, : case.num_experts - case.top_k - 1] = 0
    if case.routing == "one expert":
        odds[:, case.num_experts // 2] = 2
    ids = odds.topk(case.top_k, 1).indices
    if case.routing == "other ranks":
        ids[torch.rand(ids.shape) < 0.5] = -1
    return ids


def _rounded(x: Tensor) -> Tensor:
    """float32 values of E4M3 groups of 128 columns; the last group may be shorter."""
    columns = x.shape[1]
    x = torch.nn.functional.pad(x.float(), (0, -columns % GROUP))
    groups = x.view(x.shape[0], -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)[:, :columns]


def _wide(part: LinearTensors) -> Tensor:
    packed = torch_ops.pack_linear(part.weight, part.row_scales(), part.block_k)
    return packed.dequantize().float()


# ---------------------------------------------------------------- the check


def check(case: Case, winner: Candidate, device: str) -> None:
    """One call of the backend on the case, and one with tokens quantised as it asks for them."""
    inputs = _inputs(case, device)
    kernel = inputs.make(winner)
    _check_call(kernel, inputs.x, inputs, winner)
    if asked := input_quant(kernel, case.num_tokens):
        _check_call(kernel, asked.quantise(inputs.x), inputs, winner)


def _check_call(kernel: MoEKernel, x: Activation, inputs: Inputs, winner: Candidate) -> None:
    y = _poisoned_call(kernel, x, inputs.weights, inputs.ids)
    assert y.shape == inputs.x.shape and y.dtype == inputs.x.dtype
    wanted = inputs.expected(winner.act)
    here = (inputs.ids >= 0).any(1)
    assert bool((y[~here] == 0).all()), "a token of no expert here is not zero"
    assert bool(y.isfinite().all()), f"{int((~y.isfinite()).any(1).sum())} tokens are not finite"
    tolerance = TOLERANCES[winner.act or ActScheme.NONE]
    # Of every token: an error of one among thousands is not lost in the sum.
    error = (y.float() - wanted).norm(dim=1)[here]
    bound = tolerance * wanted.norm(dim=1)[here]
    worst = float((error / bound).max()) if len(bound) else 0.0
    assert worst < WORST_TOKEN, f"worst token: {worst:.2f} times the tolerance"
    # Of few tokens a rounding to the next number shows: one alone may be as far off as the worst.
    factor = 1 + (WORST_TOKEN - 1) / max(1, len(bound))
    assert float(error.norm()) <= factor * float(bound.norm())


@lru_cache(maxsize=4)
def _inputs(case: Case, device: str) -> Inputs:
    return Inputs(case, device)


def _poisoned_call(kernel: MoEKernel, *arguments: Activation) -> Tensor:
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    try:
        return kernel(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
