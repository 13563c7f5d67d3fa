"""`vllm completion`: bash runs the script; zsh and fish check the syntax of theirs where they are
installed."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from vllm.entrypoints.cli.completion import commands_of
from vllm.entrypoints.cli.completion_scripts import SCRIPTS
from vllm.entrypoints.cli.main import SUBCOMMANDS, make_parser
from vllm.kernels import registry

from .serving import run_cli

# What the Tab key does: `$1` the line, split as bash splits it, the last word being typed.
_TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); _vllm
for word in "${COMPREPLY[@]}"; do printf '%s\\n' "$word"; done
"""


@cache
def script(shell: str) -> str:
    done = run_cli("completion", shell, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0, done.stderr
    assert not any(line.endswith((" torch", " fastapi")) for line in done.stderr.splitlines())
    return done.stdout


@pytest.fixture
def completed(tmp_path: Path):
    file = tmp_path / "vllm.bash"
    file.write_text(script("bash"))
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "my model").mkdir()
    (folder / "other.json").touch()

    def complete(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", _TAB, "bash", str(file), "vllm", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert not done.stderr
        return done.stdout.splitlines()

    return complete


def test_bash_completes_commands_flags_and_values(completed) -> None:
    assert completed("") == [*SUBCOMMANDS]
    assert completed("ser") == ["serve"]
    assert completed("kernels", "ex") == ["explain"]
    assert completed("serve", "--max-model-l") == ["--max-model-len"]
    assert completed("serve", "--dtype", "") == ["auto", "float32", "bfloat16", "float16"]
    assert completed("serve", "m", "--dtype", "=", "fl") == ["float32", "float16"]
    assert completed("serve", "--dtype", "=") == ["auto", "float32", "bfloat16", "float16"]
    assert completed("serve", "--linear-backend", "") == [*registry.backend_names("linear")]
    assert completed("serve", "--port", "") == []
    assert completed("completion", "") == [*SCRIPTS]
    assert "DeepSeek-V3.1" in completed("kernels", "explain", "Deep")
    assert completed("fly", "--po") == []


def test_bash_completes_files_where_a_file_is_taken(completed) -> None:
    assert completed("serve", "my") == ["my model"]
    assert completed("serve", "--config", "o") == ["other.json"]
    assert completed("serve", "--dtype", "o") == []
    assert completed("kernels", "o") == []


def test_every_flag_of_every_command_is_completed(completed) -> None:
    commands = [*commands_of(make_parser(), "vllm")]
    assert {command.words for command in commands} > {"vllm bench serve", "vllm kernels explain"}
    for command in commands:
        words = command.words.split()[1:]
        assert completed(*words, "-") == [n for flag in command.flags for n in flag.names]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_syntax_of_the_other_shells(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(script(shell))
    assert "--max-model-len" in file.read_text() or "-l max-model-len" in file.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(file)], check=True)


def test_an_unknown_shell_is_told_what_there_is() -> None:
    done = run_cli("completion", "tcsh")
    assert done.returncode == 2
    assert "invalid choice: 'tcsh' (choose from" in done.stderr
