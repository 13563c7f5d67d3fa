"""The Dockerfile, compose files, manifests and workflows as values."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
MAKEFILE = (REPOSITORY / "Makefile").read_text()
SET_UP = (REPOSITORY / "tools" / "set_up.py").read_text()
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))
MANIFESTS = sorted((REPOSITORY / "deploy/kubernetes").glob("*.yaml"))
YAML = sorted(
    path
    for pattern in ("*.yaml", "*.yml")
    for folder in ("deploy", ".github")
    for path in [*(REPOSITORY / folder).rglob(pattern), REPOSITORY / "compose.yaml"]
)


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def dockerfile() -> list[tuple[str, str, str]]:
    """(stage, instruction, rest) with continued lines joined; the stage is the name after AS."""
    text = re.sub(r"^#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)
    stage, found = "", []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        if word:
            found.append((stage, word, rest.strip()))
    return found


def compose(*names: str) -> dict[str, Any]:
    """The service of vllm."""
    services = [yaml.safe_load((REPOSITORY / name).read_text())["services"] for name in names]
    return {key: value for one in services for key, value in one["vllm"].items()}


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and role, spec) of every pod of the manifests."""
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            spec = document["spec"]
            if document["kind"] == "Deployment":
                yield name_of(path), spec["template"]["spec"]
            elif document["kind"] == "LeaderWorkerSet":
                for role in ("leader", "worker"):
                    template = spec["leaderWorkerTemplate"][f"{role}Template"]
                    yield f"{name_of(path)} {role}", template["spec"]


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """(where, words after `vllm serve`) of every file that starts a server."""
    yield (
        "compose.yaml",
        [re.sub(r"\$\{.*\}", "MODEL", w) for w in compose("compose.yaml")["command"]],
    )
    for place, spec in pods():
        [container] = spec["containers"]
        if "command" not in container:
            yield place, container["args"]
        elif "vllm serve" in (script := container["args"][0]):
            joined = script.replace("\\\n", " ")
            yield place, shlex.split(re.search(r"vllm serve (.*)", joined)[1])


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]
