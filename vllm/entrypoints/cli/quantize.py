"""`vllm quantize SRC DST --format F`."""

import argparse
from pathlib import Path

from vllm.formats.registry import quantizable


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    options = [known.quantize for known in quantizable().values() if known.quantize]
    parser = subparsers.add_parser(
        "quantize",
        description="Quantises the linear layers and experts of a checkpoint and writes a new one.",
    )
    parser.add_argument("source", help="folder or hub name of a checkpoint in bf16, fp16 or fp32")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--format",
        required=True,
        metavar="|".join(option.name for option in options),
        help="; ".join(f"{option.name}: {option.help}" for option in options),
    )
    parser.add_argument(
        "--lm-head",
        choices=("int8",),
        help="quantise the output projection too, to int8 in groups of 32 columns; without it the "
        "projection stays as it is",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm.model_executor.quantize import quantize_checkpoint
    from vllm.utils.hub import resolve_model

    source = resolve_model(args.source)
    quantize_checkpoint(source, args.target, args.format, has_int8_head=args.lm_head == "int8")
    print(f"wrote {args.target}; serve it with: vllm serve {args.target}")
    return 0
