"""`vllm kernels`: which kernels exist, and the parsers of its other kinds (`kernels_*.py`)."""

import argparse
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels import registry

if TYPE_CHECKING:
    from vllm.machine import Device

# Name -> "module:function" that adds the arguments, and what it does.
_KINDS = {
    "explain": (
        "kernels_explain:add_explain",
        "Show which kernel serves each layer, and the reasons against the others.",
    ),
    "tune": ("kernels_tune:add_tune", "Measure which kernel is fastest here, layer by layer."),
    "quarantine": (
        "kernels_tune:add_quarantine",
        "List kernels that failed on this machine, or clear the list.",
    ),
    "plot": ("kernels_plot:add_plot", "Draw kernel times over the number of tokens."),
    "fit": (
        "kernels_fit:add_fit",
        "Fit the cost model of sizes that nobody measured to tables.",
    ),
    "import": (
        "kernels_import:add_import",
        "Make tables from kernel times that others measured.",
    ),
    "precompile": (
        "kernels_precompile:add_precompile",
        "Compile the kernels of MODEL into a bundle for other machines.",
    ),
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("kernels", help="List kernels and explain how one is chosen.")
    kinds = parser.add_subparsers(
        dest="kernels_kind", metavar="KIND", required=True, prog=parser.prog
    )
    listing = kinds.add_parser("list", help="List kernels with their chips and requirements.")
    listing.add_argument("--family", help=f"Only one of {', '.join(registry.FAMILIES)}.")
    listing.add_argument(
        "--device", metavar="CHIP", help="Only kernels that run on this chip, such as sm_100."
    )
    listing.add_argument("--json", action="store_true", help="As JSON, with all details.")
    listing.set_defaults(run=run_list)
    for kind, (place, text) in _KINDS.items():
        kinds.add_parser(kind, help=text, fill=partial(_fill, place))
    docs = kinds.add_parser(
        "docs", help="Write docs/kernels.md, docs/compatibility.md, and the tables of "
        "docs/models.md that have markers."
    )  # fmt: skip
    docs.add_argument("--output", type=Path, default=Path("docs/kernels.md"), metavar="FILE")
    docs.add_argument("--models", type=Path, default=Path("docs/models.md"), metavar="FILE")
    docs.add_argument(
        "--compatibility", type=Path, default=Path("docs/compatibility.md"), metavar="FILE"
    )
    docs.set_defaults(run=run_docs)


def _fill(place: str, parser: argparse.ArgumentParser) -> None:
    module, function = place.split(":")
    getattr(import_module(f"vllm.entrypoints.cli.{module}"), function)(parser)


def run_list(args: argparse.Namespace) -> None:
    from vllm.kernels.report import catalog
    from vllm.kernels.report.columns import text_width
    from vllm.platforms.libraries import native_lib

    families = registry.FAMILIES
    if args.family is not None:
        if args.family not in families:
            raise ConfigError(
                f"--family {args.family!r}: it takes {', '.join(families)}"
                f"{did_you_mean(args.family, families)}"
            )
        families = (args.family,)
    device = _device_of(args.device) if args.device else None
    found = [entry for family in families for entry in catalog.entries(family, device)]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(catalog.text(found, text_width()) or f"no kernel runs on {device}")
        print("\n" + catalog.native_text(native_lib(), text_width()))


def _device_of(name: str) -> "Device":
    from vllm.kernels.report import question

    return question.device_of(name)


def run_docs(args: argparse.Namespace) -> None:
    from vllm.entrypoints.cli.kernels_explain import write_text
    from vllm.entrypoints.compatibility import page
    from vllm.kernels.report import models_page
    from vllm.kernels.report.docs import document

    models = models_page.rewritten(_read_text(args.models), args.models)
    write_text(args.output, document())
    write_text(args.models, models)
    write_text(args.compatibility, page.document())


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
