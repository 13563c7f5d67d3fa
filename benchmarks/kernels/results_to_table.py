"""Enters results of bench_fp8_block_gemm.py in a table of measured kernels, for want of better.

    python benchmarks/kernels/results_to_table.py RESULTS.json ... --chip h100

`vllm kernels tune` measures what the engine runs, and replaces what comes from here. These are
GEMMs alone: `quantised_us` of kernels that take quantised activations. Of sweeps it takes the best
tiling of cutlass, whose choice was made by them, and skinny in the shape that the library chooses,
for up to 8 tokens: with more, what they leave out (it quantises inside) is more than its lead. Of
results that note an earlier revision of our kernels, only the others' count. Earlier files win.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels.evidence.tables import SHIPPED, Entry, Table, read_table, write_table
from vllm.kernels.report.question import GPUS
from vllm.kernels.select.problem import LinearProblem

NUM_SMS = 132
FORMAT, SCHEMES = WeightFormat.parse("fp8-block"), (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)
_SOURCE = "GEMM alone as in results/"
# Name in the results -> backend, and whether its input is quantised before.
KERNELS = {
    "deep_gemm": ("deep_gemm", True),
    "cutlass": ("cutlass", True),
    "skinny+q": ("skinny", False),
    "flashinfer": ("flashinfer-deepgemm", False),
}


MAX_SKINNY_TOKENS = 8


def kernel_of(name: str, n: int, m: int) -> tuple[str, bool] | None:
    own_shape = "skinny 2x16" if n <= 2 * 16 * NUM_SMS else "skinny 2x8"
    if name == own_shape and m <= MAX_SKINNY_TOKENS:
        return "skinny", False
    return KERNELS.get(name.split()[0] if name.startswith("cutlass ") else name)


def add_results(table: Table, path: Path) -> Table:
    results = json.loads(path.read_text())
    found: dict[tuple[str, str, bool], dict[int, float]] = {}
    for row in results["rows"]:
        size_key = LinearProblem(row["n"], row["k"], FORMAT, SCHEMES).size_key
        for name, us in row["us"].items():
            kernel = kernel_of(name, row["n"], row["m"])
            is_old = "earlier revision" in results.get("note", "") and name != "deep_gemm"
            if kernel is not None and not is_old:
                times = found.setdefault((size_key, *kernel), {})
                times[row["m"]] = min(us, times.get(row["m"], us))
    for (size_key, backend, is_quantised), us in found.items():
        old = table.rows.get(size_key, {}).get(backend, Entry("", results["date"], ()))
        known = dict(old.quantised_us if is_quantised else old.us)
        if us.keys() <= known.keys():
            continue
        added = {"quantised_us" if is_quantised else "us": tuple(sorted((us | known).items()))}
        source = f"{_SOURCE}{path.resolve().parent.name}"
        version = old.version if _SOURCE in old.version else f"{old.version}, {source}".lstrip(", ")
        table = table.with_entry(size_key, backend, replace(old, version=version, **added))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--chip", choices=GPUS, required=True)
    args = parser.parse_args()
    chip = GPUS[args.chip]
    path = SHIPPED / chip.file_name
    device = json.loads(args.results[0].read_text())["device"]
    table = read_table(path) if path.exists() else Table(chip, device)
    for results in args.results:
        table = add_results(table, results)
    write_table(path, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
