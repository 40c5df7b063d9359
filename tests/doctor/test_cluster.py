"""`disagg doctor --cluster` and the scripts on four machines with real sshd and systemd.

The tests build on each other in their order: before the deploy, after it, then faults.
"""

import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.support.deployed import GPT_OSS, NODES, QWEN, TOKEN, Lab
from tests.support.machines import HOME, four_machines, why_not
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SCRIPTS = Path(__file__).parents[2] / "scripts"
PAIRS = {"DGX Spark 1": "Mac Studio 2", "DGX Spark 2": "Mac Studio 1"}
TITLES = "#{pane_index} #{pane_title}"
Findings = list[dict[str, Any]]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """KV prefers the network `slow`, which is the faster one here; control goes by the other."""
    with four_machines(fast="1gbit", slow="4gbit") as machines:
        lab = Lab(machines)
        links = [{"prefill": prefill, "decode": decode, "gbps": 4} for prefill, decode in PAIRS.items()]
        lab.write(lab.content | {"links": links})
        command = machines.home / "disagg"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m disaggregated_inference "$@"\n')
        command.chmod(0o755)
        yield lab


def examine(lab: Lab, *arguments: str) -> tuple[int, Findings]:
    done = lab.disagg("doctor", "--cluster", "--json", "--seconds", "0.5", *arguments, check=False)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"], done.stderr
    return done.returncode, told["findings"]


def those(findings: Findings, check: str, severity: str = "") -> list[str]:
    return [each["what"] for each in findings if each["check"] == check and severity in ("", each["severity"])]


def script(lab: Lab, name: str, *arguments: str, check: bool = True) -> CompletedProcess[str]:
    environment = {"LAB_TOKEN": TOKEN, "DISAGG_COMMAND": f"{HOME}/disagg", "DISAGG_CONFIG": f"{HOME}/cluster.json"}
    environment |= {"TMUX_TMPDIR": str(HOME)}
    done = lab.machines.run(SCRIPTS / name, *arguments, check=False, timeout=300, env=environment)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def test_machines_without_anything_are_seen_from_outside(lab: Lab) -> None:
    code, findings = examine(lab)
    assert code == 4
    assert len(those(findings, "ssh", "ok")) == 4
    assert those(findings, "deployed", "warning") == ["nothing is deployed in ~/.disagg"] * 4
    assert len(those(findings, "node-answers", "error")) == 4
    assert len(those(findings, "clock-skew", "ok")) == 4  # the machines have one clock
    for prefill, decode in PAIRS.items():
        (first,) = [what for what in those(findings, "path-bandwidth") if f"{prefill} -> {decode} by 10.77.0." in what]
        rate = re.search(r": ([\d.]+) Gb/s, ([\d.]+) ms; the link has 4 Gb/s", first)
        assert rate
        assert 0 < float(rate[1]) < 4.4


def test_a_healthy_cluster_after_the_deploy(lab: Lab) -> None:
    assert script(lab, "deploy_to_machines.sh").stdout.count("healthy") >= 4
    _, findings = examine(lab)
    assert len(those(findings, "node-answers", "ok")) == 4
    assert [what.rpartition(": ")[0] for what in those(findings, "gateway", "ok")] == [QWEN, GPT_OSS]
    assert len(those(findings, "deployed", "ok")) == 4
    assert not [each for each in findings if each["severity"] == "error"]
    assert {each["machine"] for each in findings} == {*NODES, "between machines", "this machine"}
    assert len(those(findings, "port", "ok")) == 6  # two nodes have a KV port
    assert all("its node has port" in what for what in those(findings, "port"))
    assert len(those(findings, "secrets", "ok")) == 4
    assert len(those(findings, "leftovers", "ok")) == len(those(findings, "leftovers")) == 5  # with the gateway
    assert TOKEN not in json.dumps(findings)


def test_a_shaped_link_is_named_with_its_rate(lab: Lab) -> None:
    lab.machines.shape("dgx1", "100mbit", "slow")
    _, findings = examine(lab, "--machine", "dgx1", "--machine", "mac2")
    lab.machines.shape("dgx1", "4gbit", "slow")
    (what,) = those(findings, "path-bandwidth", "warning")
    rate = re.match(r"DGX Spark 1 -> Mac Studio 2 by 10\.77\.0\.103: ([\d.]+) Gb/s", what)
    assert rate
    assert float(rate[1]) < 0.2
    assert what.endswith("the link has 4 Gb/s: less than a tenth arrives")
    (order,) = those(findings, "path-order", "warning")
    assert order.startswith("DGX Spark 1 -> Mac Studio 2 by 169.254.150.103 has ")


def test_a_cut_path_is_named(lab: Lab) -> None:
    lab.machines.cut("mac1", "slow")
    code, findings = examine(lab, "--machine", "dgx2", "--machine", "mac1")
    lab.machines.heal("mac1", "slow")
    assert code in (3, 4)
    (what,) = those(findings, "path")
    assert re.fullmatch(r"DGX Spark 2 -> Mac Studio 1 by 10\.77\.0\.104: .*; another path works", what)
    assert {each["machine"] for each in findings} == {"dgx2", "mac1", "between machines", "this machine"}


def test_faults_of_a_machine_are_named_and_their_remedies_mend_them(lab: Lab) -> None:
    machine = lab.machines["mac2"]
    secret = next(path for path in machine.path("/root/.disagg/secrets").rglob("*") if path.is_file())
    inside = Path("/", *secret.relative_to(machine.path("/")).parts)
    secret.chmod(0o644)
    rogue = ["serve", "--role", "decode", "--engine", "simulated", "--model", QWEN, "--port", "9100"]
    packages = f"--setenv=PYTHONPATH={sysconfig.get_path('purelib')}"
    python = "/root/.disagg/current/venv/bin/python"
    machine.enter("systemd-run", "--unit=rogue", packages, python, "-m", "disaggregated_inference", *rogue)
    code, findings = examine(lab, "--machine", "mac2")
    faults = {each["check"]: each for each in findings if each["check"] in ("secrets", "leftovers") and each["mend"]}
    assert code == 4
    assert faults["secrets"]["what"] == f"other users of this machine can read {inside}"
    assert re.fullmatch(
        r"process \d+ is a node at port 9100; it is not in the cluster file", faults["leftovers"]["what"]
    )
    assert all(fault["why"] for fault in faults.values())
    for fault in faults.values():
        lab.machines.ssh("mac2", fault["mend"])
    assert until(lambda: machine.processes(" 9100") == [], 60)
    _, findings = examine(lab, "--machine", "mac2")
    assert {each["severity"] for each in findings if each["check"] in ("secrets", "leftovers")} == {"ok"}


def test_a_wrong_host_key_concerns_one_machine(lab: Lab) -> None:
    known = lab.machines.home / ".ssh/known_hosts"
    right = known.read_text()
    lines = right.splitlines()
    wrong = [lines[0].rsplit(" ", 1)[0] + " " + lines[1].rsplit(" ", 1)[1], *lines[1:]]
    known.write_text("\n".join(wrong) + "\n")
    code, findings = examine(lab, "--machine", "mac1", "--machine", "dgx2")
    known.write_text(right)
    assert code == 4
    assert re.match(r"the host key of \S+ is not the one in your known_hosts", those(findings, "ssh", "error")[0])
    assert len(those(findings, "ssh", "ok")) == 1
    assert len(those(findings, "path", "unknown")) == 2


def test_the_scripts_stop_and_start_the_cluster(lab: Lab) -> None:
    assert "8 of 8 passed" in script(lab, "test_system.py").stdout
    script(lab, "stop_all_servers.sh")
    assert script(lab, "check_status.py", check=False).returncode == 3
    script(lab, "start_dgx_servers.sh")
    script(lab, "start_mac2_qwen_decode.sh")
    done = script(lab, "check_status.py", check=False)
    assert done.returncode == 2
    assert "simulated:qwen3-30b-a3b: all up; simulated:gpt-oss-120b: decode down: cannot serve" in done.stdout
    script(lab, "start_mac_servers.sh")
    assert script(lab, "check_status.py").stdout.splitlines()[-1] == "verdict: all up"


def test_the_logs_of_every_machine_have_a_pane(lab: Lab) -> None:
    assert "tmux session disagg-logs" in script(lab, "monitor_logs.sh").stdout

    def tmux(*arguments: str) -> str:
        return lab.machines.run("tmux", *arguments, check=False, env={"TMUX_TMPDIR": str(HOME)}).stdout

    def follows(pane: str) -> bool:
        text = tmux("capture-pane", "-p", "-t", f"disagg-logs:.{pane}")
        return "started" in text or "ready" in text

    panes = [line.split() for line in tmux("list-panes", "-t", "disagg-logs", "-F", TITLES).splitlines()]
    assert [title for _, title in panes] == list(lab.content["machines"])
    assert all(until(partial(follows, pane), 60) for pane, _ in panes)
    script(lab, "monitor_logs.sh", "-n", "50", "--config", f"{HOME}/cluster.json", "--machine", "mac2", "-m", "dgx1")
    panes = [line.split() for line in tmux("list-panes", "-t", "disagg-logs", "-F", TITLES).splitlines()]
    assert [title for _, title in panes] == ["mac2", "dgx1"]
    assert all(until(partial(follows, pane), 60) for pane, _ in panes)
    tmux("kill-server")
