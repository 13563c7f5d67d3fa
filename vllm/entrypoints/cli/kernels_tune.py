"""`vllm kernels tune`, which measures kernels here, and `vllm kernels quarantine`."""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path

from vllm.entrypoints.cli.kernels_explain import add_model_flags, asked_model, check_model_flags
from vllm.entrypoints.cli.tune_from import add_from, ask_server, plan_line
from vllm.errors import ConfigError
from vllm.kernels import registry
from vllm.kernels.evidence.known import Known
from vllm.kernels.evidence.quarantine import forget, path_of_file, read_failures, text
from vllm.kernels.evidence.tables import TOKENS, Table, read_table, user_folder
from vllm.kernels.jit.caches import use_caches
from vllm.kernels.report import question, tuned_report
from vllm.kernels.select.policy import Policy
from vllm.kernels.select.problem import Measurable
from vllm.kernels.selection import Selection
from vllm.kernels.tuning import tune
from vllm.kernels.tuning.jobs import Job
from vllm.kernels.tuning.plan import CACHE_BYTES, plan, stale_notes, without_done
from vllm.kernels.tuning.progress import Progress
from vllm.machine import Device, Libs
from vllm.platforms.cpu import memory_limit, num_cores
from vllm.platforms.installed import gpu_memory_bytes

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
# Of a GPU's memory, for the keys and values of a step of attention.
_SHARE_OF_CACHE = 0.25


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every kernel that can run the linear layers, experts and attention of MODEL on "
        "this machine against a reference, time those that are correct, and write a table that "
        "later starts use. The same command continues an interrupted run."
    )
    text = parser.add_argument
    text("models", nargs="*", metavar="MODEL", help="As of vllm kernels explain.")
    text("--layer", action="append", default=[], help=f"One more layer: {question.LAYER_SYNTAX}.")
    text("--tp", "--tensor-parallel-size", default="1", metavar="N", help="Tensor-parallel ranks; "
         "a list measures the layers of each (1,2). Default: 1.")  # fmt: skip
    text("--ep", "--expert-parallel-size", default="1", metavar="N", help="Expert-parallel ranks, "
         "or a list. Default: 1.")  # fmt: skip
    text("--dtype", default="auto", help="Dtype of activations; default: fp32 on the CPU, else "
         "the model's.")  # fmt: skip
    text("--kv-cache-dtype", default="auto", help="Dtype of the KV cache of MODEL; default: as "
         "activations.")  # fmt: skip
    text("--tokens", metavar="M,M", help="Numbers of tokens to time linear layers and experts for; "
         f"default: {','.join(map(str, TOKENS))}.")  # fmt: skip
    text("--backend", action="append", default=[], help="Measure only this backend; repeatable.")
    text("--again", action="store_true", help="Measure again what the table already holds.")
    text("--plan", action="store_true", help="Print what would be measured, and stop.")
    text("--output", type=Path, metavar="FILE", help=f"Default: in {user_folder()}.")
    add_model_flags(parser)
    add_from(parser)
    limits = parser.add_argument_group("limits")
    text = limits.add_argument
    text("--budget", type=_seconds, metavar="TIME", help="Time limit of the whole run, as 90s, "
         "10m or 1h: what matters most is measured first. Default: none.")  # fmt: skip
    text("--seconds-per-kernel", type=float, default=10.0, metavar="S", help="Time limit for "
         "timing one kernel for one layer. Default: 10.")  # fmt: skip
    text("--timeout", type=float, default=300.0, metavar="S", help="A kernel without progress for "
         "this time is rejected. Default: 300.")  # fmt: skip
    text("--jobs", type=int, metavar="N", help="Processes that check (and compile) at once; "
         "default: half of the cores with a GPU, if they fit its memory, else 1.")  # fmt: skip
    parser.set_defaults(run=run_tune)


def _seconds(given: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", given)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{given!r}: it takes a time, as 90s, 10m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def add_quarantine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clear", action="store_true", help="Clear the list.")
    parser.add_argument("--backend", help="Only kernels of this backend.")
    parser.set_defaults(run=run_quarantine)


# ---------------------------------------------------------------- tune


def run_tune(args: argparse.Namespace) -> int:
    from vllm.platforms.probe import probe_device, probe_libs

    if not args.models and not args.layer and args.url is None:
        raise ConfigError("give a MODEL, --layer or --from; see vllm kernels tune --help")
    if args.api_key is not None and args.url is None:
        raise ConfigError("--api-key is of the server that --from names")
    if not args.models and args.url is None:
        check_model_flags(args)
    _check_limits(args)
    device = probe_device()
    if device.kind == "cuda":
        use_caches()  # an engine finds there what compiles here
    libs = probe_libs()
    backends = [_known_backend(name, tuple(registry.FLAGS)) for name in args.backend]
    traffic = ask_server(args, device) if args.url is not None else None
    layers = traffic.layers if traffic else _layers(args, device)
    usual = (traffic.tokens if traffic else ()) or TOKENS
    tokens = _numbers("--tokens", args.tokens) if args.tokens is not None else usual
    memory = gpu_memory_bytes() if device.kind == "cuda" else None
    cache_bytes = CACHE_BYTES if memory is None else int(_SHARE_OF_CACHE * memory)
    planned = plan(layers.elements(), device, libs, tokens, backends, cache_bytes)
    table, path = _table(args.output)
    ordered = traffic.ordered(planned.jobs) if traffic else list(planned.jobs)
    jobs = ordered if args.again else without_done(ordered, table)
    for note in planned.notes:
        print(f"left out: {note}")
    for note in stale_notes(planned.jobs, table):
        print(f"measured again: {note}")
    print(
        f"{len(jobs)} kernels to measure, {len(planned.jobs) - len(jobs)} are in {path}", flush=True
    )
    if not planned.jobs and not planned.notes:
        print(f"no kernel that was asked for can run on {device}; vllm kernels explain says why")
    if args.plan:
        for job in jobs:
            print(plan_line(job, traffic))
        return 0
    run = _run(args, jobs, table, path, device)
    print(_summary(run.table, layers, device, libs))
    if run.failures:
        print(f"{len(run.failures)} kernels failed and are not used: {path_of_file()}")
    return 0


def _run(
    args: argparse.Namespace, jobs: Sequence[Job], table: Table, path: Path, device: Device
) -> tune.Run:
    """After everything was measured that there was time for."""
    deadline = None if args.budget is None else time.monotonic() + args.budget
    run = tune.Run(device, table, path, _limits(args, device), Progress(sys.stdout, deadline))
    try:
        left = run.carry_out(jobs)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {path} has what was measured; the same command goes on", flush=True)
        raise
    if left:
        print(f"{len(left)} kernels were left out for want of time or of room in memory; the same "
              "command goes on")  # fmt: skip
    return run


def _layers(args: argparse.Namespace, device: Device) -> Counter[Measurable]:
    """Problems with their numbers of layers, the most in any of the models on so many ranks."""
    found: Counter[Measurable] = Counter()
    ranks = product(_numbers("--tp", args.tp), _numbers("--ep", args.ep))
    for (tp, ep), model in product(ranks, args.models):
        given = argparse.Namespace(**{**vars(args), "tp": tp, "ep": ep})
        asked = asked_model(model, given, device)
        if asked.refusal:
            raise ConfigError(f"{model}: {asked.refusal}")
        problems = (problem for _, problem in asked.problems)
        found |= Counter(p for p in problems if isinstance(p, Measurable))
    dtype = question.dtype_of(args.dtype, {}, device)
    single = (question.layer_of(layer, dtype)[1] for layer in args.layer)
    return found | Counter(p for p in single if isinstance(p, Measurable))


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


def _check_limits(args: argparse.Namespace) -> None:
    for flag in ("seconds_per_kernel", "timeout", "jobs"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: it takes a number above 0")


def _limits(args: argparse.Namespace, device: Device) -> tune.Limits:
    memory = gpu_memory_bytes() if device.kind == "cuda" else None
    jobs = args.jobs or tune.num_checkers(num_cores(), memory_limit(), memory)
    return tune.Limits(args.seconds_per_kernel, args.budget, args.timeout, jobs, memory)


def _summary(table: Table, layers: Counter[Measurable], device: Device, libs: Libs) -> str:
    """The selector's decisions with the table, without overrides."""
    tuned, untuned = (Selection(device, libs, Policy(), Known(own)) for own in ((table,), ()))
    decisions = (
        (tuned.decide(str(problem), problem), untuned.decide(str(problem), problem).chosen or "")
        for problem in layers
    )
    return tuned_report.page(table, decisions)


def _known_backend(name: str, families: Sequence[str]) -> str:
    found = next(filter(None, (registry.find_backend(family, name) for family in families)), None)
    if found is None:
        known = tuple(dict.fromkeys(chain(*map(registry.backend_names, families))))
        raise registry.unknown_backend("--backend", name, known)
    return found


# ---------------------------------------------------------------- quarantine


def run_quarantine(args: argparse.Namespace) -> None:
    name = None
    if args.backend is not None:
        name = _known_backend(args.backend, registry.FAMILIES)
    if args.clear:
        count = len(forget(name))
        print(f"{count} forgotten; vllm kernels tune, or the next start, tries them again")
    else:
        meant = [failure for failure in read_failures() if name in (None, failure.backend)]
        print(text(meant) or "no kernel has failed here")
