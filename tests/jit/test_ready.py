"""What is compiled before the first request, what is not, and who serves until it is."""

import gc
import os
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from compilers import Compiler, Library
from machines import STAND_INS, Gpu, machine
from selection_cases import LIBS, ask, linear, moe, timed

from vllm.kernels.activations import KernelWhenReady
from vllm.kernels.jit.compiled_call import CompiledCall
from vllm.kernels.jit.ready import (
    NVCC,
    Needed,
    ReadySizes,
    WarmUp,
    compiler_of,
    needed_calls,
    num_compilers,
    ready_sizes,
    stand_in,
)
from vllm.machine import Libs
from vllm.worker.first_calls import token_counts

SIZES = (16, 32, 64, 128, 192)
BEST = {"deep_gemm": (1, 8192), "cutlass": (1, 0)}


@pytest.fixture
def libraries(tmp_path):
    """Makes libraries that start without a kernel in nvcc_cache."""

    def make(name: str, **options) -> Library:
        folder = tmp_path / f"library{len(os.listdir(tmp_path))}"
        folder.mkdir()
        return Library(folder, name=name, **options)

    return make


def warm_up(tmp_path, patch, seconds: float = 0.0) -> tuple[Compiler, WarmUp]:
    compiler = Compiler(tmp_path / "cuda", seconds=seconds)
    return compiler, WarmUp(compiler.nvcc_cache(tmp_path / "store", patch), "1.0 on chip")


def make_ready(warm: WarmUp, needed: list[Needed], seconds: float) -> None:
    warm.begin(needed)
    warm.finish(seconds)


def unloadable(library: Library, name: str) -> CompiledCall:
    """Calls of which one compiles and does not load."""

    def run(size: int) -> None:
        library.run(size)
        if size == 32:
            raise RuntimeError("the driver is too old for it")

    return CompiledCall(name, SIZES, run)


# ---------------------------------------------------------------- before the first request


def test_each_distinct_kernel_is_compiled_once_and_loaded(tmp_path, monkeypatch, libraries):
    compiler, warm = warm_up(tmp_path, monkeypatch)
    library = libraries("once")
    make_ready(warm, [Needed(library.call(SIZES), must_wait=True)], 60)
    assert compiler.num_runs == 3 and library.loaded.keys() == {16, 32, 64}
    assert [c.compiler for c in warm.compiled] == [NVCC] * 3
    assert all(ready_sizes("once")(size) for size in (1, 16, 17, 64, 65, 192))
    assert not ready_sizes("once")(193)


def test_kernels_are_compiled_side_by_side(tmp_path, monkeypatch, libraries):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    compiler, warm = warm_up(tmp_path, monkeypatch, seconds=1.0)
    calls = [Needed(libraries(f"beside{i}").call(SIZES), True) for i in range(2)]
    begin = time.monotonic()
    make_ready(warm, calls, 60)
    assert compiler.num_runs == 6 and time.monotonic() - begin < 5.5


def test_compilers_take_half_of_the_cores_and_fit_into_memory():
    assert [num_compilers(cores, 64 << 30) for cores in (1, 2, 16, 224)] == [1, 1, 8, 64]
    assert num_compilers(16, 1 << 20) == 1


def test_a_start_with_everything_compiled_compiles_nothing(tmp_path, monkeypatch, libraries):
    compiler, warm = warm_up(tmp_path, monkeypatch)
    make_ready(warm, [Needed(libraries("warm").call(SIZES), True)], 60)
    again, library = WarmUp(warm.nvcc_cache, warm.library), libraries("warm")
    make_ready(again, [Needed(library.call(SIZES), True)], 60)
    assert compiler.num_runs == 3 and not again.compiled
    assert library.num_calls == 3  # one to load each kernel, none to learn which


def test_what_is_not_ready_in_time_is_compiled_meanwhile(tmp_path, monkeypatch, libraries):
    compiler, warm = warm_up(tmp_path, monkeypatch, seconds=0.5)
    make_ready(warm, [Needed(libraries("late").call(SIZES), must_wait=False)], 1e-3)
    is_ready = ready_sizes("late")
    assert not is_ready(1)
    deadline = time.monotonic() + 20
    while len(warm.compiled) < 3 and time.monotonic() < deadline:
        assert not is_ready(1)  # between steps alone
        time.sleep(0.01)
    warm.promote()
    assert is_ready(1) and not is_ready(192)  # one at a time: a step waits for it
    for _ in range(3):
        warm.promote()
    assert is_ready(1) and is_ready(192) and compiler.num_runs == 3


def test_a_kernel_that_is_compiled_late_and_does_not_load_never_serves(
    tmp_path, monkeypatch, libraries, caplog
):
    call = unloadable(libraries("late and unloadable"), "late and unloadable")
    _, warm = warm_up(tmp_path, monkeypatch, seconds=0.2)
    make_ready(warm, [Needed(call, must_wait=False)], 1e-3)
    deadline = time.monotonic() + 20
    while len(warm.compiled) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    for _ in range(4):
        warm.promote()
    is_ready = ready_sizes("late and unloadable")
    assert [is_ready(size) for size in (16, 32, 64)] == [True, False, True]
    assert "the driver is too old for it" in caplog.text


def test_what_nothing_stands_in_for_is_waited_for(tmp_path, monkeypatch, libraries):
    _, warm = warm_up(tmp_path, monkeypatch, seconds=0.2)
    library = libraries("must")
    make_ready(warm, [Needed(library.call(SIZES), must_wait=True)], 1e-3)
    assert library.loaded.keys() == {16, 32, 64}


def test_a_kernel_that_does_not_compile_is_never_ready(tmp_path, monkeypatch, libraries):
    _, warm = warm_up(tmp_path, monkeypatch)
    library = libraries("partly", broken=(32,))
    make_ready(warm, [Needed(library.call(SIZES), must_wait=False)], 60)
    assert [ready_sizes("partly")(size) for size in (16, 32, 64)] == [True, False, True]
    alone = libraries("alone", broken=(32,))
    with pytest.raises(RuntimeError, match="NVCC compilation failed"):
        make_ready(WarmUp(warm.nvcc_cache, "1.0"), [Needed(alone.call(SIZES), must_wait=True)], 60)


@pytest.mark.parametrize("content", ["", "[]", '{"source": "another", "arguments": []}'])
def test_a_start_does_not_wait_for_what_cannot_be_compiled(
    tmp_path, monkeypatch, libraries, content
):
    _, warm = warm_up(tmp_path, monkeypatch)
    library = libraries("damaged")
    planned = warm.nvcc_cache.plan(library.call(SIZES), warm.library)
    for path in (warm.nvcc_cache.folder / "recipes").iterdir():
        path.write_text(content)
    needed = [Needed(library.call(SIZES), must_wait=True)]
    start = threading.Thread(target=make_ready, args=(warm, needed, 60), daemon=True)
    start.start()
    start.join(20)
    assert not start.is_alive() and library.loaded.keys() == {16, 32, 64}
    assert all(map(warm.nvcc_cache.has, planned.values()))  # as the library had them compiled


def test_a_kernel_that_does_not_load_is_never_ready(tmp_path, monkeypatch, libraries, caplog):
    call = unloadable(libraries("unloadable"), "unloadable")
    _, warm = warm_up(tmp_path, monkeypatch)
    make_ready(warm, [Needed(call, must_wait=False)], 60)
    assert [ready_sizes("unloadable")(size) for size in (16, 32, 64)] == [True, False, True]
    assert "the driver is too old for it" in caplog.text
    with pytest.raises(RuntimeError, match="too old"):
        make_ready(WarmUp(warm.nvcc_cache, "1.0"), [Needed(call, must_wait=True)], 60)


# ---------------------------------------------------------------- what is needed


def test_only_the_tokens_that_a_part_serves_are_planned_for():
    timings = timed(cutlass=(1, 64), deep_gemm=(65, 8192), skinny=(1, 0))
    decision = ask(linear(), "90", timings=timings)
    assert decision.chosen == "cutlass<=64|deep_gemm"
    (needed,) = needed_calls([decision, decision], 300)
    assert needed.call.sizes == (128, 192, 256, 320) and not needed.must_wait
    assert needed_calls([decision], 64) == []


def test_every_number_of_tokens_up_to_the_most_has_a_size():
    decision = ask(linear(), "90", "all", "--linear-backend deep_gemm")
    (needed,) = needed_calls([decision], 8192)
    assert needed.must_wait and needed.call.sizes[:4] == (16, 32, 64, 128)
    assert needed.call.sizes[-1] == 8192 and len(needed.call.sizes) == 130
    (odd,) = needed_calls([decision], 2049)
    assert odd.call.sizes[-1] == 2112


def test_experts_are_planned_by_rows_of_both_products():
    with machine(Gpu(90), STAND_INS):
        pytest.importorskip("triton")
        decision = ask(moe(), "90", "all", "VLLM_MOE_USE_DEEP_GEMM=1")
        names = [needed.call.name for needed in needed_calls([decision], 8192)]
    assert len(names) == len(set(names)) and sum("masked" in name for name in names) == 4


def test_a_layer_that_asks_for_a_kernel_is_waited_for_whoever_else_has_its_size():
    alone = ask(linear(), "90", timings=timed(**BEST))
    asked = ask(linear(), "90", "all", "--linear-backend deep_gemm")
    for decisions in ([alone, asked], [asked, alone]):
        (needed,) = needed_calls(decisions, 300)
        assert needed.must_wait


def test_kernels_built_ahead_of_time_need_nothing():
    decision = ask(linear(), "90", "all", "VLLM_USE_DEEP_GEMM=0")
    assert compiler_of(decision, decision.chosen) == "" and needed_calls([decision], 8192) == []


# ---------------------------------------------------------------- who stands in


def test_the_first_kernel_built_ahead_of_time_stands_in():
    decision = ask(linear(), "90", timings=timed(**BEST))
    assert decision.chosen == "deep_gemm"
    assert stand_in(decision, "deep_gemm").backend == "cutlass"


def test_nothing_stands_in_that_would_keep_the_weight_widened():
    without_blocks = Libs.of(replace(lib, archs=()) if lib.name == "torch" else lib
                             for lib in LIBS["no native"].libs)  # fmt: skip
    decision = ask(linear(), "90", without_blocks, timings=timed(**BEST))
    assert decision.chosen == "deep_gemm" and stand_in(decision, "deep_gemm") is None
    others = [c.backend for c in decision.candidates if not c.reasons]
    assert "torch" in others


def test_nothing_stands_in_for_what_was_asked_for():
    forced, permitted = "--linear-backend deep_gemm", "VLLM_USE_DEEP_GEMM=1"
    decision = ask(linear(), "90", "all", forced, timings=timed(**BEST))
    assert decision.chosen == "deep_gemm" and stand_in(decision, "deep_gemm") is None
    decision = ask(linear(), "90", "all", permitted, timings=timed(**BEST))
    assert decision.chosen == "deep_gemm" and stand_in(decision, "deep_gemm").backend == "cutlass"


def test_nothing_stands_in_where_the_weight_would_be_kept_twice():
    decision = ask(linear(), "100", "all", timings=timed(**BEST))
    assert decision.chosen == "deep_gemm" and decision.winner.is_lossy
    assert stand_in(decision, "deep_gemm") is None


def test_a_kernel_serves_the_sizes_it_is_ready_for():
    sizes = ReadySizes()
    both = KernelWhenReady(lambda x: x + 1, lambda x: x - 1, sizes)
    x = torch.zeros(20, 4)
    assert both(x).eq(1).all()  # nothing was planned: the first call compiles
    sizes.set((16, 32), (16,))
    assert both(x).eq(-1).all() and both(x[:16]).eq(1).all()
    sizes.set((16, 32), (16, 32))
    assert both(x).eq(1).all() and both(torch.zeros(33, 4)).eq(-1).all()


@pytest.mark.parametrize("pairs_per_token", [1, 6, 8, 10])
def test_token_counts_of_the_warm_up_round_up_to_every_power_of_two(pairs_per_token):
    def rounded(tokens: int) -> int:
        return 1 << (tokens * pairs_per_token - 1).bit_length()

    counts = token_counts(3000)
    assert counts[0] == 1 and counts[-1] == 3000 and len(counts) < 30
    assert {rounded(m) for m in range(1, 3001)} == {rounded(m) for m in counts}


def test_a_library_that_fails_when_it_is_asked_is_served_for(tmp_path, monkeypatch, caplog):
    def run(size: int) -> None:
        raise RuntimeError("dim == 2 or dim == 3")

    _, warm = warm_up(tmp_path, monkeypatch)
    make_ready(warm, [Needed(CompiledCall("failing", SIZES, run), must_wait=False)], 60)
    assert not ready_sizes("failing")(16) and "dim == 2 or dim == 3" in caplog.text
    with pytest.raises(RuntimeError, match="dim == 2 or dim == 3"):
        make_ready(warm, [Needed(CompiledCall("failing", SIZES, run), must_wait=True)], 60)


# ---------------------------------------------------------------- in what order, and what is kept


def test_what_is_waited_for_is_compiled_first(tmp_path, monkeypatch, libraries):
    monkeypatch.setattr("vllm.kernels.jit.ready.num_compilers", lambda *_: 1)
    _, warm = warm_up(tmp_path, monkeypatch)
    may, must = libraries("may"), libraries("first")
    make_ready(warm, [Needed(may.call((16,)), False), Needed(must.call((64,)), True)], 60)
    assert [c.kernel for c in warm.compiled] == ["gemm_impl<64, 128>", "gemm_impl<16, 128>"]


def test_no_call_is_ready_until_all_was_loaded(tmp_path, monkeypatch, libraries):
    _, warm = warm_up(tmp_path, monkeypatch)
    warm.begin([Needed(libraries("begun").call(SIZES), True)])
    assert not ready_sizes("begun")(16)
    warm.finish(60)
    assert ready_sizes("begun")(16)


def test_calls_that_were_waited_for_are_let_go(tmp_path, monkeypatch, libraries):
    _, warm = warm_up(tmp_path, monkeypatch)
    own = libraries("released")
    gone = weakref.ref(own)
    make_ready(warm, [Needed(own.call(SIZES), True)], 60)
    del own
    gc.collect()
    assert gone() is None


def test_what_does_not_compile_is_not_said_to_be_late(tmp_path, monkeypatch, libraries, caplog):
    _, warm = warm_up(tmp_path, monkeypatch)
    make_ready(warm, [Needed(libraries("never", broken=(32,)).call(SIZES), False)], 60)
    assert "does not compile" in caplog.text and "VLLM_KERNEL_COMPILE_SECONDS" not in caplog.text
