"""The `vllm` command. Only the subcommand that is asked for is imported."""

import argparse
import gc
import io
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, NoReturn

from vllm import envs
from vllm.entrypoints.cli.config_file import with_file
from vllm.errors import VllmError, did_you_mean
from vllm.logger import get_logger, use_format
from vllm.utils.argparse_utils import dashed
from vllm.utils.interrupts import exit_code_of_signal, exit_on_sigterm
from vllm.version import __version__

# Name -> module with `add_parser(subparsers)`, and what it does. `add_parser` adds the parser of
# that name with `set_defaults(run=function)`; the function takes the parsed arguments and returns
# the exit code, None for 0.
SUBCOMMANDS = {
    "serve": ("vllm.entrypoints.cli.serve", "Start an OpenAI-compatible server."),
    "chat": ("vllm.entrypoints.cli.chat", "Chat with a running server."),
    "top": ("vllm.entrypoints.cli.top", "Show a running server's load in a terminal."),
    "complete": ("vllm.entrypoints.cli.client", "Let a running server continue texts."),
    "run-batch": ("vllm.entrypoints.cli.run_batch", "Answer a file of requests."),
    "bench": ("vllm.entrypoints.cli.bench", "Measure latency, throughput or a server."),
    "eval": ("vllm.entrypoints.cli.eval", "Score a server, or compare two configurations."),
    "kernels": ("vllm.entrypoints.cli.kernels", "List kernels and explain how one is chosen."),
    "quantize": ("vllm.entrypoints.cli.quantize", "Quantise a checkpoint to FP8, NVFP4 or int4."),
    "completion": ("vllm.entrypoints.cli.completion", "Print a script for the Tab key."),
    "collect-env": ("vllm.entrypoints.cli.collect_env", "Describe this machine for a report."),
}


class Parser(argparse.ArgumentParser):
    """Refuses abbreviated flags, whose meaning would change as flags are added.

    fill: adds its arguments when it is used first, so that no other subcommand pays for them.
    """

    def __init__(self, fill: "Callable[[Parser], None] | None" = None, **options: Any):
        options.setdefault("allow_abbrev", False)
        options.setdefault("add_help", fill is None)
        super().__init__(**options)
        self._fill = fill

    def fill(self) -> None:
        if self._fill is not None:
            fill, self._fill = self._fill, None
            self.add_argument("-h", "--help", action="help", help="show this help message and exit")
            fill(self)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        self.fill()
        if self._subparsers is None and arguments and arguments[0]:
            self._explain(arguments[0])
        return super().parse_known_args(*arguments, **options)

    def _explain(self, words: Sequence[str]) -> None:
        """Answers `--help=NAME`."""
        if any(word.startswith("--help=") for word in words):
            from vllm.entrypoints.cli.help import about, asked

            print(about(self, asked(words) or ""), end="")
            self.exit(0)

    def _get_formatter(self) -> argparse.HelpFormatter:
        from vllm.entrypoints.cli.help import HelpFormatter

        return HelpFormatter(prog=self.prog)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee {self.prog} --help.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code: 2 for what the user can correct."""
    words = [dashed(word) for word in (sys.argv[1:] if argv is None else argv)]
    try:
        return _run(words)
    except VllmError as error:
        if _wants_traceback():
            import traceback

            traceback.print_exc()
        print(f"vllm: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output is gone; nothing is left to be flushed to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(words: list[str]) -> int:
    command = words[0] if words else ""
    # Before a command's modules read variables for themselves.
    warnings = envs.check_all(_notice_of) if command in SUBCOMMANDS else []
    gc.disable()  # modules leave next to no garbage, and looking for it takes a tenth of their time
    parser = make_parser([command])
    gc.enable()
    if words and not command.startswith("-") and command not in SUBCOMMANDS:
        hint = did_you_mean(command, SUBCOMMANDS) or f": it takes {', '.join(SUBCOMMANDS)}"
        parser.error(f"unknown command {command!r}{hint}")
    if command in ("serve", "run-batch"):
        from vllm.entrypoints.compatibility.flags import translated

        own, notices = translated(with_file(words[1:], _subparser(parser, command)))
        words = [command, *own]
        warnings += notices
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.exit(2, f"vllm {args.command}: error: {_describe(unknown, parser)}\n")
    if getattr(args, "log_format", None) is not None:
        use_format(args.log_format)
    for warning in warnings:
        get_logger("vllm.entrypoints.cli.main").warning("%s", warning)
    return args.run(args) or 0


def _notice_of(variable: str) -> str | None:
    from vllm.entrypoints.compatibility.variables import notice_of

    return notice_of(variable)


def make_parser(commands: Collection[str] = tuple(SUBCOMMANDS)) -> Parser:
    """With the parsers of these subcommands; the others are listed alone."""
    parser = Parser(prog="vllm", description="Serve large language models.")
    parser.add_argument("-v", "--version", action="version", version=__version__)
    # With `prog`, argparse does not load what formats help.
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, prog=parser.prog
    )
    for name, (module, text) in SUBCOMMANDS.items():
        if name in commands:
            import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text, add_help=False)
    return parser


def _subparser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    choices = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found: argparse.ArgumentParser = choices[0][command]
    return found


def _describe(unknown: Sequence[str], parser: Parser) -> str:
    """One sentence for arguments that nothing takes."""
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        return f"too many arguments: {' '.join(unknown)}"
    known = _flags_of(parser)
    return "; ".join(f"unknown flag {flag}{_hint(flag, known)}" for flag in flags)


def _hint(flag: str, known: Sequence[str]) -> str:
    """What was meant, unless it is a flag of `vllm serve`, upstream's or ours."""
    from vllm.entrypoints.compatibility.flags import is_upstream

    return ": it is one of vllm serve" if is_upstream(flag) else did_you_mean(flag, known)


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """With those of its subcommands."""
    flags: list[str] = []
    for action in parser._actions:
        flags += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            flags += [flag for child in action.choices.values() for flag in _flags_of(child)]
    return flags


def _wants_traceback() -> bool:
    try:
        return bool(envs.VLLM_LOGGING_LEVEL == "debug")
    except VllmError:
        return False


def program() -> int:
    """The `vllm` command. Unlike `main`, it takes over the signals and the output of its process:
    what the encoding of a terminal lacks is written as `?`."""
    exit_on_sigterm()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        return main()
    except Exception:
        if (code := exit_code_of_signal()) is None:
            raise
        return code


if __name__ == "__main__":
    sys.exit(program())
