"""Upstream's words for backends and quantisation mean ours, in flags, keywords and variables."""

import pytest

from vllm.config.kernel import KernelConfig
from vllm.config.policy import KernelPreferences, make_policy
from vllm.errors import ConfigError
from vllm.formats.readers.registry import resolve_quantization
from vllm.kernels.registry import find_backend

STORED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "mxfp4": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize(
    ("family", "name", "ours"),
    [
        ("attention", "TRITON_ATTN", "triton"),
        ("attention", "FLASHINFER", "flashinfer"),
        ("attention", "CPU_ATTN", "cpu"),
        ("moe", "FLASHINFER_TRTLLM", "flashinfer-trtllm"),
        ("linear", "flashinfer_cutlass", "flashinfer-cutlass"),
        ("linear", "DEEPGEMM", "deep_gemm"),
    ],
)
def test_a_backend_of_upstreams_is_ours_where_there_is_one(family, name, ours):
    assert find_backend(family, name) == ours
    given = KernelConfig(**{f"{family}_backend": name}).preferences(None)
    (override,) = make_policy(given, {}).overrides
    assert (override.family, override.backend) == (family, ours)


@pytest.mark.parametrize("name", ["auto", "FLASH_ATTN", "flash_attn_mla", "CUTLASS_MLA"])
def test_attention_of_a_library_without_kernels_here_is_chosen_by_the_selector(name):
    assert KernelConfig(attention_backend=name).preferences(None).backends == ()
    assert make_policy(KernelPreferences(), {"VLLM_ATTENTION_BACKEND": name}).overrides == ()


def test_the_variable_of_attention_is_as_the_flag_and_weaker():
    env = {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}
    (override,) = make_policy(KernelPreferences(), env).overrides
    assert (override.family, override.backend) == ("attention", "triton")
    both = make_policy(KernelPreferences(backends=(("attention", "torch"),)), env).overrides
    assert min(both, key=lambda one: one.origin.rank).backend == "torch"


@pytest.mark.parametrize("family", ["linear", "moe"])
def test_a_backend_that_nobody_has_is_refused(family):
    with pytest.raises(ConfigError, match="unknown backend 'FLASH_ATTN'"):
        KernelConfig(**{f"{family}_backend": "FLASH_ATTN"})
    assert KernelConfig(**{f"{family}_backend": "auto"}).preferences(None).backends == ()


@pytest.mark.parametrize(
    ("asked", "method"), [("awq_marlin", "awq"), ("gpt_oss_mxfp4", "mxfp4"), ("awq", "awq")]
)
def test_a_method_with_a_kernel_in_its_name_is_the_method(asked, method):
    assert resolve_quantization(STORED[method], asked, "m").name == method
