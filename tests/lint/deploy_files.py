"""`make lint-deploy`: what other people's tools say of the Dockerfile, compose files, manifests,
workflows, and the configuration of Prometheus and Grafana.

Runs with tests/requirements-deploy.txt and without the network. promtool and actionlint come from
no Python package: they are used where they are on PATH. Exit code 1: a tool has found something.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.33.0"
# Debian keeps no old versions of packages, so none can be pinned.
_HADOLINT = ("hadolint", "--ignore", "DL3008", "Dockerfile")
_YAMLLINT = (
    "{extends: default, rules: {line-length: {max: 120}, document-start: disable, "
    "truthy: {check-keys: false}, comments: {min-spaces-from-content: 1}}}"
)


def main() -> int:
    # The programs of this environment first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for command in commands(Path(folder)):
            program = shutil.which(command[0], path=path)
            if program is None:
                print(f"{command[0]}: not on PATH, left out")
                continue
            done = subprocess.run([program, *command[1:]], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            print(f"{command[0]}: {'failed' if done.returncode else 'passed'}")
            if done.returncode:
                failed.append(command[0])
                print(done.stdout)
    return bool(failed)


def commands(folder: Path) -> Iterator[tuple[str, ...]]:
    """folder: for files that tools need and the repository lacks."""
    workflows = files(".github/workflows/*.yml")
    manifests = [one for each in documents("deploy/kubernetes/*.yaml") for one in known(each)]
    compose = files("*compose*.yaml", "deploy/compose*.yaml")
    yield _HADOLINT
    yield ("yamllint", "--strict", "-d", _YAMLLINT, *compose, "deploy", ".github")
    yield ("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *compose)
    yield ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    yield ("zizmor", "--offline", "--quiet", *workflows)
    yield ("actionlint", *workflows)
    yield ("kubernetes-validate", "--strict", "-k", KUBERNETES, *written(folder, manifests))
    yield ("promtool", "check", "config", "deploy/prometheus/prometheus.yml")
    yield ("promtool", "check", "rules", *written(folder, [queries_as_rules()]))


def files(*patterns: str) -> list[str]:
    return [str(p.relative_to(ROOT)) for pattern in patterns for p in sorted(ROOT.glob(pattern))]


def documents(pattern: str) -> Iterator[dict[str, Any]]:
    for file in files(pattern):
        yield from yaml.safe_load_all((ROOT / file).read_text())


def known(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifest; of a LeaderWorkerSet, which Kubernetes has no schema of, its pods."""
    if manifest["kind"] != "LeaderWorkerSet":
        return [manifest]
    templates = manifest["spec"]["leaderWorkerTemplate"]
    return [
        {"apiVersion": "v1", "kind": "Pod", **templates[f"{role}Template"]}
        | {"metadata": {"name": role, **templates[f"{role}Template"]["metadata"]}}
        for role in ("leader", "worker")
    ]


def written(folder: Path, contents: list[dict[str, Any]]) -> list[str]:
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{content.get('kind', 'rules')}-{number}.yaml"
        path.write_text(yaml.safe_dump(content))
        paths.append(str(path))
    return paths


def queries_as_rules() -> dict[str, Any]:
    """Every query of the dashboard, in the only form that promtool parses without a server."""
    board = json.loads((ROOT / "deploy/grafana/vllm.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    return {"groups": [{"name": "dashboard", "rules": rules}]}


if __name__ == "__main__":
    sys.exit(main())
