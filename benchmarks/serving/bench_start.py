"""Seconds to ready: each choice of kernels started cold, then warm, in processes of their own.

usage: python benchmarks/serving/bench_start.py Qwen/Qwen3-8B-FP8 [--wish VLLM_USE_DEEP_GEMM=0]...
           [--bundle DIR] [--name NAME] [--out benchmarks/results/h100]

The model is a shape `vllm kernels explain` knows by name, with random weights. Cold: an empty
folder for all that vLLM keeps (compiled kernels, what it learnt about libraries); warm: the same
again.
Reported for each start:
  ready_s       from the start of the process to a loaded engine, imports included
  phases_s      of the engine alone, as its log has them
  compiled      kernels compiled before ready, and the sum of their seconds, which ran side by side
  compiled_after  those that requests waited for, of 60 of 1 to 2,900 tokens; should be 0
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 33, 100, 333, 1000, 2900)


def main() -> None:
    args = parse_args()
    if args.inside:
        print(json.dumps(one_start(args.model)))
        return
    from gpu_results import write_results

    starts = []
    name = f"start_{args.name or Path(args.model).name}.json"
    for wish in args.wish or ("", "VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM=1"):
        with tempfile.TemporaryDirectory() as folder:
            for state in ("cold", "warm"):
                found = {"wish": wish or "default", "caches": state}
                found |= start(args.model, wish, Path(folder), args.bundle)
                print(json.dumps(found), flush=True)
                starts.append(found)
                write_results(args.out, name, model=args.model, starts=starts)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--wish", action="append", help="A variable, as NAME=VALUE.")
    parser.add_argument("--bundle", type=Path, help="For every start.")
    parser.add_argument("--name", help="of the result file; default: the model's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def start(model: str, wish: str, folder: Path, bundle: Path | None) -> dict[str, Any]:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "VLLM_CACHE_ROOT": str(folder), "PYTHONPATH": paths}
    if wish:
        name, _, value = wish.partition("=")
        env[name] = value
    if bundle is not None:
        env["VLLM_KERNEL_BUNDLE"] = str(bundle)
    command = [sys.executable, __file__, model, "--inside"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"the start with {wish or 'no wish'} failed with {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def one_start(model: str) -> dict[str, Any]:
    from bench_engine import seconds_since_process_start
    from bench_gpu import write_config

    from vllm import LLM, SamplingParams
    from vllm.kernels.jit.monitor import MONITOR

    with tempfile.TemporaryDirectory() as folder:
        write_config(model, Path(folder))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            max_num_seqs=256, gpu_memory_utilization=0.85,
        )  # fmt: skip
    ready = seconds_since_process_start()
    core = llm.llm_engine.core
    phases = {name: round(spent, 1) for name, spent in core.executor.report.seconds.items()}
    rng = random.Random(1)
    prompts = [
        {"prompt_token_ids": [rng.randrange(100_000) for _ in range(rng.choice(LENGTHS))]}
        for _ in range(60)
    ]
    params = [
        SamplingParams(ignore_eos=True, detokenize=False, max_tokens=rng.randrange(1, 40))
        for _ in prompts
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return {
        "ready_s": round(ready, 1),
        "phases_s": phases,
        "compiled": MONITOR.summary(),
        "compiled_after": core.stats().num_compiled,
    }


if __name__ == "__main__":
    main()
