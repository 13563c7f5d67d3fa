"""Architecture arithmetic of the build: request x kernel's list x CUDA version -> nvcc flags."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
from build_tools import find_tool, output_of

SCRIPT = Path(__file__).with_name("plan.cmake")


@functools.cache
def plan(request: str, kernel: str = "8.0 9.0 10.0 11.0 12.0", cuda: str = "13.0", **extra: str):
    """What one kernel becomes, as lists of strings by name."""
    values = {"REQUEST": request, "KERNEL_ARCHS": ";".join(kernel.split()), "CUDA": cuda, **extra}
    options = [f"-D{name}={value}" for name, value in values.items()]
    command = [find_tool("cmake"), *options, "-P", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    pairs = (line.split("=", 1) for line in done.stdout.splitlines())
    return {name: [item for item in value.split(";") if item] for name, value in pairs}


def sass(arch: str) -> str:
    return f"-gencode=arch=compute_{arch},code=sm_{arch}"


def ptx(arch: str) -> str:
    return f"-gencode=arch=compute_{arch},code=compute_{arch}"


# Code for a generation (12.0), a family (12.0f), single chips (12.0a). Request, kernel's list,
# CUDA -> machine code. All of it is built, nothing skipped.
BUILT = [
    ("12.1a", "12.0", "13.0", "121a"),  # keeps its suffix
    ("12.1a", "12.0f", "12.9", "121a"),
    ("12.1a", "12.0a 12.1a", "12.9", "121a"),
    ("12.1f", "12.0f", "12.9", "121f"),
    ("12.0f", "12.0f", "12.9", "120f"),
    ("12.0a", "12.0f", "12.8", "120a"),  # family code for one chip, where there are no families
    ("12.0", "12.0", "12.8", "120"),
    ("12.1", "12.0", "13.0", "121"),
    ("9.0a", "9.0a", "12.6", "90a"),
    ("9.0a", "9.0", "12.6", "90a"),
    ("8.6 8.9", "8.0", "12.6", "86 89"),
    ("10.3a", "10.0f", "12.9", "103a"),
    ("10.7a", "10.0f", "13.4", "107a"),
    ("11.0a", "11.0f", "13.0", "110a"),
    # A chip was asked for, and the code exists with a suffix only.
    ("9.0", "9.0a", "13.0", "90a"),
    ("12.0", "12.0f", "12.9", "120f"),
    ("12.0", "12.0f", "12.8", "120a"),
    ("12.1", "12.0f", "13.3", "121f"),
    ("12.1", "12.0a 12.1a", "13.3", "121a"),
    # A family was asked for, and the code is for each of its chips.
    ("12.0f", "12.0a 12.1a", "13.0", "120a 121a"),
    ("12.1f", "12.0a 12.1a", "13.0", "121a"),
    ("10.0f", "10.0a 10.3a", "13.3", "100a 103a"),
    ("10.0f", "10.3a", "13.0", "103a"),
    # A request and another's target coincide.
    ("12.0 12.0f", "12.0f", "13.0", "120f"),
    ("12.0f 12.1a", "12.0a 12.1a", "13.0", "120a 121a"),
    # Order and duplicates
    ("12.1a 9.0a 12.0 8.0 10.0f 12.1a", "8.0 9.0 10.0 12.0", "13.0", "80 90a 100f 120 121a"),
    ("9.0a;90a;sm_90a;SM90A 90a-real", "9.0", "13.0", "90a"),
    # Names of generations.
    ("Hopper", "9.0", "12.6", "90a"),
    ("Ampere,ada", "8.0", "12.6", "80 86 89"),
    ("Ampere+Tegra", "8.0", "12.6", "87"),
    ("Blackwell", "10.0f 12.0f", "13.0", "100f 120f"),
    ("Blackwell", "10.0f 12.0f", "12.8", "100a 120a"),
    ("Blackwell+Tegra", "11.0f", "13.0", "110f"),
]


@pytest.mark.parametrize(("request_", "kernel", "cuda", "built"), BUILT)
def test_what_was_asked_for_is_built(request_, kernel, cuda, built):
    planned = plan(request_, kernel, cuda)
    assert planned["PLAN_GENCODES"] == [sass(arch) for arch in built.split()]
    assert planned["MANIFEST"] == built.split()
    assert not planned["PLAN_SKIPPED"] + planned["REJECTED"] + planned["PLAN_ABSENT"]


# Request, kernel's list, CUDA -> machine code all the same, what is skipped, why.
SKIPPED = [
    ("12.1a", "12.0a", "13.0", "", "12.1a", "nothing for 12.1: the code is for 12.0a"),
    ("12.1", "12.0a", "13.0", "", "12.1", "nothing for 12.1: the code is for 12.0a"),
    ("12.1f", "12.0a", "13.0", "", "12.1f", "nothing for 12.1: the code is for 12.0a"),
    ("12.0f", "12.0a", "13.0", "120a", "12.0f", "nothing for 12.1: the code is for 12.0a"),
    ("10.0f", "10.0a", "13.4", "100a", "10.0f", "nothing for 10.3 10.7: the code is for 10.0a"),
    ("10.0f", "10.0a", "13.3", "100a", "10.0f", "nothing for 10.3: the code is for 10.0a"),
    ("9.0+PTX", "9.0a", "13.0", "90a", "9.0+PTX", "whose PTX no later generation takes"),
    ("12.0+PTX", "12.0f", "13.0", "120f", "12.0+PTX", "built as 12.0f, whose PTX"),
    ("12.0f+PTX", "12.0a 12.1a", "13.0", "120a 121a", "12.0f+PTX", "built as 12.0a 12.1a"),
]


@pytest.mark.parametrize(("request_", "kernel", "cuda", "built", "skipped", "why"), SKIPPED)
def test_what_a_kernel_cannot_serve_is_skipped_with_the_reason(
    request_, kernel, cuda, built, skipped, why
):
    planned = plan(request_, kernel, cuda)
    assert planned["MANIFEST"] == built.split()
    [entry] = planned["PLAN_SKIPPED"]
    arch, reason = entry.split("|")
    assert arch == skipped and why in reason


REJECTED = [
    ("12.0f", "12.8", "12.0f needs CUDA 12.9, this is 12.8: ask for 12.0a, which runs on 12.0"),
    ("10.0f", "12.8", "ask for 10.0a"),
    ("12.1a", "12.8", "12.1a needs CUDA 12.9"),
    ("10.3a", "12.8", "10.3a needs CUDA 12.9"),
    ("10.0a", "12.6", "10.0a needs CUDA 12.8, this is 12.6"),
    ("12.0", "12.6", "12.0 needs CUDA 12.8"),
    ("11.0a", "12.9", "11.0a needs CUDA 13.0"),
    ("10.1a", "12.9", "10.1 was the name of 11.0"),
    ("10.7f", "13.3", "10.7f needs CUDA 13.4"),
    ("9.0f", "13.0", "9.0 has no suffix f"),
    ("8.9a", "13.0", "8.9 has no suffix a"),
    ("7.0", "12.6", "no architecture known to this build"),
    ("13.0", "13.3", "no architecture known to this build"),
    ("99.9a", "13.3", "no architecture known to this build"),
    ("Hoper", "13.0", "not an architecture: write 9.0a"),
    ("Hopper+PTX", "13.0", "not an architecture: write 9.0a"),
    ("Volta", "12.6", "no architecture known to this build"),
    ("12.1b", "13.0", "not an architecture"),
    ("all", "13.0", "not an architecture"),
    ("9", "13.0", "not an architecture"),
]


@pytest.mark.parametrize(("request_", "cuda", "why"), REJECTED)
def test_what_the_toolkit_cannot_compile_is_rejected_and_the_rest_is_built(request_, cuda, why):
    planned = plan(f"9.0a {request_}", "9.0 10.0 11.0 12.0", cuda)
    [entry] = planned["REJECTED"]
    text, reason = entry.split("|")
    assert text == {"Volta": "7.0"}.get(request_, request_)
    assert why in reason
    assert planned["PLAN_GENCODES"] == [sass("90a")]


PTX = [
    ("12.0+PTX", [sass("120"), ptx("120")]),
    ("12.1a+PTX", [sass("121a"), ptx("121a")]),
    ("9.0a;12.0+PTX", [sass("90a"), sass("120"), ptx("120")]),
    ("9.0a+ptx 12.0f+PTX", [sass("90a"), ptx("90a"), sass("120f"), ptx("120f")]),
    ("120-virtual", [ptx("120")]),
    ("120-real", [sass("120")]),
    ("120-virtual;120-real", [sass("120"), ptx("120")]),
    ("12.0 12.0+PTX", [sass("120"), ptx("120")]),
]


@pytest.mark.parametrize(("request_", "flags"), PTX)
def test_ptx_is_embedded_where_it_was_asked_for(request_, flags):
    planned = plan(request_)
    assert planned["PLAN_GENCODES"] == flags
    assert planned["MANIFEST"] == [re.sub(".*code=(sm_)?", "", flag) for flag in flags]
    assert not planned["PLAN_SKIPPED"] + planned["REJECTED"]


@pytest.mark.parametrize(
    ("request_", "flags", "covered"),
    [
        ("12.0 12.0f", [sass("120f")], ["12.0"]),
        ("12.0+PTX 12.0f", [ptx("120"), sass("120f")], ["12.0"]),
        ("12.0 12.0f+PTX", [sass("120f"), ptx("120f")], ["12.0"]),
        ("120-virtual 12.0f", [ptx("120"), sass("120f")], []),
        ("12.0 120f-virtual", [sass("120"), ptx("120f")], []),
        ("12.0 12.0a 12.1f", [sass("120"), sass("120a"), sass("121f")], []),
    ],
)
def test_a_family_covers_its_plain_target_because_nvcc_refuses_both(request_, flags, covered):
    planned = plan(request_)
    assert planned["PLAN_GENCODES"] == flags
    assert planned["COVERED"] == covered


@pytest.mark.parametrize(
    ("request_", "kernel"),
    [("12.1a", "9.0a"), ("8.0", "8.9"), ("10.0a", "10.3a"), ("11.0", "10.0")],
)
def test_a_chip_that_a_kernel_has_no_code_for_is_absent_and_not_skipped(request_, kernel):
    planned = plan(request_, kernel)
    assert planned["PLAN_ABSENT"] == [request_]
    assert not planned["PLAN_SKIPPED"] + planned["PLAN_GENCODES"]


def test_a_kernel_that_cannot_be_built_here_skips_what_it_has_code_for():
    planned = plan("9.0a 10.0f 12.1a", "9.0 12.0f", BLOCKED="needs CUTLASS")
    assert planned["PLAN_SKIPPED"] == ["9.0a|needs CUTLASS", "12.1a|needs CUTLASS"]
    assert planned["PLAN_ABSENT"] == ["10.0f"]
    assert not planned["PLAN_GENCODES"]


@pytest.mark.parametrize(
    ("cuda", "archs"),
    [
        ("12.6", "8.0 8.9 9.0a"),
        ("12.8", "8.0 8.9 9.0a 10.0a 12.0a"),
        ("12.9", "8.0 8.9 9.0a 10.0f 12.0f"),
        ("13.0", "8.0 8.9 9.0a 10.0f 12.0f"),
        ("13.3", "8.0 8.9 9.0a 10.0f 12.0f"),
        ("13.0.88", "8.0 8.9 9.0a 10.0f 12.0f"),
    ],
)
def test_the_default_is_what_the_toolkit_has_of_the_projects_list(cuda, archs):
    planned = plan("default", cuda=cuda)
    assert planned["ACCEPTED"] == archs.split()
    assert not planned["REJECTED"] + planned["PLAN_SKIPPED"] + planned["ADVICE"]


def test_a_blackwell_chip_without_a_suffix_is_told_which_one_keeps_e2m1():
    assert "Ask for 10.0a 12.0a." in plan("9.0 10.0 12.0", cuda="12.8")["ADVICE"][0]
    assert "Ask for 12.1f." in plan("9.0a 12.1+PTX", cuda="13.0")["ADVICE"][0]
    assert not plan("8.0 9.0 12.0a")["ADVICE"]


@pytest.mark.parametrize(
    ("memory_gib", "cores", "jobs"), [(24, 2, 3), (8, 2, 1), (2, 16, 1), (128, 16, 18)]
)
def test_cutlass_compiles_are_as_many_as_memory_holds_and_at_least_one(memory_gib, cores, jobs):
    planned = plan("9.0a", MEMORY_MIB=str(memory_gib * 1024), CORES=str(cores))
    assert planned["JOBS"] == [str(jobs)]


# What ptxas 12.6.85, 12.8.93, 12.9.86, 13.0.88, 13.3.73 and 13.5.37 assembled an empty kernel for,
# of the chips in the table and 10.1 (2026-11-22).
OLD = "7.5 8.0 8.6 8.7 8.9 9.0 9.0a"
ASSEMBLED = {
    "12.6": OLD,
    "12.8": f"{OLD} 10.0 10.0a 12.0 12.0a",
    "12.9": f"{OLD} 10.0 10.0a 10.0f 10.3 10.3a 10.3f 12.0 12.0a 12.0f 12.1 12.1a 12.1f",
}
ASSEMBLED["13.0"] = f"{ASSEMBLED['12.9']} 8.8 11.0 11.0a 11.0f"
ASSEMBLED["13.3"] = ASSEMBLED["13.0"]
ASSEMBLED["13.5"] = f"{ASSEMBLED['13.0']} 10.7 10.7a 10.7f"
EVERY = [chip + suffix for chip in ASSEMBLED["13.5"].split() for suffix in ("", "a", "f")]


@pytest.mark.parametrize("cuda", ASSEMBLED)
def test_a_toolkit_is_given_what_its_assembler_was_seen_to_take(cuda):
    archs = " ".join(arch for arch in EVERY if re.fullmatch(r"\d+\.\d[af]?", arch))
    assert set(plan(archs, cuda=cuda)["ACCEPTED"]) == set(ASSEMBLED[cuda].split())


def test_the_table_of_toolkits_is_what_the_nvcc_here_compiles_for(nvcc):
    cuda = re.search(r"release (\S+),", output_of(nvcc, "--version"))[1]
    theirs = set(re.findall(r"'sm_(\d+[af]?)'", output_of(nvcc, "--help")))
    numbers = {re.sub(r"\D", "", arch) for arch in theirs} | {
        "75",
        "88",
        "103",
        "107",
        "110",
        "121",
    }
    every = [number + suffix for number in sorted(numbers) for suffix in ("", "a", "f")]
    planned = plan(" ".join(f"sm_{arch}" for arch in every), cuda=cuda)
    assert {arch.replace(".", "") for arch in planned["ACCEPTED"]} == theirs
