"""`vllm kernels plot`: kernel times of a model's layers over the number of tokens, as a picture."""

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from vllm.config.kernel import KernelConfig
from vllm.config.selection import Facts, selection_for
from vllm.entrypoints.cli.kernels_explain import add_model_flags, asked_model
from vllm.errors import ConfigError, nearest_names
from vllm.kernels.evidence.tables import missing_note
from vllm.kernels.report import plot, question
from vllm.kernels.report.curves import curves_of
from vllm.kernels.report.layer_groups import by_decision, counted
from vllm.kernels.select.decision import Record
from vllm.platforms.installed import installed_chip, installed_device
from vllm.platforms.probe import installed_kernel_libs
from vllm.utils.files import write_atomically


def add_plot(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw the time of every kernel over the number of tokens, a panel for each size of linear "
        "layers and experts, from the tables and estimates that choose. What is chosen is marked. "
        "Needs matplotlib (pip install 'vllm[plot]'), neither the chip nor the weights."
    )
    text = parser.add_argument
    text("model", metavar="MODEL", help="As of vllm kernels explain.")
    text("--device", metavar="CHIP", help="As of vllm kernels explain; default: this machine's.")
    text("--libs", metavar="LIST", help="As of vllm kernels explain; default: those installed.")
    text("--tp", "--tensor-parallel-size", type=int, default=1, help="Tensor-parallel ranks.")
    text("--ep", "--expert-parallel-size", type=int, default=1, help="Expert-parallel ranks.")
    text("--dtype", default="auto", help="Dtype of activations.")
    text("--layer", metavar="PATTERN", default="*", help="Only layers whose name matches, as "
         "'*.down_proj'.")  # fmt: skip
    text("-o", "--output", type=Path, metavar="FILE", default=Path("kernel_times.svg"),
         help=f"{', '.join(plot.FORMATS)}. Default: kernel_times.svg.")  # fmt: skip
    add_model_flags(parser)
    parser.set_defaults(run=run_plot)


def run_plot(args: argparse.Namespace) -> None:
    suffix = args.output.suffix.lower()
    if suffix not in plot.FORMATS:
        raise ConfigError(f"--output {args.output}: it takes a name in {', '.join(plot.FORMATS)}")
    plot.check_installed()
    device = question.device_of(args.device) if args.device else installed_device()
    libs = question.libs_of(args.libs, device) if args.libs else installed_kernel_libs(device)
    chip = question.chip_of(args.device, device) if args.device else installed_chip(device)
    asked = asked_model(args.model, args, device)
    if asked.refusal:
        raise ConfigError(f"{args.model}: {asked.refusal}")
    preferences = KernelConfig().preferences(asked.quant_config)
    selection = selection_for(Facts.of(chip, libs), preferences, asked.model_type)
    for name, problem in asked.problems:
        selection.decide(name, problem)
    panels = _panels(selection.records, args.layer, f"{args.model} on {chip}")
    ranks = [f"{name} {size}" for name, size in (("TP", args.tp), ("EP", args.ep)) if size > 1]
    title = f"Kernel times of {', '.join([args.model, *ranks])} on {chip}"
    try:
        write_atomically(args.output, plot.picture(panels, title, suffix))
    except OSError as error:
        raise ConfigError(f"{args.output} cannot be written: {error}") from error
    if args.device and args.libs is None:
        note = "with the libraries installed here; --libs all assumes all of them"
        print(f"note: {note}", file=sys.stderr)
    if note := missing_note(chip):
        print(f"note: {note}", file=sys.stderr)
    print(f"wrote {args.output}")


def _panels(records: list[Record], pattern: str, where: str) -> list[plot.Panel]:
    """Of decisions with times; says how many layers have none."""
    shown = [record for record in records if fnmatchcase(record[0], pattern)]
    if not shown:
        names = nearest_names(pattern, [name for name, _ in records])
        hint = f"; did you mean {' or '.join(names)}?" if names else ""
        raise ConfigError(f"--layer {pattern!r} matches no layer of this model{hint}")
    timed = [record for record in shown if curves_of(record[1])]
    if not timed:
        raise ConfigError(f"nothing is known of kernel times of {where}: run vllm kernels tune")
    if left := len(shown) - len(timed):
        print(f"left out: {counted(left, 'layer')} without known times, attention included")
    return [plot.Panel(*group) for group in by_decision(timed).items()]
