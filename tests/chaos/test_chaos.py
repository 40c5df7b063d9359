"""`disagg chaos` for a minute; what it says of a wrong answer; how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.chaos.cluster import chaos_cluster
from disaggregated_inference.chaos.run import ChaosRun
from disaggregated_inference.chaos.settings import ChaosSettings
from tests.support.cluster import Process, config_of
from tests.support.command import read_output
from tests.support.waiting import until

pytestmark = pytest.mark.slow

LONG_S = 600.0  # a busy machine is no fault of the cluster


@contextmanager
def chaos(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "disaggregated_inference", "chaos", *arguments]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            print(read_output(errors))


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    output, _ = process.communicate(timeout=LONG_S)
    return process.returncode, json.loads(output)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_minute_of_chaos(tmp_path: Path, record_property: Any) -> None:
    """No answer is wrong and no request fails, while nodes die and lines break. Faults come by the clock: with three
    clients at once there are as many as with more, and two cores are not full."""
    with chaos(tmp_path, "--minutes", "1", "--seed", "18", "--requests-at-once", "3", "--json") as process:
        code, report = ended(process)
    counts = {name: report[name] for name in ("requests", "right", "over_failure", "cancelled", "failed", "wrong")}
    struck = [fault for fault in report["faults"] if fault["struck"]]
    assert (report["wrong"], report["failed"], report["left"]) == (0, 0, []), report["cases"][:3]
    assert code == 0
    assert report["right"] > 20
    assert report["over_failure"] > 0
    assert report["cancelled"] > 0
    assert len(struck) >= 5
    assert len({fault["kind"] for fault in struck}) >= 3
    record_property("report", f"a minute of chaos: {counts}, {len(struck)} faults, slowest {report['slowest_s']} s")


def test_chaos_with_tls(tmp_path: Path) -> None:
    """All lines are encrypted: a garbled one is a broken connection."""
    with chaos(tmp_path, "--tls", "--minutes", "0.15", "--seed", "3", "--requests-at-once", "4", "--json") as process:
        code, report = ended(process)
    assert (code, report["wrong"], report["failed"], report["left"]) == (0, 0, 0, []), report["cases"][:3]
    assert report["right"] > 5
    assert [fault for fault in report["faults"] if fault["struck"]]


class Misled(ChaosRun):
    """Expects something else than the cluster answers."""

    async def _ask_undisturbed(self) -> None:
        await super()._ask_undisturbed()
        for answer in self._expected:
            answer.choices[0].finish_reason = "other"


def test_a_wrong_answer_is_found(tmp_path: Path) -> None:
    settings = ChaosSettings(requests=40, faults=False)
    with chaos_cluster(settings) as cluster:
        report = asyncio.run(Misled(settings, cluster, lambda text: None).run())
    assert not report.passed
    assert report.wrong > 0 == report.right
    assert "'other'" in report.cases[0].what
    assert report.cases[0].request_id.startswith("chaos-1-")


def test_no_growth_over_some_hundred_requests(tmp_path: Path) -> None:
    with chaos(tmp_path, "--no-faults", "--requests", "250", "--log", "run.json", "--json") as process:
        code, report = ended(process)
    assert (code, report["wrong"], report["failed"], report["grown"]) == (0, 0, 0, [])
    assert len(report["samples"]) == 10
    found = report["samples"][-1]["processes"]
    assert set(found) == {"p1", "p2", "d1", "d2", "gateway", "library"}
    assert all(each["python_blocks"] > 100_000 for each in found.values())  # by each process's own count
    assert json.loads((tmp_path / "run.json").read_text())["requests"] == report["requests"] >= 250


def test_ctrl_c_ends_the_run_with_its_table(tmp_path: Path) -> None:
    with chaos(tmp_path, "--minutes", "30") as process:
        assert until(lambda: len(children_of(process.pid)) >= 5, LONG_S)  # the last one is the gateway
        children = children_of(process.pid)
        time.sleep(2)  # some requests
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LONG_S)
    assert "left behind" in output or process.returncode == 130, output  # 130: it had not begun
    assert until(lambda: not any(map(is_alive, children)), 30)


def test_all_processes_end_with_the_tool(tmp_path: Path) -> None:
    """Also those that are frozen when it is killed."""
    with chaos(tmp_path, "--minutes", "30", "--seed", "4") as process:
        assert until(lambda: len(children_of(process.pid)) >= 5, LONG_S)
        children = children_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert until(lambda: not any(map(is_alive, children)), LONG_S)


def test_nodes_of_others_stay_alive(tmp_path: Path) -> None:
    """With a cluster file only the lines are disturbed; with one node of each role and --everything, also those."""
    profile = ("--profile", "custom:prefill=20000,decode=400,answer=60", "--kv-memory", "64M", "--lease", "5")
    roles = {"p1": "prefill", "d1": "decode"}
    pair = [Process(name, role, "simulated", "simulated:tiny", *profile) for name, role in roles.items()]
    try:
        for node in pair:
            node.ready()
        path = tmp_path / "cluster.json"
        path.write_text(json.dumps(config_of(*pair)))
        arguments = ("--config", str(path), "--minutes", "0.1", "--everything", "--seed", "7", "--json")
        with chaos(tmp_path, *arguments) as process:
            code, report = ended(process)
        assert (code, report["wrong"], report["left"]) == (0, 0, [])
        assert all(node.alive for node in pair)
    finally:
        for node in pair:
            node.end()
    kinds = {fault["kind"] for fault in report["faults"] if fault["struck"]}
    assert kinds
    assert kinds <= {"cut", "slow", "garble", "black hole", "reload", "unload", "disk full"}
    assert {fault["where"] for fault in report["faults"] if fault["kind"] == "disk full"} <= {"gateway"}
