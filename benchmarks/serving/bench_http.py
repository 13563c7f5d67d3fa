"""A model by HTTP: throughput beside `LLM`, and how long clients wait for tokens.

usage: python benchmarks/serving/bench_http.py MODEL [--engine-args JSON] [--cases CASE ...]
           [--out benchmarks/results/h200] [-- FLAG ...]

The model is a shape `vllm kernels explain` knows, one of family_sizes.json or a config.json, with
random weights, and a tokenizer whose every token is a word. `LLM` runs in a process of its own
that ends before the server starts; all other cases share one start of `vllm serve FLAG ...`.
--engine-args are for both. Clients are --processes processes (http_clients.py). Cases:
  offline  256 requests given to `LLM` at once, 100 to 1,024 tokens in and out, temperature 0.6,
           ends ignored: the load of bench_gpu.py; the median of --rounds after one
  http     the same requests by as many streaming clients of /v1/completions, likewise;
           of_offline: their output tokens a second to those of `offline`
  short    512 requests at once, 128 tokens in, 32 out, after one round. Limits: TTFT_MS, PER_S
  waves    64, 128 and 256 clients, each of which sends 3 requests of 1,000 tokens in and 200 out,
           the next when one has ended. first_ttft_ms: of the requests that all send at once;
           next_ttft_ms: of the others
What clients saw, of all rounds that count:
  ttft_ms, itl_ms    to the first event, and between two events of a stream: p50 and p99. Events
                     that are read together have 0 between them
  tokens_per_event   above 1 where the server put several into one
  client_cpu         share of a core that the busiest client process used: near 1, the clients are
                     what is measured
  api_cpu            of the API processes of the server, cores
The server's own account of the same requests, from /metrics, means:
  queue_ms     from arrival to the schedule of the first step; prefill_ms from there to the first
               token; http_ms: the rest of what clients waited
  steps        computed by the engine, with the tokens of one
The result file is written anew after each case and number of clients.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

from http_clients import Plan, Request

CLIENTS = Path(__file__).with_name("http_clients.py")
CASES = ("offline", "http", "short", "waves")
TEMPERATURE, WAVES = 0.6, 3
LEAST, SHORT, WAVE = 100, (128, 32), (1000, 200)
TTFT_MS, PER_S = 400, 300
ENGINE = {"max_model_len": 4096, "max_num_seqs": 256, "gpu_memory_utilization": 0.85}
# Sums of /metrics, and what their count is called.
METRICS = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "tokens": "vllm:iteration_tokens_total",
}


def main() -> None:
    args, flags = parse_args()
    from bench_fairness import served
    from bench_families import config_of, write_tokenizer
    from gpu_results import write_results

    from vllm.architectures.registry import describe

    config, engine = config_of(args.model), ENGINE | json.loads(args.engine_args)
    vocab_size = describe(config).vocab_size
    name = f"http_{args.name or Path(args.model).name.removesuffix('.json')}.json"
    results: dict[str, Any] = {"model": args.model, "engine_args": engine, "flags": flags}

    def tell(case: str, found: dict[str, Any]) -> None:
        print(case, json.dumps(found), flush=True)
        results[case] = found
        write_results(args.out, name, **results)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        write_tokenizer(Path(folder), vocab_size)
        if "offline" in args.cases:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                tell("offline", pool.submit(offline, folder, engine, vocab_size, args).result())
        if cases := [case for case in CASES[1:] if case in args.cases]:
            given = ["--load-format", "dummy", *flags_of(engine), *flags]
            with served(folder, given) as url:
                load = Load(url, vocab_size, args)
                for case in cases:
                    found = getattr(load, case)(results)
                    for part in [found] if isinstance(found, dict) else found:
                        tell(case, part)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("model")
    flag("--engine-args", default="{}", help=f"beside {json.dumps(ENGINE)}")
    flag("--cases", nargs="+", choices=CASES, default=CASES)
    flag("--name", help="of the result file; default: the model's")
    flag("--out", type=Path, default=Path("benchmarks/results/h200"))
    flag("--rounds", type=int, default=2)
    flag("--processes", type=int, default=6)
    flag("--requests", type=int, default=256, help="of `offline` and `http`")
    flag("--longest", type=int, default=1024, help="most tokens in, and out, of a request")
    flag("--short", type=int, default=512, help="requests of `short`")
    flag("--clients", type=int, nargs="+", default=(64, 128, 256), help="of `waves`")
    mark = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return parser.parse_args(sys.argv[1:mark]), sys.argv[mark + 1 :]


def mixed(args: argparse.Namespace, turn: int) -> list[Request]:
    """The same lengths in each turn, and other tokens: no prefix cache helps."""
    draw = Random(0)
    least = min(LEAST, args.longest)

    def length() -> int:
        return draw.randint(least, args.longest)

    return [Request(f"mixed {turn} {i}", length(), length()) for i in range(args.requests)]


def flags_of(engine: Mapping[str, Any]) -> Iterator[str]:
    """Engine arguments as flags of `vllm serve`."""
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None:
            yield from (f"--{flag}", value if isinstance(value, str) else json.dumps(value))


def offline(
    folder: str, engine: Mapping[str, Any], vocab_size: int, args: argparse.Namespace
) -> dict[str, Any]:
    """In a process of its own."""
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **engine)
    seconds = []
    for turn in range(args.rounds + 1):
        requests = mixed(args, turn)
        prompts = [{"prompt_token_ids": one.prompt(vocab_size)} for one in requests]
        params = [
            SamplingParams(
                temperature=TEMPERATURE, ignore_eos=True, detokenize=False, max_tokens=one.num_out
            )
            for one in requests
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert [len(o.outputs[0].token_ids) for o in outputs] == [one.num_out for one in requests]
    num_out = sum(one.num_out for one in requests)
    return {
        "requests": len(requests),
        "tokens_in": sum(one.num_in for one in requests),
        "tokens_out": num_out,
        "output_tok_s": round(num_out / statistics.median(seconds[1:]), 1),
        "rounds_s": [round(one, 3) for one in seconds],
    }


class Load:
    """Cases of one server. They take what the cases before found."""

    def __init__(self, url: str, vocab_size: int, args: argparse.Namespace):
        self._url, self._vocab_size, self._args = url, vocab_size, args

    def http(self, results: Mapping[str, Any]) -> dict[str, Any]:
        turns = range(self._args.rounds + 1)
        rounds = [self._round([[one] for one in mixed(self._args, turn)]) for turn in turns][1:]
        found = summary(rounds)
        if "offline" in results:
            found["of_offline"] = round(
                found["output_tok_s"] / results["offline"]["output_tok_s"], 3
            )
        return found

    def short(self, results: Mapping[str, Any]) -> dict[str, Any]:
        num_in, num_out = self._cut(SHORT)
        for turn in range(2):
            clients = [
                [Request(f"short {turn} {i}", num_in, num_out)] for i in range(self._args.short)
            ]
            found = summary([self._round(clients)])
        return found | {"limits": {"ttft_ms": {"p50": TTFT_MS}, "requests_s": PER_S}}

    def waves(self, results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """After each number of clients what was found so far."""
        num_in, num_out = self._cut(WAVE)
        found: dict[str, Any] = {}
        for count in self._args.clients:
            clients = [
                [Request(f"waves {count} {i} {k}", num_in, num_out) for k in range(WAVES)]
                for i in range(count)
            ]
            found[str(count)] = summary([self._round(clients)])
            yield found

    def _cut(self, lengths: tuple[int, int]) -> tuple[int, int]:
        return min(lengths[0], self._args.longest), min(lengths[1], self._args.longest)

    def _round(self, clients: list[list[Request]]) -> dict[str, Any]:
        """One load, by clients in several processes."""
        from bench_api import api_pids, cpu_seconds

        port = urlsplit(self._url).port or 80
        pids, before = api_pids(port), self._metrics()
        num = min(self._args.processes, len(clients))
        processes = []
        for place in range(num):
            plan = Plan(port, self._vocab_size, TEMPERATURE, clients[place::num])
            process = subprocess.Popen(
                [sys.executable, CLIENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            send(process, plan.line())
            processes.append(process)
        for process in processes:
            read(process)
        cpu = cpu_seconds(pids)
        for process in processes:
            send(process, "go\n")
        answers = [json.loads(read(process)) for process in processes]
        cpu = cpu_seconds(pids) - cpu
        for process in processes:
            process.wait()
        done = sorted(chain.from_iterable(answer["requests"] for answer in answers))
        return {
            "requests": done,
            "gaps": [*chain.from_iterable(answer["gaps"] for answer in answers)],
            "seconds": max(last for _, _, last, _ in done) - done[0][0],
            "tokens_out": sum(one.num_out for own in clients for one in own),
            "num_first": len(clients),
            "api_cpu_s": cpu,
            "client_cpu": max(answer["cpu_s"] / answer["wall_s"] for answer in answers),
            "metrics": {name: now - before[name] for name, now in self._metrics().items()},
        }

    def _metrics(self) -> dict[str, float]:
        """Sums and counts, over all labels."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return {
            f"{name}_{part}": sum(
                float(value)
                for value in re.findall(rf"^{metric}_{part}(?:{{.*}})? (\S+)$", text, re.M)
            )
            for name, metric in METRICS.items()
            for part in ("sum", "count")
        }


def send(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()


def read(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"clients ended with {process.wait()}: see above")
    return line


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates are medians of the rounds, all else is of all their requests together."""
    waits = [first - start for one in rounds for start, first, _, _ in one["requests"]]
    at_once, later = (
        [first - start for one in rounds for start, first, _, _ in part(one)]
        for part in (
            lambda one: one["requests"][: one["num_first"]],
            lambda one: one["requests"][one["num_first"] :],
        )
    )
    seconds = sum(one["seconds"] for one in rounds)
    num_events = sum(num for one in rounds for *_, num in one["requests"])
    num_out = sum(one["tokens_out"] for one in rounds)
    sums = {name: sum(one["metrics"][name] for one in rounds) for name in rounds[0]["metrics"]}
    queue, prefill = (sums[f"{name}_sum"] / sums[f"{name}_count"] for name in ("queue", "prefill"))
    rate = statistics.median(one["tokens_out"] / one["seconds"] for one in rounds)
    found = {
        "requests": len(waits),
        "output_tok_s": round(rate, 1),
        "requests_s": round(
            statistics.median(len(one["requests"]) / one["seconds"] for one in rounds), 1
        ),
        "ttft_ms": percentiles(waits),
        "itl_ms": percentiles([gap for one in rounds for gap in one["gaps"]]),
    }
    if later:
        found |= {"first_ttft_ms": percentiles(at_once), "next_ttft_ms": percentiles(later)}
    return found | {
        "queue_ms": round(queue * 1e3, 1),
        "prefill_ms": round(prefill * 1e3, 1),
        "http_ms": round((statistics.fmean(waits) - queue - prefill) * 1e3, 1),
        "steps": round(sums["tokens_count"]),
        "tokens_per_step": round(sums["tokens_sum"] / sums["tokens_count"], 1),
        "tokens_per_event": round(num_out / num_events, 3),
        "client_cpu": round(max(one["client_cpu"] for one in rounds), 2),
        "api_cpu": round(sum(one["api_cpu_s"] for one in rounds) / seconds, 2),
        "api_us_per_token": round(sum(one["api_cpu_s"] for one in rounds) / num_out * 1e6, 1),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {
        f"p{percent}": round(ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] * 1e3, 2)
        for percent in (50, 99)
    }


if __name__ == "__main__":
    main()
