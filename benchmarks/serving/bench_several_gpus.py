"""One model on one GPU and on two: time per token with its layers shared, throughput with engines
side by side.

usage: python benchmarks/serving/bench_several_gpus.py Qwen/Qwen3-8B-FP8
           [--engine-args JSON] [--out benchmarks/results/h200]

The model is a shape `vllm kernels explain` knows by name, with random weights. Every line is a
process of its own:
  latency N     tensor parallel over N GPUs. tpotB_ms: per output token of B requests of 32 prompt
                tokens, (129 tokens minus 1) / 128, the median of 3; ttft_ms: 3,500 tokens, likewise
                steps: kernels of a step on the first GPU while one request decodes, and when none
                runs, as bench_gpu.py has it
  throughput N  N engines behind AsyncLLM: 256 N requests given at once, 100 to 1,024 tokens in and
                out, temperature 0.6
ready_s: from the start of the process. The two lines of one GPU run at the same time, each on its
own; those of two GPUs alone. A line that fails or takes too long keeps the numbers that it had; the
result file is written anew after each.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

PROMPT, OUTPUT, PREFILL, NUM_REQUESTS, LENGTHS = 32, 128, 3500, 256, (100, 1024)
BATCHES = (1, 8, 64)
MAX_ID = 150_000
ENGINE = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096,
    "max_num_seqs": 256, "gpu_memory_utilization": 0.85,
}  # fmt: skip
LINES = ((("latency", 1), ("throughput", 1)), (("latency", 2),), (("throughput", 2),))
SECONDS_OF_LINE = 150
PROFILED_TOKENS = 20
SHARED = ("ttft_ms", "output_tok_s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engine-args", default="{}")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--line", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.line:
        what, size = args.line[0], int(args.line[1])
        options = ENGINE | {"model": args.model} | json.loads(args.engine_args)
        found = latency(size, options) if what == "latency" else throughput(size, options)
        print(json.dumps(found), flush=True)
        return
    from gpu_results import write_results

    lines: dict[str, dict[str, Any]] = {}
    name = f"several_gpus_{Path(args.model).name}.json"
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.model, Path(folder))
        for together in LINES:
            started = [start(line, gpu, folder, args) for gpu, line in enumerate(together)]
            for (what, size), process in zip(together, started):
                lines[f"{what} {size}"] = finish(process)
            print(json.dumps(lines | ratios(lines), indent=1), flush=True)
            write_results(args.out, name, model=args.model, **ratios(lines), **lines)


def ratios(lines: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Of two GPUs to one, of those numbers that both have."""
    found = {}
    for what in ("latency", "throughput"):
        one, two = (lines.get(f"{what} {size}", {}) for size in (1, 2))
        for number in one.keys() & two.keys() & {*(f"tpot{n}_ms" for n in BATCHES), *SHARED}:
            found[f"{number}_of_one_gpu"] = round(two[number] / one[number], 3)
    return dict(sorted(found.items()))


def write_config(model: str, folder: Path) -> None:
    from vllm.architectures.registry import builtin_config

    (folder / "config.json").write_text(json.dumps(builtin_config(model)))


def start(
    line: tuple[str, int], gpu: int, folder: str, args: argparse.Namespace
) -> "subprocess.Popen[str]":
    what, size = line
    env = dict(os.environ)
    if size == 1:
        env["CUDA_VISIBLE_DEVICES"] = str(gpu)
    words = [sys.executable, __file__, folder, "--engine-args", args.engine_args]
    return subprocess.Popen(
        [*words, "--line", what, str(size)], env=env, stdout=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The numbers it printed last, and why it printed no more."""
    failed = ""
    try:
        output, _ = process.communicate(timeout=SECONDS_OF_LINE)
        if process.returncode != 0:
            failed = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        failed = f"not done after {SECONDS_OF_LINE} s"
        # Its ranks end with it.
        process.kill()
        output, _ = process.communicate()
    printed = [line for line in output.splitlines() if line.startswith("{")]
    found = dict(json.loads(printed[-1])) if printed else {}
    return found | ({"failed": failed} if failed else {})


# ---------------------------------------------------------------- one line


def latency(num_gpus: int, options: dict[str, Any]) -> dict[str, Any]:
    from bench_engine import seconds_since_process_start
    from rank_profile import recording_ranks

    from vllm import LLM

    with recording_ranks() as folder:
        llm = LLM(**options, tensor_parallel_size=num_gpus)
        found: dict[str, Any] = {"ready_s": round(seconds_since_process_start(), 1)}
        rng = random.Random(0)
        seconds(llm, rng, 8, 16, 32)
        for batch in BATCHES:
            found[f"tpot{batch}_ms"] = round(median_of_3(lambda b=batch: per_token(llm, rng, b)), 3)
            print(json.dumps(found), flush=True)
        found["ttft_ms"] = round(median_of_3(lambda: seconds(llm, rng, 1, PREFILL, 1)) * 1e3, 1)
        print(json.dumps(found), flush=True)
        found["steps"] = {"decode 1": decode_steps(llm, rng, folder if num_gpus > 1 else None)}
    return found


def decode_steps(llm: Any, rng: random.Random, ranks: Path | None) -> dict[str, Any]:
    """ranks: what `recording_ranks` gave, where they are not this process."""
    from gpu_profile import profile_steps
    from rank_profile import profile_rank

    def decode(num_tokens: int = PROFILED_TOKENS + 1) -> float:
        return seconds(llm, rng, 1, PROMPT, num_tokens)

    if ranks is None:
        return profile_steps(decode, PROFILED_TOKENS)
    return profile_rank(ranks, decode, PROFILED_TOKENS, lambda: decode(1))


def per_token(llm: Any, rng: random.Random, batch: int) -> float:
    """Milliseconds."""
    first = seconds(llm, rng, batch, PROMPT, 1)
    return (seconds(llm, rng, batch, PROMPT, OUTPUT + 1) - first) / OUTPUT * 1e3


def seconds(llm: Any, rng: random.Random, batch: int, num_in: int, num_out: int) -> float:
    prompts = [{"prompt_token_ids": random_ids(rng, num_in)} for _ in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, sampling(num_out, 0.0), use_tqdm=False)
    spent = time.perf_counter() - begin
    assert {len(output.outputs[0].token_ids) for output in outputs} == {num_out}
    return spent


def throughput(num_engines: int, options: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(_throughput(num_engines, options))


async def _throughput(num_engines: int, options: dict[str, Any]) -> dict[str, Any]:
    from bench_engine import seconds_since_process_start

    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.async_llm import AsyncLLM

    llm = AsyncLLM(EngineArgs(**options, data_parallel_size=num_engines))
    await llm.wait_ready()
    ready = seconds_since_process_start()
    rng = random.Random(0)
    await serve(llm, rng, [(16, 32)] * 8 * num_engines)
    lengths = [(rng.randint(*LENGTHS), rng.randint(*LENGTHS)) for _ in range(NUM_REQUESTS)]
    lengths *= num_engines
    before = time.process_time()
    spent = await serve(llm, rng, lengths)
    own_seconds = time.process_time() - before
    await llm.shutdown()
    return {
        "ready_s": round(ready, 1),
        "num_requests": len(lengths),
        "seconds": round(spent, 2),
        "front_end_cpu_s": round(own_seconds, 2),
        "output_tok_s": round(sum(num_out for _, num_out in lengths) / spent),
    }


async def serve(llm: Any, rng: random.Random, lengths: list[tuple[int, int]]) -> float:
    """Seconds until all are done."""

    async def one(index: int, num_in: int, num_out: int) -> int:
        prompt = {"prompt_token_ids": random_ids(rng, num_in)}
        async for output in llm.generate(prompt, sampling(num_out, 0.6), f"{begin}-{index}"):
            found = len(output.outputs[0].token_ids)
        return found

    begin = time.perf_counter()
    found = await asyncio.gather(*(one(i, *length) for i, length in enumerate(lengths)))
    spent = time.perf_counter() - begin
    assert found == [num_out for _, num_out in lengths]
    return spent


def sampling(num_tokens: int, temperature: float) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, MAX_ID) for _ in range(count)]


def median_of_3(measure: Any) -> float:
    return statistics.median(measure() for _ in range(3))


if __name__ == "__main__":
    main()
