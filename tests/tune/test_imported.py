"""Kernel times that others measured: what the shipped tables say of a problem."""

import gzip
import json
import os
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from selection_cases import linear, moe
from slow import quick
from slowness import slowness

from vllm.errors import ConfigError
from vllm.formats.act_scheme import ActScheme
from vllm.kernels import registry
from vllm.kernels.evidence import imported
from vllm.kernels.evidence.imported import (
    BALANCED,
    BANDS,
    NUM_NEAR,
    SHIPPED,
    SKEWED,
    find_imported,
    first_times,
    parse_size,
    place_in_tables,
    read_imported,
    size_text,
    times_text,
)
from vllm.kernels.evidence.importing.check import (
    against_ours,
    compared,
    num_shapes,
    slower_than_bf16,
)
from vllm.kernels.evidence.importing.held_out import GOAL, Chooser, held_out
from vllm.kernels.evidence.importing.kernels import KERNELS
from vllm.kernels.evidence.importing.sources import SYSTEMS
from vllm.kernels.evidence.importing.text import check_lines
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.splits import Timings
from vllm.kernels.evidence.tables import SHIPPED as OURS
from vllm.kernels.evidence.tables import Chip, Entry, Table, read_table
from vllm.kernels.report.question import libs_of
from vllm.kernels.select.grade import Grade
from vllm.machine import Device

B200, B300 = SYSTEMS["b200_sxm"].chip, SYSTEMS["b300_sxm"].chip
TRTLLM, TRITON = "sglang_flashinfer_trtllm_moe", "sglang_fused_moe_triton"
# Qwen3-235B-A22B's experts, which both frameworks measured.
MEASURED = {"num_experts": 128, "top_k": 8, "hidden": 4096, "intermediate": 1536}
# DeepSeek-V2-Lite's, which nobody did.
NOT_MEASURED = {"num_experts": 64, "top_k": 6, "hidden": 2048, "intermediate": 1408}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def table(chip: Chip, family: str = "moe") -> imported.ImportedTable:
    (found,) = (found for found in find_imported(chip, family) if not found.is_near)
    return found


def imported_times(chip: Chip, problem, routing: str = BALANCED) -> imported.ImportedTimes | None:
    """Of the tables of `chip` that choices may follow."""
    tables = find_imported(chip, problem.family, alone_ranking=True)
    return first_times(tables, problem, routing)


def split_of(times: imported.ImportedTimes):
    able = tuple((name, None) for name, _ in times.us)
    return Timings(times.source, times.tokens, times.us).best_split(able, (1, 16384))


# ---------------------------------------------------------------- what the tables say


def rows_of(chip: Chip, weight_format: str) -> tuple[int, dict[str, tuple]]:
    kinds = [
        kind
        for kind in table(chip).kinds
        if kind.format == weight_format and kind.routing == BALANCED
    ]
    return num_shapes(kinds), {one.label: one.ratios for one in compared(kinds)}


@pytest.mark.parametrize(
    ("system", "weight_format", "shapes", "label", "ratios"),
    [
        ("b200_sxm", "fp8-block", 4530, TRTLLM, (1.01, 1.01, 1.02, 1.10, 1.61)),
        ("b200_sxm", "fp8-block", 4530, "deepgemm", (1.55, 1.29, 1.20, 1.10, 1.02)),
        ("b200_sxm", "fp8-block", 4530, TRITON, (1.23, 1.25, 1.28, 1.49, 2.45)),
        ("b200_sxm", "nvfp4", 5400, TRTLLM, (1.01, 1.04, 1.04, 1.06, 1.07)),
        ("b200_sxm", "nvfp4", 5400, "moe_torch_flow_cutlass", (2.36, 2.21, 1.90, 1.63, 1.57)),
        ("rtx_pro_6000_server", "fp8-block", 3705, TRITON, (1.02, 1.01, 1.00, 1.00, 1.00)),
    ],
)  # fmt: skip
def test_geometric_means_are_those_of_the_measurements(
    system, weight_format, shapes, label, ratios
):
    """As a README beside the measurements gives them, of files with all digits."""
    num, found = rows_of(SYSTEMS[system].chip, weight_format)
    assert num == shapes
    assert found[label] == pytest.approx(ratios, abs=0.006)


@pytest.mark.parametrize("chip", [B200, B300], ids=["B200", "B300"])
@pytest.mark.parametrize("routing", [BALANCED, SKEWED])
def test_fp8_experts_are_split_between_trtllm_and_deep_gemm(chip, routing):
    times = imported_times(chip, moe(**MEASURED), routing)
    (limit, few), (rest, many) = split_of(times)
    assert (few, many, rest) == ("flashinfer-trtllm", "deep_gemm", None)
    assert limit in ((128, 256) if routing == BALANCED else (64, 128))


@pytest.mark.parametrize(
    ("ranks", "limit"), [({}, 256), ({"cut": 2}, 256), ({"cut": 4}, 2048)], ids=str
)
def test_the_limit_grows_as_a_rank_has_less_of_an_expert(ranks, limit):
    """DeepSeek-V3's experts over more and more tensor-parallel ranks."""
    size = {"num_experts": 256, "top_k": 8, "hidden": 7168}
    problem = moe(**size, intermediate=2048 // ranks.get("cut", 1), **ranks)
    parts = split_of(imported_times(B200, problem))
    assert parts == ((limit, "flashinfer-trtllm"), (None, "deep_gemm"))


@pytest.mark.parametrize("chip", [B200, B300], ids=["B200", "B300"])
@pytest.mark.parametrize("sizes", [MEASURED, NOT_MEASURED], ids=["measured", "near"])
def test_nvfp4_experts_go_to_trtllm(chip, sizes):
    times = imported_times(chip, moe("nvfp4", **sizes))
    assert split_of(times) == ((None, "flashinfer-trtllm"),)
    clear = [lead.backend for lead in times.leads() if lead.is_clear]
    assert len(clear) > len(times.tokens) / 2 and set(clear) == {"flashinfer-trtllm"}


def test_the_fastest_has_a_lead_over_the_next_and_is_clear_beyond_the_error():
    times = imported_times(B200, moe(**MEASURED))
    us = dict(times.us)
    for lead, error, *both in zip(
        times.leads(), times.error, us["flashinfer-trtllm"], us["deep_gemm"]
    ):
        assert lead.lead == pytest.approx(max(both) / min(both) - 1)
        assert lead.is_clear == (lead.lead > error)
    assert {lead.is_clear for lead in times.leads()} == {True, False}


def test_the_tensor_parallel_half_of_a_size_is_what_was_measured_with_two_ranks():
    whole = imported_times(B200, moe(**MEASURED))
    half = imported_times(B200, moe(**{**MEASURED, "intermediate": 768}, cut=2))
    assert (whole.sizes, half.sizes) == (("4096x1536x8x128/1",), ("4096x768x8x128/1",))
    assert half.distance == 0 and max(dict(half.us)["deep_gemm"]) < max(dict(whole.us)["deep_gemm"])
    apart = imported_times(B200, moe(**MEASURED, cut_experts=4))
    assert apart.sizes == ("4096x1536x8x128/4",)


# ---------------------------------------------------------------- near sizes


def test_a_size_that_nobody_measured_is_estimated_from_near_ones():
    times = imported_times(B200, moe(**NOT_MEASURED))
    assert 0 < times.distance <= imported.MAX_DISTANCE and len(times.sizes) == NUM_NEAR
    assert "estimated from" in times.source and "AIConfigurator" in times.source
    near = [dict(at(size).us)["deep_gemm"] for size in times.sizes]
    own = dict(times.us)["deep_gemm"]
    for column, us in zip(zip(*near), own):
        assert min(column) * 0.5 < us < max(column) * 2
    # The error of the estimate comes on top.
    exact = imported_times(B200, moe(**MEASURED))
    assert all(a > b for a, b in zip(times.error, exact.error))


def at(size: str) -> imported.ImportedTimes:
    return table(B200).kind("fp8-block", "silu", BALANCED).at(parse_size(size))


def test_a_size_far_from_all_has_no_times():
    assert imported_times(B200, moe(num_experts=4, top_k=4, hidden=64, intermediate=64)) is None


def test_twice_the_weights_take_more_time_but_not_twice_as_much():
    kind = table(B200).kind("fp8-block", "silu", BALANCED)
    (one,) = kind.near((4096, 1536, 8, 128, 1))
    near = kind.near((4096, 1536, 8, 128, 1), skip=lambda size: size == (4096, 1536, 8, 128, 1))
    assert one.scale == 1 and near[0].distance > 0
    for other in near:
        weights = imported.num_weights((4096, 1536, 8, 128, 1))
        ratio = weights / imported.num_weights(parse_size(other.text))
        assert other.scale == pytest.approx(ratio**0.5)
    assert all(a.pull >= b.pull for a, b in pairwise(near))


def test_both_backends_are_estimated_from_the_same_sizes():
    kind = table(B200).kind("fp8-block", "silu", BALANCED)
    only_one = next(
        size
        for size in map(parse_size, kind.by_backend["flashinfer-trtllm"])
        if size_text(size) not in kind.by_backend["deep_gemm"]
    )
    times = kind.at(only_one)
    assert len(times.us) == 2 and size_text(only_one) not in times.sizes
    assert all(None not in us for _, us in times.us)


@pytest.mark.parametrize("routing", [BALANCED, SKEWED])
@pytest.mark.parametrize("chip", quick([B200, B300], [B200]), ids=str)
def test_what_is_chosen_for_experts_costs_little(chip, routing):
    """Of the fastest, for sizes that were measured, for others and for models that nobody did."""
    libs = libs_of("all", chip.device)

    def chosen(weight_format):
        kind = table(chip).kind(weight_format, "silu", routing)
        return held_out(kind, Chooser(chip.device, libs, kind))

    own, single, model, *fixed = chosen("fp8-block")
    assert own.num_sizes == 240 and not own.num_unknown
    assert own.mean <= 1.01 and single.mean <= 1.02 and model.mean <= 1.02
    assert own.reaches_goal and model.reaches_goal and GOAL == 1.05
    assert max(own.mean, model.mean) < min(one.mean for one in fixed)
    nvfp4, *_ = chosen("nvfp4")
    assert nvfp4.reaches_goal and not nvfp4.num_unknown and nvfp4.mean <= 1.02


def test_a_chosen_kernel_that_nobody_measured_is_named():
    """No kernel takes FP8 experts without libraries but ours, of which nobody knows a time."""
    kind = table(B200).kind("fp8-block", "silu", BALANCED)
    own, *fixed = held_out(kind, Chooser(B200.device, libs_of("none", B200.device), kind))
    assert own.chosen == ("cutlass",) and own.num_unknown == own.num_sizes
    assert not own.is_known and not own.reaches_goal
    assert all("always" in one.how or "up to" in one.how for one in fixed)


@pytest.mark.slow
def test_a_check_says_whether_the_goal_is_reached():
    libs = libs_of("all", B200.device)
    lines = list(check_lines(table(B200), (), libs))
    goals = [line for line in lines if "goal" in line]
    assert len([line for line in goals if "reached by 1.0" in line]) == 4  # with both routings
    at = lines.index("nvfp4 silu balanced: flashinfer-cutlass, flashinfer-trtllm; 202 sizes")
    own = "\n".join(lines[at : at + 12])
    assert "nothing left out" in own and "goal" in own
    # What no kernel here computes.
    assert any("not measured: no kernel" in line for line in lines)
    # Those of a chip that we measure decide nothing.
    h100 = SYSTEMS["h100_sxm"].chip
    assert not any("goal" in line for line in check_lines(table(h100), (), libs))


# ---------------------------------------------------------------- what is not answered


@pytest.mark.parametrize(
    "problem",
    [
        moe(layout="batched"),
        moe(activation="gelu"),
        moe(intermediate=500),
        moe(dtype="fp16"),
        moe(act=(ActScheme.NONE,)),
        moe("int4-group[128]"),
        linear("fp8-tensor"),
        linear("nvfp4"),
        linear(n=960, parts=(576, 192, 192), cut_n=32),
    ],
    ids=str,
)
def test_a_problem_that_others_did_not_measure_has_no_times(problem):
    assert imported_times(B200, problem) is None


@pytest.mark.parametrize("system", ["h100_sxm", "h200_sxm"])
def test_nothing_ranks_by_them_where_we_measure(system):
    chip = SYSTEMS[system].chip
    assert imported_times(chip, moe(**MEASURED)) is None
    assert table(chip).times(moe(**MEASURED)) is not None


def test_a_measurement_of_another_size_takes_nothing_from_the_imported_ones():
    problem = moe(**MEASURED)
    entry = Entry("torch 2.13.0", "2026-11-24", ((1, 3.0), (8192, 9.0)))
    own = Table(B200, "B200").with_entry(linear("bf16", n=8, k=8).size_key, "torch", entry)
    assert Known((own,), (), B200).evidence(problem) == Known((), (), B200).evidence(problem)
    assert Known((own,), (), B200).evidence(problem).grade is Grade.IMPORTED


def test_chips_are_told_apart():
    rtx_5090 = Chip(Device.parse("sm_120"), 170)
    assert imported_times(SYSTEMS["rtx_pro_6000_server"].chip, moe("nvfp4")) is not None
    assert imported_times(rtx_5090, moe("nvfp4")) is None
    assert imported_times(Chip(Device.parse("cpu")), moe()) is None
    other_memory = replace(SYSTEMS["l40s"].chip, memory_gb_per_s=960)
    assert "another chip" in imported_times(other_memory, linear("bf16")).source


def test_peers_rank_nothing():
    times = imported_times(B200, moe(num_experts=256, top_k=8, hidden=4096, intermediate=2048))
    assert {name for name, _ in times.us} == {"flashinfer-trtllm", "deep_gemm"}
    assert {name for name, _ in times.peers} == {"sglang-triton"}
    assert all(len(us) == len(times.tokens) for _, us in (*times.us, *times.peers))


# ---------------------------------------------------------------- the tables as files


def test_every_table_names_its_source_and_is_small():
    paths = sorted(SHIPPED.glob("*.json.gz"))
    assert len(paths) == 2 * len(SYSTEMS)
    assert sum(path.stat().st_size for path in paths) < 2_000_000
    notice = (SHIPPED.parents[3] / "NOTICE").read_text()
    for path in paths:
        found = read_imported(path)
        assert path.name == imported.file_name(found.chip, found.family, found.ranks)
        assert (found.project, found.licence) == ("AIConfigurator", "Apache-2.0")
        assert found.commit in notice
        date, _, command = found.derived.partition(" by ")
        assert date in notice and command in notice


def test_every_backend_is_one_of_ours_and_every_kernel_has_a_reason():
    for kernel in KERNELS:
        assert kernel.why
        assert not kernel.backend or kernel.backend in registry.backend_names(kernel.family)
    for path in SHIPPED.glob("*.json.gz"):
        found = read_imported(path)
        for kind in found.kinds:
            assert set(kind.by_backend) <= set(registry.backend_names(found.family))
            assert not any(one.backend and one.fault for one in kind.series)
            assert len(kind.error) == len(BANDS) and min(kind.error) > 0


def test_times_have_three_digits():
    assert times_text([7.1234, 12.345, 999.6, 1234.5, None]) == "7.12 12.3 1000 1230 -"
    assert imported.parse_times("7.12 1230 -") == (7.12, 1230.0, None)


def test_a_broken_table_is_named_and_set_aside(tmp_path):
    folder = tmp_path / "kernel_tables" / imported.FOLDER
    folder.mkdir(parents=True)
    whole = (SHIPPED / "sm_100_moe.json.gz").read_bytes()
    path = folder / "sm_100_moe.json.gz"
    for content in (whole[:1000], b"{}", whole[:20] + b"\0" * 50):
        path.write_bytes(content)
        read_imported.cache_clear()
        with pytest.raises(ConfigError, match=rf"{path} is no table .* vllm kernels import"):
            read_imported(path)
        imported_times(B200, moe(**MEASURED))
        assert not path.exists() and path.with_name(f"{path.name}.broken").exists()
    read_imported.cache_clear()


def test_a_table_of_the_user_comes_first(tmp_path):
    folder = tmp_path / "kernel_tables" / imported.FOLDER
    folder.mkdir(parents=True)
    own = folder / "sm_100_moe.json.gz"
    os.link(SHIPPED / own.name, own)
    first, second = find_imported(B200, "moe")
    assert (first is read_imported(own), second is read_imported(SHIPPED / own.name)) == (
        True,
        True,
    )


def test_reading_and_asking_take_less_than_20_ms():
    def seconds() -> float:
        read_imported.cache_clear()
        imported.parse_times.cache_clear()
        start = time.perf_counter()
        imported_times(B200, moe(**NOT_MEASURED))
        imported_times(B200, linear("bf16", n=5000))
        return time.perf_counter() - start

    # Half as much again: decompressing does not slow down as the yardstick does.
    assert min(seconds() for _ in range(5)) < 0.02 * 1.5 * slowness()


# ---------------------------------------------------------------- other checks


def test_cases_where_bf16_is_faster_than_fp8_are_listed():
    found, num_compared = slower_than_bf16(table(B200))
    assert 0 < len(found) < num_compared / 2
    assert all(one.us > one.bf16_us for one in found)
    assert [one.ratio for one in found] == sorted((one.ratio for one in found), reverse=True)
    names = {(one.format, one.name) for one in found}
    # A single token reads no more than its experts: quantising it is what counts.
    assert ("fp8-block", "flashinfer-trtllm") in names
    assert not any("min-latency" in name for _, name in names)
    layers, _ = slower_than_bf16(table(B200, "linear"))
    assert {one.name for one in layers if one.format == "fp8-block"} == {"deep_gemm"}


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        (linear(n=5120, k=2048), ((None, "deep_gemm"),)),
        (moe(num_experts=256, hidden=2048, intermediate=512), ((None, "flashinfer-trtllm"),)),
        (
            moe(num_experts=256, hidden=2048, intermediate=512),
            ((1024, "flashinfer-trtllm"), (None, "deep_gemm")),
        ),
    ],
    ids=["linear", "experts", "split"],
)
def test_a_layer_that_is_faster_in_bf16_is_among_the_listed_cases(problem, parts):
    """At its worst, by the library that serves so many tokens."""
    found = Known(chip=B200).faster_in_bf16(problem, parts)
    assert found is not None and found.worst_tokens in found.tokens
    assert len(found.tokens) <= found.num_compared
    cases, _ = slower_than_bf16(table(B200, problem.family))
    _, size = place_in_tables(problem, BALANCED)
    by_tokens = {}
    for one in cases:
        is_asked = (one.size, one.format) == (size, "fp8-block") and one.routing in ("", BALANCED)
        limits = [limit for limit, name in parts if name == one.name]
        if is_asked and limits and one.tokens <= min(limits[0] or 8192, 8192):
            by_tokens.setdefault(one.tokens, []).append(one.ratio)
    assert found.tokens == tuple(sorted(m for m, own in by_tokens.items() if max(own) > 1.03))
    assert found.ratio in by_tokens[found.worst_tokens]


def test_nothing_is_said_of_bf16_where_it_was_not_compared():
    known, parts = Known(chip=B200), ((None, "deep_gemm"),)
    assert known.faster_in_bf16(linear("bf16", n=5120, k=2048), parts) is None
    assert known.faster_in_bf16(linear(n=5136, k=2048), parts) is None  # nobody measured that size
    assert known.faster_in_bf16(linear(n=5120, k=2048), ((None, "cutlass"),)) is None
    # Tables of chips that we measure are a cross-check of the import alone.
    h100 = SYSTEMS["h100_sxm"].chip
    assert Known(chip=h100).faster_in_bf16(linear(n=5120, k=2048), parts) is None


def test_what_we_measured_too_agrees_with_the_imported_times():
    """DeepGEMM of an H100: ours, with quantisation, over SGLang's. Every band within 20 %."""
    ours = read_table(OURS / "sm_90_132_3352.json")
    found = against_ours(table(SYSTEMS["h100_sxm"].chip, "linear"), ours)
    (one,) = [each for each in found if each.name == "deep_gemm / deep_gemm"]
    assert one.num_shapes > 200
    assert all(0.83 < ratio < 1.2 for ratio in one.ratios)


@pytest.mark.parametrize(
    ("sizes", "is_compared"),
    [("128x768x2048x8", True), ("128/4x768x2048x8", True), ("128x96x2048x8, padded", False)],
)
def test_rows_of_experts_per_rank_are_compared_with_those_of_others(sizes, is_compared):
    """Each with times of its own number of ranks."""
    h100 = table(SYSTEMS["h100_sxm"].chip, "moe")
    sizes, comma, padded = sizes.partition(",")
    size_key = f"fp8-block[128x128]:{sizes} bf16 dynamic-group128,none{comma}{padded}"
    entry = Entry("", "2026-11-24", ((16, 100.0), (64, 200.0)))
    ours = Table(SYSTEMS["h100_sxm"].chip, "", {size_key: {"triton": entry}})
    found = against_ours(h100, ours)
    assert bool(found) == is_compared
    assert all(one.num_shapes for one in found)


def test_a_table_is_json():
    content = json.loads(gzip.decompress((SHIPPED / "sm_100_moe.json.gz").read_bytes()))
    assert content["source"]["url"] == "https://github.com/ai-dynamo/aiconfigurator"
    kernel = content["kinds"][0]["kernels"][0]
    assert {"measured_by", "label", "name", "backend", "why", "fault", "us"} == set(kernel)
