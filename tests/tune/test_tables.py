"""Tables of measured kernels: files, which of them hold here, and those that this build ships."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection_cases import LIBS, ask, linear, moe
from slow import quick

from vllm.config.policy import KernelPreferences, make_policy
from vllm.errors import ConfigError
from vllm.formats.act_scheme import ActScheme
from vllm.kernels import registry
from vllm.kernels.evidence.imported import find_imported
from vllm.kernels.evidence.tables import (
    SHIPPED,
    TOKENS,
    Chip,
    Entry,
    Table,
    find_tables,
    missing_note,
    read_table,
    timings_of,
    user_folder,
    write_table,
    write_whole,
)
from vllm.kernels.report.question import GPUS, chip_of, device_of
from vllm.kernels.report.text_report import expectation_of
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.select.select import select
from vllm.machine import BUILD, Device, Libs
from vllm.platforms.cpu import num_cores
from vllm.platforms.installed import installed_chip, memory_gb_per_s

H100 = GPUS["h100"]
ENTRY = Entry("deep_gemm 0.1.3", "2026-11-22", ((1, 5.25), (64, 7.5)), ((1, 4.0),))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def table(**rows: Entry) -> Table:
    """Of 4096x4096, by backend."""
    return Table(H100, "NVIDIA H100", {linear().size_key: rows})


entries = st.builds(
    Entry,
    st.text(max_size=9),
    st.dates().map(str),
    st.dictionaries(
        st.integers(1, 9999), st.integers(1, 9999).map(lambda n: n / 8), min_size=1
    ).map(lambda us: tuple(sorted(us.items()))),
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), entries, min_size=1))
def test_a_table_comes_back_from_its_file_with_four_digits(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("tables") / "t.json"
    write_table(path, table(**rows))
    again = read_table(path)
    for backend, entry in rows.items():
        found = again.rows[linear().size_key][backend]
        assert (found.version, found.date) == (entry.version, entry.date)
        for (m, us), (own_m, own_us) in zip(found.us, entry.us, strict=True):
            assert m == own_m and us == pytest.approx(own_us, rel=1e-3)
    write_table(path, again)
    assert read_table(path) == again


def test_what_a_table_says_names_its_file_its_chip_and_its_date(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm.kernels.evidence.tables.SHIPPED", tmp_path / "shipped")
    path = user_folder() / "sm_90_132_3352.json"
    write_table(path, table(deep_gemm=ENTRY, cutlass=Entry("", "2027-01-01", ((8, 9.0),))))
    timings = timings_of(find_tables(H100), linear())
    assert timings.source == f"{path} (NVIDIA H100, 2027-01-01)"
    assert timings.tokens == (1, 8, 64)
    # 4.0 and not 5.25: what feeds a layer quantises for a kernel that takes that
    assert dict(timings.us) == {"deep_gemm": (4.0, None, 7.5), "cutlass": (None, 9.0, None)}


def rows(**us: dict[int, float]) -> dict[str, Entry]:
    return {name: Entry("", "2026-11-23", tuple(times.items())) for name, times in us.items()}


@pytest.mark.parametrize(
    ("mine", "tokens", "us"),
    [
        ({"a": {8: 5.0}}, (1, 8, 64), {"a": (1.0, 5.0, 3.0), "b": (4.0, 4.0, 4.0)}),
        # Nobody else was measured for 5: that says nothing against them.
        ({"a": {5: 0.1}}, (1, 8, 64), {"a": (1.0, 2.0, 3.0), "b": (4.0, 4.0, 4.0)}),
        ({"c": {1: 9.0, 64: 9.0}}, (1, 8, 64),
         {"c": (9.0, None, 9.0), "a": (1.0, 2.0, 3.0), "b": (4.0, 4.0, 4.0)}),
        ({"a": {5: 1.0}, "b": {5: 2.0}}, (1, 5, 8, 64),
         {"a": (1.0, 1.0, 2.0, 3.0), "b": (4.0, 2.0, 4.0, 4.0)}),
    ],
)  # fmt: skip
def test_a_row_that_lacks_something_is_filled_up_from_that_of_the_build(
    monkeypatch, tmp_path, mine, tokens, us
):
    shipped = {"a": {1: 1.0, 8: 2.0, 64: 3.0}, "b": {1: 4.0, 8: 4.0, 64: 4.0}}
    monkeypatch.setattr("vllm.kernels.evidence.tables.SHIPPED", tmp_path / "shipped")
    for folder, own in ((user_folder(), mine), (tmp_path / "shipped", shipped)):
        write_table(folder / H100.file_name, table(**rows(**own)))
    timings = timings_of(find_tables(H100), linear())
    assert (timings.tokens, dict(timings.us)) == (tokens, us)
    assert " over " in timings.source


def test_a_row_that_lacks_nothing_is_taken_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr("vllm.kernels.evidence.tables.SHIPPED", tmp_path / "shipped")
    write_table(user_folder() / H100.file_name, table(**rows(a={1: 9.0, 8: 9.0}, b={1: 8.0})))
    write_table(tmp_path / "shipped" / H100.file_name, table(**rows(a={1: 1.0, 8: 2.0})))
    timings = timings_of(find_tables(H100), linear())
    assert dict(timings.us) == {"a": (9.0, 9.0), "b": (8.0, None)}
    assert timings.source.startswith(str(user_folder())) and " over " not in timings.source


@pytest.mark.parametrize(
    ("chip", "holds"),
    [
        (H100, True),
        (Chip(H100.device, 132, 3350), True),  # another driver rounds the clock differently
        (Chip(H100.device, 132), True),
        (Chip(H100.device), True),
        (GPUS["h200"], None),  # the same architecture and multiprocessors
        (Chip(H100.device, 78, 3352), False),
        (Chip(Device.parse("sm_100"), 132, 3352), False),
        (Chip(Device.parse("cpu"), 132), False),
    ],
)
def test_a_table_holds_for_its_multiprocessors_and_memory_alone(chip, holds):
    """holds: None where it is an estimate."""
    write_table(user_folder() / H100.file_name, table(deep_gemm=ENTRY))
    found = [not t.is_near for t in find_tables(chip) if t.source.startswith("/")]
    assert found == ([] if holds is False else [bool(holds)])


def test_what_was_measured_on_a_chip_with_other_memory_is_an_estimate_that_says_so(monkeypatch):
    monkeypatch.setattr("vllm.kernels.evidence.tables.SHIPPED", user_folder())
    write_table(user_folder() / H100.file_name, table(deep_gemm=ENTRY))
    h200 = GPUS["h200"]
    assert "; another chip" in timings_of(find_tables(h200), linear()).source
    note = missing_note(h200)
    assert "cuda:sm_90, 132 SMs, 4814 GB/s" in note and H100.file_name in note
    assert "estimates" in note and not missing_note(H100)
    assert "the default order holds" in missing_note(Chip(H100.device, 78, 4000))
    assert not missing_note(Chip(Device.parse("sm_80")))
    stale = Entry("deep_gemm 0.0", "2026-11-21", ENTRY.us)
    write_table(user_folder() / h200.file_name, Table(h200, "", {linear().size_key: {"a": stale}}))
    timings = timings_of(find_tables(h200), linear(), {"a": "deep_gemm 0.1"})
    assert "another chip" not in timings.source and timings.stale and not missing_note(h200)


def test_a_cpu_counts_its_cores_and_a_gpu_its_memory():
    assert installed_chip(Device("cpu")) == Chip(Device("cpu"), num_cores())
    # An H200's clock in kHz and width of its bus, as its driver said.
    assert memory_gb_per_s(3_201_000, 6016) == GPUS["h200"].memory_gb_per_s


def test_an_architecture_means_the_h100_unless_another_of_its_chips_is_named():
    for name, chip in (("sm_90", H100), ("cuda:sm_90", H100), ("H200", GPUS["h200"])):
        assert chip_of(name, device_of(name)) == chip
    assert chip_of("sm_100", device_of("sm_100")) == Chip(Device.parse("sm_100"))


def test_a_users_row_comes_before_that_of_the_build():
    own = next(table for table in find_tables(H100) if table.chip == H100)
    problem = next(p for p in shipped_problems(own) if isinstance(p, LinearProblem))
    assert timings_of(find_tables(H100), problem).source.startswith(f"tuned/{H100.file_name}")
    mine = Table(H100, "mine", {problem.size_key: {"deep_gemm": ENTRY}})
    write_table(user_folder() / H100.file_name, mine)
    assert "mine" in timings_of(find_tables(H100), problem).source


def test_what_was_measured_with_another_version_says_so_and_yields_to_what_was_not():
    old, new = Entry("lib 1", "2026-11-22", ((8, 9.0),)), Entry("lib 2", "2026-11-23", ((8, 5.0),))
    tables = [table(a=old, b=old), table(a=new, b=old)]
    here = {"a": "lib 2", "b": "lib 1"}
    timings = timings_of(tables, linear(), here)
    assert dict(timings.us) == {"a": (5.0,), "b": (9.0,)} and not timings.stale
    timings = timings_of(tables[:1], linear(), here)
    assert timings.stale == (("a", "lib 1", "lib 2"),)
    assert timings.source.endswith("; a in another version)")
    # What is not here is no reason to doubt what was measured.
    assert not timings_of(tables[:1], linear(), {"c": "lib 3"}).stale


def test_a_row_holds_for_problems_of_its_size_alone():
    own = table(deep_gemm=ENTRY)
    assert own.timings(linear()) is not None and own.timings(linear(bias=True)) is not None
    assert own.timings(linear(parts=(2048, 1024, 1024))) is not None
    assert own.timings(linear(parts=(4000, 96))) is None  # with partial scale blocks
    assert own.timings(moe()) is None and own.timings(linear(dtype="fp16")) is None
    assert own.timings(linear(act=(ActScheme.NONE,))) is None
    experts = Table(H100, "", {moe().size_key: {"triton": ENTRY}})
    assert experts.timings(moe()) is not None
    for changes in ({"cut_experts": 8}, {"layout": "batched"}, {"intermediate": 192, "cut": 4}):
        assert experts.timings(moe(**changes)) is None
    batched = moe(layout="batched")
    assert Table(H100, "", {batched.size_key: {"triton": ENTRY}}).timings(batched) is None


@pytest.mark.parametrize(
    ("problem", "size_key"),
    [
        (linear(), "fp8-block[128x128]:4096x4096 bf16 dynamic-group128,none"),
        (moe(), "fp8-block[128x128]:256x512x2048x8 bf16 dynamic-group128,none"),
        (moe(intermediate=256, cut=2),
         "fp8-block[128x128]:256x256x2048x8 bf16 dynamic-group128,none"),
        (moe(cut_experts=4), "fp8-block[128x128]:256/4x512x2048x8 bf16 dynamic-group128,none"),
        (moe(intermediate=64, cut=8),
         "fp8-block[128x128]:256x64x2048x8 bf16 dynamic-group128,none, "
         "padded to 128x2048, refined to 64x64 blocks"),
        (linear(n=128, k=2048, parts=(64, 64), cut_n=8),
         "fp8-block[128x128]:128x2048 bf16 dynamic-group128,none, "
         "padded to 256x2048, refined to 64x128 blocks"),
    ],
)  # fmt: skip
def test_a_size_key_says_what_speed_depends_on(problem, size_key):
    assert problem.size_key == size_key
    path = user_folder() / H100.file_name
    write_table(path, Table(H100, "", {size_key: {"deep_gemm": ENTRY}}))
    assert timings_of([read_table(path)], problem) is not None


def test_tokens_of_experts_that_ranks_share_are_timed_as_floats():
    whole = moe(intermediate=256)
    experts = Table(H100, "", {whole.size_key: {"triton": ENTRY}})
    assert experts.timings(whole).us == (("triton", (4.0, 7.5)),)
    assert experts.timings(replace(whole, cut=2)).us == (("triton", (5.25, 7.5)),)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"rows": {}}', "{", '{"device": "sm_9"}',
     '{"device": "sm_90", "num_sms": 132, "name": "", "rows": []}'],
)  # fmt: skip
def test_a_broken_file_is_set_aside_with_its_name(text, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    path = user_folder() / H100.file_name
    write_table(path, table(deep_gemm=ENTRY))
    before = find_tables(H100)
    path.write_text(text)
    assert find_tables(H100) == before[1:]
    assert f"{path} is broken" in caplog.text
    assert path.with_name(f"{path.name}.broken").read_text() == text and not path.exists()


def test_a_file_of_an_earlier_version_keeps_no_engine_from_starting():
    size_key = linear().size_key.rpartition(" ")[0]
    write_table(user_folder() / "sm_90_132.json", Table(H100, "", {size_key: {"a": ENTRY}}))
    path = user_folder() / "sm_90_132.json"
    content = json.loads(path.read_text())
    del content["memory_gb_per_s"]
    path.write_text(json.dumps(content))
    first = find_tables(H100)[0]
    assert first.source == str(path) and first.timings(linear()) is None


def test_processes_that_write_one_file_at_once_leave_one_of_theirs(tmp_path):
    path, texts = tmp_path / "file.json", [str(i) * 10**6 for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write_whole, [path] * 64, texts * 8))
    assert path.read_text() in texts and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("us", [0, -1, "fast", None, True, float("nan")])
def test_times_that_are_none_are_refused(us):
    path = user_folder() / H100.file_name
    write_table(path, table(deep_gemm=ENTRY))
    content = json.loads(path.read_text())
    content["rows"][linear().size_key]["deep_gemm"]["us"]["1"] = us
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        read_table(path)


@pytest.mark.parametrize(
    ("name", "is_measured"),
    [
        ("RTX PRO 6000", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("sm_120", True),
        ("RTX 5090", False),
        ("RTX 5080", False),
        ("L40S", True),
        ("L40", True),
        ("L4", False),
        ("RTX 4090", False),
    ],
)
def test_what_others_measured_holds_for_the_gpu_that_a_name_means(name, is_measured):
    """An architecture's GPUs differ in their multiprocessors."""
    tables = find_imported(chip_of(name, device_of(name)), "linear")
    assert bool(tables) is is_measured and not any(table.is_near for table in tables)


def test_files_of_chips_and_cpus_have_names_of_their_own():
    names = {Chip(Device.parse(d), 8).file_name for d in ("sm_90", "sm_100", "cpu", "cpu:avx2")}
    assert names == {"sm_90_8.json", "sm_100_8.json", "cpu_8.json", "cpu-avx2_8.json"}
    assert len({chip.file_name for chip in GPUS.values()}) == len(GPUS)


# ---------------------------------------------------------------- what this build ships

SHIPPED_FILES = sorted(SHIPPED.glob("*.json"))
_WITHOUT = {
    "all": (),
    "no deep_gemm": ("deep_gemm",),
    "no flashinfer": ("flashinfer",),
    "only ours": ("deep_gemm", "flashinfer"),
}


def libs_without(names) -> Libs:
    kept = [lib for lib in LIBS["all"].libs if lib.name not in names]
    return Libs.of([*kept, registry.built()])


def shipped_problems(own: Table):
    for size_key in own.rows:
        yield problem_of(size_key)


def problem_of(size_key: str):
    """Some problem of this size; of partial blocks one of a built-in model."""
    if "padded" in size_key:
        names = *_MODELS, "Qwen3-235B-A22B-FP8"
        problems = models_on_h100(1, 2, 4, 8, names=names)
        return next(problem for problem in problems if problem.size_key == size_key)
    weight, _, rest = size_key.partition(":")
    sizes, dtype, schemes = rest.split(" ")
    experts, _, ranks = sizes.partition("x")[0].partition("/")
    numbers = [int(size) for size in (experts, *sizes.split("x")[1:])]
    act = tuple(map(ActScheme, schemes.split(",")))
    if len(numbers) == 2:
        return linear(weight, n=numbers[0], k=numbers[1], dtype=dtype, act=act)
    names = ("num_experts", "intermediate", "hidden", "top_k")
    sizes = dict(zip(names, numbers))
    return moe(weight.partition("[")[0], dtype=dtype, act=act, cut_experts=int(ranks or 1), **sizes)


@pytest.mark.parametrize(
    "problem",
    [
        linear(),
        moe(),
        moe(cut_experts=8),
        moe(intermediate=64, cut=8),
        moe(num_experts=128, hidden=4096, intermediate=192, cut=8),
        linear("bf16", n=64),
    ],
)
def test_a_size_key_says_which_problem_it_is_of(problem):
    assert problem_of(problem.size_key).size_key == problem.size_key


def test_what_a_norm_quantises_counts_for_layers_after_one():
    problem = linear()
    after_attention = replace(problem, comes_quantised=False)
    own = table(deep_gemm=ENTRY)
    assert own.timings(problem).us == (("deep_gemm", (4.0, 7.5)),)
    assert own.timings(after_attention).us == (("deep_gemm", (5.25, 7.5)),)


def test_layers_after_attention_are_known_by_their_names():
    from vllm.formats.readers.registry import resolve_quantization
    from vllm.kernels.problems import layer_problems
    from vllm.kernels.report.model_files import find_model

    for model in ("Qwen3-8B-FP8", "Qwen3.5-35B-A3B-FP8"):
        config = find_model(model).config
        quant = resolve_quantization(config["quantization_config"], None, model)
        problems = layer_problems(config, quant, dtype="bf16", kv_format="bf16", tp=1)
        after = {
            name.rpartition(".")[2]
            for name, problem in problems
            if isinstance(problem, LinearProblem) and not problem.comes_quantised
        }
        assert after == ({"o_proj", "out_proj"} if "3.5" in model else {"o_proj"})


def test_files_are_named_after_the_chip_and_its_sms():
    assert SHIPPED_FILES
    for path in SHIPPED_FILES:
        own = read_table(path)
        assert path.name == own.chip.file_name
        assert {problem.size_key for problem in shipped_problems(own)} == set(own.rows)
        for row in own.rows.values():
            assert set(row) <= set(registry.backend_names("linear"))


def models_on_h100(*ranks: int, names=()):
    from vllm.formats.readers.registry import resolve_quantization
    from vllm.kernels.problems import layer_problems
    from vllm.kernels.report.model_files import find_model

    for model in names or _MODELS:
        config = find_model(model).config
        quant = resolve_quantization(config["quantization_config"], None, model)
        for tp in ranks:
            for _, problem in layer_problems(config, quant, dtype="bf16", kv_format="bf16", tp=tp):
                if getattr(problem, "weight", None) and problem.weight.is_quantized:
                    yield problem


def layers_on_h100(*ranks: int) -> set[LinearProblem]:
    return {problem for problem in models_on_h100(*ranks) if isinstance(problem, LinearProblem)}


_MODELS = ("Qwen3-8B-FP8", "Qwen3-30B-A3B-FP8", "Qwen3.5-35B-A3B-FP8", "Devstral-Small-2-24B")
_FORMATS = {
    "fp8-block": {"deep_gemm", "cutlass", "skinny"},
    "fp8-tensor": {"scaled_mm"},
    "fp8-channel": {"scaled_mm"},
}


def test_every_fp8_layer_of_the_models_is_measured_on_the_h100():
    tables = find_tables(H100)
    for problem in layers_on_h100(1, 2):
        timings = timings_of(tables, problem)
        assert timings is not None, str(problem)
        assert _FORMATS[problem.format] <= {name for name, _ in timings.us}, str(problem)
        assert set(timings.tokens) == set(TOKENS)


def test_on_one_h100_measurements_choose_among_our_kernels_for_every_layer():
    libs = libs_without(_WITHOUT["only ours"])
    tables = find_tables(H100)
    problems = {p for p in layers_on_h100(1) if p.format == "fp8-block"}
    assert len(problems) >= 10
    for problem in problems:
        timings = timings_of(tables, problem)
        decision = ask(problem, "90", libs, timings=timings)
        assert decision.origin.rank == 6, str(problem)
        assert expectation_of(decision).worst_regret <= 0.10, str(problem)


@pytest.mark.parametrize("without", quick(_WITHOUT, [*_WITHOUT][:1]))
def test_regret_is_3_percent_on_average_and_12_at_worst(without):
    """Of the kernels chosen, against the fastest that can run: over shapes and token counts."""
    logs, worst = [], {}
    for own in map(read_table, SHIPPED_FILES):
        for problem in shipped_problems(own):
            specs = registry.specs(problem.family)
            policy = make_policy(KernelPreferences(), {})
            decision = select(
                problem, own.chip.device, libs_without(_WITHOUT[without]), policy, specs,
                evidence=own.timings(problem),
            )  # fmt: skip
            choice = expectation_of(decision)
            if choice is None:
                continue  # what serves it then, nobody has measured
            logs.append(log(1 + choice.mean_regret))
            worst[str(problem)] = choice.worst_regret
    assert exp(sum(logs) / len(logs)) - 1 <= 0.03
    assert max(worst.values()) <= 0.12, worst


def test_the_libraries_of_these_tests_say_what_is_built():
    assert libs_without(()).get(BUILD) is not None
    assert ask(linear(), "90", libs_without(("deep_gemm",))).chosen == "cutlass"


def test_estimates_of_two_chips_are_not_mixed():
    one, other = (
        Table(GPUS[chip], "", {linear().size_key: {name: ENTRY}}, chip, is_near=True)
        for chip, name in (("h100", "a"), ("h200", "b"))
    )
    timings = timings_of((one, other), linear())
    assert [name for name, _ in timings.us] == ["a"] and " over " not in timings.source


def test_what_is_stale_in_two_tables_is_told_once():
    old, here = Entry("lib 1", "2026-11-22", ((8, 9.0),)), {"a": "lib 2", "b": "lib 2"}
    stale = timings_of([table(a=old), table(a=old, b=old)], linear(), here).stale
    assert stale == (("a", "lib 1", "lib 2"), ("b", "lib 1", "lib 2"))


@pytest.mark.parametrize(
    ("theirs", "alike"), [("cpu", True), ("cpu:avx2", True), ("cpu:avx512", False)]
)
def test_a_table_of_a_cpu_holds_for_its_instructions(theirs, alike):
    ours = Chip(Device.parse("cpu:avx2"), 8)
    assert ours.is_like(Chip(Device.parse(theirs), 8)) == alike
