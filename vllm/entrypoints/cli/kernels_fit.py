"""`vllm kernels fit`: the cost model for sizes that nobody measured."""

import argparse
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError
from vllm.kernels.evidence.cost_model import path_of_fitted, text_of_fitted, write_fitted
from vllm.kernels.evidence.tables import read_table, user_folder
from vllm.kernels.tuning import held_out, whole_models
from vllm.kernels.tuning.fit import fitted_of, kinds_of


def add_fit(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fit the cost model to tables that vllm kernels tune wrote, and write the "
        "numbers to the folder fitted/ beside that of the table. Prints how well the model "
        "chooses for sizes that are left out of the fit, and how far whole models are from the "
        "fastest kernels of the table."
    )
    text = parser.add_argument
    text("tables", nargs="*", type=Path, metavar="TABLE", help="Default: every table in "
         f"{user_folder()}.")  # fmt: skip
    text("--check", action="store_true", help="Write nothing; exit with 1 where a file is not what "
         "its table gives.")  # fmt: skip
    parser.set_defaults(run=run_fit)


def run_fit(args: argparse.Namespace) -> int:
    tables = args.tables or sorted(user_folder().glob("*.json"))
    if not tables:
        raise ConfigError(
            f"there is no table in {user_folder()}: run vllm kernels tune, or give a TABLE"
        )
    differing = []
    cases: list[held_out.Case] = []
    models: list[whole_models.WholeModel] = []
    for path in tables:
        table, target = read_table(path), path_of_fitted(path)
        fits = kinds_of(table)
        fitted = fitted_of(path, table, fits)
        if not args.check:
            write_fitted(target, fitted)
        elif not target.exists() or target.read_text() != text_of_fitted(fitted):
            differing.append(f"{target} is not what {path} gives: run vllm kernels fit {path}")
        print(f"{path}: {_summary(fitted.kinds.items())}" + ("" if args.check else f" -> {target}"))
        cases += held_out.cases_of(table, fits)
        models += whole_models.whole_models(table)
    if cases:
        print("\n" + held_out.text(held_out.summaries(cases)))
    if models:
        print("\n" + whole_models.text(models))
    print("".join(f"\n{line}" for line in differing), end="\n" if differing else "")
    return 1 if differing else 0


def _summary(kinds: Any) -> str:
    return ", ".join(f"{kind}: {cost.num_sizes} sizes" for kind, cost in kinds) or (
        "too few sizes for a fit"
    )
