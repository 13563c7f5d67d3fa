"""Parts of the all2all of tokens between experts that need no second rank."""

import importlib.util

import pytest
import torch

from vllm.distributed.all2all import Experts
from vllm.distributed.deep_ep import expert_of_places, widen_packed_ue8m0
from vllm.distributed.layout import Layout
from vllm.distributed.make_all2all import make_all2all
from vllm.distributed.parallel import planned
from vllm.errors import ConfigError
from vllm.utils.deep_gemm import pack_ue8m0


def test_packed_scales_of_received_tokens_are_applied_exactly():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 0x7F, (2, 8, 1024), generator=generator, dtype=torch.uint8)
    q = codes.view(torch.float8_e4m3fn)
    scales = 2.0 ** torch.randint(-20, 6, (2, 8, 8), generator=generator)
    packed = torch.stack([pack_ue8m0(expert) for expert in scales])
    wide = widen_packed_ue8m0(q, packed, torch.bfloat16)
    assert torch.equal(wide.float(), q.float() * scales.repeat_interleave(128, -1))


def test_places_without_a_token_belong_to_no_expert():
    found = expert_of_places(torch.tensor([2, 0, 3]), 3)
    assert found.tolist() == [[0, 0, -1], [-1, -1, -1], [2, 2, 2]]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
@pytest.mark.parametrize("name", ["deepep_low_latency", "deepep_high_throughput"])
def test_a_missing_library_is_named(monkeypatch, name):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", name)
    with pytest.raises(ConfigError, match=f"{name} needs DeepEP.*allgather_reducescatter"):
        make_all2all(planned(Layout(tensor_size=2), True), Experts(range(4), 8, 128))
