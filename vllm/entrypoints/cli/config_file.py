"""`--config FILE`: flags of `vllm serve` from a YAML file, as `max-model-len: 4096`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm.errors import ConfigError, did_you_mean
from vllm.utils.argparse_utils import dashed

_FLAG = "--config"


def with_file(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments with those of the --config file before them, so that the command line takes
    precedence. parser: of the command; the file's `model` becomes its default.

    ConfigError for a file that is no mapping of flags to values that they take.
    """
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == _FLAG]
    if not places:
        return [*words]
    if len(places) > 1:
        raise ConfigError(f"{_FLAG} is given {len(places)} times: it takes one file")
    _, equals, file = words[places[0]].partition("=")
    before, after = words[: places[0]], words[places[0] + 1 :]
    if not equals:
        file, after = (after[0], after[1:]) if after else ("", after)
    if not file or file.startswith("-"):
        raise ConfigError(f"{_FLAG} takes a YAML file")
    flags = _read(Path(file))
    if "model" in flags:
        model = str(flags.pop("model"))
        is_given = any(word.partition("=")[0] == "--model" for word in words)
        parser.set_defaults(model=None if is_given else model)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    try:
        own = [word for name, value in flags.items() for word in _words_of(name, value, actions)]
    except ConfigError as error:
        raise ConfigError(f"{_FLAG} {file}: {error}") from None
    others = [*before, *after]
    front = [others.pop(0)] if others and not others[0].startswith("-") else []
    return [*front, *own, *others]


def _read(path: Path) -> dict[str, Any]:
    yaml: Any = import_module("yaml")  # has no types
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{_FLAG} {path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{_FLAG} {path} holds no flags with values, as max-model-len: 4096")
    return found


def _words_of(name: str, value: Any, actions: dict[str, argparse.Action]) -> Iterator[str]:
    """Arguments for one flag of the file: true or false for a switch, several for a repeatable
    flag, JSON for any other list or mapping."""
    flag = dashed("--" + name.removeprefix("--"))
    action = actions.get(flag)
    if action is None and (words := _of_upstream(flag, value)) is not None:
        yield from words
        return
    if action is None or flag in (_FLAG, "--help"):
        raise ConfigError(f"unknown flag {name}{did_you_mean(flag, actions)}")
    is_switch = action.nargs == 0
    if value is None or is_switch != isinstance(value, bool):
        takes = "true or false" if is_switch else "a value"
        raise ConfigError(f"{name} takes {takes}, not {json.dumps(value, default=str)}")
    if is_switch:
        negated = f"--no-{flag.removeprefix('--')}"
        yield from [flag] if value else [negated] if negated in action.option_strings else []
    elif isinstance(action, argparse._AppendAction) and action.nargs is None:
        yield from (f"{flag}={item}" for item in (value if isinstance(value, list) else [value]))
    elif isinstance(value, list) and action.nargs is not None:
        yield from (flag, *map(str, value))
    else:
        yield f"{flag}={json.dumps(value) if isinstance(value, list | dict) else value}"


def _of_upstream(flag: str, value: Any) -> list[str] | None:
    from vllm.entrypoints.compatibility.flags import words_of

    return words_of(flag, value)
