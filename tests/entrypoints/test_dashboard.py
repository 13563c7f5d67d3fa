"""Dashboard and alerts ask for what a server that has answered requests exports."""

import json
import re

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


@pytest.fixture(scope="module")
def exported(server: RunningServer) -> dict[str, set[str]]:
    """Names of the samples at /metrics after some requests, with the labels of each."""
    server.complete(prompt="ban fick", n=2, temperature=1)
    server.chat(max_tokens=4)
    server.events("/v1/completions", prompt="ban", max_tokens=4)
    server.complete(unknown_field=1)
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
