"""The engine on a GPU: start, throughput, latency, and where the time of a step goes.

usage: python benchmarks/serving/bench_gpu.py Qwen/Qwen3-8B-FP8 [--engine-args JSON] [--name NAME]
           [--contexts N ...] [--skip-profile] [--out benchmarks/results/h100]

The model is a shape `vllm kernels explain` knows by name, with random weights. Reported:
  ready_s     from the start of the process to a loaded engine
  output_tok_s  256 requests given at once, 100 to 1,024 tokens in and out, temperature 0.6
  weight_gb   weights that one token is multiplied with: read once, they bound tpot1_ms
  tpotB_ms    per output token of B requests of 32 prompt tokens: (129 tokens minus 1) / 128,
              the median of 3; beside it the bytes of weights a second that makes
  contexts    the same for one request of N prompt tokens
  ttft_ms     a prompt of 3,500 tokens and one output token, the median of 3; with the TFLOP/s of
              its matrix products
  steps       kernels of a step by GPU time, from torch's profiler (which slows the host down);
              kernels that start early and wait for the one before count the wait too
Prompts are random token ids, so that no prefix cache helps.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

PROMPT, OUTPUT, PREFILL, NUM_REQUESTS, MAX_LEN = 32, 128, 3500, 256, 1024
BATCHES = (1, 8, 64)
# Of an element of a weight; two where it is not listed. NVFP4 has a byte of scale for 16.
BYTES = {"fp8": 1, "nvfp4": 9 / 16, "int4": 1 / 2}
PROFILED_TOKENS = 20


def main() -> None:
    args = parse_args()
    from bench_engine import seconds_since_process_start
    from gpu_results import write_results

    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_config(args.model, Path(folder))
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True,
            max_model_len=max([4096, *(n + 2 * OUTPUT for n in args.contexts)]),
            max_num_seqs=256, gpu_memory_utilization=0.85, **json.loads(args.engine_args),
        )  # fmt: skip
    ready = seconds_since_process_start()
    bench = Bench(llm, SamplingParams)
    bench.seconds([(16, 32)] * 8)
    results = {"model": args.model, "ready_s": round(ready, 1), **bench.numbers()}
    if args.contexts:
        results["contexts"] = {n: round(bench.ms_per_token(1, n), 3) for n in args.contexts}
    print(json.dumps(results, indent=1), flush=True)
    if not args.skip_profile:
        results["steps"] = bench.steps()
        print(json.dumps(results["steps"], indent=1))
    write_results(args.out, f"engine_{args.name or Path(args.model).name}.json", **results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--engine-args", default="{}")
    parser.add_argument("--name", help="of the result file; default: the model's")
    parser.add_argument("--contexts", type=int, nargs="+", default=())
    parser.add_argument("--skip-profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h100"))
    return parser.parse_args()


def write_config(model: str, folder: Path) -> None:
    from vllm.kernels.builtin_models import builtin_config

    (folder / "config.json").write_text(json.dumps(builtin_config(model)))


class Bench:
    def __init__(self, llm: Any, sampling_params: Any):
        self._llm = llm
        self._sampling_params = sampling_params
        self._rng = random.Random(0)
        config = llm.llm_engine.config.model_config
        self._max_id = config.vocab_size - 1000
        self._num_bytes, self._num_weights = weights_read(llm)

    def numbers(self) -> dict[str, Any]:
        seconds, num_out = self.mixed_load()
        found: dict[str, Any] = {
            "output_tok_s": round(num_out / seconds), "weight_gb": round(self._num_bytes / 1e9, 3)
        }  # fmt: skip
        for batch in BATCHES:
            ms = self.ms_per_token(batch)
            found[f"tpot{batch}_ms"] = round(ms, 3)
            found[f"tpot{batch}_weight_gb_s"] = round(self._num_bytes / ms / 1e6)
        ms = median_of_3(lambda: self.seconds([(PREFILL, 1)]) * 1e3)
        found["ttft_ms"] = round(ms, 1)
        found["ttft_matmul_tflop_s"] = round(2 * self._num_weights * PREFILL / ms / 1e9, 1)
        return found

    def steps(self) -> dict[str, Any]:
        found = {}
        for batch in BATCHES:
            decode = [(PROMPT, PROFILED_TOKENS + 1)] * batch
            found[f"decode {batch}"] = self._profile(decode, PROFILED_TOKENS)
        found["prefill"] = self._profile([(PREFILL, 1)], 1)
        return found

    def mixed_load(self) -> tuple[float, int]:
        """Seconds that its requests take together, and the tokens that they put out."""
        mix = [(self._length(), self._length()) for _ in range(NUM_REQUESTS)]
        return self.seconds(mix, temperature=0.6), sum(num_out for _, num_out in mix)

    def _length(self) -> int:
        return self._rng.randint(100, MAX_LEN)

    def ms_per_token(self, batch: int, num_prompt: int = PROMPT) -> float:
        one, many = ([(num_prompt, num_out)] * batch for num_out in (1, OUTPUT + 1))

        def measure() -> float:
            first = self.seconds(one)
            return (self.seconds(many) - first) / OUTPUT * 1e3

        return median_of_3(measure)

    def seconds(self, lengths: list[tuple[int, int]], temperature: float = 0.0) -> float:
        prompts = [
            {"prompt_token_ids": [self._rng.randint(0, self._max_id) for _ in range(num_in)]}
            for num_in, _ in lengths
        ]
        params = [
            self._sampling_params(
                temperature=temperature, ignore_eos=True, detokenize=False, max_tokens=num_out
            )
            for _, num_out in lengths
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in lengths]
        return seconds

    def _profile(self, lengths: list[tuple[int, int]], num_steps: int) -> dict[str, Any]:
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.seconds(lengths)
        microseconds: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        # Not profiled.events(): that builds a tree of them first, which takes minutes.
        for event in profiled.profiler.kineto_results.events():
            if event.device_type() == DeviceType.CUDA:
                microseconds[event.name()] += event.duration_ns() / 1e3
                counts[event.name()] += 1
        return {
            name[:90]: {
                "us": round(us / num_steps, 1),
                "launches": round(counts[name] / num_steps, 1),
            }
            for name, us in microseconds.most_common(20)
        }


def median_of_3(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(3))


def weights_read(llm: Any) -> tuple[int, int]:
    """(bytes, elements) of the weights that a token is multiplied with, the experts it uses among
    them, scales aside but for those of NVFP4."""
    num_bytes = num_weights = 0
    for _, decision in llm.llm_engine.core.selection.records:
        problem = decision.problem
        if problem.family == "linear":
            count = problem.n * problem.k
        elif problem.family == "moe":
            count = 3 * problem.top_k * problem.hidden * problem.intermediate
        else:
            continue
        num_weights += count
        num_bytes += int(count * BYTES.get(problem.weight.element, 2))
    return num_bytes, num_weights


if __name__ == "__main__":
    main()
