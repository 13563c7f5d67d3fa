"""`vllm quantize SRC DST --format F`."""

import argparse
from pathlib import Path

# Kept in step with vllm.model_executor.quantize_formats, which needs torch, by a test.
FORMATS = ("fp8-block", "fp8-tensor", "nvfp4", "w4a16")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="write a quantised copy of a checkpoint",
        description="Quantises the linear layers and experts of a checkpoint and writes a new one.",
    )
    parser.add_argument("source", help="folder or hub name of a checkpoint in bf16, fp16 or fp32")
    parser.add_argument("target", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--format",
        required=True,
        metavar="|".join(FORMATS),
        help="fp8-block: E4M3 with one scale per 128x128 block, edge blocks partial; fp8-tensor: "
        "E4M3 with one scale per weight; nvfp4: E2M1 with a scale per 16 columns, weight-only; "
        "w4a16: symmetric int4 in groups of 128 columns (or 64 or 32), weight-only",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm.model_executor.quantize import quantize_checkpoint
    from vllm.utils.hub import resolve_model

    quantize_checkpoint(resolve_model(args.source), args.target, args.format)
    print(f"wrote {args.target}; serve it with: vllm serve {args.target}")
    return 0
