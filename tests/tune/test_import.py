"""`vllm kernels import`: what it reads, what it refuses, and what it makes of it."""

import sys
from pathlib import Path
from statistics import median

import pytest
from tune.imports import (
    COMMIT,
    DEEP_GEMM,
    LINEAR,
    gemm_row,
    moe_row,
    of_checkout,
    write_csv,
    write_parquet,
)

from vllm.entrypoints.cli.main import main
from vllm.kernels.evidence.imported import BALANCED, ImportedTable, read_imported
from vllm.kernels.evidence.importing.kernels import KERNELS, kernel_of
from vllm.kernels.evidence.importing.sources import SYSTEMS

GEMM, MOE = "b200_sxm_gemm.parquet", "b200_sxm_moe.parquet"
NAMED = ("--commit", COMMIT, "--date", "2026-11-24")


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """run(*words) -> (exit code, stdout, stderr), reading `in` and writing `out`."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))

    def run_import(*words: str) -> tuple[int, str, str]:
        folders = ("--from", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
        code = main(["kernels", "import", *folders, *words])
        return code, *capsys.readouterr()

    return run_import


@pytest.fixture
def refused(run, tmp_path):
    """refused(*words) -> the one line that says why; nothing is written."""

    def run_refused(*words: str) -> str:
        code, _, err = run(*(words or NAMED))
        assert code == 2, err
        assert not (tmp_path / "out").exists()
        (line,) = err.splitlines()
        return line

    return run_refused


def imported(folder: Path, name: str = "sm_100_moe.json.gz") -> ImportedTable:
    return read_imported(folder / "out" / name)


def sizes_of(table: ImportedTable, backend: str) -> dict[str, str]:
    return table.kinds[0].by_backend[backend]


# ---------------------------------------------------------------- what is read


def test_times_are_filed_under_the_backend_that_calls_the_same_kernel(run, tmp_path):
    rows = [moe_row(40.25), moe_row(60, DEEP_GEMM), moe_row(55.5, num_tokens=16)]
    rows.append(moe_row(70, "sglang 0.5.14: sglang_fused_moe_triton"))
    write_parquet(tmp_path / "in" / MOE, rows)
    code, out, err = run(*NAMED)
    assert code == 0, err
    assert "1 tables" in out and "4 rows, 0 of them left out" in out
    table = imported(tmp_path)
    (kind,) = table.kinds
    assert (kind.format, kind.activation, kind.routing) == ("fp8-block", "silu", BALANCED)
    assert kind.tokens == (8, 16)
    assert kind.by_backend == {
        "deep_gemm": {"4096x1536x8x128/1": "60 -"},
        "flashinfer-trtllm": {"4096x1536x8x128/1": "40.2 55.5"},
    }
    assert kind.peers == {"sglang-triton": {"4096x1536x8x128/1": "70 -"}}
    assert (table.commit, table.licence) == (COMMIT, "Apache-2.0")
    assert table.derived == "2026-11-24 by vllm kernels import --from in"


def test_a_checkout_gives_the_same_table_as_the_thinned_form(run, tmp_path):
    rows = [
        *(moe_row(us, num_tokens=m) for m, us in ((1, 30), (4, 44.5), (64, 90))),
        *(moe_row(us, DEEP_GEMM, num_tokens=m) for m, us in ((1, 50), (4, 60), (64, 80))),
    ]
    write_parquet(tmp_path / "in" / MOE, rows)
    run(*NAMED)
    thinned = (tmp_path / "out" / "sm_100_moe.json.gz").read_bytes()
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    # What the thinned form does not have, in both layouts that checkouts had.
    extra = [moe_row(99, num_tokens=3), moe_row(99, num_tokens=32768), moe_row(99, moe_tp_size=16)]
    extra += [moe_row(99, distribution="power_law_1.01")]
    data = tmp_path / "in" / "src" / "data" / "b200_sxm"
    write_parquet(
        data / "moe" / "sglang" / "0.5.14" / "moe_perf.parquet",
        of_checkout([*rows[:3], *extra], "moe_dtype"),
    )
    write_csv(data / "trtllm" / "1.3.0rc20" / "moe_perf.txt", of_checkout(rows[3:], "moe_dtype"))
    # An older version of a framework, and a system that no table is made of.
    write_csv(
        data / "trtllm" / "1.3.0rc5" / "moe_perf.txt",
        of_checkout([moe_row(5, "trtllm 1.3.0rc5: deepgemm")], "moe_dtype"),
    )
    write_csv(
        data.parent / "gb200" / "trtllm" / "1.3.0rc20" / "moe_perf.txt",
        of_checkout(rows[3:], "moe_dtype"),
    )
    code, out, err = run(*NAMED)
    assert code == 0, err
    assert "left out: gb200" in out
    assert (tmp_path / "out" / "sm_100_moe.json.gz").read_bytes() == thinned


def test_the_same_bytes_come_out_twice(run, tmp_path):
    write_parquet(tmp_path / "in" / MOE, [moe_row(40), moe_row(60, DEEP_GEMM)])
    found = []
    for _ in range(2):
        run(*NAMED)
        found.append((tmp_path / "out" / "sm_100_moe.json.gz").read_bytes())
    assert found[0] == found[1]


def test_the_commit_is_the_one_that_the_readme_names(run, tmp_path):
    write_parquet(tmp_path / "in" / MOE, [moe_row(40)])
    (tmp_path / "in" / "README.md").write_text(f"AIConfigurator, commit {COMMIT}, 2026-08-21\n")
    assert run("--date", "2026-11-24")[0] == 0
    assert imported(tmp_path).commit == COMMIT


def test_rows_that_came_twice_give_the_median(run, tmp_path):
    times = [40.0, 44.0, 90.0]
    write_parquet(tmp_path / "in" / MOE, [moe_row(us) for us in times])
    run(*NAMED)
    (text,) = sizes_of(imported(tmp_path), "flashinfer-trtllm").values()
    assert float(text) == median(times)


def test_ranks_shares_are_sizes_of_their_own(run, tmp_path):
    rows = [moe_row(40), moe_row(30, moe_tp_size=4), moe_row(20, moe_ep_size=8)]
    write_parquet(tmp_path / "in" / MOE, rows)
    run(*NAMED)
    assert sizes_of(imported(tmp_path), "flashinfer-trtllm") == {
        "4096x384x8x128/1": "30",
        "4096x1536x8x128/1": "40",
        "4096x1536x8x128/8": "20",
    }


def test_experts_without_a_gate_are_kept_apart(run, tmp_path):
    """By the label of TensorRT-LLM, which holds for others too, and by sizes that are known."""
    size = {"dtype": "nvfp4", "hidden_size": 1024, "inter_size": 512}
    nemotron = {"hidden_size": 2688, "inter_size": 1856, "topk": 6, "dtype": "nvfp4"}
    rows = [
        moe_row(30, "trtllm 1.3.0rc20: moe_torch_flow_nongated", **size),
        moe_row(20, **size),
        moe_row(25, **nemotron, moe_tp_size=2),
        moe_row(40, dtype="nvfp4"),
    ]
    write_parquet(tmp_path / "in" / MOE, rows)
    run(*NAMED)
    kinds = {kind.activation: kind for kind in imported(tmp_path).kinds}
    assert set(kinds["silu"].by_backend["flashinfer-trtllm"]) == {"4096x1536x8x128/1"}
    assert set(kinds["relu2"].by_backend) == {"flashinfer-trtllm", "flashinfer-cutlass"}
    assert set(kinds["relu2"].by_backend["flashinfer-trtllm"]) == {
        "1024x512x8x128/1",
        "2688x928x6x128/1",
    }


def test_times_with_a_fault_rank_nothing(run, tmp_path):
    label = "vllm 0.24.0: DeepGemmFp8BlockScaledMMKernel"
    rows = [
        gemm_row(20, DEEP_GEMM, dtype="fp8_block"),
        gemm_row(40, "sglang 0.5.14: sglang_deepgemm_gemm_nt_f8f8bf16", dtype="fp8_block"),
        gemm_row(180, label, dtype="fp8_block", m=2048),
        gemm_row(180, label, dtype="fp8_block", m=512),  # host time alone
    ]
    for system in ("b200_sxm", "h100_sxm"):
        write_parquet(tmp_path / "in" / f"{system}_gemm.parquet", rows)
    run(*NAMED)
    (kind,) = imported(tmp_path, "sm_100_linear.json.gz").kinds
    assert kind.by_backend == {"deep_gemm": {"4096x4096": "20 -"}}
    assert kind.peers["vllm-deep_gemm"] == {"4096x4096": "- 180"}
    # On Hopper SGLang's is the same kernel, timed well.
    (hopper,) = imported(tmp_path, "sm_90_132_3352_linear_check.json.gz").kinds
    assert {one.measured_by for one in hopper.series if one.backend == "deep_gemm"} == {
        "SGLang 0.5.14",
        "TensorRT-LLM 1.3.0rc20",
    }


def test_the_framework_with_most_sizes_speaks_for_a_kernel(run, tmp_path):
    by_vllm = "vllm 0.24.0: vllm_fp8moe_flashinfer_trtllm_x"
    rows = [
        moe_row(40),
        moe_row(30, moe_tp_size=2),
        moe_row(99, by_vllm),
        moe_row(9, by_vllm, topk=4),
    ]
    rows.append(moe_row(41, num_tokens=16))
    write_parquet(tmp_path / "in" / MOE, [*rows, moe_row(31, moe_tp_size=4)])
    run(*NAMED)
    assert sizes_of(imported(tmp_path), "flashinfer-trtllm") == {
        "4096x384x8x128/1": "31 -",
        "4096x768x8x128/1": "30 -",
        "4096x1536x8x128/1": "40 41",
        "4096x1536x4x128/1": "9 -",
    }


def test_the_error_is_how_far_frameworks_disagree_on_one_kernel(run, tmp_path):
    by_vllm = "vllm 0.24.0: torch.nn.functional.linear"
    sizes = [128 * i for i in range(1, 31)]
    rows = [
        *(gemm_row(20, LINEAR, n=n, m=m) for n in sizes for m in (8, 512)),
        *(gemm_row(22, by_vllm, n=n, m=8) for n in sizes),
        *(gemm_row(26, by_vllm, n=n, m=512) for n in sizes),
    ]
    write_parquet(tmp_path / "in" / GEMM, rows)
    run(*NAMED)
    (kind,) = imported(tmp_path, "sm_100_linear.json.gz").kinds
    # 22 / 20 and 26 / 20; where there are no pairs, the worst of the others.
    assert kind.error == (0.3, 0.1, 0.3, 0.3, 0.3)
    assert kind.at((128, 4096)).error == (0.1, 0.3)


def test_two_calls_by_one_framework_are_no_disagreement(run, tmp_path):
    calls = [f"vllm 0.24.0: vllm_fp8moe_flashinfer_trtllm_{name}" for name in ("modular", "whole")]
    rows = [
        moe_row(20 * (i + 1), call, hidden_size=128 * n)
        for i, call in enumerate(calls)
        for n in range(1, 31)
    ]
    write_parquet(tmp_path / "in" / MOE, rows)
    run(*NAMED)
    (kind,) = imported(tmp_path).kinds
    assert kind.error == (0.2,) * 5  # nothing is known


def test_an_estimate_compares_kernels_at_the_same_sizes(run, tmp_path):
    """DeepGEMM lacks a token count of the nearer size, whose time would favour the other."""
    rows = [
        *(moe_row(10, hidden_size=4096, num_tokens=m) for m in (8, 16)),
        *(moe_row(40, hidden_size=8192, num_tokens=m) for m in (8, 16)),
        moe_row(20, DEEP_GEMM, hidden_size=4096, num_tokens=8),
        *(moe_row(80, DEEP_GEMM, hidden_size=8192, num_tokens=m) for m in (8, 16)),
    ]
    write_parquet(tmp_path / "in" / MOE, rows)
    run(*NAMED)
    times = imported(tmp_path).kinds[0].at((4608, 1536, 8, 128, 1))
    for lead in times.leads():
        assert (lead.backend, lead.lead) == ("flashinfer-trtllm", pytest.approx(1.0, abs=0.01))


# ---------------------------------------------------------------- labels


def test_every_label_is_listed_with_its_rows_and_its_reason(run, tmp_path):
    rows = [moe_row(40), moe_row(41, num_tokens=16), moe_row(60, "sglang 0.6: sglang_new_moe")]
    rows.append(moe_row(50, dtype="int4_wo"))
    write_parquet(tmp_path / "in" / MOE, rows)
    code, out, _ = run("--plan")
    assert code == 0 and not (tmp_path / "out").exists()
    lines = [line.strip() for line in out.splitlines()]
    assert "fp8-block       2 rows  SGLang 0.5.14: sglang_flashinfer_trtllm_moe" in lines
    assert "flashinfer-trtllm: FlashInfer's TensorRT-LLM kernels, which ours calls" in lines
    unknown = lines[lines.index("fp8-block       1 rows  SGLang 0.6: sglang_new_moe") + 1]
    assert unknown.startswith("left out: unknown")
    # It is named where it is left out, and what nobody decided is never in a table.
    code, out, _ = run(*NAMED)
    assert code == 0 and "sglang_new_moe" in out and "2 of them left out" in out
    assert [one.label for one in imported(tmp_path).kinds[0].series] == [
        "sglang_flashinfer_trtllm_moe"
    ]


def test_no_label_has_two_meanings():
    for known in KERNELS:
        label = known.label.replace("*", "x")
        for weight_format in known.formats:
            for system in SYSTEMS.values():
                arch = system.chip.device.arch
                found = kernel_of(known.framework, label, known.family, weight_format, arch)
                assert found == known or known.chips != "*", (known, found)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf"), None])
def test_a_time_that_is_none_is_refused(refused, tmp_path, value):
    path = write_parquet(tmp_path / "in" / MOE, [moe_row(40), moe_row(value), moe_row(41)])
    assert f"{path}: row 2: us = " in refused()


@pytest.mark.parametrize("value", [0, -4, 2.5, None])
def test_a_size_that_is_none_is_refused(refused, tmp_path, value):
    path = write_parquet(tmp_path / "in" / GEMM, [gemm_row(), gemm_row(n=value)])
    assert f"{path}: row 2: n = " in refused()


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_another_unit_is_noticed(refused, tmp_path, factor):
    path = write_parquet(tmp_path / "in" / MOE, [moe_row(100 * factor)])
    line = refused()
    assert str(path) in line and "'us' is not in microseconds" in line


def test_a_missing_column_is_named_with_those_that_are_there(refused, tmp_path):
    row = {key: value for key, value in moe_row(40).items() if key != "moe_ep_size"}
    write_parquet(tmp_path / "in" / MOE, [row])
    line = refused()
    assert "no column 'moe_ep_size'; it has source, dtype, num_tokens" in line


def test_a_truncated_file_is_named(refused, tmp_path):
    path = write_parquet(tmp_path / "in" / MOE, [moe_row(40)])
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} is not readable as Parquet" in refused()


def test_one_broken_file_writes_nothing_of_the_others(refused, tmp_path):
    write_parquet(tmp_path / "in" / GEMM, [gemm_row()])
    (tmp_path / "in" / MOE).write_bytes(b"PAR1")
    assert MOE in refused()


def test_a_file_without_rows_is_named(refused, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    path = write_parquet(tmp_path / "in" / MOE, [moe_row(40)])
    parquet.write_table(pa.Table.from_pylist([moe_row(40)]).slice(0, 0), path)
    assert f"{path}: it has no rows" in refused()


def test_an_unknown_chip_is_refused_with_those_that_are_known(refused, tmp_path):
    write_parquet(tmp_path / "in" / "b200_sxn_moe.parquet", [moe_row(40)])
    line = refused()
    assert "unknown chip 'b200_sxn'" in line and "did you mean b200_sxm?" in line


def test_a_source_of_another_form_is_refused(refused, tmp_path):
    write_parquet(tmp_path / "in" / MOE, [moe_row(40, source="deepgemm")])
    assert "source 'deepgemm' is not 'framework version: kernel'" in refused()


@pytest.mark.parametrize("name", ["moe_perf.txt", "moe_perf.parquet"])
def test_a_pointer_of_git_lfs_is_recognised(refused, tmp_path, name):
    path = tmp_path / "in" / "data" / "b200_sxm" / "sglang" / "0.5.14" / name
    path.parent.mkdir(parents=True)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{path} is a pointer of Git LFS: run git lfs pull" in refused()


def test_an_empty_folder_is_refused_with_what_is_expected(refused, tmp_path):
    assert "there is no such folder" in refused()
    (tmp_path / "in").mkdir()
    assert "it has no <system>_gemm.parquet" in refused()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--date", "2026-11-24"), "give --commit"),
        (("--commit", "main"), "--commit 'main': it takes the 40 digits"),
        (("--commit", COMMIT, "--date", "today"), "--date 'today': it takes YYYY-MM-DD"),
        (("--system", "b200"), "--system 'b200': it takes b200_sxm"),
        ((*NAMED, "--system", "l40s"), "the folder has no measurements of it"),
    ],
)
def test_wrong_arguments_are_refused(refused, tmp_path, words, text):
    write_parquet(tmp_path / "in" / MOE, [moe_row(40)])
    assert text in refused(*words)


def test_without_pyarrow_the_extra_is_named(refused, tmp_path, monkeypatch):
    write_parquet(tmp_path / "in" / MOE, [moe_row(40)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs pyarrow" in (line := refused()) and "vllm[import]" in line


# ---------------------------------------------------------------- --check


@pytest.mark.slow
def test_the_check_prints_what_choosing_costs(run):
    code, out, err = run("--check", "--system", "b300_sxm")
    assert code == 0, err
    lines = out.splitlines()
    start = lines.index("fp8-block silu balanced: deep_gemm, flashinfer-trtllm; 240 sizes")
    chosen = lines[start + 3 : start + 6]
    assert [line.partition(", worst")[0] for line in chosen] == [
        f"  chosen / fastest {mean}" for mean in ("1.003", "1.011", "1.017")
    ]
    assert "nothing left out" in chosen[0] and "whole models left out" in chosen[2]
    assert any(line.endswith("reached by 1.003") for line in lines[start:])
    assert any("bf16 faster than quantised, by one framework" in line for line in lines)
