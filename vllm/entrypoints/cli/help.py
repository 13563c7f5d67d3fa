"""`--help` with defaults, and `--help=NAME` for one flag or one group of flags."""

import argparse
from collections.abc import Sequence

from vllm.errors import ConfigError, did_you_mean

ALL = "all"


class HelpFormatter(argparse.HelpFormatter):
    """Says the default of a flag whose text does not."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        is_told = text is None or "default" in text.lower()
        if is_told or not action.option_strings or default in (None, False, argparse.SUPPRESS, ()):
            return text
        return f"{str(text).rstrip('.')} (default: %(default)s)."


def asked(words: Sequence[str]) -> str | None:
    """NAME of `--help=NAME`."""
    found = [word.removeprefix("--help=") for word in words if word.startswith("--help=")]
    return found[0] if found else None


def about(parser: argparse.ArgumentParser, name: str) -> str:
    """The help of the flag or group `name`, of all flags that contain it where it is neither, or of
    everything for `all`. ConfigError where nothing is found."""
    if name == ALL:
        return parser.format_help()
    wanted = _bare(name)
    groups = {_bare(group.title or ""): group for group in parser._action_groups}
    if wanted in groups:
        return _shown(parser, groups[wanted].title or "", groups[wanted]._group_actions)
    actions = [action for action in parser._actions if action.option_strings]
    exact = [a for a in actions if wanted in map(_bare, a.option_strings)]
    near = exact or [a for a in actions if any(wanted in _bare(o) for o in a.option_strings)]
    if near:
        return _shown(parser, "", near)
    if text := _of_upstream(name):
        return text
    titles = [group.title or "" for group in parser._action_groups if group._group_actions]
    known = [option for action in actions for option in action.option_strings] + titles
    raise ConfigError(
        f"--help={name}: no flag or group is called so{did_you_mean(name, known)}; groups: "
        f"{', '.join(titles)}"
    )


def _of_upstream(name: str) -> str:
    from vllm.entrypoints.compatibility.flags import explained

    return explained(f"--{name.lstrip('-').replace('_', '-')}")


def _shown(parser: argparse.ArgumentParser, title: str, actions: Sequence[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title or None)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


def _bare(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "").replace("-", "")
