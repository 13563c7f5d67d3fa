"""Latency and throughput of the engine behind `from vllm import LLM`, beside the machine's limits.

usage: python benchmarks/serving/bench_engine.py MODEL_DIR [--dtype auto] [--cases ...]
           [--repeat 3] [--engine-args JSON] [--json FILE]

Cases, each after a warm-up of the same kind, each the median of --repeat runs:
  tpotB       ms per output token for B requests of 32 prompt tokens: (time of 129 output tokens
              minus time of 1) / 128
  prefill     ms for a prompt of 1,500 tokens and one output token
  throughput  output tokens per second of 64 requests given at once, 32 to 256 prompt tokens and
              32 to 128 output tokens
Prompts are fresh random token ids, so that no prefix cache helps; end ids are ignored. The limits
are torch's on this machine, measured first: reading 256 MB, and a 2048^3 float32 matmul. The
script drives any engine with this interface: run it with that engine's Python.
"""

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, PREFILL, NUM_REQUESTS = 32, 128, 1500, 64


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(model=args.model, dtype=args.dtype, **json.loads(args.engine_args))
    ready = seconds_since_process_start()
    bench = Bench(llm, SamplingParams, args.model, args.repeat)
    result: dict[str, Any] = {
        "engine": __import__("vllm").__version__,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "arguments": vars(args) | {"model": Path(args.model).name, "json": None},
        "ready_s": round(ready, 2),
        "import_and_load_s": round(time.perf_counter() - start, 2),
        "resident_mib_at_ready": resident_mib(),
        "limits": measure_limits(),
        "cases": {},
    }
    print(f"ready after {ready:.1f} s; limits: {result['limits']}")
    for case in args.cases.split(","):
        runs = bench.run(case)
        entry = describe(case, runs, Path(args.model), result["limits"])
        result["cases"][case] = entry
        print(f"{case:<12} {entry}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--cases", default="tpot1,tpot8,tpot32,prefill,throughput")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engine-args", default='{"max_model_len": 2048, "max_num_seqs": 64}')
    parser.add_argument("--json")
    return parser.parse_args()


class Bench:
    def __init__(self, llm: Any, sampling_params: Any, model: str, repeat: int):
        self._llm = llm
        self._sampling_params = sampling_params
        self._repeat = repeat
        self._rng = random.Random(0)
        config = json.loads(Path(model, "config.json").read_text())
        self._max_id = config["vocab_size"] - 100

    def run(self, case: str) -> list[float]:
        measure = self._case(case)
        measure()
        return [measure() for _ in range(self._repeat)]

    def _case(self, case: str) -> Callable[[], float]:
        if case.startswith("tpot"):
            size = int(case.removeprefix("tpot"))
            one, many = ([(PROMPT, n)] * size for n in (1, OUTPUT + 1))
            return lambda: (self._seconds(many) - self._seconds(one)) / OUTPUT * 1e3
        if case == "prefill":
            return lambda: self._seconds([(PREFILL, 1)]) * 1e3
        if case == "throughput":
            rng = random.Random(7)
            mix = [(rng.randint(32, 256), rng.randint(32, 128)) for _ in range(NUM_REQUESTS)]
            return lambda: sum(output for _, output in mix) / self._seconds(mix)
        raise SystemExit(f"unknown case {case!r}: tpotB, prefill or throughput")

    def _seconds(self, lengths: list[tuple[int, int]]) -> float:
        prompts = [
            {"prompt_token_ids": [self._rng.randint(50, self._max_id) for _ in range(length)]}
            for length, _ in lengths
        ]
        params = [
            self._sampling_params(
                temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=output
            )
            for _, output in lengths
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        got = [len(output.outputs[0].token_ids) for output in outputs]
        assert got == [output for _, output in lengths], got
        return seconds


def describe(case: str, runs: list[float], model: Path, limits: dict[str, float]) -> dict[str, Any]:
    """The median with what it means in bytes and operations a second.

    Weights are read once a step and multiplied with every token: bytes of the safetensors files,
    two operations for each weight of a matrix. Attention and the cache are not counted.
    """
    median = statistics.median(runs)
    unit = "output_tok_s" if case == "throughput" else "ms"
    entry: dict[str, Any] = {unit: round(median, 2), "runs": [round(run, 2) for run in runs]}
    if case == "throughput":
        return entry
    num_bytes, num_weights = weights_of(model)
    tokens = PREFILL if case == "prefill" else int(case.removeprefix("tpot"))
    gb_s, gflop_s = num_bytes / median / 1e6, 2 * num_weights * tokens / median / 1e6
    entry |= {
        "GB/s": round(gb_s, 1),
        "of_read_bandwidth": f"{gb_s / limits['read_gb_s']:.0%}",
        "GFLOP/s": round(gflop_s, 1),
        "of_float32_matmul": f"{gflop_s / limits['float32_gflop_s']:.0%}",
    }
    return entry


def weights_of(model: Path) -> tuple[int, int]:
    """(bytes, matrix elements) of a checkpoint whose embedding is also its output projection."""
    from safetensors import safe_open

    num_bytes = num_weights = 0
    for file in model.glob("*.safetensors"):
        num_bytes += file.stat().st_size
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is not iterable)
                shape = opened.get_slice(name).get_shape()
                if name.endswith(".weight") and len(shape) == 2:
                    num_weights += shape[0] * shape[1]
    return num_bytes, num_weights


def measure_limits() -> dict[str, float]:
    import torch

    data, a = torch.ones(64 << 20), torch.randn(2048, 2048)
    read = best_seconds(lambda: data.sum())
    matmul = best_seconds(lambda: a @ a)
    return {
        "read_gb_s": round(data.nbytes / read / 1e9, 1),
        "float32_gflop_s": round(2 * 2048**3 / matmul / 1e9, 1),
        "threads": torch.get_num_threads(),
    }


def best_seconds(run: Callable[[], object], repeat: int = 10) -> float:
    run()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_since_process_start() -> float:
    started = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - started / os.sysconf("SC_CLK_TCK")


def resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def machine() -> dict[str, Any]:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    flags = Path("/proc/cpuinfo").read_text()
    isas = {"avx512_bf16": "avx512_bf16", "avx512bw": "avx512", "avx2": "avx2"}
    isa = next((isa for flag, isa in isas.items() if flag in flags), platform.machine())
    forced = os.environ.get("VLLM_CPU_ISA", "")
    return {"cpu": names[0] if names else "?", "cores": len(names), "isa": forced or isa}


if __name__ == "__main__":
    main()
