"""The engine on a GPU: start, throughput, latency, and where the time of a step goes.

usage: python benchmarks/serving/bench_gpu.py Qwen/Qwen3-8B-FP8 [--engine-args JSON] [--name NAME]
           [--contexts N ...] [--skip-profile] [--out benchmarks/results/h100]

The model is a shape `vllm kernels explain` knows, one of family_sizes.json or a config.json,
with random weights. Reported:
  ready_s     from the start of the process to a loaded engine
  output_tok_s  256 requests given at once, 100 to 1,024 tokens in and out, temperature 0.6
  weight_gb   weights that one token is multiplied with: read once, they bound tpot1_ms
  tpotB_ms    per output token of B requests of 32 prompt tokens: (129 tokens minus 1) / 128,
              the median of 3; beside it the bytes of weights a second that makes
  contexts    the same for one request of N prompt tokens; gb_s: weights and cache read a second
  ttft_ms     a prompt of 3,500 tokens and one output token, the median of 3; with the TFLOP/s of
              its matrix products; ttft128_ms: of 128 tokens, the median of 15
  ttft_parts  of one such prompt, without the profiler: before_ms from the call of generate() to the
              step, launching_ms until the host has launched it, device_ms from the beginning of the
              step to the end of its last kernel by the device's clock, after_ms from there to the
              return
  steps       kernels of the step of a prompt by GPU time, from torch's profiler (which slows the
              host down); one that starts early counts from the end of the one before it on its
              stream. waiting: when no kernel runs; before_us from the call of generate() to the
              first, between_us in each step, after_us from the end of the last to the return.
              Steps that decode: `vllm bench steps --roofline`
Prompts are random token ids, so that no prefix cache helps. The result file is written anew with
every number, for runs that are cut.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

PROMPT, OUTPUT, SHORT, PREFILL, NUM_REQUESTS, MAX_LEN = 32, 128, 128, 3500, 256, 1024
BATCHES = (1, 8, 64)


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
    results: dict[str, Any] = {
        "model": args.model,
        "ready_s": round(seconds_since_process_start(), 1),
    }
    bench = Bench(llm, SamplingParams)
    bench.seconds([(16, 32)] * 8)
    name = f"engine_{args.name or Path(args.model).name.removesuffix('.json')}.json"
    parts = [bench.numbers(), bench.contexts(args.contexts)]
    for found in chain(*parts, () if args.skip_profile else bench.steps()):
        print(json.dumps(found, indent=1 if "steps" in found else None), flush=True)
        for key, value in found.items():
            if isinstance(value, dict):
                results.setdefault(key, {}).update(value)
            else:
                results[key] = value
        write_results(args.out, name, **results)


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
    from bench_families import config_of

    (folder / "config.json").write_text(json.dumps(config_of(model)))


class Bench:
    def __init__(self, llm: Any, sampling_params: Any):
        self._llm = llm
        self._sampling_params = sampling_params
        self._rng = random.Random(0)
        config = llm.llm_engine.config.model_config
        self._max_id = config.vocab_size - 1000
        self._num_bytes, self._num_weights = weights_read(llm)
        self._cache_bytes = cache_bytes_per_token(llm)

    def numbers(self) -> Iterator[dict[str, Any]]:
        seconds, num_out = self.mixed_load()
        weight_gb = round(self._num_bytes / 1e9, 3)
        yield {"output_tok_s": round(num_out / seconds), "weight_gb": weight_gb}
        for batch in BATCHES:
            ms = self.ms_per_token(batch)
            gb_s = round(self._num_bytes / ms / 1e6)
            yield {f"tpot{batch}_ms": round(ms, 3), f"tpot{batch}_weight_gb_s": gb_s}
        shorts = [self.seconds([(SHORT, 1)]) * 1e3 for _ in range(15)]
        yield {"ttft128_ms": round(statistics.median(shorts), 2)}
        ms = median_of_3(lambda: self.seconds([(PREFILL, 1)]) * 1e3)
        tflop_s = round(2 * self._num_weights * PREFILL / ms / 1e9, 1)
        yield {"ttft_ms": round(ms, 1), "ttft_matmul_tflop_s": tflop_s}
        yield {"ttft_parts": self.first_token_parts()}

    def first_token_parts(self) -> dict[str, float]:
        """Milliseconds of a prompt, the median of 3 by what its step takes."""
        return sorted((self.parts_once() for _ in range(3)), key=lambda p: p["device_ms"])[1]

    def parts_once(self) -> dict[str, float]:
        """Of one prompt: see `ttft_parts`."""
        import torch

        runner = self._llm.llm_engine.core.runner
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        times: list[float] = []

        def execute_model(*given: Any) -> Any:
            times.append(time.perf_counter())
            marks[0].record()
            try:
                return type(runner).execute_model(runner, *given)
            finally:
                marks[1].record()
                times.append(time.perf_counter())

        run = self.generation([(PREFILL, 1)])
        torch.cuda.synchronize()
        runner.execute_model = execute_model
        try:
            begin = time.perf_counter()
            run()
            end = time.perf_counter()
        finally:
            del runner.execute_model
        assert len(times) == 2, "a prompt that is one step"
        device_ms = marks[0].elapsed_time(marks[1])
        return {
            "before_ms": round((times[0] - begin) * 1e3, 2),
            "launching_ms": round((times[1] - times[0]) * 1e3, 2),
            "device_ms": round(device_ms, 2),
            "after_ms": round((end - times[0]) * 1e3 - device_ms, 2),
        }

    def contexts(self, lengths: list[int]) -> Iterator[dict[str, Any]]:
        for length in lengths:
            ms = self.ms_per_token(1, length)
            num_bytes = self._num_bytes + self._cache_bytes * (length + OUTPUT / 2)
            entry = {"ms": round(ms, 3), "gb_s": round(num_bytes / ms / 1e6)}
            yield {"contexts": {str(length): entry}}

    def steps(self) -> Iterator[dict[str, Any]]:
        from gpu_profile import profile_steps

        yield {"steps": {"prefill": profile_steps(self.generation([(PREFILL, 1)]), 1)}}

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

    def generation(
        self, lengths: list[tuple[int, int]], temperature: float = 0.0
    ) -> Callable[[], list[Any]]:
        """Of requests that are made now."""
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
        return lambda: self._llm.generate(prompts, params, use_tqdm=False)

    def seconds(self, lengths: list[tuple[int, int]], temperature: float = 0.0) -> float:
        run = self.generation(lengths, temperature)
        start = time.perf_counter()
        outputs = run()
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in lengths]
        return seconds


def median_of_3(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(3))


def weights_read(llm: Any) -> tuple[int, int]:
    """(bytes, elements) of the weights that a token is multiplied with, the experts it uses among
    them; bytes with scales."""
    from vllm.kernels.step_bytes import DecodeStep, layer_bytes

    num_bytes, num_weights, one = 0.0, 0, DecodeStep(batch=1, context=1)
    for _, decision in llm.llm_engine.core.selection.records:
        problem = decision.problem
        num_bytes += layer_bytes(problem, one).weights
        if problem.family == "linear":
            num_weights += problem.n * problem.k
        elif problem.family == "moe":
            parts = problem.num_first_parts + 1
            num_weights += parts * problem.top_k * problem.hidden * problem.intermediate
    return round(num_bytes), num_weights


def cache_bytes_per_token(llm: Any) -> int:
    """Of K and V in all layers, as one engine without ranks holds them."""
    from vllm.kernels.step_bytes import key_bytes

    problems = [decision.problem for _, decision in llm.llm_engine.core.selection.records]
    return sum(key_bytes(problem) for problem in problems if problem.family == "attention")


if __name__ == "__main__":
    main()
