"""Every backend that computes experts on a CPU, on generated problems (the GPU's: gpu/)."""

import pytest
from moe_cases import Case, candidates, check, generate
from slow import quick

from vllm.machine import Device
from vllm.platforms.probe import probe_libs

CPU = Device("cpu")
CASES = generate(20)


def test_every_backend_with_code_for_a_cpu_takes_some_case():
    taken = set().union(*(candidates(case, CPU, probe_libs()) for case in CASES))
    assert taken == {"cpu", "torch"}


@pytest.mark.parametrize("case", quick(CASES, CASES[::3]), ids=str)
def test_backends_compute_what_the_formats_say(case: Case):
    for winner in candidates(case, CPU, probe_libs()).values():
        check(case, winner, "cpu")
