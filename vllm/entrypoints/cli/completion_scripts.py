"""Completion scripts for three shells, from one table of commands. Each finds the command that is
typed, then completes the value of a flag, a flag, a subcommand or an argument."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

NOTHING, TEXT, FILE = "nothing", "text", "file"


class Flag(NamedTuple):
    """takes: NOTHING, TEXT or FILE. values: those that it takes, () where they are not a list."""

    names: tuple[str, ...]
    text: str
    takes: str
    values: tuple[str, ...]


class Command(NamedTuple):
    """words: as they are typed, `vllm kernels list`. commands: the next word with what it does.
    values: of the arguments that are no flags. takes_files: whether these may be files."""

    words: str
    commands: tuple[tuple[str, str], ...]
    flags: tuple[Flag, ...]
    values: tuple[str, ...]
    takes_files: bool


_BASH = """\
# Completion of vllm for bash, written by `vllm completion bash`.
_vllm() {
    local current=${COMP_WORDS[COMP_CWORD]} flag=${COMP_WORDS[COMP_CWORD-1]}
    local command=vllm word flags='' values='' files=''
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$command $word" in
            @COMMANDS@) command="$command $word" ;;
        esac
    done
    # Bash takes --flag=value for three words.
    if [[ $current == '=' ]]; then
        current=''
    elif [[ $flag == '=' ]]; then
        flag=${COMP_WORDS[COMP_CWORD-2]}
    fi
    case "$command $flag" in
@FLAGS@
        *)
            case "$command" in
@ARGUMENTS@
            esac
            [[ $current == -* ]] && values=$flags files='' ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$values" -- "$current")
    if [[ $files ]]; then
        compopt -o filenames 2> /dev/null
        mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")
    fi
}
complete -F _vllm vllm
"""

_ZSH = """\
#compdef vllm
# Completion of vllm for zsh, written by `vllm completion zsh`.
_vllm() {
    local current=${words[CURRENT]} flag=${words[CURRENT-1]} command=vllm word files=''
    local -a flags values
    for word in ${words[2,CURRENT-1]}; do
        case "$command $word" in
            @COMMANDS@) command="$command $word" ;;
        esac
    done
    if [[ $current == --*=* ]]; then
        flag=${current%%=*}
        current=''
        compset -P '*='
    fi
    case "$command $flag" in
@FLAGS@
        (*)
            case "$command" in
@ARGUMENTS@
            esac
            if [[ $current == -* ]]; then
                values=($flags)
                files=''
            fi ;;
    esac
    (( $#values )) && _describe vllm values
    [[ -n $files ]] && _files
    return 0
}
if [[ $funcstack[1] == _vllm ]]; then
    _vllm "$@"
else
    compdef _vllm vllm
fi
"""

_FISH = """\
# Completion of vllm for fish, written by `vllm completion fish`.
function __vllm_command
    set -l found vllm
    for word in (commandline -opc)[2..-1]
        switch "$found $word"
            case @COMMANDS@
                set found "$found $word"
        end
    end
    echo $found
end
complete -c vllm -f
@LINES@
"""


def bash(commands: Sequence[Command]) -> str:
    flags = (
        f"        {places}) values={_words(values)} files={files} ;;"
        for (values, files), places in _by_value(commands).items()
    )
    arguments = (
        f"                {_quoted(command.words)})\n"
        f"                    flags={_words(_names(command))}\n"
        f"                    values={_words([*dict(command.commands), *command.values])}\n"
        f"                    files={_yes(command)} ;;"
        for command in commands
    )
    return _filled(_BASH, commands, FLAGS="\n".join(flags), ARGUMENTS="\n".join(arguments))


def zsh(commands: Sequence[Command]) -> str:
    flags = (
        f"        ({places}) values=({_listed(values)}) files={files} ;;"
        for (values, files), places in _by_value(commands).items()
    )
    arguments = (
        f"                ({_quoted(command.words)})\n"
        f"                    flags=({_described(_flag_texts(command))})\n"
        f"                    values=({_described(command.commands)}{_listed(command.values)})\n"
        f"                    files={_yes(command)} ;;"
        for command in commands
    )
    return _filled(_ZSH, commands, FLAGS="\n".join(flags), ARGUMENTS="\n".join(arguments))


def fish(commands: Sequence[Command]) -> str:
    return _filled(_FISH, commands, LINES="\n".join(_fish_lines(commands)))


def _fish_lines(commands: Sequence[Command]) -> Iterator[str]:
    for command in commands:
        here = _fish_quoted(f'test (__vllm_command) = "{command.words}"')
        line = f"complete -c vllm -n {here}"
        for name, text in command.commands:
            yield f"{line} -a {name} -d {_fish_quoted(text)}"
        if command.values:
            yield f"{line} -a {_fish_quoted(' '.join(command.values))}"
        if command.takes_files:
            yield f"{line} -F"
        for flag in command.flags:
            names = (f"-l {n[2:]}" if n.startswith("--") else f"-{_short(n)}" for n in flag.names)
            takes = "" if flag.takes == NOTHING else " -r -F" if flag.takes == FILE else " -x"
            values = f" -a {_fish_quoted(' '.join(flag.values))}" if flag.values else ""
            yield f"{line} {' '.join(names)}{takes}{values} -d {_fish_quoted(flag.text)}"


def _short(name: str) -> str:
    """`-q` is one letter, `-tp` is not."""
    return f"s {name[1:]}" if len(name) == 2 else f"o {name[1:]}"


def _filled(script: str, commands: Sequence[Command], **parts: str) -> str:
    """Commands below `vllm` are told by their words."""
    separator = " " if script is _FISH else "|"
    quoted = [_quoted(command.words) for command in commands if " " in command.words]
    parts["COMMANDS"] = separator.join(quoted)
    for name, text in parts.items():
        script = script.replace(f"@{name}@", text)
    return script


def _by_value(commands: Iterable[Command]) -> dict[tuple[tuple[str, ...], str], str]:
    """By values and "yes" for files: the pattern of command and flag."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for command in commands:
        for flag in command.flags:
            if flag.takes != NOTHING:
                key = flag.values, "yes" if flag.takes == FILE else "''"
                found.setdefault(key, []).extend(f"{command.words} {n}" for n in flag.names)
    return {key: "|".join(map(_quoted, places)) for key, places in found.items()}


def _yes(command: Command) -> str:
    return "yes" if command.takes_files else "''"


def _names(command: Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names]


def _flag_texts(command: Command) -> list[tuple[str, str]]:
    return [(name, flag.text) for flag in command.flags for name in flag.names]


def _words(values: Iterable[str]) -> str:
    return _quoted(" ".join(values))


def _listed(values: Iterable[str]) -> str:
    return " ".join(map(_quoted, values))


def _described(pairs: Iterable[tuple[str, str]]) -> str:
    """As `_describe` takes them; a colon ends the word."""
    escaped = ((name.replace(":", "\\:"), text) for name, text in pairs)
    return " ".join(_quoted(f"{name}:{text}") for name, text in escaped)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SCRIPTS: dict[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""By the name of the shell."""
