"""`vllm bench steps`: the time of a decode step, by kernel, against the bytes that it must move."""

import argparse
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import bench_serve
from vllm.errors import ConfigError
from vllm.kernels.report import question
from vllm.kernels.report.roofline import Bandwidth, Roofline, limit_rows, summary, text, timed_rows
from vllm.kernels.step_bytes import DecodeStep, layer_kinds

if TYPE_CHECKING:
    from vllm.engine.llm_engine import LLMEngine
    from vllm.entrypoints.step_bench import StepBench

_BATCHES, _CONTEXT, _STEPS = "1,8,64", 1024, 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Time decode steps of MODEL: one token for each of so many requests. With --roofline a "
        "table for each batch size says how long every kind of layer takes, how long moving its "
        "bytes takes at least (weights as they are stored, KV cache, recurrent states), and what "
        "is left between kernels. Needs no weights with --load-format dummy."
    )
    flag = parser.add_argument
    flag("model", nargs="?", metavar="MODEL", help="Folder, hub name or, with --load-format dummy "
         "or --no-run, a built-in name of vllm kernels explain; default: the demo.")  # fmt: skip
    flag("--batch", default=_BATCHES, metavar="B,B", help="Numbers of requests.")
    flag("--context", type=int, default=_CONTEXT, metavar="N", help="Prompt tokens of each.")
    flag("--steps", type=int, default=_STEPS, metavar="N", help="Steps to time.")
    flag("--roofline", action="store_true", help="A table by layer, and the limits.")
    flag("--no-run", action="store_true", help="Only the limits, from config.json and a memory "
         "bandwidth: needs neither weights nor a GPU. Goes with --roofline.")  # fmt: skip
    flag("--device", metavar="CHIP", help="Of --no-run: whose published memory bandwidth, such as "
         "h200; default: this machine's GPU.")  # fmt: skip
    flag("--bandwidth", type=float, metavar="GB/S", help="Of --no-run: instead of the published "
         "one.")  # fmt: skip
    flag("--json", metavar="FILE", help="File to write the results to.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    batches = _batches(args)
    result: dict[str, Any] = {"model": args.model or "demo", "date": time.strftime("%Y-%m-%d")}
    found = _limits(args, batches) if args.no_run else _measured(args, batches, result)
    entries = []
    for one in found:
        print(text(one) + "\n" if args.roofline else summary(one), flush=True)
        entries.append(one.to_json())
        if args.json:
            _write(Path(args.json), {**result, **one.bandwidth.to_json(), "steps": entries})
    if args.json:
        print(f"Written to {args.json}")


def _batches(args: argparse.Namespace) -> list[int]:
    """Checks what does not depend on the model, too."""
    if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", args.batch, re.ASCII):
        raise ConfigError(
            f"--batch {args.batch!r}: it takes numbers of requests, 1 or more, such as {_BATCHES}"
        )
    bench_serve.check_numbers(args, "1 or more", lambda n: n >= 1, "context", "steps")
    bench_serve.check_numbers(args, "a number above 0", lambda n: 0 < n < math.inf, "bandwidth")
    if args.no_run and not args.roofline:
        raise ConfigError("--no-run prints the limits of --roofline: give both")
    for name in ("device", "bandwidth"):
        if getattr(args, name) is not None and not args.no_run:
            raise ConfigError(f"--{name} is for --no-run: a run is on this machine, and measures")
    if args.speculative_config is not None:
        raise ConfigError("--speculative-config: bench steps has steps without draft tokens alone")
    if args.json:
        bench_serve.check_writable("--json", args.json)
    batches = [int(size) for size in args.batch.split(",")]
    if max(batches) > args.max_num_seqs:
        raise ConfigError(
            f"--batch {max(batches)}: more than --max-num-seqs {args.max_num_seqs}; lower the one "
            f"or raise the other"
        )
    return batches


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n")


# ---------------------------------------------------------------- without a run


def _limits(args: argparse.Namespace, batches: list[int]) -> Iterator[Roofline]:
    from vllm.entrypoints.cli.kernels_explain import asked_model

    if args.pipeline_parallel_size != 1 or args.data_parallel_size != 1:
        raise ConfigError(
            "--no-run has the limits of a tensor-parallel or expert-parallel rank: leave "
            "--pipeline-parallel-size and --data-parallel-size out"
        )
    device, bandwidth = _published(args)
    tp = args.tensor_parallel_size
    ep = tp if args.enable_expert_parallel else 1
    asked = asked_model(
        args.model or _demo(), argparse.Namespace(**vars(args), tp=tp, ep=ep), device
    )
    layers = asked.layers
    assert layers is not None
    if asked.refusal:
        raise ConfigError(asked.refusal)
    most = args.max_model_len or _longest(layers.text)
    if most is not None and args.context > most:
        raise ConfigError(f"--context {args.context}: the model takes at most {most} tokens")
    for note in asked.facts.notes if asked.facts is not None else ():
        print(f"note: {note}", file=sys.stderr)
    dtype = question.dtype_of(args.dtype, layers.text, device)
    _print_bandwidth(bandwidth)
    for batch in batches:
        step = DecodeStep(batch, args.context)
        kinds = layer_kinds(asked.problems, layers.items, step, tp, dtype)
        yield Roofline(step, bandwidth, limit_rows(kinds, bandwidth))


def _longest(config: Mapping[str, Any]) -> int | None:
    """Tokens of a request; None where nothing says so. config: of a text model."""
    from vllm.architectures.registry import describe, is_described

    return describe(config).max_position_embeddings if is_described(config) else None


def _published(args: argparse.Namespace) -> tuple[Any, Bandwidth]:
    """The chip whose formats and types count, and its bandwidth."""
    from vllm.platforms.installed import installed_chip, installed_device

    device = question.device_of(args.device) if args.device else installed_device()
    if args.bandwidth is not None:
        return device, Bandwidth(args.bandwidth * 1e9, "--bandwidth")
    if args.device:
        name, rate = question.published_bandwidth(args.device, device)
        return device, Bandwidth(rate * 1e9, f"published for {name}")
    rate = installed_chip(device).memory_gb_per_s
    if not rate:
        raise ConfigError(
            "--no-run: there is no GPU here; name one, as in --device h200, or give --bandwidth "
            "GB/S"
        )
    return device, Bandwidth(rate * 1e9, "clock and width of this GPU's memory")


def _print_bandwidth(bandwidth: Bandwidth) -> None:
    print(f"memory: {bandwidth.bytes_per_s / 1e9:,.0f} GB/s ({bandwidth.source})\n")


def _demo() -> str:
    from vllm.entrypoints.demo import demo_model_path

    return str(demo_model_path())


# ---------------------------------------------------------------- a run


def _measured(
    args: argparse.Namespace, batches: list[int], result: dict[str, Any]
) -> Iterator[Roofline]:
    """Adds to `result` what it ran on."""
    from vllm import LLM
    from vllm.entrypoints.step_bench import StepBench, check_fits
    from vllm.platforms.bandwidth import device_name, memory_bandwidth

    with _model_folder(args) as model:
        engine_args = EngineArgs.from_cli_args(args, model)
        engine_args.skip_tokenizer_init = True
        config = engine_args.create_engine_config()
        ranks = config.parallel_config
        if ranks.num_engine_ranks * ranks.data_parallel_size > 1:
            raise ConfigError(
                "bench steps times one rank, in this process: leave parallel sizes out, or give "
                "--no-run for the limits of a rank of several"
            )
        for batch in batches:
            check_fits(config, batch, args.context, args.steps)
        engine = LLM(**vars(engine_args)).llm_engine
    bench, kind = StepBench(engine), engine.core.selection.device.kind
    given = {name: getattr(args, name) for name in ("context", "steps", "kv_cache_dtype")}
    result |= {"device": device_name(kind), "arguments": given}
    how = "a kernel that reads and writes" if kind == "cuda" else "reading"
    bandwidth = Bandwidth(memory_bandwidth(kind), f"measured, {how}")
    _print_bandwidth(bandwidth)
    for batch in batches:
        yield _roofline(engine, bench, batch, args, bandwidth)


@contextmanager
def _model_folder(args: argparse.Namespace) -> Iterator[str]:
    """MODEL; with random weights also one of whom only config.json is known."""
    from vllm.architectures.registry import builtin_config

    model = args.model or _demo()
    config = builtin_config(model) if args.load_format == "dummy" else None
    if config is None or Path(model).exists():
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield folder


def _roofline(
    engine: "LLMEngine", bench: "StepBench", batch: int, args: argparse.Namespace,
    bandwidth: Bandwidth,
) -> Roofline:  # fmt: skip
    profile = bench.measure(batch, args.context, args.steps, args.roofline)
    step = DecodeStep(batch, profile.context)
    model, records = engine.config.model_config, engine.core.selection.records
    assert model.decoder is not None
    problems = [(name, decision.problem) for name, decision in records]
    dtype = question.DTYPES[model.dtype]
    kinds = layer_kinds(problems, model.decoder.items(), step, 1, dtype)
    rows = limit_rows(kinds, bandwidth)
    if args.roofline:
        backends = {name: decision.backend_for(batch) for name, decision in reversed(records)}
        rows = timed_rows(kinds, profile.kernels, bandwidth, backends)
    times = profile.step_us, profile.wait_us, profile.eager_step_us, profile.idle_us
    return Roofline(step, bandwidth, rows, *times)
