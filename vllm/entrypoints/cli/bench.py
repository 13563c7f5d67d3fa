"""`vllm bench`: latency and throughput of the engine in this process, or of a running server."""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import bench_serve, bench_steps
from vllm.entrypoints.demo import demo_model_path

_PERCENTILES = (10, 50, 90, 99)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench")
    kinds = parser.add_subparsers(dest="bench_kind", metavar="KIND", required=True)
    serve = kinds.add_parser("serve", help="Load on a running server.")
    bench_serve.add_flags(serve)
    serve.set_defaults(run=bench_serve.run)

    latency = kinds.add_parser("latency", help="Time of one batch.")
    latency.add_argument("--batch-size", type=int, default=8)
    latency.add_argument("--num-iters-warmup", type=int, default=3)
    latency.add_argument("--num-iters", type=int, default=10)
    _add_common_flags(latency, run_latency)

    throughput = kinds.add_parser("throughput", help="Rate of many requests given at once.")
    throughput.add_argument("--num-prompts", type=int, default=100)
    _add_common_flags(throughput, run_throughput)

    bench_steps.add_flags(kinds.add_parser("steps", help="Time of decode steps, by kernel."))


def _add_common_flags(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--model", help="Folder or hub name; default: the demo model.")
    parser.add_argument("--input-len", type=int, default=32, help="Prompt length in tokens.")
    parser.add_argument("--output-len", type=int, default=128, help="Output length in tokens.")
    parser.add_argument("--output-json", help="File to write the result to.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run)


def run_latency(args: argparse.Namespace) -> None:
    batch = _Batch(args)
    for _ in range(args.num_iters_warmup):
        batch.seconds(args.batch_size)
    seconds = sorted(batch.seconds(args.batch_size) for _ in range(args.num_iters))
    result: dict[str, Any] = {
        "avg_latency": statistics.fmean(seconds),
        "latencies": seconds,
        "percentiles": {p: bench_serve.percentile(seconds, p) for p in _PERCENTILES},
    }
    print(f"Mean latency: {result['avg_latency']:.4f} s")
    for p, value in result["percentiles"].items():
        print(f"p{p} latency: {value:.4f} s")
    _write(args.output_json, result)


def run_throughput(args: argparse.Namespace) -> None:
    batch = _Batch(args)
    batch.seconds(1)
    seconds = batch.seconds(args.num_prompts)
    num_out = args.num_prompts * args.output_len
    num_all = num_out + args.num_prompts * args.input_len
    result = {
        "elapsed_time": seconds,
        "num_requests": args.num_prompts,
        "total_num_tokens": num_all,
        "requests_per_second": args.num_prompts / seconds,
        "tokens_per_second": num_all / seconds,
        "output_tokens_per_second": num_out / seconds,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s"
    )
    _write(args.output_json, result)


class _Batch:
    """The engine, and batches of requests of one shape to give it."""

    def __init__(self, args: argparse.Namespace):
        from vllm import LLM, SamplingParams

        _check(args)
        model = str(demo_model_path()) if args.model is None else args.model
        self._llm = LLM(**vars(EngineArgs.from_cli_args(args, model)))
        self._params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=args.output_len, detokenize=False
        )
        self._input_len = args.input_len
        self._rng = random.Random(args.seed)

    def seconds(self, size: int) -> float:
        """Time to generate for `size` fresh random prompts: nothing is found in a cache."""
        vocab_size = self._llm.llm_engine.config.model_config.vocab_size
        prompts = [
            {"prompt_token_ids": self._rng.choices(range(vocab_size), k=self._input_len)}
            for _ in range(size)
        ]
        start = time.perf_counter()
        self._llm.generate(prompts, self._params, use_tqdm=False)
        return time.perf_counter() - start


def _check(args: argparse.Namespace) -> None:
    counts = ("batch_size", "num_iters", "num_prompts", "input_len", "output_len")
    bench_serve.check_numbers(args, "1 or more", lambda n: n >= 1, *counts)
    bench_serve.check_numbers(args, "0 or more", lambda n: n >= 0, "num_iters_warmup")
    if args.output_json:
        bench_serve.check_writable("--output-json", args.output_json)


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
        print(f"Written to {path}")
