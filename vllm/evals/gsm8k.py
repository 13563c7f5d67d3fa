"""GSM8K against the completions API of a running server, ours or any OpenAI-compatible one.

The prompts are those of lm-evaluation-harness' task `gsm8k`, answers are greedy, and the last
number of an answer counts (there: the filter `flexible-extract`). A second score, by the rule of
upstream's script, is for comparison with scores and thresholds published there (`last_digits`).
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.evals import gsm8k_data
from vllm.evals.gsm8k_data import Item
from vllm.evals.numbers import last_digits, last_number
from vllm.evals.statistics import wilson_interval
from vllm.utils.http_client import HttpClient, HttpError

STOP = ("Question:", "</s>", "<|im_end|>")
_REQUEST_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Server:
    """Where to ask. model None takes the first one that the server lists."""

    base_url: str
    model: str | None = None
    api_key: str | None = None


@dataclass
class Answer:
    """What a server made of one question. prediction: the last number in text, or None.

    is_correct_upstream: by upstream's rule, `last_digits` of text and worked answer are equal.
    """

    index: int
    label: str
    prediction: str | None
    is_correct: bool
    is_correct_upstream: bool
    text: str
    num_output_tokens: int
    latency_s: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--host", default="127.0.0.1")
    flag("--port", type=int, default=8000)
    flag("--base-url", help="Address of the server; instead of --host and --port.")
    flag("--api-key", help="API key; default: VLLM_API_KEY.")
    flag("--model", help="Model name; default: the first that the server lists.")
    flag("--num-questions", type=int, default=1319,
         help="Number of questions, from the start of the test set.")  # fmt: skip
    flag("--num-shots", type=int, default=5,
         help="Number of worked examples, from the training set.")  # fmt: skip
    flag("--seed", type=int, help="Seed that draws the worked examples; default: the first ones.")
    flag("--max-tokens", type=int, default=256, help="Maximum tokens of an answer.")
    flag("--concurrency", type=int, default=64, help="Maximum concurrent requests.")
    flag("--data-dir", type=Path, help="Folder of test.jsonl and train.jsonl.")
    flag("--download", action="store_true", help="Fetch the data into --data-dir first.")
    flag("--no-checksum", action="store_true", help="Accept data other than the published files.")
    flag("--save-results", type=Path, metavar="FILE", help="Write all answers as JSON.")


def run(args: argparse.Namespace) -> int:
    """Prints the score; 1 if a question was left without an answer."""
    for name, least in (("num_questions", 1), ("num_shots", 0), ("max_tokens", 1),
                        ("concurrency", 1)):  # fmt: skip
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}")
    if args.save_results and not args.save_results.parent.is_dir():
        raise ConfigError(f"--save-results {args.save_results}: its folder does not exist")
    folder = args.data_dir or gsm8k_data.default_folder()
    if args.download:
        gsm8k_data.download(folder)
    key = args.api_key or envs.VLLM_API_KEY
    server = Server(args.base_url or f"http://{args.host}:{args.port}", args.model, key)
    items = questions_and_shots(
        folder, args.num_questions, args.num_shots, args.seed, not args.no_checksum
    )
    result = evaluate(server, *items, args.max_tokens, args.concurrency)
    print(summary(result))
    if args.save_results:
        save(result, args.save_results)
    return 0 if result["error"] is None else 1


def questions_and_shots(
    folder: Path, num_questions: int, num_shots: int, seed: int | None, is_checked: bool = True
) -> tuple[list[Item], list[Item]]:
    """The first test items, and the worked examples that precede each."""
    test = gsm8k_data.load(folder, "test", is_checked)
    train = gsm8k_data.load(folder, "train", is_checked) if num_shots else []
    return test[:num_questions], gsm8k_data.choose_shots(train, num_shots, seed)


def evaluate(
    server: Server,
    questions: Sequence[Item],
    shots: Sequence[Item],
    max_tokens: int = 256,
    concurrency: int = 64,
) -> dict[str, Any]:
    """Asks every question, and returns the score with all answers.

    accuracy, interval (95 %), accuracy_upstream and invalid_rate are shares of the questions that
    were answered.
    The first request that fails ends the run: what was answered until then is in the result, and
    `error` says what happened (None: every question was answered). HttpError if not even the
    list of models comes back.
    """
    return asyncio.run(_evaluate(server, questions, shots, max_tokens, concurrency))


async def _evaluate(
    server: Server, questions: Sequence[Item], shots: Sequence[Item], max_tokens: int, limit: int
) -> dict[str, Any]:
    answers: list[Answer] = []
    places = asyncio.Semaphore(limit)
    failure = None
    async with HttpClient(server.base_url, server.api_key) as client:
        model = server.model or await client.first_model()

        async def answer(index: int, item: Item) -> None:
            async with places:
                body = {"model": model, "prompt": gsm8k_data.prompt_of(item.question, shots),
                        "max_tokens": max_tokens, "temperature": 0, "stop": list(STOP)}  # fmt: skip
                start = time.perf_counter()
                async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                    reply = await client.post_json("/v1/completions", body)
                answers.append(_judged(index, item, reply, time.perf_counter() - start))

        start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for index, item in enumerate(questions):
                    group.create_task(answer(index, item))
        except* (HttpError, TimeoutError, LookupError, TypeError, ValueError) as errors:
            failure = f"{type(errors.exceptions[0]).__name__}: {errors.exceptions[0]}"
    duration = time.perf_counter() - start
    answers.sort(key=lambda answer: answer.index)
    settings = {"model": model, "num_questions": len(questions), "num_shots": len(shots),
                "max_tokens": max_tokens, "concurrency": limit}  # fmt: skip
    return settings | score(answers, duration) | {"error": failure, "answers": answers}


def _judged(index: int, item: Item, reply: Any, latency: float) -> Answer:
    text, usage = reply["choices"][0]["text"], reply.get("usage") or {}
    found = last_number(text)
    return Answer(
        index=index,
        label=str(item.label),
        prediction=None if found is None else str(found),
        is_correct=found == item.label,
        is_correct_upstream=last_digits(text) == last_digits(item.solution),
        text=text,
        num_output_tokens=int(usage.get("completion_tokens", 0)),
        latency_s=latency,
    )


def score(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Rates, latencies in seconds, and output tokens per second of the whole run."""
    num_all = len(answers)
    num_right = sum(answer.is_correct for answer in answers)
    num_upstream = sum(answer.is_correct_upstream for answer in answers)
    latencies = [answer.latency_s for answer in answers]
    num_tokens = sum(answer.num_output_tokens for answer in answers)
    return {
        "num_answered": num_all,
        "num_correct": num_right,
        "accuracy": num_right / num_all if num_all else None,
        "interval": wilson_interval(num_right, num_all),
        "num_correct_upstream": num_upstream,
        "accuracy_upstream": num_upstream / num_all if num_all else None,
        "invalid_rate": sum(a.prediction is None for a in answers) / num_all if num_all else None,
        "duration_s": duration,
        "mean_latency_s": statistics.fmean(latencies) if latencies else None,
        "max_latency_s": max(latencies, default=None),
        "num_output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / duration if duration else None,
    }


def summary(result: dict[str, Any]) -> str:
    """The score in a few lines; without answers, only what went wrong."""
    lines = [f"Model                {result['model']}"]
    lines.append(f"Questions answered   {result['num_answered']} of {result['num_questions']}")
    if result["num_answered"]:
        low, high = result["interval"]
        lines += [
            f"Accuracy             {result['accuracy']:.4f} (95 %: {low:.4f} to {high:.4f})",
            f"By vLLM's rule       {result['accuracy_upstream']:.4f} (last digits, without sign)",
            f"Invalid answers      {result['invalid_rate']:.4f}",
            f"Latency (s)          {result['mean_latency_s']:.2f} mean, "
            f"{result['max_latency_s']:.2f} most",
            f"Output tokens/s      {result['output_tokens_per_s']:.1f}",
        ]
    if result["error"] is not None:
        lines.append(f"STOPPED EARLY        {result['error']}")
    return "\n".join(lines)


def save(result: dict[str, Any], path: Path) -> None:
    """Writes the result with every answer as JSON."""
    content = result | {"answers": [asdict(answer) for answer in result["answers"]]}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-results {path} cannot be written: {error}") from error
