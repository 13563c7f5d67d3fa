"""Dashboard and alerts ask for what a server that has answered requests exports."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from promql import Selector, selectors

from .serving import REPOSITORY, RunningServer

BOARD = json.loads((REPOSITORY / "deploy/grafana/vllm.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if "targets" in panel]
RULES = yaml.safe_load((REPOSITORY / "deploy/prometheus/rules.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
OF_PROMETHEUS = frozenset({"job", "instance"})
"""Labels that it adds to each sample of a server."""


def load(server: RunningServer) -> None:
    server.complete(prompt="ban fick", n=2, temperature=1)
    server.chat(max_tokens=4)
    server.events("/v1/completions", prompt="ban", max_tokens=4)
    server.complete(unknown_field=1)


@pytest.fixture(scope="module")
def exported(server: RunningServer) -> dict[str, set[str]]:
    """Names of the samples at /metrics after some requests, with the labels of each."""
    load(server)
    samples: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def missing(query: str, exported: dict[str, set[str]]) -> list[Selector]:
    found = selectors(query)
    assert found, f"{query} asks for no metric"
    return [
        one
        for one in found
        if one.metric not in exported or one.labels - exported[one.metric] - OF_PROMETHEUS
    ]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_asks_for_metrics_and_labels_that_a_server_has(panel, exported):
    for target in panel["targets"]:
        assert missing(target["expr"], exported) == []
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        for one in selectors(target["expr"]):
            assert shown <= exported[one.metric] | OF_PROMETHEUS


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_metrics_and_labels_that_a_server_has(alert, exported):
    assert missing(alert["expr"], exported) == []
    shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert shown <= {
        label for one in selectors(alert["expr"]) for label in exported[one.metric]
    } | (OF_PROMETHEUS)


def test_the_choices_of_the_dashboard_are_labels_of_a_server(exported):
    asked = [one["definition"] for one in BOARD["templating"]["list"] if one["type"] == "query"]
    for text in asked:
        metric, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", text).groups()
        assert label in exported[metric] | OF_PROMETHEUS


def test_each_variable_of_a_query_is_a_choice_of_the_dashboard():
    known = {one["name"] for one in BOARD["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(?:{(\w+)}|(\w+))", json.dumps(PANELS))) <= {
        pair for name in known for pair in ((name, ""), ("", name))
    }


def test_each_panel_has_a_number_and_a_place_of_its_own():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum(vllm:a)", [("vllm:a", "")]),
        (
            'sum by (le, x) (rate(vllm:a_bucket{m=~"$m", i="1"}[5m]))',
            [("vllm:a_bucket", "i le m x")],
        ),
        ('histogram_quantile(0.5, sum(rate(a{b="by (c)"}[$__rate_interval])))', [("a", "b")]),
        ("a > 0.95 and on (i) rate(b[5m]) > 0", [("a", "i"), ("b", "i")]),
        ('sum(a{s=~"5.."}) / sum(b) > 1e-3', [("a", "s"), ("b", "")]),
    ],
)
def test_metrics_and_labels_are_read_off_a_query(query, found):
    expected = [Selector(name, frozenset(labels.split())) for name, labels in found]
    assert selectors(query) == expected


@pytest.mark.parametrize("query", ["sum(vllm:nothing)", 'vllm:num_requests_running{modell="x"}'])
def test_a_query_that_finds_nothing_is_noticed(query, exported):
    assert missing(query, exported)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus (Debian: prometheus)")
def test_prometheus_answers_every_query_with_a_number(server, tmp_path):
    """With short intervals; a query that divides by what nobody counted is NaN, and fails."""
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    config["rule_files"] = [str(REPOSITORY / "deploy/prometheus/rules.yml")]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    queries = [re.sub(r"\$(instance|model_name)", ".*", query) for query in queries]
    left = [query.replace("$__rate_interval", "10s") for query in queries]
    with prometheus(tmp_path) as url:
        end = time.monotonic() + 30
        while left and time.monotonic() < end:
            load(server)
            left = [query for query in left if not values_of(url, query)]
    assert left == []


@contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml",
               f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def values_of(url: str, query: str) -> list[float]:
    """What it answers; none while it starts, and none where a value is no number."""
    asked = f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []
        raise AssertionError(f"{query}: {error.read().decode()}") from error
    except urllib.error.URLError:
        return []
    values = [float(one["value"][1]) for one in found]
    return [] if any(value != value for value in values) else values
