"""Time per token with speculative decoding, by n-grams or as --config says, and without it, in one
engine.

usage: python benchmarks/serving/bench_drafts.py MODEL [--load-format dummy] [--batch 1,8]
           [--cases copy,half,none] [--config JSON] [--acceptance RATE] [--plain]
           [--engine-args JSON] [--repeat 3] [--json FILE]

MODEL: a folder, or with `--load-format dummy` a name whose config.json is built in; the folder of
what drafts with draft_model or eagle3 needs a config.json alone then, and where --config names no
head for eagle3, one of the model's sizes with 32,000 tokens is made up. Cases, each of 256 output
tokens after a prompt of 512, for drafts of n-grams:
  copy  the output repeats one token: every draft is accepted, as where a text is copied
  half  it is one of two tokens at random, of which drafts guess a part
  none  tokens at random from the whole vocabulary: hardly a draft
  text  the prompt is --prompt, and the answer greedy; needs weights and a tokenizer
Runs with and without drafts alternate; times are medians, in ms per output token of a request. What
pays is learnt over all runs of a case and batch, as a server learns it; the first warms up.
Which tokens come is the same with drafts and without: where it is not, as it may be on a GPU, whose
rounding depends on the number of rows, the share of equal outputs says so.

--acceptance RATE accepts that share of the draft tokens by lot, so that drafts can be measured with
random weights; every step then has drafts of num_speculative_tokens, and the case is `none` alone.
step_ms are medians of the steps in which all requests decode; pays: how many times as fast tokens
come in these with drafts, tokens_per_step of a request. Unlike with_ms it leaves out the end of a
run, where requests with better lots are done. What drafts with mtp and eagle3 costs something in
steps without drafts too: --plain measures an engine without it before.
"""

import argparse
import gc
import json
import platform
import random
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm import LLM, SamplingParams
from vllm.core.speculation import Speculation

PROMPT, OUTPUT = 512, 256


def main() -> None:
    args = parse_args()
    cases = [(case, batch) for case in args.cases for batch in args.batch]
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "arguments": vars(args) | {"model": Path(args.model).name, "json": None},
        "cases": {f"{case} b{batch}": {} for case, batch in cases},
    }
    for measure in (plain, compare) if args.plain else (compare,):
        with tempfile.TemporaryDirectory() as folder:
            llm = load(args, Path(folder), drafts=measure is compare)
        for case, batch in cases:
            entry = measure(llm, case, batch, args)
            result["cases"][f"{case} b{batch}"] |= entry
            print(f"{case} b{batch}:", *(f"{name} {v}" for name, v in entry.items()), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        llm.llm_engine.core.sleep()  # frees the memory
        del llm
        gc.collect()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--cases")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--config", default='{"method": "ngram"}')
    parser.add_argument("--acceptance", type=float)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--engine-args", default='{"max_model_len": 2048, "max_num_seqs": 64}')
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    by_lot = args.acceptance is not None
    args.cases = (args.cases or ("none" if by_lot else "copy,half,none")).split(",")
    args.batch = [*map(int, args.batch.split(","))]
    args.config = json.loads(args.config)
    if by_lot:
        args.config["rejection_sample_method"] = "synthetic"
        args.config["synthetic_acceptance_rate"] = args.acceptance
    return args


def load(args: argparse.Namespace, folder: Path, drafts: bool) -> LLM:
    model, options = args.model, json.loads(args.engine_args)
    if not Path(model).is_dir():
        from vllm.architectures.registry import builtin_config

        (folder / "config.json").write_text(json.dumps(builtin_config(model)))
        model = folder
    config = dict(args.config)
    if config["method"] == "eagle3" and "model" not in config:
        config["model"] = str(made_up_head(Path(model), folder / "head"))
    if drafts:
        options["speculative_config"] = config
    return LLM(
        model, load_format=args.load_format, skip_tokenizer_init="text" not in args.cases, **options
    )


def made_up_head(model: Path, folder: Path) -> Path:
    """config.json of an EAGLE-3 head as those published for models of these sizes."""
    fields = json.loads((model / "config.json").read_text())
    fields = fields.get("text_config", fields)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size")  # fmt: skip
    head = {name: fields[name] for name in names if name in fields} | {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": min(32000, fields["vocab_size"]),
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head))
    return folder


def machine() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def plain(llm: LLM, case: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Of an engine in which nothing drafts."""
    runs = [run(llm, case, batch, turn, args.prompt) for turn in range(args.repeat + 1)][1:]
    return {
        "plain_ms": milliseconds([one.seconds for one in runs]),
        "plain_step_ms": milliseconds([s for one in runs for s in one.steps]),
    }


def milliseconds(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def compare(llm: LLM, case: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    core, config = llm.llm_engine.core, llm.llm_engine.core.config.speculative_config
    assert config is not None
    by_lot = config.acceptance_rate is not None
    runs: dict[bool, list[Run]] = {False: [], True: []}
    num_drafts = num_drafted = num_accepted = num_equal = 0
    learnt = Speculation(config)
    core.stats()
    for turn in range(args.repeat + 1):
        found = {}
        for is_on in (False, True):
            core.speculation = learnt if is_on else None
            found[is_on] = run(llm, case, batch, turn, args.prompt)
            if turn:  # the first warms up
                runs[is_on].append(found[is_on])
        stats = learnt.take_counts()
        num_drafts, num_drafted = num_drafts + stats[0], num_drafted + stats[1]
        num_accepted += sum(stats[2].values())
        num_equal += sum(a == b for a, b in zip(found[False].tokens, found[True].tokens))
    seconds = [[one.seconds for one in runs[is_on]] for is_on in (False, True)]
    without, with_drafts = map(milliseconds, seconds)
    entry = {
        "without_ms": without,
        "with_ms": with_drafts,
        "ratio": round(without / with_drafts, 3),
        "accepted": round(num_accepted / max(1, num_drafted), 3),
        "accepted_per_token": round(num_accepted / (batch * OUTPUT * (args.repeat + 1)), 3),
        "runs_ms": [[round(s * 1e3, 3) for s in own] for own in seconds],
    }
    if not by_lot:
        return entry | {"equal": round(num_equal / (batch * (args.repeat + 1)), 3)}
    steps = [milliseconds([s for one in runs[is_on] for s in one.steps]) for is_on in (False, True)]
    tokens = 1 + num_accepted / num_drafts
    return entry | {
        "without_step_ms": steps[0],
        "with_step_ms": steps[1],
        "tokens_per_step": round(tokens, 3),
        "pays": round(steps[0] / steps[1] * tokens, 3),
    }


class Run(NamedTuple):
    """seconds: per output token after the first. steps: seconds of those in which all requests
    decode. tokens: of each request."""

    seconds: float
    steps: list[float]
    tokens: list[list[int]]


def run(llm: LLM, case: str, batch: int, turn: int, text: str) -> Run:
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
    core.on_scheduled = lambda step: None
    # From the first step in which every request decodes.
    first = next(at for at, step in ends if is_decode(step, batch))
    steps = [
        after - at
        for (at, step), (after, following) in pairwise(ends)
        if is_decode(step, batch) and is_decode(following, batch)
    ]
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return Run((end - first) / OUTPUT, steps, tokens)


def is_decode(step: Any, batch: int) -> bool:
    """Whether each of `batch` requests computes its last token and its draft alone."""
    drafts = step.scheduled_spec_decode_tokens
    counts = step.num_scheduled_tokens
    return len(counts) == batch and all(
        count == 1 + len(drafts.get(request_id, ())) for request_id, count in counts.items()
    )


if __name__ == "__main__":
    main()
