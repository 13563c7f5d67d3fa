"""DeepGEMM's experts with tokens that arrive quantised, in a block for each expert.

In Triton's interpreter with the stand-in for the library, in every form of scales; on a GPU with
the library, in the forms that it takes there. UE8M0 on SM100: not run on hardware.
"""

from collections.abc import Iterator

import pytest
import torch
from machines import STAND_INS, Gpu, machine
from moe_cases import Case, Inputs
from torch import Tensor
from triton_device import DEVICE, IS_INTERPRETED, MARKS, needs_gpu

from vllm.formats.scales import Scales
from vllm.kernels.activations import KernelByTokens, batched
from vllm.kernels.backends import deep_gemm as backend
from vllm.kernels.interface import BatchedMoEKernel, MoEKernel
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.select import select
from vllm.machine import Device, Lib, Libs
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.platforms.probe import probe_device, probe_libs
from vllm.utils.deep_gemm import pack_ue8m0

pytestmark = MARKS

FORMS = (Scales.FLOAT32, Scales.FLOAT32_CEIL_UE8M0, Scales.UE8M0)
# Tokens of each expert, and rows of a block: whole tiles of 128. On a GPU there are so many that
# the plain call takes the GEMM of rows without blocks.
COUNTS, SIZE = ((5, 0, 20), 128) if IS_INTERPRETED else ((5, 0, 300), 512)
CASE = Case(len(COUNTS), 1, 512, 128, "fp8-block", sum(COUNTS), "even", 0)
# Of ||x - y|| / ||y||. Other tilings of a GPU may add up in another order, and an E4M3 number
# between the products be the next one.
ROUNDING = 5e-3


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Iterator[Scales]:
    """On a GPU, `Experts` skips the forms that its chip does not take."""
    if IS_INTERPRETED:
        with machine(Gpu(100 if request.param is Scales.UE8M0 else 90), STAND_INS):
            yield request.param
    else:
        pytest.importorskip("deep_gemm")
        yield request.param


class Experts:
    """The kernel of a case, its tokens by expert, and the plain call on them."""

    def __init__(self, form: Scales):
        self.form, self.inputs = form, Inputs(CASE, DEVICE)
        device, libs = probe_device(), probe_libs()
        if IS_INTERPRETED:
            device = Device.parse("sm_100" if form is Scales.UE8M0 else "sm_90")
            libs = Libs.of([Lib("deep_gemm", "2.6"), Lib("triton", "3.5")])
        policy = Policy(e8m0=form is not Scales.FLOAT32 or None)
        specs = [spec for spec in backend.SPECS if spec.family == "moe"]
        (candidate,) = select(CASE.problem, device, libs, policy, specs).candidates
        if candidate.scales != form or candidate.reasons:
            pytest.skip(f"takes {candidate.scales}: {'; '.join(map(str, candidate.reasons))}")
        self.kernel: MoEKernel = backend.moe(CASE.problem, self.inputs.tensors, candidate)
        self.by_expert = self.inputs.x.split(COUNTS)
        self.ids = torch.arange(len(COUNTS), device=DEVICE).repeat_interleave(
            torch.tensor(COUNTS, device=DEVICE)
        )

    def plain(self, x: Tensor) -> Tensor:
        """Tokens x [sum of COUNTS, hidden], sorted and quantised by the kernel."""
        return self.kernel(x, torch.ones(len(x), 1, device=DEVICE), self.ids.unsqueeze(1))

    def blocks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As DeepEP delivers tokens [sum of COUNTS, hidden]: q, scales with rows running fastest,
        and counts. Where no token is, bytes are 255: NaN of E4M3, exponents of NaN."""
        q = torch.full((len(COUNTS), SIZE, CASE.hidden), 255, dtype=torch.uint8, device=DEVICE)
        values, scales = per_token_group_quant_fp8(
            x, 128, use_ue8m0=self.form is not Scales.FLOAT32
        )
        scales = pack_ue8m0(scales) if self.form is Scales.UE8M0 else scales
        memory = scales.new_empty(len(COUNTS), scales.shape[1], SIZE)
        memory.view(torch.uint8).fill_(255)
        by_row = memory.transpose(1, 2)
        parts = zip(values.split(COUNTS), scales.split(COUNTS), strict=True)
        for expert, (own, own_scales) in enumerate(parts):
            q[expert, : len(own)] = own.view(torch.uint8)
            by_row[expert, : len(own)] = own_scales
        counts = torch.tensor(COUNTS, dtype=torch.int32, device=DEVICE)
        return q.view(torch.float8_e4m3fn), by_row, counts

    def of_blocks(self, x: Tensor) -> Tensor:
        taker = batched(self.kernel)
        assert taker is not None and taker.scales == self.form
        found = taker.from_quantized(*self.blocks(x), expected_m=sum(COUNTS) // len(COUNTS))
        assert found.shape == (len(COUNTS), SIZE, CASE.hidden) and found.dtype == torch.bfloat16
        return torch.cat([rows[:count] for rows, count in zip(found, COUNTS, strict=True)])


def widened(q: Tensor, scales: Tensor, counts: Tensor) -> Tensor:
    """The tokens of blocks in bfloat16, one after another."""
    if scales.dtype == torch.int32:
        exponents = torch.stack([scales >> shift & 0xFF for shift in (0, 8, 16, 24)], -1)
        exponents = exponents.flatten(-2) - 127
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    wide = q.float() * scales.repeat_interleave(128, -1)[..., : q.shape[-1]]
    return torch.cat([rows[:n] for rows, n in zip(wide, counts.tolist(), strict=True)]).bfloat16()


def distance(x: Tensor, y: Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def test_blocks_give_what_the_plain_call_gives(form: Scales):
    experts = Experts(form)
    found, plain = experts.of_blocks(experts.inputs.x), experts.plain(experts.inputs.x)
    assert bool(found.isfinite().all())
    if IS_INTERPRETED:
        assert torch.equal(found, plain)
    assert distance(found, plain) < ROUNDING


@pytest.mark.parametrize("form", FORMS[1:], indirect=True)
def test_tokens_that_were_widened_and_quantised_again_give_the_same(form: Scales):
    """With powers of two, which a second quantisation finds again."""
    experts = Experts(form)
    blocks = experts.blocks(experts.inputs.x)
    again = experts.plain(widened(*blocks))
    found = experts.of_blocks(experts.inputs.x)
    if IS_INTERPRETED:
        assert torch.equal(found, again)
    assert distance(found, again) < ROUNDING


@pytest.mark.parametrize("form", [Scales.FLOAT32], indirect=True)
def test_the_results_are_those_of_the_format(form: Scales):
    """Of float32 scales; for powers of two the weights are rounded a second time."""
    experts = Experts(form)
    experts.inputs.ids = experts.ids.unsqueeze(1)
    experts.inputs.weights = torch.ones_like(experts.inputs.weights)
    wanted = experts.inputs.expected(CASE.problem.act[0])
    assert distance(experts.of_blocks(experts.inputs.x), wanted) < 0.03


def test_of_a_split_the_part_for_the_most_tokens_takes_blocks(form: Scales):
    kernel = Experts(form).kernel
    assert batched(KernelByTokens([(64, lambda *_: None), (None, kernel)])) is kernel
    assert batched(KernelByTokens([(64, kernel), (None, lambda *_: None)])) is None


@needs_gpu
def test_a_captured_graph_serves_other_tokens_and_other_counts(form: Scales):
    experts = Experts(form)
    taker: BatchedMoEKernel | None = batched(experts.kernel)
    assert taker is not None
    held = experts.blocks(experts.inputs.x)
    taker.from_quantized(*held, expected_m=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = taker.from_quantized(*held, expected_m=64)
    held[2].copy_(torch.tensor([3, 0, 70], device=DEVICE))
    for mine, theirs in zip(held[:2], experts.blocks(experts.inputs.x.flip(0)), strict=False):
        mine.copy_(theirs)
    graph.replay()
    wanted = taker.from_quantized(*held, expected_m=64)
    for rows, other, count in zip(found, wanted, held[2].tolist(), strict=True):
        assert torch.equal(rows[:count], other[:count])
