"""A kernel that keeps scales in the type of the activations: what that costs a weight is measured
while it is loaded, entered in the ledger, and within the budget or another kernel serves."""

import pytest
import torch

from vllm.architectures.sharding import Dim, linear
from vllm.config.policy import KernelPreferences, make_policy
from vllm.formats.readers.awq import AwqConfig
from vllm.kernels.report.question import parse_lib
from vllm.kernels.selection import Selection
from vllm.machine import Device, Libs
from vllm.model_executor.context import ModelContext
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.methods import QuantizationMethods
from vllm.ops import torch_ops

ROWS, COLUMNS, GROUP = 128, 256, 64


def loaded(scales, budget, libs="humming=0.1.19"):
    """The selection after an AWQ layer for Hopper was loaded, whose numbers are emulated here."""
    device = Device.parse("sm_90")
    policy = make_policy(KernelPreferences(max_requant_error=budget), {})
    selection = Selection(
        device, Libs.of(map(parse_lib, libs.split(","))), policy, is_emulated=True
    )
    methods = QuantizationMethods(AwqConfig(GROUP))
    context = ModelContext(None, torch.bfloat16, torch.bfloat16, methods, selection,
                           torch_ops, "bf16", 64, False)  # fmt: skip
    spec = linear("proj", Dim("rows", ROWS), Dim("columns", COLUMNS), "replicated")
    layer = ReplicatedLinear(context, "", spec)
    layer.weight.data.random_(0, 256)
    layer.zero_points.data.random_(0, 16)
    layer.scales.data.copy_(scales)
    layer.make_kernel()
    ((_, decision),) = selection.records
    assert layer.decision is decision  # which who asks the layer is told
    return selection


def scales(dtype):
    torch.manual_seed(0)
    return (torch.rand(ROWS, COLUMNS // GROUP) * 1e-2 + 1e-3).to(dtype).float()


def test_scales_that_the_activations_hold_cost_nothing():
    selection = loaded(scales(torch.bfloat16), 0.01)
    ((_, decision),) = selection.records
    (entry,) = selection.ledger.entries
    assert decision.chosen == "humming"
    assert entry.is_exact and entry.transform == "int4-group[64] float32 -> activation-type"


def test_scales_in_fp16_are_rounded_to_bf16_and_the_ledger_says_by_how_much():
    selection = loaded(scales(torch.float16), None)
    (entry,) = selection.ledger.entries
    assert not entry.is_exact and 2.0**-12 < entry.relative_error < 2.0**-8
    assert "re-quantised 1 layer with loss" in selection.ledger.summary()


@pytest.mark.parametrize(
    ("libs", "next_one"), [("humming=0.1.19,native=0.1+90a", "marlin"), ("humming=0.1.19", "torch")]
)
def test_over_the_budget_the_next_kernel_serves_and_nothing_is_rounded(libs, next_one):
    selection = loaded(scales(torch.float16), 1e-4, libs)
    ((_, decision),) = selection.records
    assert decision.chosen == next_one and not selection.ledger.entries
