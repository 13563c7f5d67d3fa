"""Counts the machine instructions that converting a pair of float32 to E2M1 takes.

    python benchmarks/kernels/e2m1_sass.py [--arch sm_90a] [--cuobjdump PATH] [--list software]

Compiles e2m1_sass.cu, whose kernels convert 16 and 32 values per thread, and counts what the
longer kernel has more: constants and addresses, which are made once, cancel out. Loads and stores
are not counted. Needs nvcc and cuobjdump, which the toolkit and triton carry; no GPU.
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).with_name("e2m1_sass.cu")
CONVERSIONS = {
    "software": "csrc/quantization/fp4/nvfp4_utils.cuh",
    "ladder": "threshold ladder",
    "cuda_fp4": "cuda_fp4.h",
}
PAIRS = 8  # by which the kernels of 32 and 16 values differ
UNCOUNTED = ("LDG", "STG", "NOP")
FUNCTION = re.compile(r"^\s*Function : (\w+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)")


def find_cuobjdump() -> str | None:
    if found := shutil.which("cuobjdump"):
        return found
    triton = importlib.util.find_spec("triton")
    folders = triton.submodule_search_locations if triton else None
    return shutil.which("cuobjdump", path=f"{folders[0]}/backends/nvidia/bin") if folders else None


def disassemble(arch: str, cuobjdump: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "e2m1.cubin"
        command = ["nvcc", "-std=c++20", "-O3", "-cubin", f"-arch={arch}", SOURCE, "-o", cubin]
        subprocess.run(command, check=True)
        dump = [cuobjdump, "-sass", cubin]
        return subprocess.run(dump, check=True, capture_output=True, text=True).stdout


def count(sass: str) -> dict[str, Counter[str]]:
    """Instructions of each function by opcode."""
    counts: dict[str, Counter[str]] = {}
    name = ""
    for line in sass.splitlines():
        if found := FUNCTION.match(line):
            name = found[1]
            counts[name] = Counter()
        elif (found := INSTRUCTION.match(line)) and not found[1].startswith(UNCOUNTED):
            counts[name][found[1]] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--list", choices=CONVERSIONS, help="show this one's opcodes too")
    given = parser.parse_args()
    if given.cuobjdump is None:
        parser.error("no cuobjdump on the PATH or in triton: give --cuobjdump")
    counts = count(disassemble(given.arch, given.cuobjdump))
    print(f"SASS instructions per pair of values, {given.arch}")
    for name, title in CONVERSIONS.items():
        more = counts[f"{name}_4"].total() - counts[f"{name}_2"].total()
        print(f"{title:<42}{more / PAIRS:>8.2f}")
    if given.list:
        more = counts[f"{given.list}_4"] - counts[f"{given.list}_2"]
        for opcode, number in more.most_common():
            print(f"  {opcode:<40}{number / PAIRS:>8.2f}")


if __name__ == "__main__":
    main()
