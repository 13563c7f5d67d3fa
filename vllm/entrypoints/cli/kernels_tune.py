"""`vllm kernels tune`, which measures kernels here, and `vllm kernels quarantine`."""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path

from vllm.entrypoints.cli.kernels_explain import asked_model
from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.quarantine import forget, path_of_file, read_failures, text
from vllm.kernels.evidence.tables import TOKENS, Table, read_table, user_folder
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.report import question, text_report
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import LinearProblem
from vllm.kernels.selection import Selection
from vllm.kernels.tuning import tune
from vllm.kernels.tuning.workers import Job
from vllm.machine import Device, Libs
from vllm.platforms.cpu import memory_limit, num_cores
from vllm.platforms.installed import gpu_memory_bytes


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every kernel that can run the linear layers of MODEL on this machine "
        "against a reference, time those that are correct, and write a table that later starts "
        "use. The same command continues an interrupted run."
    )
    text = parser.add_argument
    text("models", nargs="*", metavar="MODEL", help="As of vllm kernels explain.")
    text("--layer", action="append", default=[], help=f"One more layer: {question.LAYER_SYNTAX}.")
    text("--tp", "--tensor-parallel-size", default="1", metavar="N", help="Tensor-parallel ranks; "
         "a list measures the layers of each (1,2). Default: 1.")  # fmt: skip
    text("--ep", "--expert-parallel-size", type=int, default=1, help="Expert-parallel ranks.")
    text("--dtype", default="auto", help="Dtype of activations; default: fp32 on the CPU, else "
         "the model's.")  # fmt: skip
    text("--tokens", metavar="M,M", help="Numbers of tokens to time; default: "
         f"{','.join(map(str, TOKENS))}.")  # fmt: skip
    text("--backend", action="append", default=[], help="Measure only this backend; repeatable.")
    text("--again", action="store_true", help="Measure again what the table already holds.")
    text("--plan", action="store_true", help="Print what would be measured, and stop.")
    text("--output", type=Path, metavar="FILE", help=f"Default: in {user_folder()}.")
    limits = parser.add_argument_group("limits")
    text = limits.add_argument
    text("--seconds-per-kernel", type=float, default=10.0, metavar="S", help="Time limit for "
         "timing one kernel for one layer. Default: 10.")  # fmt: skip
    text("--seconds", type=float, metavar="S", help="Time limit of the whole run; default: none.")
    text("--timeout", type=float, default=300.0, metavar="S", help="A kernel without progress for "
         "this time is rejected. Default: 300.")  # fmt: skip
    text("--jobs", type=int, metavar="N", help="Processes that check (and compile) at once; "
         "default: half of the cores with a GPU, if they fit its memory, else 1.")  # fmt: skip
    parser.set_defaults(run=run_tune)


def add_quarantine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="Clear the list.")
    parser.add_argument("--backend", help="Only kernels of this backend.")
    parser.set_defaults(run=run_quarantine)


# ---------------------------------------------------------------- tune


def run_tune(args: argparse.Namespace) -> int:
    from vllm.platforms.probe import probe_device, probe_libs

    if not args.models and not args.layer:
        raise ConfigError("give a MODEL or --layer; see vllm kernels tune --help")
    device = probe_device()
    if device.kind == "cuda":
        use_caches()  # an engine finds there what compiles here
    libs = probe_libs()
    for name in args.backend:
        registry.check_backend_name("linear", name, "--backend")
    problems = _problems(args, device)
    tokens = _numbers("--tokens", args.tokens) if args.tokens is not None else TOKENS
    planned = tune.plan(problems, device, libs, tokens, args.backend)
    table, path = _table(args.output)
    jobs = list(planned.jobs) if args.again else tune.without_done(planned.jobs, table)
    for note in planned.notes:
        print(f"left out: {note}")
    print(
        f"{len(jobs)} kernels to measure, {len(planned.jobs) - len(jobs)} are in {path}", flush=True
    )
    if not planned.jobs and not planned.notes:
        print(f"no kernel that was asked for can run on {device}; vllm kernels explain says why")
    if args.plan:
        for job in jobs:
            print(f"{job}  M = {', '.join(map(str, job.tokens))}")
        return 0
    say = partial(print, flush=True)
    run = tune.Run(device, table, path, _limits(args, jobs, device), say)
    left: Sequence[Job] = ()
    try:
        left = run.carry_out(jobs)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {path} has what was measured; the same command goes on", flush=True)
        raise
    print(_summary(run.table, problems, device, libs))
    if run.failures:
        print(f"{len(run.failures)} kernels failed and are not used: {path_of_file()}")
    if left:
        print(f"{len(left)} kernels were left out for want of time or of room in memory; the same "
              "command goes on")  # fmt: skip
    return 0


def _problems(args: argparse.Namespace, device: Device) -> list[LinearProblem]:
    found = []
    for tp, model in product(_numbers("--tp", args.tp), args.models):
        own = argparse.Namespace(dtype=args.dtype, tp=tp, ep=args.ep)
        asked = asked_model(model, own, device)
        if asked.refusal:
            raise ConfigError(f"{model}: {asked.refusal}")
        found += [problem for _, problem in asked.problems]
    dtype = question.dtype_of(args.dtype, {}, device)
    found += [question.layer_of(layer, dtype)[1] for layer in args.layer]
    return [problem for problem in dict.fromkeys(found) if isinstance(problem, LinearProblem)]


def _numbers(flag: str, given: str) -> tuple[int, ...]:
    try:
        numbers = sorted({int(item) for item in given.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ConfigError(f"{flag} {given!r}: it takes numbers from 1 up, as 1,8,64")
    return tuple(numbers)


def _table(output: Path | None) -> tuple[Table, Path]:
    """The existing table, or an empty one, and its path."""
    from vllm.platforms.probe import device_name, probe_chip

    chip = probe_chip()
    path = output or user_folder() / chip.file_name
    if not path.exists():
        return Table(chip, device_name(), source=str(path)), path
    table = read_table(path)
    if not table.chip.is_like(chip):
        raise ConfigError(f"{path} is of {table.chip}, and this is {chip}: give another --output")
    return table, path


def _limits(args: argparse.Namespace, jobs: Sequence[Job], device: Device) -> tune.Limits:
    for flag in ("seconds_per_kernel", "seconds", "timeout", "jobs"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: it takes a number above 0")
    memory = gpu_memory_bytes() if device.kind == "cuda" else None
    default = tune.num_checkers(jobs, num_cores(), memory_limit(), memory)
    return tune.Limits(args.seconds_per_kernel, args.seconds, args.timeout, args.jobs or default)


def _summary(table: Table, problems: list[LinearProblem], device: Device, libs: Libs) -> str:
    """The selector's decisions with the table, without overrides."""
    selection = Selection(device, libs, Policy(), Known((table,)))
    lines = []
    for problem in problems:
        decision = selection.decide(str(problem), problem)
        if line := text_report.expected_line(decision):
            lines.append(text_report.outcome(decision).partition(" (")[0])
            lines.append(f"    {line}")
    return "\n".join(lines)


# ---------------------------------------------------------------- quarantine


def run_quarantine(args: argparse.Namespace) -> None:
    name = None
    if args.backend is not None:
        found = (registry.find_backend(family, args.backend) for family in registry.FAMILIES)
        name = next(filter(None, found), None)
        if name is None:
            known = dict.fromkeys(chain(*map(registry.backend_names, registry.FAMILIES)))
            what = f"--backend {args.backend!r}"
            raise registry.unknown_backend(what, args.backend, tuple(known))
    if args.clear:
        count = len(forget(name))
        print(f"{count} forgotten; vllm kernels tune, or the next start, tries them again")
    else:
        meant = [failure for failure in read_failures() if name in (None, failure.backend)]
        print(text(meant) or "no kernel has failed here")
