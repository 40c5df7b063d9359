"""deploy/grafana and deploy/prometheus: every series that they name is exported by a running gateway or its nodes."""

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from disaggregated_inference.gateway.slo import targets
from disaggregated_inference.observe import READING_GAUGES
from tests.support.cluster import Process
from tests.support.gateway import served, simulated_config, simulated_pair

pytestmark = pytest.mark.slow

DEPLOY = Path(__file__).parents[2] / "deploy"
_NOT_SERIES = re.compile(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(by|without|on|ignoring|group_left)\s*\([^)]*\)')
_NAME = re.compile(r"(?<![\w:.$])[a-zA-Z_:][\w:]*(?!\w*\s*\()")
_PROMETHEUS_OWN = {"up", "and", "or", "unless", "bool", "offset"}


def names_in(expression: str) -> set[str]:
    """The series of an expression: without strings, labels, ranges and functions."""
    return set(_NAME.findall(_NOT_SERIES.sub(" ", expression))) - _PROMETHEUS_OWN


def panels() -> Iterator[dict[str, Any]]:
    yield from json.loads((DEPLOY / "grafana" / "disagg.json").read_text())["panels"]


def grafana_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel.get("targets", [])]


def rules() -> list[dict[str, Any]]:
    content = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def exported(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = set[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


@pytest.fixture(scope="module")
def series() -> Iterator[set[str]]:
    with simulated_pair() as pair, served(simulated_config(*pair)) as gateway:
        yield exported(gateway) | nodes_series(*pair)


def nodes_series(*nodes: Process) -> set[str]:
    return set[str]().union(*(exported(f"http://127.0.0.1:{node.port}") for node in nodes))


def test_names_are_found_in_expressions() -> None:
    expression = 'sum by (le, model) (rate(a_total{x="b_total"}[5m])) / (c:d_sum > 0.05) and up == 1'
    assert names_in(expression) == {"a_total", "c:d_sum"}


@pytest.mark.parametrize("expression", [*grafana_expressions(), *(rule["expr"] for rule in rules())])
def test_every_series_is_exported(series: set[str], expression: str) -> None:
    assert names_in(expression) or expression.startswith("up{")
    assert names_in(expression) <= series


def test_readings_are_exported(series: set[str]) -> None:
    assert set(READING_GAUGES) <= series


def test_every_rule_is_complete() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_panels_have_places_of_their_own() -> None:
    taken = set[tuple[int, int]]()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels()}) == len(list(panels()))


def test_the_scrape_config_names_the_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    assert [job["job_name"] for job in config["scrape_configs"]] == ["disagg-gateway", "disagg-node"]


TARGET_ALERTS = {
    "end_to_end": "DisaggSlow",
    "requests_per_second": "DisaggThroughputBelowTarget",
    "parallel_efficiency": "DisaggParallelEfficiencyBelowTarget",
    "uptime": "DisaggUptimeBelowTarget",
    "errors": "DisaggErrors",
    "failover": "DisaggSlowFailover",
    "cost_per_request": "DisaggCostAboveTarget",
    "requests_per_kwh": "DisaggEnergyBelowTarget",
    "utilisation": "DisaggUtilisationBelowTarget",
}


def test_every_target_has_an_alert_with_its_goal() -> None:
    expressions = {rule["alert"]: rule["expr"] for rule in rules()}
    for target in targets([], []):
        goal = target.goal / 100 if target.unit == "%" else target.goal
        expression = expressions[TARGET_ALERTS[target.name]]
        assert re.search(rf"(?<![\d.]){goal:g}(?:\.0)?(?![\d.])", expression), (target.name, expression)
