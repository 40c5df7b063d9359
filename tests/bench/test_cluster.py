"""The benchmarks of the orchestrator run to their end, at sizes that measure nothing."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from disaggregated_inference.bench import cluster, orchestrator
from disaggregated_inference.bench.report import Report
from disaggregated_inference.bench.targets import LOAD
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.gateway import targets
from disaggregated_inference.local_nodes import running
from disaggregated_inference.models import ModelFiles
from tests.support.engines import ENGINE_OPTIONS

pytestmark = pytest.mark.slow


def require_saved(report: Report, path: Path) -> None:
    assert all(math.isfinite(row.value) for row in report.rows)
    assert [row["what"] for row in json.loads(path.read_text())["rows"]] == [row.what for row in report.rows]


def test_what_the_orchestrator_adds(tmp_path: Path) -> None:
    small = orchestrator.OrchestratorExtent(open_streams=4, paced_streams=2, steady_s=1.0, learned_lengths=(50, 100))
    report = orchestrator.run((1, 3), 4, 4, 4, tmp_path, small)
    require_saved(report, tmp_path / "orchestrator.json")
    names = [row.what for row in report.rows]
    assert {"1 at once: added to the first token, p50", "3 at once: CPU per further token"} <= set(names)
    assert "predicted first token, 4 at a time: measured / predicted, p99" in names
    assert any("second attempt" in name for name in names)


def test_published_machines_are_called_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = cluster.run("published", (64, 32), 4, 1, tmp_path)
    require_saved(report, tmp_path / "cluster-published.json")
    assert "SIMULATED" in report.title
    assert all(row.what.startswith("SIMULATED") for row in report.rows)
    assert {row.against for row in report.rows} >= {cluster.DECODE_ALONE, cluster.PREFILL_ALONE, "one by one"}
    shown = capsys.readouterr().out
    assert "ESTIMATE" in shown
    assert "not measure: failover" in shown
    loaded = [row for row in report.rows if row.what.startswith("SIMULATED 16 requests at once, 64 in: ")]
    goals = {target.name: (target.goal, target.better == "lower", target.unit) for target in targets([], [])}
    assert [(row.goal, row.at_most, row.unit) for row in loaded] == [goals[name] for name in goals if name in LOAD]
    known = {row.what.partition(": ")[2].partition(",")[0]: row.value for row in loaded}
    assert known["errors"] == 0
    assert known["requests per kWh"] > 0, "by the published watts"
    assert known["requests per second"] > 0


@pytest.mark.skipif(set(ENGINE_OPTIONS) < {"torch", "mlx"}, reason="needs both engines")
def test_real_engines_share_answers(tiny_folder: Callable[[str], Path]) -> None:
    """One model of the two: starting real engines is what takes time here."""
    served = cluster.computed_model(ModelFiles("tiny", tiny_folder("llama")), "tiny", alone=True)
    report = Report("")
    with running(served.machines):
        asyncio.run(cluster.measure(report, cluster.Scenario("", "", [served], (16,), 3, at_once=2), 1))
    assert {row.against for row in report.rows} >= {cluster.DECODE_ALONE, cluster.PREFILL_ALONE, "one by one"}
    assert not any("SIMULATED" in row.what for row in report.rows)
    assert any("requests at once" in row.what and row.goal == 10 for row in report.rows)
    assert not any("kWh" in row.what for row in report.rows), "what these machines draw is not known"


def test_an_unknown_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="real, published"):
        cluster.run("imagined", (), 0, 1, tmp_path)
