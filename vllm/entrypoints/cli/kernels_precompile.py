"""`vllm kernels precompile`: compiles the kernels that a model needs on this chip into a bundle."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.errors import ConfigError
from vllm.kernels.jit.caches import (
    BUNDLED,
    MANIFEST,
    OWN_VARIABLES,
    made_for,
    read_manifest,
    write_manifest,
)
from vllm.kernels.jit.flashinfer import copy_large_modules
from vllm.kernels.report.model_files import find_model
from vllm.utils.files import locked

# Prompt lengths of one batch: long, short and of one token; then it decodes.
_PROMPTS, _OUTPUT = (1, 2, 17, 300, 1500), 8


def add_precompile(parser: argparse.ArgumentParser) -> None:
    from vllm.engine.arg_utils import EngineArgs

    parser.description = (
        "Start an engine of MODEL with random weights on the GPUs of this machine and "
        "write every kernel that it compiles. With VLLM_KERNEL_BUNDLE=DIR a start on the same chip "
        "with the same libraries compiles nothing. The flags of vllm serve apply."
    )
    parser.add_argument("model", metavar="MODEL", help="Folder, config.json or built-in name.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR",
                        help="A new folder, or an older bundle to replace.")  # fmt: skip
    parser.add_argument("--tp", type=int, metavar="N", help="Same as --tensor-parallel-size.")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(run=run_precompile)


def run_precompile(args: argparse.Namespace) -> int:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.probe import probe_device, probe_libs

    device = probe_device()
    if device.kind != "cuda":
        raise ConfigError(
            "vllm kernels precompile compiles for the GPU that it runs on, and this machine shows "
            "none: run it where the chip is (kernels for the CPU are built with the package)"
        )
    out = args.out.expanduser().resolve()
    _check_out(out)
    if args.tp is not None:
        args.tensor_parallel_size = args.tp
    with _alone(out), tempfile.TemporaryDirectory() as folder:
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            model = _model_folder(args.model, Path(folder))
            engine_args = EngineArgs.from_cli_args(args, model)
            engine_args.load_format, engine_args.skip_tokenizer_init = "dummy", True
            copy_large_modules(staging)
            num_late = _compile(engine_args, staging)
            fit_for = made_for(device, probe_libs())
            for path in staging.iterdir():
                if path.name not in BUNDLED:
                    shutil.rmtree(path)
            count = write_manifest(staging, fit_for)
            publish(staging, out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    text = ", ".join(f"{name} {version}" for name, version in fit_for.items())
    print(f"{out}: {count} files, {size / 1e6:.1f} MB, for {text}")
    if num_late:
        print(f"{num_late} kernels were compiled by requests only, and are in it too")
    print(f"use it with VLLM_KERNEL_BUNDLE={out}")
    return 0


def _check_out(out: Path) -> None:
    if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out} is neither new nor a bundle: give a folder that does not exist yet"
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made: {error}") from error


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """ConfigError while another process writes the same bundle."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(out, waits=False))
        except BlockingIOError:
            raise ConfigError(f"--out {out} is being written by another process") from None
        yield


def _model_folder(model: str, folder: Path) -> str:
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    files = find_model(model)
    quantization = {"quantization_config": stored} if (stored := files.quantization()) else {}
    (folder / "config.json").write_text(json.dumps(files.config | quantization))
    return str(folder)


def _compile(engine_args: Any, staging: Path) -> int:
    """Runs an engine whose caches are in `staging`; returns the number of kernels that requests
    compiled after the start."""
    own = {"VLLM_KERNEL_CACHE": str(staging), "VLLM_KERNEL_COMPILE_SECONDS": "86400"}
    for name, value in {**dict.fromkeys((*OWN_VARIABLES, "VLLM_KERNEL_BUNDLE")), **own}.items():
        envs.set_for_children(name, value)

    from vllm import SamplingParams
    from vllm.engine.llm_engine import LLMEngine

    engine = LLMEngine(engine_args.create_engine_config())
    limit = engine.config.model_config.max_model_len - _OUTPUT
    params = SamplingParams(ignore_eos=True, detokenize=False, max_tokens=_OUTPUT)
    for index, length in enumerate(_PROMPTS):
        ids = {"prompt_token_ids": list(range(1, 1 + min(length, limit)))}
        engine.add_request(str(index), ids, params)
    while engine.has_unfinished:
        engine.step()
    return len(engine.core.stats().compile_waits)


def publish(staging: Path, out: Path) -> None:
    """Replaces the bundle `out` by two renames."""
    staging.chmod(0o755)
    old = None
    if out.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
        os.rename(out, old / out.name)
    os.rename(staging, out)
    read_manifest(out)
    if old is not None:
        shutil.rmtree(old)
