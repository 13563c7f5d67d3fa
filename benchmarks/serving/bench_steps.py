"""Where the time of a mixed load goes, step by step: device, host, waiting.

usage: python benchmarks/serving/bench_steps.py Qwen/Qwen3-8B-FP8 [--engine-args JSON]
           [--out benchmarks/results/h100]

The load is that of bench_gpu.py: 256 requests given at once, 100 to 1,024 tokens in and out,
random weights. Steps are grouped by kind and by the number of requests that decode:
  device_ms   from the end of the step before to the end of this one
  launch_ms   the host puts the step together and launches it, meanwhile
  wait_ms     the host waits for a step's tokens; where that is nothing, the device waits for it
  gb_s        of steps that decode, models without experts: bytes of weights over device_ms
  tflop_s     of matrix products, over device_ms
The table of the steps so far is written every few seconds, for runs that are cut.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_gpu import MAX_LEN, NUM_REQUESTS, Bench, weights_read, write_config
from gpu_results import write_results

from vllm import LLM, SamplingParams

GROUP = 32
SECONDS_BETWEEN_TABLES = 5.0


@dataclass
class TimedStep:
    """num_requests and num_tokens that it computes, times in seconds, and an event at its end."""

    num_requests: int
    num_tokens: int
    launch: float
    ended: torch.cuda.Event
    wait: float = 0.0

    @property
    def group(self) -> str:
        if self.num_tokens > self.num_requests:
            return "with prompts"
        return f"decode {self.num_requests // GROUP * GROUP}+"


class StepTimer:
    """Times every step of the executor that it is put around. report: called now and then."""

    def __init__(self, executor: Any, report: Callable[[list[TimedStep]], None]):
        self.steps: list[TimedStep] = []
        self._report, self._reported = report, time.perf_counter()
        self._execute_model = executor.execute_model
        executor.execute_model = self.execute_model

    def execute_model(self, step: Any, bitmasks: Any) -> Any:
        counts = step.num_scheduled_tokens.values()
        start = time.perf_counter()
        if start - self._reported > SECONDS_BETWEEN_TABLES:
            self._report([timed for timed in self.steps if timed.ended.query()])
            self._reported = start = time.perf_counter()
        launched = self._execute_model(step, bitmasks)
        seconds = time.perf_counter() - start
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        timed = TimedStep(len(counts), sum(counts), seconds, ended)
        self.steps.append(timed)
        return TimedResult(launched, timed)


@dataclass
class TimedResult:
    launched: Any
    timed: TimedStep

    def result(self) -> Any:
        start = time.perf_counter()
        result = self.launched.result()
        self.timed.wait = time.perf_counter() - start
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engine-args", default="{}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.model, Path(folder))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4 * MAX_LEN,
            max_num_seqs=NUM_REQUESTS, gpu_memory_utilization=0.85, **json.loads(args.engine_args),
        )  # fmt: skip
    bench = Bench(llm, SamplingParams)
    bench.seconds([(16, 32)] * 8)
    weights = weights_read(llm)
    has_experts = any(d.problem.family == "moe" for _, d in llm.llm_engine.core.selection.records)

    def report(steps: list[TimedStep], **summary: Any) -> None:
        rows = table(steps, *weights, has_experts)
        print(summary or f"after {len(steps)} steps:", flush=True)
        for row in rows:
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        if args.out:
            name = f"steps_{Path(args.model).name}.json"
            write_results(args.out, name, model=args.model, **summary, rows=rows)

    timer = StepTimer(llm.llm_engine.core.executor, report)
    seconds, num_out = bench.mixed_load()
    torch.cuda.synchronize()
    report(timer.steps, seconds=round(seconds, 2), output_tok_s=round(num_out / seconds))


def table(
    steps: list[TimedStep], num_bytes: int, num_weights: int, has_experts: bool
) -> list[dict[str, Any]]:
    """Means of each group, by the number of requests that decode; without the first step."""
    groups: dict[str, list[tuple[TimedStep, float]]] = {}
    for before, step in pairwise(steps):
        groups.setdefault(step.group, []).append((step, before.ended.elapsed_time(step.ended)))
    rows = []
    for group, timed in sorted(groups.items(), key=lambda entry: group_number(entry[0])):
        tokens = sum(step.num_tokens for step, _ in timed) / len(timed)
        ms = sum(ms for _, ms in timed) / len(timed)
        row = {
            "steps": group,
            "count": len(timed),
            "tokens": round(tokens),
            "device_ms": round(ms, 3),
            "launch_ms": round(sum(step.launch for step, _ in timed) / len(timed) * 1e3, 3),
            "wait_ms": round(sum(step.wait for step, _ in timed) / len(timed) * 1e3, 3),
            "device_s": round(sum(ms for _, ms in timed) / 1e3, 2),
            "tflop_s": round(2 * num_weights * tokens / ms / 1e9, 1),
        }
        if group.startswith("decode") and not has_experts:
            row["gb_s"] = round(num_bytes / ms / 1e6)
        rows.append(row)
    return rows


def group_number(group: str) -> int:
    """Steps with prompts first."""
    digits = "".join(filter(str.isdigit, group))
    return int(digits) if digits else -1


if __name__ == "__main__":
    main()
