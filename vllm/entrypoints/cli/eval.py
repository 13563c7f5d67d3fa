"""`vllm eval`: the accuracy of a running server, and of one configuration against another."""

import argparse
import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.entrypoints.demo import demo_model_path
from vllm.errors import ConfigError, did_you_mean
from vllm.evals import gsm8k, gsm8k_data
from vllm.evals.numbers import last_number
from vllm.evals.paired import Budget, Comparison, compare, compare_answers

if TYPE_CHECKING:
    from vllm.evals.measure import Configuration, Job, TokenIds

_SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("eval")
    kinds = parser.add_subparsers(dest="eval_kind", metavar="KIND", required=True)
    score = kinds.add_parser("gsm8k", help="GSM8K questions to a running server.")
    gsm8k.add_flags(score)
    score.set_defaults(run=gsm8k.run)
    paired = kinds.add_parser(
        "paired",
        help="Two configurations of the engine on the same tokens.",
        description="Runs configuration A, then B, on the same texts, and compares their "
        "logprobs of every token. The exit code is 1 if B exceeds the budget. A configuration is "
        "the arguments of `vllm serve`, after variables if there are any: "
        '--b "VLLM_USE_DEEP_GEMM=0 MODEL --linear-backend emulation"; "" is the demo model.',
    )
    _add_paired_flags(paired)
    paired.set_defaults(run=run_paired)


def _add_paired_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--a", required=True, metavar="ARGS", help="The reference configuration.")
    flag("--b", required=True, metavar="ARGS", help="The configuration compared with it.")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--prompts", type=Path, metavar="FILE", help="Texts, one per line.")
    texts.add_argument("--gsm8k", type=Path, metavar="DIR",
                       help="Folder of GSM8K: questions with their worked answers.")  # fmt: skip
    flag("--num-questions", type=int, default=100,
         help="Number of questions of --gsm8k (default: 100).")  # fmt: skip
    flag("--answers", action="store_true",
         help="With --gsm8k: both answer, 5-shot, for McNemar's test.")  # fmt: skip
    flag("--no-checksum", action="store_true", help="Accept data other than the published files.")
    flag("--max-tokens", type=int, default=256, help="Maximum tokens of an answer.")
    flag("--top-k", type=int, default=100,
         help="Number of likeliest tokens to compare (default: 100).")  # fmt: skip
    flag("--max-kl", type=float, metavar="NATS", help="Budget: mean KL(A || B) per token.")
    flag("--min-top1", type=float, metavar="SHARE", help="Budget: top-1 agreement, 0 to 1.")
    flag("--min-p", type=float, metavar="P",
         help="Budget: B must not be right less often with McNemar's p below this.")  # fmt: skip
    flag("--json", action="store_true", help="Print JSON.")


def run_paired(args: argparse.Namespace) -> int:
    """Prints the comparison; 1 if it is over budget."""
    from vllm.evals.measure import measure

    _check(args)
    budget = Budget(args.max_kl, args.min_top1, args.min_p)
    a, b = _configuration("--a", args.a), _configuration("--b", args.b)
    tokenizer = _common_tokenizer(a, b)
    job, items = _job(args, tokenizer)
    measured = [measure(side, job) for side in (a, b)]
    answers = None
    if args.answers:
        answers = compare_answers(*(_correct(m.outputs, items, tokenizer) for m in measured))
    if not measured[0].positions:
        raise ConfigError("the prompts have no second token: there is nothing to compare")
    comparison = compare(measured[0].positions, measured[1].positions, answers)
    over = comparison.over_budget(budget)
    if args.json:
        verdict = {"a": args.a, "b": args.b, "budget": vars(budget), "over_budget": over}
        print(json.dumps({**verdict, **asdict(comparison)}, indent=1))
    else:
        print(_page(comparison))
        kept = "No budget was given" if budget == Budget() else "Within budget"
        print("\n".join(f"OVER BUDGET: {text}" for text in over) or kept)
    return 1 if over else 0


def _check(args: argparse.Namespace) -> None:
    from vllm.sampling_params import MAX_LOGPROBS

    if not 1 <= args.top_k <= MAX_LOGPROBS:
        raise ConfigError(f"--top-k {args.top_k}: it takes 1 to {MAX_LOGPROBS}")
    for name in ("num_questions", "max_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    for name, most in (("max_kl", float("inf")), ("min_top1", 1), ("min_p", 1)):
        value = getattr(args, name)
        if value is not None and not 0 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: it takes 0 to {most}")
    if args.answers and args.gsm8k is None:
        raise ConfigError("--answers needs questions that have answers: give --gsm8k DIR")
    if args.min_p is not None and not args.answers:
        raise ConfigError("--min-p judges answers: give --answers and --gsm8k DIR with it")


def _configuration(flag: str, text: str) -> "Configuration":
    """[VLLM_NAME=VALUE ...] then the arguments of `vllm serve`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.cli.main import Parser
    from vllm.evals.measure import Configuration

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from error
    variables = []
    while words and (match := _SETTING.fullmatch(words[0])):
        if match[1] not in envs.VARIABLES:
            hint = did_you_mean(match[1], envs.VARIABLES)
            raise ConfigError(f"{flag}: unknown environment variable {match[1]}{hint}")
        variables.append((match[1], match[2]))
        words.pop(0)
    parser = Parser(prog=f"vllm eval paired {flag}")
    subparsers = parser.add_subparsers()
    serve.add_parser(subparsers)
    args, unknown = parser.parse_known_args(["serve", *words])
    if unknown:
        flags = subparsers.choices["serve"]._option_string_actions
        hint = did_you_mean(unknown[0].partition("=")[0], flags)
        raise ConfigError(f"{flag}: `vllm serve` does not take {unknown[0]}{hint}")
    engine_args = EngineArgs.from_cli_args(args, args.model or str(demo_model_path()))
    return Configuration(flag, replace(engine_args, skip_tokenizer_init=True), tuple(variables))


def _common_tokenizer(a: "Configuration", b: "Configuration") -> Any:
    """The tokenizer of A. ConfigError if B's vocabulary differs: tokens are compared by id."""
    from vllm.engine.tokenizer import load_tokenizer

    models = [side.engine_args.create_engine_config().model_config for side in (a, b)]
    tokenizer = load_tokenizer(models[0])
    if models[0].tokenizer != models[1].tokenizer:
        vocabularies = [tokenizer.get_vocab(), load_tokenizer(models[1]).get_vocab()]
        if vocabularies[0] != vocabularies[1]:
            raise ConfigError(
                f"--a and --b have different vocabularies ({models[0].tokenizer}, "
                f"{models[1].tokenizer}): their tokens cannot be compared one by one"
            )
    return tokenizer


def _job(args: argparse.Namespace, tokenizer: Any) -> "tuple[Job, list[gsm8k_data.Item]]":
    from vllm.evals.measure import Job

    items: list[gsm8k_data.Item] = []
    shots: list[gsm8k_data.Item] = []
    if args.gsm8k is None:
        texts = _lines(args.prompts)
    else:
        num_shots = 5 if args.answers else 0
        items, shots = gsm8k.questions_and_shots(
            args.gsm8k, args.num_questions, num_shots, None, not args.no_checksum
        )
        texts = [f"Question: {item.question}\nAnswer: {item.solution}" for item in items]
    questions = [gsm8k_data.prompt_of(item.question, shots) for item in items]
    job = Job(
        texts=tokenizer(texts)["input_ids"],
        questions=tokenizer(questions)["input_ids"] if args.answers else [],
        max_tokens=args.max_tokens,
        num_logprobs=args.top_k,
    )
    return job, items


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}") from error
    if not (texts := [line for line in lines if line.strip()]):
        raise ConfigError(f"--prompts {path} is empty; it takes one text per line")
    return texts


def _correct(
    outputs: "list[TokenIds]", items: "list[gsm8k_data.Item]", tokenizer: Any
) -> list[bool]:
    """Whether each answer, cut at the server's stop strings, ends with the right number."""
    cut = re.compile("|".join(map(re.escape, gsm8k.STOP)))
    texts = [cut.split(tokenizer.decode(ids, skip_special_tokens=True))[0] for ids in outputs]
    return [last_number(text) == item.label for text, item in zip(texts, items)]


def _page(result: Comparison) -> str:
    low, high = result.top1_interval
    lines = [
        f"Token positions            {result.num_positions}",
        f"Mean KL(A || B)            {result.kl:.6f} nats (largest {result.max_kl:.4f}; "
        f"{result.mean_rest:.2%} of the mass unlisted)",
        f"Top-1 agreement            {result.top1:.4f} (95 %: {low:.4f} to {high:.4f})",
        f"Mean logprob, B less A     {result.logprob_difference:+.6f} nats",
    ]
    if found := result.answers:
        lines += [
            f"Correct answers            A {found.num_correct_a}, B {found.num_correct_b} "
            f"of {found.num_questions}",
            f"Only A, only B             {found.num_only_a}, {found.num_only_b} "
            f"(McNemar's exact p {found.p:.4g})",
        ]
    return "\n".join(lines)
