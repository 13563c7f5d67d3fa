"""How long a prompt of 3,500 tokens takes on a GPU that rested before it, and on one that did not.

usage: python benchmarks/serving/bench_prompt_clock.py [MODEL] [--out benchmarks/results/h200]

device_ms: from the beginning of the step to the end of its last kernel, by the device's clock, of
eight prompts in a row with `rest_s` of nothing before each; then what nvidia-smi says of the clock
of the multiprocessors, of power, and of what limits them (bit 0x4: the power cap).
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

RESTS, PROMPTS = (2.0, 0.5, 0.1, 0.0), 8
QUERY = "clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_event_reasons.active"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="Qwen/Qwen3-8B-FP8")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100"))
    args = parser.parse_args()
    from bench_gpu import Bench, write_config
    from gpu_results import write_results

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_config(args.model, Path(folder))
        llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=4096)
    bench = Bench(llm, SamplingParams)
    bench.seconds([(16, 32)] * 8)
    found = []
    for rest_s in RESTS:
        device_ms = []
        for _ in range(PROMPTS):
            time.sleep(rest_s)
            device_ms.append(bench.parts_once()["device_ms"])
        entry = {
            "rest_s": rest_s,
            "device_ms": device_ms,
            "median_ms": round(statistics.median(device_ms), 1),
            "gpu": dict(zip(QUERY.split(","), what_nvidia_smi_says(), strict=True)),
        }
        print(entry, flush=True)
        found.append(entry)
    write_results(args.out, "prompt_clock.json", model=args.model, prompts=found)


def what_nvidia_smi_says() -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [value.strip() for value in done.stdout.strip().split(",")]


if __name__ == "__main__":
    main()
