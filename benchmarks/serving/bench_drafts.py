"""Time per token with speculative decoding, by n-grams or as --config says, and without it, in one
engine.

usage: python benchmarks/serving/bench_drafts.py MODEL [--load-format dummy] [--batch 1,8]
           [--cases copy,half,none] [--config JSON] [--engine-args JSON] [--repeat 3] [--json FILE]

MODEL: a folder, or with `--load-format dummy` a name whose config.json is built in; the folder of
what drafts with draft_model or eagle3 needs a config.json alone then. Cases, each of 256 output
tokens after a prompt of 512, for drafts of n-grams:
  copy  the output repeats one token: every draft is accepted, as where a text is copied
  half  it is one of two tokens at random, of which drafts guess a part
  none  tokens at random from the whole vocabulary: hardly a draft
  text  the prompt is --prompt, and the answer greedy; needs weights and a tokenizer
Runs with and without drafts alternate; times are medians, in ms per output token of a request. What
pays is learnt over all runs of a case and batch, as a server learns it; the first warms up.
Which tokens come is the same with drafts and without: where it is not, as it may be on a GPU, whose
rounding depends on the number of rows, the share of equal outputs says so.
"""

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vllm import LLM, SamplingParams
from vllm.core.speculation import Speculation

PROMPT, OUTPUT = 512, 256


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = load(args, Path(folder))
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "arguments": vars(args) | {"model": Path(args.model).name, "json": None},
        "cases": {},
    }
    for case in args.cases.split(","):
        for batch in map(int, args.batch.split(",")):
            entry = compare(llm, case, batch, args)
            result["cases"][f"{case} b{batch}"] = entry
            print(f"{case} b{batch}:", *(f"{name} {v}" for name, v in entry.items()), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--cases", default="copy,half,none")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--config", default='{"method": "ngram"}')
    parser.add_argument("--engine-args", default='{"max_model_len": 2048, "max_num_seqs": 64}')
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json")
    return parser.parse_args()


def load(args: argparse.Namespace, folder: Path) -> LLM:
    model, options = args.model, json.loads(args.engine_args)
    if not Path(model).is_dir():
        from vllm.architectures.registry import builtin_config

        (folder / "config.json").write_text(json.dumps(builtin_config(model)))
        model = folder
    has_text = "text" in args.cases.split(",")
    return LLM(
        model, load_format=args.load_format, skip_tokenizer_init=not has_text,
        speculative_config=json.loads(args.config), **options,
    )  # fmt: skip


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def compare(llm: LLM, case: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    core, config = llm.llm_engine.core, llm.llm_engine.core.config.speculative_config
    assert config is not None
    seconds: dict[bool, list[float]] = {False: [], True: []}
    num_drafted = num_accepted = num_equal = 0
    learnt = Speculation(config)
    for turn in range(args.repeat + 1):
        tokens = {}
        for is_on in (False, True):
            core.speculation = learnt if is_on else None
            timed, tokens[is_on] = run(llm, case, batch, turn, args.prompt)
            if turn:  # the first warms up
                seconds[is_on].append(timed)
        stats = core.stats()
        num_drafted += stats.num_draft_tokens
        num_accepted += sum(stats.num_accepted_tokens.values())
        num_equal += sum(a == b for a, b in zip(tokens[False], tokens[True]))
    without, with_drafts = (statistics.median(seconds[is_on]) * 1e3 for is_on in (False, True))
    return {
        "without_ms": round(without, 3),
        "with_ms": round(with_drafts, 3),
        "ratio": round(without / with_drafts, 3),
        "accepted": round(num_accepted / max(1, num_drafted), 3),
        "accepted_per_token": round(num_accepted / (batch * OUTPUT * (args.repeat + 1)), 3),
        "equal": round(num_equal / (batch * (args.repeat + 1)), 3),
        "runs_ms": [[round(s * 1e3, 3) for s in seconds[is_on]] for is_on in (False, True)],
    }


def run(llm: LLM, case: str, batch: int, turn: int, text: str) -> tuple[float, list[list[int]]]:
    """Seconds per output token after the first, and the tokens of each request."""
    rng = random.Random(turn)
    vocab = llm.llm_engine.config.model_config.vocab_size
    prompts: list[Any] = [text] * batch
    few: dict[str, Any] = {"temperature": 1.0}
    if case == "text":
        few = {"temperature": 0.0}
    elif case in ("copy", "half", "none"):
        ids = [[rng.randrange(vocab // 2) for _ in range(PROMPT)] for _ in range(batch)]
        prompts = [{"prompt_token_ids": own} for own in ids]
        if case != "none":
            few["allowed_token_ids"] = [7] if case == "copy" else [7, 8]
    else:
        raise SystemExit(f"unknown case {case!r}: copy, half, none or text")
    params = [
        SamplingParams(
            **few, seed=turn * 1000 + i, ignore_eos=True, detokenize=False, max_tokens=OUTPUT
        )
        for i in range(batch)
    ]
    core, ends = llm.llm_engine.core, []
    core.scheduler.reset_prefix_cache()
    core.on_scheduled = lambda step: ends.append((time.perf_counter(), step))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end = time.perf_counter()
    # From the first step in which every request decodes.
    first = next(at for at, step in ends if is_decode(step, batch))
    return (end - first) / OUTPUT, [list(output.outputs[0].token_ids) for output in outputs]


def is_decode(step: Any, batch: int) -> bool:
    """Whether each of `batch` requests computes its last token and its draft alone."""
    drafts = step.scheduled_spec_decode_tokens
    counts = step.num_scheduled_tokens
    return len(counts) == batch and all(
        count == 1 + len(drafts.get(request_id, ())) for request_id, count in counts.items()
    )


if __name__ == "__main__":
    main()
