"""What a start says: where its seconds went, and which option to change when a GPU is full."""

import time

import pytest
import torch

from vllm.errors import ConfigError
from vllm.utils.startup import StartupReport
from vllm.utils.torch_utils import naming_the_knob


def test_an_inner_phase_counts_for_itself():
    report = StartupReport()
    with report.phase("outer"):
        time.sleep(0.02)
        with report.phase("inner"):
            time.sleep(0.05)
    assert 0.02 <= report.seconds["outer"] < 0.05 <= report.seconds["inner"]


def test_a_phase_that_fails_is_counted_too():
    report = StartupReport()
    with pytest.raises(KeyError), report.phase("broken"):
        raise KeyError
    assert "broken" in report.seconds


def test_a_full_gpu_names_the_option():
    told = pytest.raises(ConfigError, match=r"CUDA out of memory.*change --max-num-seqs")
    with told, naming_the_knob("--max-num-seqs (lower)"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More text")
