"""Biases and activations of experts whose products another kernel computes, against plain torch."""

import pytest
import torch
from triton_device import DEVICE, MARKS

from vllm.kernels.triton.expert_bias import activate_biased
from vllm.kernels.triton.moe_rows import sort
from vllm.ops import torch_ops

pytestmark = MARKS
NUM_EXPERTS, TOP_K = 5, 2


class Rows:
    """Pairs of some tokens, a few of them with experts of other ranks."""

    def __init__(self, num_tokens: int, width: int):
        self.ids = torch.randint(-1, NUM_EXPERTS + 1, (num_tokens, TOP_K), device=DEVICE)
        self.positions = sort(self.ids, NUM_EXPERTS, block_m=8).positions
        self.x = torch.randn(num_tokens * TOP_K, width, device=DEVICE).bfloat16()
        self.bias = torch.randn(NUM_EXPERTS, width, device=DEVICE)
        self.is_here = (self.positions >= 0).flatten()
        self.places = self.positions.flatten()[self.is_here].long()

    def biased(self) -> torch.Tensor:
        """float32, of the pairs that are here."""
        experts = self.ids.flatten()[self.is_here]
        return self.x[self.places].float() + self.bias[experts]


@pytest.mark.parametrize("limit", (0.0, 0.7, 7.0))
@pytest.mark.parametrize("num_tokens, inner", ((1, 40), (33, 360), (70, 1440)))
def test_rows_get_the_bias_of_their_expert_and_the_activation(num_tokens, inner, limit):
    rows = Rows(num_tokens, 2 * inner)
    given = activate_biased(rows.x, rows.bias, rows.ids, rows.positions, limit)
    if limit:
        wanted = torch_ops.swigluoai_and_mul(rows.biased(), limit)
    else:
        wanted = torch_ops.silu_and_mul(rows.biased())
    torch.testing.assert_close(given[rows.places].float(), wanted, atol=1e-2, rtol=8e-3)
