"""The record of the architectures on which kernels were compared with the reference is what a run
gives."""

import json
import re
import time

import pytest
import torch
from kernel_comparisons import WRONG, kernels, outcome_of
from slow import quick
from stand_ins.broken_comparisons import ENDS, HANGS
from stand_ins.broken_comparisons import WRONG as OTHER

from tests.kernels.passed_on import COMMAND, RECORD, Outcome, entry, merged, run, table
from vllm.kernels.backends import cpu
from vllm.machine import CHIPS, Device
from vllm.platforms.probe import probe_device, probe_libs

RECORDED = json.loads(RECORD.read_text())
OF_CPU = [name for name, kernel in kernels().items() if "cpu" in kernel.spec.devices]
FEW = [
    "linear/cpu/fp8-block",
    "linear/emulation-ue8m0/fp8-block",
    "linear/torch/nvfp4",
    "moe/cpu/int4-group",
    "attention/cpu/fp8",
    "attention/torch/bf16",
    "kv_quant/cpu/fp8",
]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compared(name: str) -> Outcome:
    return outcome_of(kernels()[name], probe_device(), probe_libs())


# ---------------------------------------------------------------- the committed file


@pytest.mark.parametrize("arch", RECORDED)
def test_an_entry_names_an_architecture_and_kernels_that_exist(arch):
    one = RECORDED[arch]
    assert {*one} == {"machine", "date", "command", "libs", "kernels"}
    assert arch == "cpu" or arch in CHIPS
    assert one["kernels"] == sorted({*one["kernels"]}) and one["libs"] == sorted(one["libs"])
    chip = Device.parse(arch)
    for name in one["kernels"]:
        assert {chip.arch, chip.family} & kernels()[name].spec.devices, name


def test_every_kernel_of_the_cpu_was_compared_on_one():
    assert RECORDED["cpu"]["kernels"] == sorted(OF_CPU), f"run {COMMAND} on a CPU"


@pytest.mark.parametrize("name", quick(OF_CPU, FEW))
def test_a_kernel_that_is_recorded_for_the_cpu_passes_on_this_one(name):
    assert compared(name).kind == "passed"


# ---------------------------------------------------------------- a run


@pytest.mark.parametrize("name", ["linear/cpu/bf16", "moe/cpu/bf16", "attention/cpu/bf16"])
def test_a_kernel_that_is_wrong_is_not_recorded(name, monkeypatch):
    family = name.partition("/")[0]
    monkeypatch.setattr(cpu, family, WRONG[family](getattr(cpu, family)))
    outcome = compared(name)
    assert outcome.kind == "wrong"
    assert re.search(r"relative error (3.0\d|2.99)e-02", outcome.text)
    assert entry({name: outcome}, probe_libs())["kernels"] == []


def test_a_kernel_that_raises_is_told_and_one_of_another_chip_is_absent(monkeypatch):
    def refuses(*given):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(cpu, "kv_quant", refuses)
    outcome = compared("kv_quant/cpu/bf16")
    assert outcome.kind == "failed" and "RuntimeError: no such thing" in outcome.text
    outcome = compared("linear/deep_gemm/fp8-block")
    assert outcome.kind == "absent" and "runs on sm_" in outcome.text


def broken_run(names: list[str], seconds: float) -> dict[str, Outcome]:
    serve = "stand_ins.broken_comparisons:serve"
    end = time.monotonic() + seconds
    return run(names, probe_device(), probe_libs(), 1, end, serve)


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_or_is_wrong_leaves_the_others_a_new_one():
    others = ["moe/cpu/bf16", "moe/cpu/fp16"]
    found = broken_run([ENDS, OTHER, *others], 60)
    assert found[ENDS].kind == "failed" and "SIGABRT: an illegal memory" in found[ENDS].text
    assert found[OTHER].kind == "wrong" and found[OTHER].text != found[others[0]].text
    assert {found[name] for name in others} == {Outcome("passed", found[others[0]].text)}
    assert entry(found, probe_libs())["kernels"] == others


@pytest.mark.slow
def test_a_kernel_that_hangs_and_what_comes_after_it_are_not_run():
    found = broken_run([HANGS, OTHER], 5)
    assert {outcome.kind for outcome in found.values()} == {"not run"}
    assert found[OTHER].text == "time was up" and "0 passed" in table(found)


def test_a_chip_gets_its_entry_beside_those_of_others():
    old = {"sm_90": {"kernels": ["a"]}, "cpu": {"kernels": ["b"]}}
    new = merged(old, "sm_100", {"kernels": ["c"]})
    assert [*new] == ["cpu", "sm_100", "sm_90"] and new["sm_90"] == old["sm_90"]
    assert merged(new, "cpu", {"kernels": []})["cpu"] == {"kernels": []}


# ---------------------------------------------------------------- what is compared


@pytest.mark.parametrize("chip", ["sm_89", "sm_90", "sm_100", "sm_120", "cpu"])
def test_every_kernel_for_a_chip_takes_one_of_the_problems(chip):
    """With all libraries there. Of each format shards begin inside blocks for some kernel."""
    from selection_cases import LIBS

    device = Device.parse(chip)
    own = {n: k for n, k in kernels().items() if {chip, device.family} & k.spec.devices}
    assert own
    cut = set()
    for kernel in own.values():
        for probe in kernel.probes(device, LIBS["all"]):
            problem = probe.problem
            if getattr(problem, "cut_n", 1) * getattr(problem, "cut", 1) > 1:
                cut.add((problem.family, kernel.format))
    products = {
        (k.spec.family, k.format) for k in own.values() if k.spec.family in ("linear", "moe")
    }
    assert cut == products
