"""deploy/grafana and deploy/prometheus: every series that they name is exported by a running gateway or its nodes."""

import asyncio
import json
import re
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from disaggregated_inference.api import (
    EnergyShare,
    ErrorDetail,
    Failover,
    GpuReading,
    NetworkReading,
    Readings,
    RequestRecord,
)
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway.metrics import GatewayMetrics
from disaggregated_inference.gateway.slo import targets
from disaggregated_inference.observe import READING_GAUGES, reading_gauges
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.cluster import Process
from tests.support.gateway import served, simulated_config, simulated_pair
from tests.support.promql import RANGE, VECTOR, PromqlError, kind
from tests.support.waiting import until

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


def scraped(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text: str = response.read().decode()
    return text


def exported(text: str) -> set[str]:
    found = set[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            found |= {f"{name}_{end}" for end in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return found


def urls_of(*nodes: Process) -> list[str]:
    return [f"http://127.0.0.1:{node.port}" for node in nodes]


@pytest.fixture(scope="module")
def pages() -> list[str]:
    """The metrics of a gateway that has answered a request, and of its nodes."""
    links = {"links": [{"prefill": "p1", "decode": "d1", "gbps": 10}]}
    with simulated_pair() as pair, served(simulated_config(*pair, local="never") | links) as gateway:
        body = {"model": "simulated:tiny", "prompt": "x" * 500, "max_tokens": 4}
        httpx.post(f"{gateway}/v1/completions", json=body, timeout=60).raise_for_status()
        assert until(lambda: "disagg_link_goodput_bytes_per_second{" in scraped(gateway), 60)
        return [scraped(url) for url in (gateway, *urls_of(*pair))]


@pytest.fixture(scope="module")
def series(pages: list[str]) -> set[str]:
    return set[str]().union(*map(exported, pages))


FAILURE = Failover(node="d1", code="unreachable", message="x", stall_s=1.0)
SERVER = {"host": "127.0.0.1", "port": 9, "model": "m"}
MACHINE = Readings(
    cpu_share=0.5,
    memory_used_bytes=1,
    memory_total_bytes=2,
    power_w=3.0,
    networks=(NetworkReading(name="eth0", received_bytes_s=1.0, sent_bytes_s=1.0, line_rate_bits_s=1.0),),
    gpus=(GpuReading(name="GPU", utilisation=0.5, temperature_c=50.0, power_w=3.0),),
)


async def _page_of_what_seldom_happens() -> str:
    """Failures, failovers, fallbacks, energy: counted by the gateway's own code."""
    config = {"prefill_servers": [SERVER | {"name": "p1"}], "decode_servers": [SERVER | {"name": "d1", "port": 8}]}
    async with DisaggregatedInference(load_config(config)) as core:
        metrics = GatewayMetrics(lambda: core)
        usual = RequestRecord(
            model="m",
            total_time=2.0,
            sequential_time=2.0,
            kind="disaggregated",
            decode_node="d1",
            completion_tokens=1,
            prompt_tokens_recomputed=1,
            failovers=(FAILURE,),
            energy=(EnergyShare(node="d1", phase="decode", joules=1.0, source="measured"),),
            energy_wh=1.0,
            cost=1.0,
        )
        metrics.ended(usual)
        metrics.ended(RequestRecord(model="m", kind="fallback"))
        metrics.ended(RequestRecord(model="m", outcome="failed", error=ErrorDetail("no_decode_node", "x")))
        metrics.refused(BadRequest("x"))
        return (await metrics.text()).decode()


class _Meters(Collector):
    """Of a machine with meters and a GPU."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from reading_gauges([(["d1"], MACHINE)], ["node"])


def _page_of_a_machine_with_meters() -> str:
    registry = CollectorRegistry()
    registry.register(_Meters())
    return generate_latest(registry).decode()


Labels = dict[str, dict[str, set[str]]]  # series, label, values


@pytest.fixture(scope="module")
def labels(pages: list[str]) -> Labels:
    found: Labels = defaultdict(lambda: defaultdict(set))
    others = [asyncio.run(_page_of_what_seldom_happens()), _page_of_a_machine_with_meters()]
    families = chain.from_iterable(text_string_to_metric_families(page) for page in [*pages, *others])
    for sample in chain.from_iterable(family.samples for family in families):
        known = found[sample.name]
        for name, value in sample.labels.items():
            known[name].add(value)
    found["up"] = {}
    for each in found.values():  # Prometheus adds these
        each |= {"instance": set(), "job": {"disagg-gateway", "disagg-node"}}
    return found


def test_names_are_found_in_expressions() -> None:
    expression = 'sum by (le, model) (rate(a_total{x="b_total"}[5m])) / (c:d_sum > 0.05) and up == 1'
    assert names_in(expression) == {"a_total", "c:d_sum"}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("sum(rate(a_total[5m])", "'' stands where \\)"),
        ("sum(rate(a_total[5m])))", "'\\)' is left over"),
        ("rate(a_total)", "rate takes a range, not a vector"),
        ("sum(a_total[5m])", "sum takes a vector, not a range"),
        ("a_total[5m]", ""),
        ("rates(a_total[5m])", "rates is no known function"),
        ("rate(a_total[5 minutes])", "is no PromQL"),
        ("histogram_quantile(sum by (le) (a_bucket), 0.95)", "takes a scalar, not a vector"),
        ('a_total{outcome="ok}', "is no PromQL"),
        ("a_total{outcome=ok}", "'ok' is no string"),
        ("a_total > and b_total", "'and' stands where an expression"),
        ("a_total b_total", "'b_total' is left over"),
        ("sum by le (a_total)", "'le' stands where"),
        ("1 > 2", "needs bool"),
        ("a_total and 1", "and joins no vector and scalar"),
    ],
)
def test_wrong_expressions_are_found(wrong: str, why: str) -> None:
    if not why:
        assert kind(wrong) == RANGE
        return
    with pytest.raises(PromqlError, match=why):
        kind(wrong)


@pytest.mark.parametrize("expression", [*grafana_expressions(), *(rule["expr"] for rule in rules())])
def test_every_series_is_exported(series: set[str], expression: str) -> None:
    assert kind(expression) == VECTOR
    assert names_in(expression) or expression.startswith("up{")
    assert names_in(expression) <= series


_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)")
_SHOWN = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


def wrong_labels(expression: str, labels: Labels) -> list[str]:
    """Labels that a series of the expression does not have, and values that they never have."""
    found = []
    for name, content in _SELECTOR.findall(expression):
        for label, _, wanted in _MATCHER.findall(content):
            values = labels[name].get(label)
            known = values is not None and (wanted.startswith("$") or set(wanted.split("|")) <= values)
            found += [] if known else [f"{name}: {label}={wanted}"]
    for part in expression.split(" and "):
        grouped = {label.strip() for group in _GROUPING.findall(part) for label in group.split(",")}
        found += [f"{name}: {label}" for name in names_in(part) for label in grouped if label not in labels[name]]
    return found


def result_labels(expression: str, labels: Labels) -> set[str]:
    """Those that the expression's result has."""
    if by := re.findall(r"\bby\s*\(([^)]*)\)", expression):
        return set.intersection(*({label.strip() for label in group.split(",")} for group in by)) - {"le"}
    if re.search(r"\bsum\s*\(", expression):
        return set()
    return set.intersection(*(set(labels[name]) for name in names_in(expression) or {"up"}))


def shown() -> Iterator[tuple[str, str]]:
    """Expressions, and the texts that name labels of their results."""
    for panel in panels():
        yield from ((target["expr"], target.get("legendFormat", "")) for target in panel.get("targets", []))
    for rule in rules():
        yield rule["expr"], rule["annotations"]["summary"]


def test_wrong_labels_are_found(labels: Labels) -> None:
    wrong = 'sum by (nodes) (rate(disagg_requests_total{outcome="okay", models=~"$model"}[5m]))'
    name = "disagg_requests_total"
    assert wrong_labels(wrong, labels) == [f"{name}: outcome=okay", f"{name}: models=$model", f"{name}: nodes"]


@pytest.mark.parametrize(("expression", "text"), [*shown()])
def test_every_label_is_exported(labels: Labels, expression: str, text: str) -> None:
    assert wrong_labels(expression, labels) == []
    assert set(_SHOWN.findall(text)) - {"value"} <= result_labels(expression, labels)


def test_choices_of_the_grafana_dashboard_are_labels(labels: Labels) -> None:
    content = json.loads((DEPLOY / "grafana" / "disagg.json").read_text())["templating"]["list"]
    queries = [each["query"]["query"] for each in content if each["type"] == "query"]
    assert queries == [each["definition"] for each in content if each["type"] == "query"]
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in labels[name]


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
