"""Every declared kernel is the choice for something: none is there for nothing."""

from dataclasses import replace
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace

import pytest
from selection_cases import (
    DEVICES,
    FORMATS,
    LIBS,
    ask,
    attention,
    delta_rule,
    kv_quant,
    linear,
    mamba2,
    moe,
    parse_device,
)

from vllm.formats.act_scheme import ActScheme
from vllm.kernels import registry
from vllm.kernels.default_order import DEFAULT_ORDER, DEVICE_ORDER
from vllm.kernels.registry import FAMILIES
from vllm.kernels.select.policy import Override, Policy
from vllm.kernels.select.reason import Origin
from vllm.kernels.select.select import select
from vllm.kernels.select.spec import STORED, UP_FIRST, KernelSpec
from vllm.machine import CHIPS, Device, Libs

ALL_SPECS = [spec for family in registry.FAMILIES for spec in registry.specs(family)]

# Kernels that something always stands before in the default order: they are for people who ask,
# and for splits that were measured.
ONLY_BY_WISH = {
    ("linear", "cutlass", "fp8-channel"),
    ("linear", "skinny", "fp8-block"),
    ("linear", "skinny", "fp8-channel"),
    ("linear", "flashinfer-trtllm", "fp8-block"),
    ("linear", "flashinfer-trtllm", "nvfp4"),
    ("linear", "emulation", "fp8-block"),
    ("linear", "emulation-ue8m0", "fp8-block"),
}


def name(spec: KernelSpec) -> tuple[str, str, str]:
    """Family, backend and the first of its formats, which tells a backend's kernels apart."""
    return spec.family, spec.backend, min(spec.formats)


def questions():
    """(problem, device, libraries): enough for every kernel to come first somewhere."""
    weights = [*FORMATS, "fp8-block[64x64]"]
    layers = [linear(weight) for weight in weights]
    layers += [linear(weight, n=4080) for weight in FORMATS]
    layers += [linear(weight, m_range=(1, 16)) for weight in ("fp8-block", "fp8-channel", "nvfp4")]
    layers.append(linear("bf16", n=64, k=2048, m_range=(1, 16)))
    w4a8 = (ActScheme.DYNAMIC_TOKEN, ActScheme.NONE)
    layers += [ask_for("int4-group[128]", act=w4a8) for ask_for in (linear, moe)]
    layers += [
        moe(weight, layout=layout) for weight in FORMATS for layout in ("standard", "batched")
    ]
    layers += [attention(cache) for cache in ("bf16", "fp8", "fp32")]
    layers += [kv_quant(cache) for cache in ("bf16", "fp8", "fp32")]
    layers += [kv_quant(cache, dtype=cache) for cache in ("fp16", "fp32")]
    layers += [
        ask_for(dtype=dtype) for ask_for in (delta_rule, mamba2) for dtype in ("bf16", "fp32")
    ]
    # FlashInfer comes with its binaries.
    groups = [
        [lib for lib in LIBS["all"].libs if lib.name.partition("_")[0] == name.partition("_")[0]]
        for name in sorted(lib.name for lib in LIBS["all"].libs)
        if name != "flashinfer_cubin"
    ]
    libs = [
        Libs.of(lib for group in some for lib in group)
        for size in range(len(groups) + 1)
        for some in combinations(groups, size)
    ]
    return product(layers, DEVICES, libs)


@cache
def chosen_by_themselves() -> frozenset[tuple[str, str, str]]:
    """The kernels that come first for some question when nobody wishes for anything."""
    found = set()
    for problem, device, libs in questions():
        decision = ask(problem, device, libs)
        found |= {
            name(spec)
            for spec in registry.specs(problem.family)
            if spec.backend == decision.chosen and problem.format in spec.formats
        }
    return frozenset(found)


def serves_when_forced(spec: KernelSpec) -> bool:
    policy = Policy((Override(spec.family, spec.backend, Origin(2, "--flag")),))
    return any(
        select(problem, parse_device(device), libs, policy, registry.specs(spec.family)).chosen
        == spec.backend
        for problem, device, libs in questions()
        if problem.family == spec.family and problem.format in spec.formats
    )


def test_kernels_can_be_told_apart_by_name():
    assert len({name(spec) for spec in ALL_SPECS}) == len(ALL_SPECS)
    assert set(registry.FAMILIES) == set(FAMILIES)


@pytest.mark.slow
def test_all_but_a_known_few_come_first_somewhere():
    assert {name(spec) for spec in ALL_SPECS} - chosen_by_themselves() == ONLY_BY_WISH


@pytest.mark.parametrize("spec", ALL_SPECS, ids=lambda spec: "/".join(name(spec)))
def test_it_serves_when_asked_for(spec):
    assert serves_when_forced(spec)


def test_a_backend_has_one_kernel_for_a_format():
    for family in registry.FAMILIES:
        taken = [(spec.backend, f) for spec in registry.specs(family) for f in spec.formats]
        assert len(taken) == len(set(taken))


def test_every_kernel_of_a_backend_is_registered():
    modules = set()
    for family in registry.FAMILIES:
        names = registry.backend_names(family)
        assert len(names) == len(set(names))
        for backend in names:
            assert any(spec.backend == backend for spec in registry.specs(family)), backend
        modules |= {registry.backend(backend) for backend in names}
    declared = [spec for module in modules for spec in module.SPECS]
    assert len(declared) == len(ALL_SPECS)


def test_a_layout_that_is_not_shared_is_of_one_backend():
    """Its makers lay a weight out each by itself: two of them would hold it twice."""
    owners = {}
    for spec in ALL_SPECS:
        for layout in spec.weight_layouts:
            owners.setdefault(layout, set()).add(spec.backend)
    assert {STORED, UP_FIRST} <= owners.keys()
    own = {layout: names for layout, names in owners.items() if layout not in (STORED, UP_FIRST)}
    assert len(own) > 2 and all(len(names) == 1 for names in own.values()), own


@pytest.mark.parametrize(("family", "device_family"), DEVICE_ORDER)
def test_the_order_of_a_device_family_has_every_backend_once(family, device_family):
    names = DEVICE_ORDER[family, device_family]
    assert sorted(names) == sorted(DEFAULT_ORDER[family]) and names != DEFAULT_ORDER[family]
    assert device_family in {Device.parse(chip).family for chip in (*CHIPS, "cpu")}
    own = registry.specs(family, device_family)
    assert sorted(map(name, own)) == sorted(map(name, registry.specs(family)))
    assert registry.specs(family, "sm_9x") == registry.specs(family)


@pytest.mark.parametrize("device_family", ["", "sm_10x"])
def test_a_backend_of_a_package_is_preferred_to_the_one_it_names_on_every_chip(device_family):
    (spec,) = (spec for spec in registry.specs("moe") if spec.backend == "cpu")
    added = SimpleNamespace(SPECS=(replace(spec, backend="added"),), BEFORE={"moe": "deep_gemm"})
    registry.register("added", added, "")
    try:
        names = registry.backend_names("moe", device_family)
    finally:
        del registry._own["added"]
        for cached in (registry.backend_names, registry.specs, registry.built):
            cached.cache_clear()
    assert names.index("added") == names.index("deep_gemm") - 1


def test_minimum_versions_are_of_libraries_that_the_table_of_decisions_knows():
    known = {lib.name for lib in LIBS["all"].libs}
    assert {lib for spec in ALL_SPECS for lib, _ in spec.libs} <= known
    assert {lib for spec in ALL_SPECS for _, lib, _ in spec.carries + spec.prebuilt} <= known
