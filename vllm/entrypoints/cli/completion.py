"""`vllm completion`: what a shell completes after `vllm`, read from the argument parsers."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.architectures.registry import builtin_names
from vllm.entrypoints.cli.completion_scripts import FILE, NOTHING, SCRIPTS, TEXT, Command, Flag
from vllm.kernels import registry

_FILE_NAMES = ("FILE", "FOLDER", "DIR", "PATH", ".JSON", "MODEL")
_HELP_CHARS = 70


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        description="Print a script that makes the Tab key complete commands, flags and their "
        "values: source <(vllm completion bash), in ~/.bashrc to keep it; the same with zsh; "
        "vllm completion fish > ~/.config/fish/completions/vllm.fish",
    )
    parser.add_argument("shell", choices=[*SCRIPTS], help="For which shell.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from vllm.entrypoints.cli.main import make_parser

    script = SCRIPTS[args.shell]
    print(script(tuple(commands_of(make_parser(), "vllm"))), end="")


def commands_of(parser: argparse.ArgumentParser, words: str) -> Iterator[Command]:
    """Of a parser and, after it, of those of its subcommands."""
    from vllm.entrypoints.cli.main import SUBCOMMANDS, Parser

    if isinstance(parser, Parser):
        parser.fill()
    flags, values, takes_files = [], list[str](), False
    nested: dict[str, argparse.ArgumentParser] = {}
    texts: dict[str, str] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            nested |= action.choices
            texts |= {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            flags.append(_flag(action, parser))
        else:
            values += _values(action, words)
            takes_files = takes_files or _takes(action) == FILE
    texts |= {name: text for name, (_, text) in SUBCOMMANDS.items() if words == "vllm"}
    commands = tuple((name, texts.get(name, "")) for name in nested)
    yield Command(words, commands, tuple(flags), tuple(values), takes_files)
    for name, child in nested.items():
        yield from commands_of(child, f"{words} {name}")


def _flag(action: argparse.Action, parser: argparse.ArgumentParser) -> Flag:
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    names = tuple(action.option_strings)
    return Flag(names, _first_sentence(text), _takes(action), tuple(_values(action)))


def _first_sentence(text: str) -> str:
    line = " ".join(text.split())
    for end in (" (default", ". ", "; "):
        line = line.partition(end)[0]
    return line.rstrip(".")[:_HELP_CHARS]


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return NOTHING
    names = [action.metavar] if isinstance(action.metavar, str) else list(action.metavar or ())
    is_file = action.type is Path or action.dest.endswith("file")
    return FILE if is_file or any(n.upper().endswith(_FILE_NAMES) for n in names) else TEXT


def _values(action: argparse.Action, words: str = "") -> list[str]:
    """words: of the command whose argument it is, "" for a flag."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if words.startswith("vllm kernels") and action.metavar == "MODEL":
        return list(builtin_names())
    family = {flag: family for family, flag in registry.FLAGS.items()}
    found = next((family[name] for name in action.option_strings if name in family), None)
    return list(registry.backend_names(found)) if found else []
