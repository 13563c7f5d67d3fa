"""Parts of the all2all of tokens between experts that need no second rank."""

import importlib.util

import pytest
import torch

from vllm.distributed.all2all import Experts
from vllm.distributed.deep_ep import expert_of_places
from vllm.distributed.layout import Layout
from vllm.distributed.make_all2all import make_all2all
from vllm.distributed.parallel import planned
from vllm.errors import ConfigError


def test_places_without_a_token_belong_to_no_expert():
    found = expert_of_places(torch.tensor([2, 0, 3]), 3)
    assert found.tolist() == [[0, 0, -1], [-1, -1, -1], [2, 2, 2]]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
@pytest.mark.parametrize("name", ["deepep_low_latency", "deepep_high_throughput"])
def test_a_missing_library_is_named(monkeypatch, name):
    monkeypatch.setenv("VLLM_ALL2ALL_BACKEND", name)
    with pytest.raises(ConfigError, match=f"{name} needs DeepEP.*allgather_reducescatter"):
        make_all2all(planned(Layout(tensor_size=2), True), Experts(range(4), 8, 128))
