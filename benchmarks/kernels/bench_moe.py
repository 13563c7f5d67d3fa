"""Times every backend of the fused mixture of experts on a GPU, FP8 with 128x128 blocks.

    python benchmarks/kernels/bench_moe.py [--out DIR] [--parts] [--layers] [--tokens N ...]
    python benchmarks/kernels/bench_moe.py --of moe.json [--table kernels.json]

A time is that of the whole layer from the router's choice on: sorting, quantising, both products
and the weighted sum. Each is the median of CUDA-graph replays; a graph makes one call after another
with other experts, until four times L2 has been read. Tokens choose experts evenly at random.
`of copy`: bytes of the weights of experts that were chosen, read in that time, over the bandwidth
(read + written) of a copy of 1 GB in the same run. Regret: time of the backend that the selector
takes, over the best one's. `quantised`: the same for tokens that the norm before has quantised, of
backends that ask for it; that is how the engine calls them. --parts times each small kernel alone
too. --layers times, for 1, 8 and 64 tokens, all kernels of a layer's mixture of experts in one
captured graph, from the norm before it to the one after, as they are and with what saves launches
left out: what they take beyond the sum of their parts is waits. Results are kept as they come.
FlashInfer's experts are among them where their module is built
(python -m vllm.kernels.jit.flashinfer fused_moe_90).
--of shows the regret of results that are there already, with the tables of today, on any machine;
--table adds them to a table of measured kernels (vllm/kernels/evidence/tuned).
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_results import write_results
from gpu_timing import copy_bandwidth, replay_microseconds
from moe_parts import layer_microseconds, make_layers, part_microseconds
from torch import Tensor

from vllm.formats.act_scheme import ActScheme
from vllm.formats.weight_format import WeightFormat
from vllm.kernels import registry
from vllm.kernels.activations import Activation, input_quant
from vllm.kernels.evidence.tables import Entry, find_tables, read_table, timings_of, write_table
from vllm.kernels.evidence.versions import version_of
from vllm.kernels.interface import MoEKernel, MoETensors
from vllm.kernels.report.question import chip_of
from vllm.kernels.select.decision import Decision
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import MoEProblem
from vllm.kernels.select.select import select
from vllm.machine import BUILD, Device, Libs
from vllm.platforms.probe import probe_device, probe_libs
from vllm.utils.math_utils import cdiv

FORMAT = WeightFormat.parse("fp8-block")
# experts, experts of a token, hidden, intermediate
MODELS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Qwen3.5-35B-A3B": (256, 8, 2048, 512)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
LAYER_TOKENS = (1, 8, 64)
BLOCK = 128


@dataclass(frozen=True)
class Row:
    """active: experts that were chosen, on average. gb_per_s: of their weights. quantised_us: for
    tokens that are quantised already; None for a backend that takes floats."""

    model: str
    backend: str
    num_tokens: int
    active: float
    microseconds: float
    gb_per_s: float
    of_copy: float
    tflops: float
    quantised_us: float | None = None


def make_tensors(problem: MoEProblem) -> MoETensors:
    count, hidden, inner = problem.num_experts, problem.hidden, problem.intermediate

    def stacked(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        values = torch.randn(count, rows, columns, device="cuda", dtype=torch.bfloat16)
        scales = torch.rand(count, cdiv(rows, BLOCK), cdiv(columns, BLOCK), device="cuda")
        return values.to(torch.float8_e4m3fn), scales / columns**0.5

    gate_up, gate_up_scales = stacked(2 * inner, hidden)
    down, down_scales = stacked(hidden, inner)
    return MoETensors(FORMAT, gate_up, down, gate_up_scales, down_scales)


class Calls:
    """The same tokens with different choices of experts."""

    def __init__(self, problem: MoEProblem, num_tokens: int):
        expert_bytes = 3 * problem.hidden * problem.intermediate
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        shape = (num_tokens, problem.hidden)
        self.x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.logits = torch.randn(num_tokens, problem.num_experts, device="cuda").bfloat16()
        weights = torch.rand(num_tokens, problem.top_k, device="cuda")
        self.weights = weights / weights.sum(1, keepdim=True)
        num_calls = max(4, cdiv(4 * l2, problem.top_k * num_tokens * expert_bytes))
        odds = torch.rand(num_calls, num_tokens, problem.num_experts, device="cuda")
        self.ids = odds.topk(problem.top_k, -1).indices
        self.active = sum(len(ids.unique()) for ids in self.ids) / num_calls
        self.active_bytes = self.active * expert_bytes
        self.flops = 2 * num_tokens * problem.top_k * expert_bytes

    def microseconds(self, call: MoEKernel, x: Activation) -> float:
        runs = [lambda ids=ids: call(x, self.weights, ids) for ids in self.ids]
        return replay_microseconds(runs, num_replays=10)


def problem_of(model: str) -> MoEProblem:
    schemes = (ActScheme.DYNAMIC_GROUP128, ActScheme.NONE)  # as these checkpoints allow
    return MoEProblem(*MODELS[model], FORMAT, schemes)


def decide(problem: MoEProblem, device: Device, libs: Libs) -> Decision:
    timings = timings_of(find_tables(chip_of(str(device), device)), problem)
    libs = Libs(libs.libs | {registry.built()})
    specs = registry.specs("moe", device.family)
    return select(problem, device, libs, Policy(), specs, timings=timings)


def kernels_of(problem: MoEProblem, tensors: MoETensors) -> dict[str, MoEKernel]:
    """Of every backend that can run here; torch's computes every expert for every token."""
    candidates = decide(problem, probe_device(), probe_libs()).candidates
    able = [c for c in candidates if not c.reasons and not c.parts and c.backend != "torch"]
    return {c.backend: registry.backend(c.backend).moe(problem, tensors, c) for c in able}


def print_regret(rows: Sequence[Row], device: Device, libs: Libs) -> None:
    """Of the selector's choice against the best backend; geometric mean over all problems."""
    logs = []
    for model, num_tokens in dict.fromkeys((row.model, row.num_tokens) for row in rows):
        winner = decide(problem_of(model), device, libs).winner
        parts = winner.parts or ((None, winner.backend),)
        name = next(b for limit, b in parts if limit is None or num_tokens <= limit)
        own = [row for row in rows if (row.model, row.num_tokens) == (model, num_tokens)]
        us = {row.backend: row.quantised_us or row.microseconds for row in own}
        best = min(us, key=us.__getitem__)
        logs.append(math.log(us[name] / us[best]))
        line = f"{model:<18}{num_tokens:>6}  takes {name:<19} best {best:<19}"
        print(f"{line}{us[name] / us[best] - 1:>7.1%}")
    print(f"regret, geometric mean: {math.exp(sum(logs) / len(logs)) - 1:.1%}")


def read_results(path: Path) -> tuple[list[Row], Device, Libs, dict[str, Any]]:
    content = json.loads(path.read_text())
    rows = [Row(**row) for row in content["rows"]]
    return rows, Device.parse(content["arch"]), Libs.parse(content["libs"]), content


def add_to_table(path: Path, rows: Sequence[Row], device: Device, libs: Libs, date: str) -> None:
    table = read_table(path)
    for model in MODELS:
        for backend in dict.fromkeys(row.backend for row in rows):
            own = [row for row in rows if (row.model, row.backend) == (model, backend)]
            spec = next(s for s in registry.specs("moe") if s.backend == backend)
            us = tuple((row.num_tokens, row.microseconds) for row in own)
            quantised = tuple((row.num_tokens, row.quantised_us) for row in own if row.quantised_us)
            entry = Entry(version_of(spec, libs, device), date, us, quantised)
            table = table.with_entry(problem_of(model).size_key, backend, entry)
    write_table(path, table)


class Results:
    """What was found so far; `file` holds it after every measurement."""

    def __init__(self, folder: Path | None, header: dict[str, Any]):
        self.folder, self.header = folder, header
        self.rows: list[Row] = []
        self.parts: dict[str, dict[int, dict[str, float]]] = {}
        self.layers: dict[str, dict[int, dict[str, float]]] = {}

    def keep(self) -> None:
        if self.folder:
            rows = [asdict(row) for row in self.rows]
            found = {"rows": rows, "parts": self.parts, "layers": self.layers}
            write_results(self.folder, "moe.json", **self.header, **found)


def print_times(title: str, times: dict[str, float]) -> None:
    print(f"    {title}: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()) + " us")


def row_of(
    name: tuple[str, str], kernel: MoEKernel, calls: Calls, num_tokens: int, copied: float
) -> Row:
    us = calls.microseconds(kernel, calls.x)
    asked = input_quant(kernel, num_tokens)
    quantised = calls.microseconds(kernel, asked.quantise(calls.x)) if asked else None
    speed, tflops = calls.active_bytes / us, calls.flops / us / 1e6
    return Row(*name, num_tokens, calls.active, us, speed / 1e3, speed / copied, tflops, quantised)


def measure(tokens: Sequence[int], has_parts: bool, copied: float, results: Results) -> None:
    for model in MODELS:
        problem = problem_of(model)
        tensors = make_tensors(problem)
        kernels = kernels_of(problem, tensors)
        head = f"{'backend':<19}{'tokens':>7}{'active':>8}{'us':>10}{'quantised':>10}{'GB/s':>8}"
        print(f"{problem}\n{head}{'of copy':>9}{'TFLOP/s':>9}")
        for num_tokens in tokens:
            calls = Calls(problem, num_tokens)
            for backend, kernel in kernels.items():
                row = row_of((model, backend), kernel, calls, num_tokens, copied)
                results.rows.append(row)
                results.keep()
                quantised = f"{row.quantised_us:>10.2f}" if row.quantised_us else f"{'-':>10}"
                line = f"{backend:<19}{num_tokens:>7}{row.active:>8.1f}{row.microseconds:>10.2f}"
                line += f"{quantised}{row.gb_per_s:>8.0f}{row.of_copy:>9.1%}{row.tflops:>9.1f}"
                print(line, flush=True)
            if has_parts:
                found = part_microseconds(problem, tensors, calls.x, calls.ids)
                results.parts.setdefault(model, {})[num_tokens] = found
                results.keep()
                print_times("each alone", found)
        del tensors, kernels
        torch.cuda.empty_cache()


def measure_layers(results: Results) -> None:
    for model in MODELS:
        layers = make_layers(f"Qwen/{model}-FP8")
        for num_tokens in LAYER_TOKENS:
            found = layer_microseconds(layers, num_tokens)
            results.layers.setdefault(model, {})[num_tokens] = found
            results.keep()
            print_times(f"{model}, a layer for {num_tokens} tokens", found)
        del layers
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder that receives moe.json")
    parser.add_argument("--parts", action="store_true", help="small kernels alone too")
    parser.add_argument("--layers", action="store_true", help="whole layers in one graph too")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--of", type=Path, help="measure nothing: results of an earlier run")
    parser.add_argument("--table", type=Path, help="with --of: table that receives them")
    arguments = parser.parse_args()
    if arguments.of:
        rows, device, libs, content = read_results(arguments.of)
        if arguments.table:
            add_to_table(arguments.table, rows, device, libs, content["date"])
        print_regret(rows, device, libs)
        return
    copied = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {copied / 1e6:.2f} TB/s")
    device, libs = probe_device(), probe_libs()
    known = Libs(frozenset(lib for lib in libs.libs if lib.name != BUILD))
    header = {"arch": str(device), "libs": str(known), "copy_tb_per_s": copied / 1e6}
    results = Results(arguments.out, header)
    if arguments.layers:
        measure_layers(results)
    measure(arguments.tokens, arguments.parts, copied, results)
    print_regret(results.rows, device, libs)


if __name__ == "__main__":
    main()
