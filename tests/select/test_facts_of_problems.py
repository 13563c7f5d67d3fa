"""Whatever a problem asks a kernel to compute is computed by it, or speaks against it."""

import pytest
from selection_cases import DEVICES, SCHEMES, ask, attention, moe

from vllm.architectures.decoder import CHUNKED, RELU2, SINKS, SOFTCAP, SWIGLUOAI
from vllm.architectures.kv_cache import MLA
from vllm.kernels.select.problem import AttentionProblem, KVQuantProblem
from vllm.kernels.select.reason import Why
from vllm.utils.dataclasses import replace

LATENTS = AttentionProblem(16, 1, 576, "bf16", variant=MLA, value_dim=512)
# Those that take the scale and the window, and those that take more.
PLAIN = {"torch", "triton", "flashinfer", "cpu"}
SCORES = PLAIN - {"flashinfer"}


def able(problem) -> set[str]:
    """Backends that take it on some chip."""
    decisions = (ask(problem, device) for device in DEVICES)
    return {c.backend for decision in decisions for c in decision.candidates if not c.reasons}


@pytest.mark.parametrize(
    ("facts", "backends"),
    [
        ({"scale": 0.1}, PLAIN),
        ({"sliding_window": 128}, PLAIN),
        ({"variant": SINKS}, SCORES),
        ({"variant": SOFTCAP, "softcap": 50.0}, SCORES),
        ({"softcap": 50.0}, SCORES),
        ({"variant": CHUNKED, "sliding_window": 128}, SCORES),
        ({"variant": CHUNKED, "softcap": 50.0, "sliding_window": 128}, SCORES),
        ({"variant": SINKS, "softcap": 50.0, "sliding_window": 128}, SCORES),
        ({"variant": "position biases"}, set()),
        ({"value_dim": 64}, set()),
    ],
)
def test_attention_goes_to_kernels_that_compute_all_of_it(facts, backends):
    assert able(attention(head_dim=128, **facts)) == backends


@pytest.mark.parametrize(
    ("facts", "backends"),
    [
        ({}, {"torch", "triton"}),
        ({"scale": 0.1}, {"torch", "triton"}),
        ({"softcap": 50.0}, set()),
        ({"sliding_window": 128}, set()),
    ],
)
def test_kernels_of_latents_compute_nothing_else(facts, backends):
    assert able(replace(LATENTS, **facts)) == backends


def test_latents_are_written_by_kernels_that_know_them():
    assert able(KVQuantProblem(1, 576, "bf16", variant=MLA)) == {"torch", "triton"}


# With a limit between the products (swigluoai of gpt-oss), and with biases after them.
LIMIT, BIAS = {"activation": SWIGLUOAI, "swiglu_limit": 7.0}, {"bias": True}
GPT_OSS = {"torch", "triton", "marlin", "cpu"}


@pytest.mark.parametrize("weight", SCHEMES)
@pytest.mark.parametrize(
    ("facts", "backends"),
    [
        (BIAS, GPT_OSS),
        (LIMIT | BIAS, GPT_OSS),
        (LIMIT, GPT_OSS - {"marlin"}),
        ({"activation": "silu", "swiglu_limit": 7.0}, set()),
        ({"activation": SWIGLUOAI}, set()),
        ({"activation": RELU2}, GPT_OSS - {"marlin"}),
        ({"activation": RELU2, "swiglu_limit": 7.0}, set()),
        ({"activation": "gelu"}, set()),
    ],
)
def test_experts_go_to_kernels_that_compute_all_of_them(weight, facts, backends):
    plain = able(moe(weight))
    assert plain
    assert able(moe(weight, **facts)) == plain & backends


def test_the_reason_says_what_is_not_computed():
    decision = ask(attention(softcap=30.0), "90")
    reasons = {c.backend: c.reasons for c in decision.candidates}["flashinfer"]
    assert [(r.why, r.text) for r in reasons] == [
        (Why.NUMERICS, f"computes plain attention, not {SOFTCAP}")
    ]
    decision = ask(moe(swiglu_limit=7.0), "90")
    assert "not silu with a limit of 7" in " ".join(
        reason.text for c in decision.candidates for reason in c.reasons
    )
