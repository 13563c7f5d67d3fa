"""Quantisers in torch give a GPU the bits that they give a CPU."""

import pytest
import torch

from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
    per_token_group_quant_fp8_packed_for_deepgemm,
    requant_weight_ue8m0_inplace,
)
from vllm.utils.fp8 import per_block_cast_to_fp8

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def requantised(q: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    requant_weight_ue8m0_inplace(q, scales)
    return q, scales


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_gives_the_bits_of_the_cpu(ue8m0, dtype):
    x = torch.randn(300, 1000) * torch.exp2(torch.randint(-12, 12, (300, 1000)).float())
    x = (x * (torch.rand(300, 1000) > 0.1)).to(dtype)
    for cast in (
        lambda x: per_token_group_quant_fp8(x, 128, use_ue8m0=ue8m0),
        lambda x: per_token_group_quant_fp8_packed_for_deepgemm(x, 128),
        lambda x: per_block_cast_to_fp8(x, use_ue8m0=ue8m0),
        lambda x: requantised(*per_block_cast_to_fp8(x)),
    ):
        on_cpu, on_gpu = cast(x), cast(x.cuda())
        assert torch.equal(on_gpu[0].cpu().view(torch.uint8), on_cpu[0].view(torch.uint8))
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1])
