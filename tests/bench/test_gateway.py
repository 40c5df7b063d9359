"""The gateway's benchmark runs to its end, at a size that measures nothing."""

import json
import math
from pathlib import Path

import pytest

from disaggregated_inference.bench import dashboards, gateway, processes, servers
from disaggregated_inference.errors import BadRequest


@pytest.mark.slow
def test_what_the_gateway_adds(tmp_path: Path) -> None:
    report = gateway.run((3,), 4, 6, "", tmp_path, gateway.GatewayExtent(repeats=1, steady_s=1.5))
    assert all(math.isfinite(row.value) for row in report.rows)
    saved = json.loads((tmp_path / "gateway.json").read_text())["rows"]
    assert [row["what"] for row in saved] == [row.what for row in report.rows]
    found = {row.what: row for row in report.rows}
    assert "SIMULATED" in report.title
    others = {row.against for row in report.rows if row.what == "3 at once: CPU of a request for one token"}
    assert others == {servers.BARE, servers.HANDING}
    goals = {other: found[f"3 at once: CPU of a request, of {other}"].goal for other in others}
    assert goals == {servers.BARE: None, servers.HANDING: 2.0}
    assert found["3 of 50 tokens/s: CPU per token, of bare"].goal == 1.4
    assert found["3 of 50 tokens/s: added to a token, p99"].value > 0
    assert found["of 12 prompts, answered differently by them"].value == 0


def test_an_environment_without_litellm_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"litellm\[proxy\]"):
        servers.litellm_command(str(tmp_path), tmp_path, "http://127.0.0.1:1")


@pytest.mark.parametrize(("text", "seconds"), [("0:01.25", 1.25), ("02:03:04", 7384.0), ("1-00:00:01", 86401.0)])
def test_cpu_time_of_ps(text: str, seconds: float) -> None:
    assert processes.parse_cpu_time(text) == seconds


@pytest.mark.slow
def test_what_open_dashboards_cost(tmp_path: Path) -> None:
    report = dashboards.run(3, 4, tmp_path, dashboards.Windows(rounds=1, window_s=1.0, settle_s=0.2))
    found = {row.what: row for row in report.rows}
    for what in ("CPU per token", "added time per token"):
        assert found[what].value > 0
        assert found[f"{what}, of that without dashboards"].goal == 1.05
        assert len(found[what].ratios) == 1, "of each pair of windows"
    assert json.loads((tmp_path / "dashboards.json").read_text())["rows"]
