"""Checks a command of the documentation: runs it, or has the program itself parse its words."""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from doc_pages import REPOSITORY, Command, text_of
from entrypoints.serving import RunningServer
from packaging.requirements import Requirement

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import main as cli

RUN = (
    ("bench", "serve"),
    ("chat",),
    ("collect-env",),
    ("complete",),
    ("kernels", "explain"),
    ("kernels", "list"),
    ("quantize",),
)
"""Subcommands of vllm that are run where a page has them in a block."""


class Parsed(Exception):
    """A parser accepted its words; what would follow is not run."""


def check(
    one: Command, monkeypatch: pytest.MonkeyPatch, server: Callable[[], RunningServer] | None
) -> None:
    """Runs or parses the command. server: starts it at its first call; None to parse only."""
    program = one.words[0] if one.words else ""
    assert program in PROGRAMS, f"{one.place}: {one.text}: nothing here can check it"
    with monkeypatch.context() as patch:
        for name, value in one.variables.items():
            patch.setenv(name, value)
        try:
            PROGRAMS[program](one.words[1:], patch, server)
        except (AssertionError, SystemExit, Exception) as error:
            raise AssertionError(f"{one.place}: {one.text}: {error!r}") from error


# ---------------------------------------------------------------- vllm


def vllm(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    if is_name_alone(words):
        return
    kind = next((known for known in RUN if tuple(words[: len(known)]) == known), None)
    if server is None or kind is None:
        parse_vllm(words, patch)
        return
    added = {
        ("chat",): lambda: ["--url", f"{server().url}/v1"],
        ("complete",): lambda: ["--url", f"{server().url}/v1"],
        ("bench", "serve"): lambda: ["--port", str(server().port)],
    }.get(kind, list)()
    assert cli.main([*words, *added]) == 0


def is_name_alone(words: list[str]) -> bool:
    """`vllm kernels tune` or `vllm serve --help`, as the name of a command in a sentence."""
    names = [word for word in words if word != "--help"]
    return len(names) <= 2 and names[0] in cli.SUBCOMMANDS and not any("-" in w for w in names[1:])


def parse_vllm(words: list[str], patch: pytest.MonkeyPatch) -> None:
    """Through `main`, with a function in place of the command's own."""
    parse = cli.Parser.parse_known_args

    def accepted(args: argparse.Namespace) -> int:
        if words[0] == "serve":
            EngineArgs.from_cli_args(args, args.model or "demo")
        raise Parsed

    def known(self, *given, **options):
        args, unknown = parse(self, *given, **options)
        args.run = accepted
        return args, unknown

    patch.setattr(cli.Parser, "parse_known_args", known)
    with pytest.raises(Parsed):
        cli.main(words)


# ---------------------------------------------------------------- other programs


def curl(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    words = [word.replace("localhost:8000", f"127.0.0.1:{server().port}") for word in words]
    done = subprocess.run(
        ["curl", "--silent", "--show-error", "--fail-with-body", "--max-time", "60", *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--directory", str(REPOSITORY), *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def python(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """A script or a module: its parser accepts the words. One without flags has no parser."""
    is_module = words[0] == "-m"
    name, given = (words[1], words[2:]) if is_module else (words[0], words[1:])
    if name == "pytest":
        return pytest_(given, patch, server)
    file = Path(*name.split(".")).with_suffix(".py") if is_module else Path(name)
    source = (REPOSITORY / file).read_text()
    if "ArgumentParser" not in source:
        assert "sys.argv" in source or not given
        assert not any(word.startswith("-") for word in given), "it takes no flags"
        return None
    patch.setattr(sys, "argv", [name, *given])
    patch.setattr(sys, "path", [str((REPOSITORY / file).parent), *sys.path])
    patch.setattr(argparse.ArgumentParser, "parse_args", accepting(argparse.ArgumentParser))
    run: Callable[..., object] = runpy.run_module if is_module else runpy.run_path
    with pytest.raises(Parsed):
        run(name if is_module else str(REPOSITORY / file), run_name="__main__")
    return None


def accepting(parser: type[argparse.ArgumentParser]) -> Callable[..., None]:
    parse = parser.parse_args

    def parse_args(self, *given, **options):
        parse(self, *given, **options)
        raise Parsed

    return parse_args


def pytest_(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """Its options are known and its files exist; no test is collected, which is exit code 5. The
    options of a conftest.py are looked for only where others do not suffice."""
    for options in (["--noconftest"], []):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "--ignore-glob=*", *options, *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        if done.returncode in (0, 5):
            return
    raise AssertionError(done.stdout + done.stderr)


def pip(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """pip knows the options, and what is installed are requirements or extras of this package."""
    from pip._internal.commands import create_command

    assert words[0] == "install"
    extras = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    _, wanted = create_command("install").parser.parse_args(words[1:])
    for word in wanted:
        own = re.fullmatch(r"(?:\.|vllm)(?:\[(\w+)\])?", word)
        if own:
            assert own[1] is None or own[1] in extras
        elif not word.startswith("./"):  # a package of CONTRIBUTING.md: test_contributing.py
            Requirement(word)


def cmake(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """Its definitions are read by the build."""
    files = [REPOSITORY / "CMakeLists.txt", *sorted((REPOSITORY / "cmake").glob("*.cmake"))]
    read = " ".join(file.read_text() for file in files)
    for word in words:
        if word.startswith("-D"):
            name = word[2:].partition("=")[0]
            assert name in read or name.split("_")[0] in ("CMAKE", "Python"), name


def docker(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """Nothing is built or started: stages and files exist, and what a server gets is parsed."""
    stages = re.findall(r" AS (\S+)", text_of("Dockerfile"))
    for option, value in pairwise(words):
        assert option != "--target" or value in stages, value
        assert option != "-f" or (REPOSITORY / value).exists(), value
        assert option != "--build-arg" or f"ARG {value.partition('=')[0]}=" in text_of("Dockerfile")
    image = next((i for i, word in enumerate(words) if re.fullmatch(r"vllm:\w+", word)), None)
    assert words[0] in ("build", "run", "compose")
    if words[0] == "run":
        assert image is not None and words[image].partition(":")[2] in stages
        parse_vllm(["serve", *words[image + 1 :]], patch)


def kubectl(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """Its manifests exist, and the secret has the keys that they ask for."""
    manifests = "".join(p.read_text() for p in (REPOSITORY / "deploy/kubernetes").glob("*.yaml"))
    if words[:2] == ["apply", "-f"]:
        assert (REPOSITORY / words[2]).exists(), words[2]
        return
    assert words[:3] == ["create", "secret", "generic"]
    given = [word.split("=")[1] for word in words[4:] if word.startswith("--from-literal")]
    assert f"secretName: {words[3]}\n" in manifests
    assert set(given) == set(re.findall(r"\bkey: ([\w-]+)", manifests))


def tool(words: list[str], patch: pytest.MonkeyPatch, server) -> None:
    """A tool of the set-up, or git: only its presence is asked for."""


PROGRAMS: dict[str, Callable[..., None]] = {
    "cmake": cmake,
    "curl": curl,
    "docker": docker,
    "git": tool,
    "kubectl": kubectl,
    "make": make,
    "pip": pip,
    "pytest": pytest_,
    "python": python,
    "vllm": vllm,
}
