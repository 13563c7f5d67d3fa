"""`vllm kernels import`: tables from kernel times that others measured."""

import argparse
import re
from datetime import UTC, date, datetime
from pathlib import Path

from vllm.errors import ConfigError, did_you_mean
from vllm.kernels.evidence import imported
from vllm.kernels.evidence.importing.derive import Provenance, derive, labels
from vllm.kernels.evidence.importing.sources import SYSTEMS, Source, commit_of, find_sources
from vllm.kernels.evidence.importing.text import FAMILIES, check_lines, label_lines
from vllm.kernels.evidence.tables import find_tables, user_folder
from vllm.kernels.report.question import libs_of
from vllm.utils.files import write_atomically


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Derive tables of kernel times from the measurements of AIConfigurator "
        "(github.com/ai-dynamo/aiconfigurator): a checkout of it, or Parquet files thinned out of "
        "it. Nothing is measured and nothing is fetched. Needs pyarrow (vllm[import])."
    )
    text = parser.add_argument
    text("--from", dest="folder", type=Path, default=Path(), metavar="FOLDER",
         help="The measurements. Default: the current folder.")  # fmt: skip
    text("--out", type=Path, metavar="FOLDER",
         help=f"Default: {user_folder() / imported.FOLDER}.")  # fmt: skip
    text("--system", action="append", default=[], metavar="NAME",
         help=f"Only this chip: {', '.join(SYSTEMS)}; repeatable.")  # fmt: skip
    text("--commit", metavar="SHA", help="The commit of AIConfigurator that the measurements are "
         "of. Default: the one that README.md in the folder names.")  # fmt: skip
    text("--date", metavar="YYYY-MM-DD", help="Of the derivation. Default: today.")
    instead = parser.add_mutually_exclusive_group()
    text = instead.add_argument
    text("--plan", action="store_true", help="Print every label with its number of rows and the "
         "backend that it stands for, and stop.")  # fmt: skip
    text("--check", action="store_true", help="Of the tables that are here: compare the kernels, "
         "and choose for sizes that are left out.")  # fmt: skip
    parser.set_defaults(run=run_import)


def run_import(args: argparse.Namespace) -> None:
    if unknown := [name for name in args.system if name not in SYSTEMS]:
        raise ConfigError(
            f"--system {unknown[0]!r}: it takes {', '.join(SYSTEMS)}"
            f"{did_you_mean(unknown[0], SYSTEMS)}"
        )
    if args.check:
        _check(args.system or list(SYSTEMS))
        return
    folder = args.folder.expanduser().resolve()
    sources, notes = find_sources(folder)
    if args.system:
        sources = [source for source in sources if source.system in args.system]
    if args.plan:
        _plan(sources)
    else:
        _import(sources, _provenance(args, folder), args.out or user_folder() / imported.FOLDER)
    for note in notes:
        print(f"left out: {note}")


def _plan(sources: list[Source]) -> None:
    for source in sources:
        system = SYSTEMS[source.system]
        print(f"{system.name}, {FAMILIES[source.family]}")
        print("\n".join(label_lines(labels(source.rows(), source.family, system))))


def _provenance(args: argparse.Namespace, folder: Path) -> Provenance:
    commit = args.commit or commit_of(folder)
    if commit is None:
        raise ConfigError(
            f"--from {folder}: no README.md in it names its commit: give --commit, which "
            f"git rev-parse HEAD prints in a checkout"
        )
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise ConfigError(f"--commit {commit!r}: it takes the 40 digits of a commit")
    try:
        day = date.fromisoformat(args.date) if args.date else datetime.now(UTC).date()
    except ValueError:
        raise ConfigError(f"--date {args.date!r}: it takes YYYY-MM-DD") from None
    return Provenance(commit, str(day), f"vllm kernels import --from {folder.name}")


def _import(sources: list[Source], provenance: Provenance, out: Path) -> None:
    """Writes all or, where something is wrong with one, nothing."""
    if not sources:
        raise ConfigError("--system: the folder has no measurements of it")
    files: dict[Path, bytes] = {}
    for source in sources:
        system, rows = SYSTEMS[source.system], source.rows()
        path = out / imported.file_name(system.chip, source.family, system.ranks)
        files[path] = derive(rows, source.family, system, provenance)
        found = labels(rows, source.family, system)
        num_left_out = sum(one.num_rows for one in found if one.kernel is None)
        print(f"{system.name}, {FAMILIES[source.family]}: {len(rows)} rows, {num_left_out} of them "
              f"left out; --plan says why", flush=True)  # fmt: skip
        for one in (one for one in found if one.kernel is None and one.is_unknown):
            print(f"  {one.measured_by}: {one.label} ({one.format}): {one.reason}")
    for path, content in files.items():
        try:
            write_atomically(path, content)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
    size = sum(map(len, files.values()))
    print(f"{len(files)} tables, {size / 1e6:.2f} MB, in {out}")


def _check(systems: list[str]) -> None:
    for name in systems:
        system = SYSTEMS[name]
        ours = [table for table in find_tables(system.chip) if not table.is_near]
        libs = libs_of("all", system.chip.device)
        for family in FAMILIES:
            tables = imported.find_imported(system.chip, family)
            for table in (table for table in tables if not table.is_near):
                print("\n".join(check_lines(table, ours, libs)), end="\n\n")
