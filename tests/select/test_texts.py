"""Devices, libraries and formats are texts that round-trip; wrong ones say what is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection_cases import DEVICES, policy_of

from vllm.config.policy import KernelPreferences, make_policy
from vllm.errors import ConfigError
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.registry import FLAGS
from vllm.kernels.report.question import parse_lib
from vllm.machine import Device, Lib, Libs


@pytest.mark.parametrize(
    "text", ["cpu", "cpu:avx512", "cpu:portable", "cuda:sm_90", "cuda:sm_121a", "cuda:sm_100f"]
)
def test_devices_round_trip(text):
    assert str(Device.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "arch", "family"),
    [
        ("sm_90", "sm_90", "sm_9x"),
        ("sm_121a", "sm_121", "sm_12x"),
        ("cuda:sm_103", "sm_103", "sm_10x"),
        ("cpu:avx2", "cpu", "cpu"),
    ],
)
def test_a_device_knows_its_chip_and_its_family(text, arch, family):
    device = Device.parse(text)
    assert (device.arch, device.family) == (arch, family)


@pytest.mark.parametrize("text", ["", "gpu", "sm_", "sm_9", "cuda:sm_90x", "cpu:sse", "sm_1000"])
def test_an_unknown_device_is_refused_with_what_is_accepted(text):
    with pytest.raises(ConfigError, match="unknown device") as caught:
        Device.parse(text)
    assert repr(text) in str(caught.value) and "sm_90" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("fp32", "bf16", "fp16", "nvfp4", "fp8-tensor", "fp8-channel"),
        *("fp8-block[128x128]", "fp8-block[64x32]", "int4-group[128]"),
    ],
)
def test_weight_formats_round_trip(text):
    assert str(WeightFormat.parse(text)) == text


def test_a_block_format_without_sizes_is_of_128():
    assert WeightFormat.parse("fp8-block") == WeightFormat.parse("fp8-block[128x128]")


@pytest.mark.parametrize("text", ["", "fp9", "fp8", "fp8-block[128]", "fp8-row"])
def test_an_unknown_weight_format_is_refused_with_what_is_accepted(text):
    with pytest.raises(ConfigError, match="unknown weight format") as caught:
        WeightFormat.parse(text)
    assert repr(text) in str(caught.value) and "fp8-block" in str(caught.value)


NAMES = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,3}(\.post[0-9])?", fullmatch=True)
ARCHS = st.lists(st.from_regex(r"sm[0-9]{2,3}[af]?", fullmatch=True), max_size=2).map(tuple)
ERRORS = st.from_regex(r"[A-Za-z]([A-Za-z: ]{0,20}[a-z])?", fullmatch=True)
LIBRARIES = st.one_of(
    st.builds(Lib, NAMES),
    st.builds(Lib, NAMES, VERSIONS, ARCHS),
    st.builds(Lib, NAMES, broken=ERRORS),
)


@given(LIBRARIES)
def test_libraries_round_trip(lib):
    assert parse_lib(str(lib)) == lib


def test_a_library_may_be_pinned_as_pip_does():
    assert parse_lib("flashinfer==0.6.13") == Lib("flashinfer", "0.6.13")


@given(st.permutations([Lib("a", "1"), Lib("b"), Lib("c", broken="x")]))
def test_the_text_of_libraries_does_not_depend_on_their_order(libs):
    assert str(Libs.of(libs)) == "a=1,b,c=broken: x"
    assert Libs.of(libs).get("b") == Lib("b") and Libs.of(libs).get("d") is None


def test_no_libraries_have_a_text_too():
    assert str(Libs()) == "none"


# ---------------------------------------------------------------- wishes that make no sense


@pytest.mark.parametrize("family", sorted(FLAGS))
def test_an_unknown_backend_is_refused_with_the_known_ones_and_the_nearest(family):
    wanted = registry.backend_names(family)[0]
    preferences = KernelPreferences(backends=((family, wanted + "x"),))
    with pytest.raises(ConfigError, match="unknown backend") as caught:
        make_policy(preferences, {})
    text = str(caught.value)
    assert FLAGS[family] in text and f"did you mean {wanted}?" in text
    assert all(name in text for name in registry.backend_names(family))


@pytest.mark.parametrize("text", ["triton", "=triton", "*.down_proj"])
def test_a_kernel_wish_without_a_pattern_or_a_backend_says_its_form(text):
    with pytest.raises(ConfigError, match="PATTERN=BACKEND") as caught:
        policy_of(f"--kernel {text}")
    assert repr(text) in str(caught.value)


def test_a_kernel_wish_for_an_unknown_backend_is_refused():
    with pytest.raises(ConfigError, match="did you mean cutlass"):
        policy_of("--kernel *.down_proj=cutlas")


def test_variables_with_backend_names_are_checked_too():
    for variable in ("VLLM_LINEAR_BACKEND", "VLLM_NVFP4_GEMM_BACKEND"):
        with pytest.raises(ConfigError, match=variable):
            make_policy(KernelPreferences(), {variable: "cutlas"})


@pytest.mark.parametrize("spelling", ["deep_gemm", "DeepGEMM", "deep-gemm", "DEEPGEMM"])
def test_backends_are_known_in_every_usual_spelling(spelling):
    policy = policy_of(f"--linear-backend {spelling}")
    assert [override.backend for override in policy.overrides] == ["deep_gemm"]


def test_a_kernel_wish_means_every_family_that_has_the_backend():
    policy = policy_of("--kernel model.*=triton")
    assert {o.family for o in policy.overrides} == set(registry.FAMILIES)


@pytest.mark.parametrize("device", DEVICES)
def test_without_wishes_a_policy_asks_for_nothing(device):
    policy = policy_of("-", "llama", device)
    assert policy.overrides == policy.exclusions == ()
