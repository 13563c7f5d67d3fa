"""Tables of measured kernels: files, which of them hold here, and those that this build ships."""

import json
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st
from selection_cases import LIBS, ask, linear, moe

from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.policy import Wishes, make_policy
from vllm.kernels.problem import LinearProblem
from vllm.kernels.render import expectation_of
from vllm.kernels.select import select
from vllm.kernels.spec import BUILD, Device, Libs
from vllm.kernels.tune_table import (
    SHIPPED,
    TOKENS,
    Entry,
    Table,
    file_name,
    find_tables,
    read_table,
    timings_of,
    user_folder,
    write_table,
)

H100 = Device.parse("sm_90")
ENTRY = Entry("deep_gemm 0.1.3", "2026-11-22", ((1, 5.25), (64, 7.5)), ((1, 4.0),))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))


def table(**rows: Entry) -> Table:
    """Of 4096x4096, by backend."""
    return Table(H100, 132, "NVIDIA H100", {linear().size_key: rows})


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


def test_what_a_table_says_names_its_file_its_chip_and_its_date():
    path = user_folder() / "sm_90_132.json"
    write_table(path, table(deep_gemm=ENTRY, cutlass=Entry("", "2027-01-01", ((8, 9.0),))))
    timings = timings_of(find_tables(H100, 132), linear())
    assert timings.source == f"{path} (NVIDIA H100, 2027-01-01)"
    assert timings.tokens == (1, 8, 64)
    # 4.0 and not 5.25: what feeds a layer quantises for a kernel that takes that
    assert dict(timings.us) == {"deep_gemm": (4.0, None, 7.5), "cutlass": (None, 9.0, None)}


def test_a_table_holds_for_its_chip_and_number_of_sms_alone():
    write_table(user_folder() / "sm_90_132.json", table(deep_gemm=ENTRY))
    own = [t for t in find_tables(H100, 132) if t.source.startswith("/")]
    assert len(own) == 1 == len([t for t in find_tables(H100, None) if t.source.startswith("/")])
    assert not find_tables(H100, 78) and not find_tables(Device.parse("sm_100"), 132)
    assert not find_tables(Device.parse("cpu"), 132)


def test_a_users_row_comes_before_that_of_the_build():
    own = find_tables(H100, 132)[-1]
    problem = next(p for p in shipped_problems(own) if isinstance(p, LinearProblem))
    size_key = problem.size_key
    assert timings_of(find_tables(H100, 132), problem).source.startswith("tuned/sm_90_132.json")
    own = Table(H100, 132, "mine", {size_key: {"deep_gemm": ENTRY}})
    write_table(user_folder() / file_name(H100, 132), own)
    assert "mine" in timings_of(find_tables(H100, 132), problem).source


def test_problems_that_a_size_does_not_describe_are_in_no_table():
    own = table(deep_gemm=ENTRY)
    assert own.timings(linear()) is not None and own.timings(linear(bias=True)) is not None
    assert own.timings(linear(parts=(2048, 1024, 1024))) is not None
    assert own.timings(linear(parts=(4000, 96))) is None  # a scale block is cut
    assert own.timings(moe()) is None and own.timings(linear(dtype="fp16")) is None
    experts = Table(H100, 132, "", {moe().size_key: {"triton": ENTRY}})
    assert experts.timings(moe()) is not None
    for changes in ({"cut_experts": 8}, {"layout": "batched"}, {"intermediate": 192, "cut": 4}):
        assert experts.timings(moe(**changes)) is None


@pytest.mark.parametrize("text", ["", "[]", '{"rows": {}}', "{", '{"device": "sm_9"}'])
def test_a_broken_file_is_refused_with_its_name_and_what_to_do(text):
    path = user_folder() / "sm_90_132.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match="delete it") as error:
        find_tables(H100, 132)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("us", [0, -1, "fast", None, True, float("nan")])
def test_times_that_are_none_are_refused(us):
    path = user_folder() / "sm_90_132.json"
    write_table(path, table(deep_gemm=ENTRY))
    content = json.loads(path.read_text())
    content["rows"][linear().size_key]["deep_gemm"]["us"]["1"] = us
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError):
        read_table(path)


def test_files_of_chips_and_cpus_have_names_of_their_own():
    names = {file_name(Device.parse(d), 8) for d in ("sm_90", "sm_100", "cpu", "cpu:avx2")}
    assert names == {"sm_90_8.json", "sm_100_8.json", "cpu_8.json", "cpu-avx2_8.json"}


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
        weight, _, rest = size_key.partition(":")
        sizes, dtype = rest.split(" ")
        numbers = [int(size) for size in sizes.split("x")]
        if len(numbers) == 2:
            yield linear(weight, n=numbers[0], k=numbers[1], dtype=dtype)
        else:
            names = ("num_experts", "intermediate", "hidden", "top_k")
            yield moe(dtype=dtype, **dict(zip(names, numbers)))


def test_files_are_named_after_the_chip_and_its_sms():
    assert SHIPPED_FILES
    for path in SHIPPED_FILES:
        own = read_table(path)
        assert path.name == file_name(own.device, own.num_sms)
        for row in own.rows.values():
            assert set(row) <= set(registry.backend_names("linear"))


def models_on_h100():
    from vllm.kernels.layers import layer_problems
    from vllm.kernels.question import read_model
    from vllm.model_executor.layers.quantization import resolve_quantization

    for model in ("Qwen3-8B-FP8", "Qwen3-30B-A3B-FP8", "Qwen3.5-35B-A3B-FP8"):
        config = read_model(model)
        quant = resolve_quantization(config["quantization_config"], None, model)
        for tp in (1, 2):
            for _, problem in layer_problems(config, quant, dtype="bf16", kv_format="bf16", tp=tp):
                if isinstance(problem, LinearProblem) and problem.format == "fp8-block":
                    yield problem


@pytest.mark.xfail(strict=True, reason="vllm kernels tune has run for two of the sizes so far")
def test_every_fp8_block_layer_of_the_models_is_measured_on_the_h100():
    tables = find_tables(H100, 132)
    for problem in set(models_on_h100()):
        timings = timings_of(tables, problem)
        assert timings is not None, str(problem)
        assert {"deep_gemm", "cutlass", "skinny"} <= {name for name, _ in timings.us}
        assert set(timings.tokens) == set(TOKENS)


@pytest.mark.parametrize("without", _WITHOUT)
def test_regret_is_3_percent_on_average_and_10_at_worst(without):
    """Of the kernels chosen, against the fastest that can run: over shapes and token counts."""
    logs, worst = [], {}
    for own in map(read_table, SHIPPED_FILES):
        for problem in shipped_problems(own):
            specs = registry.specs(problem.family)
            policy = make_policy(Wishes(), {}, "llama", own.device)
            decision = select(
                problem, own.device, libs_without(_WITHOUT[without]), policy, specs,
                timings=own.timings(problem),
            )  # fmt: skip
            choice = expectation_of(decision)
            if choice is None:
                continue  # what serves it then, nobody has measured
            logs.append(log(1 + choice.mean_regret))
            worst[str(problem)] = choice.worst_regret
    assert exp(sum(logs) / len(logs)) - 1 <= 0.03
    assert max(worst.values()) <= 0.10, worst


def test_the_libraries_of_these_tests_say_what_is_built():
    assert libs_without(()).get(BUILD) is not None
    assert ask(linear(), "90", libs_without(("deep_gemm",))).chosen == "cutlass"
