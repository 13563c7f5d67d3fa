"""A split one of whose kernels cannot run here is decided anew over all numbers of tokens."""

import pytest
from selection_cases import LIBS, TOKENS, ask, linear, timed

from vllm.kernels.select.reason import Why
from vllm.machine import NATIVE, Libs, Quarantined
from vllm.utils.dataclasses import replace

TIMES = timed(
    skinny=(1, 8), triton=(9, 64), cutlass=(65, 512), deep_gemm=(513, 8192), marlin=(1, 0)
)
WHOLE = ("skinny", "triton", "cutlass", "deep_gemm")
# Libraries of each kernel, and all kernels that are made of them.
LIBRARIES = {
    "skinny": (NATIVE, {"skinny", "cutlass", "marlin"}),
    "triton": ("triton", {"triton"}),
    "cutlass": (NATIVE, {"skinny", "cutlass", "marlin"}),
    "deep_gemm": ("deep_gemm", {"deep_gemm"}),
}


def without(name: str) -> Libs:
    return replace(LIBS["all"], libs=tuple(lib for lib in LIBS["all"].libs if lib.name != name))


def broken(name: str) -> Libs:
    libs = (replace(lib, broken="fails" * (lib.name == name)) for lib in LIBS["all"].libs)
    return replace(LIBS["all"], libs=tuple(libs))


def quarantined(backend: str) -> Libs:
    failed = Quarantined(backend, linear().size_key, Why.NUMERICS, "wrong")
    return replace(LIBS["all"], quarantined=frozenset({failed}))


@pytest.mark.parametrize("part", WHOLE)
@pytest.mark.parametrize("how", [without, broken, quarantined])
def test_the_others_serve_every_number_of_tokens(part, how):
    whole = ask(linear(), "90", timings=TIMES)
    assert tuple(name for _, name in whole.parts) == WHOLE
    library, lost = LIBRARIES[part]
    libs, lost = (how(part), {part}) if how is quarantined else (how(library), lost)
    decision = ask(linear(), "90", libs, timings=TIMES)
    serving = {decision.backend_for(num_tokens) for num_tokens in TOKENS}
    assert not serving & lost and serving == {name for _, name in decision.parts}
    assert decision.parts[-1][0] is None and not decision.winner.reasons
    judged = {c.backend: c for c in decision.candidates}
    assert all(not judged[name].reasons for name in serving if name != "skinny")
    assert judged[part].reasons
    # Whoever could run keeps the range in which it is the fastest.
    for num_tokens in TOKENS:
        fastest = whole.backend_for(num_tokens)
        assert fastest in lost or decision.backend_for(num_tokens) == fastest


def test_where_all_that_was_timed_is_lost_the_default_order_serves():
    failed = {
        Quarantined(name, linear().size_key, Why.NUMERICS, "wrong") for name in dict(TIMES.us)
    }
    decision = ask(
        linear(), "90", replace(LIBS["all"], quarantined=frozenset(failed)), timings=TIMES
    )
    assert decision.origin.rank == 7 and len(decision.parts) == 1
    assert decision.chosen not in dict(TIMES.us)
