"""`disagg doctor` on this machine: real readings, real processes."""

import ast
import http.server
import json
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.doctor import CHECKS, ExpectedMachine, examine_machine, reference
from disaggregated_inference.doctor.machine import MACHINE_CHECKS
from disaggregated_inference.doctor.path_probe import closed_port
from disaggregated_inference.doctor.plan import ExpectedServer
from disaggregated_inference.doctor.ports import check_ports
from tests.support.command import disagg

SOURCES = Path(__file__).parents[2] / "src/disaggregated_inference/doctor"
PAGE = Path(__file__).parents[2] / "docs/TROUBLESHOOTING.md"
SIMULATED: dict[str, Any] = {"model": "simulated:qwen3-30b-a3b", "engine": "simulated", "host": "127.0.0.1"}


def _cluster(port: int, role: str = "decode") -> dict[str, object]:
    return {f"{role}_servers": [SIMULATED | {"name": "here", "port": port}]}


def test_the_page_is_made_of_the_catalogue() -> None:
    assert PAGE.read_text() == reference(), "run: disagg doctor --list > docs/TROUBLESHOOTING.md"


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_of_the_catalogue_is_made(name: str) -> None:
    """And a check that is not in it fails an assertion when it is made."""
    code = "".join(path.read_text() for path in SOURCES.glob("*.py") if path.name != "checks.py")
    assert f'"{name}"' in code


def test_a_reading_that_fails_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without programs to ask, most readings fail; none may end the doctor."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("disaggregated_inference.doctor.commands._PATH", "/nowhere")
    servers = (ExpectedServer(name="n", role="decode", port=8001, **SIMULATED),)
    report = examine_machine(ExpectedMachine(servers=servers))
    reasons = {finding.check: finding.what for finding in report.findings if finding.severity == "unknown"}
    assert reasons["leftovers"] == "ps is not installed"
    assert {finding.check for finding in report.findings} >= {"python-version", "disk", "secrets", "port"}
    assert report.exit_code == 0


def test_every_machine_check_has_a_name() -> None:
    assert {name for name, _ in MACHINE_CHECKS} <= set(CHECKS)


def test_a_port_that_another_program_uses() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as taken:
        threading.Thread(target=taken.serve_forever, daemon=True).start()
        server = ExpectedServer(name="here", role="decode", port=taken.server_port, **SIMULATED)
        (finding,) = check_ports(ExpectedMachine(servers=(server,)))
        taken.shutdown()
    assert (finding.severity, finding.check) == ("error", "port")
    assert f"here: port {server.port} is used by " in finding.what
    (finding,) = check_ports(ExpectedMachine(servers=(server,)))
    assert finding.what == f"here: port {server.port} is free, and no node runs there"


@pytest.mark.slow
def test_the_command_with_a_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(_cluster(8001) | {"tokem": "x"}))
    done = disagg("doctor", "--json", "--config", str(file), home=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"]
    assert told["exit_code"] in (3, 4)  # this machine may have faults of its own
    faults = [finding["what"] for finding in told["findings"] if finding["check"] == "cluster-file"]
    assert faults == [f'{file}: tokem: unknown key, ignored; did you mean "token"?']
    text = disagg("doctor", "--config", str(file), home=tmp_path).stdout
    assert "why:  A mistyped key is ignored, and a default is used in its place." in text
    assert "mend: disagg config check" in text
    assert re.fullmatch(r"\d+ of \d+ findings are ok; .*\d+ warnings?.*", text.splitlines()[-1])


@pytest.mark.slow
def test_the_command_sees_a_running_node(tmp_path: Path) -> None:
    from tests.support.node_process import Node

    node = Node("decode", "--engine", "simulated", "--model", SIMULATED["model"], forked=False)
    try:
        file = tmp_path / "cluster.json"
        assert node.ready
        file.write_text(json.dumps(_cluster(node.ready["port"])))
        told = json.loads(disagg("doctor", "--json", "--config", str(file), home=tmp_path).stdout)
    finally:
        node.stop()
    ports = [finding["what"] for finding in told["findings"] if finding["check"] == "port"]
    assert ports == [f"here: its node has port {node.ready['port']}"]
    assert any(finding["check"] == "leftovers" and "is a node" in finding["what"] for finding in told["findings"])


def test_mistakes_of_the_command(tmp_path: Path) -> None:
    done = disagg("doctor", "--machine", "dgx1", home=tmp_path)
    assert (done.returncode, done.stderr) == (1, "error: --machine names machines of a cluster: add --cluster\n")
    done = disagg("doctor", "--config", str(tmp_path / "gone.toml"), home=tmp_path)
    assert "gone.toml: cannot be read: No such file or directory" in done.stderr
    done = disagg("doctor", "--cluster", "--seconds", "60", home=tmp_path)
    assert done.returncode == 2


def test_the_path_probe_is_for_old_pythons_too() -> None:
    """macOS has 3.9. No annotation is evaluated, and there is no newer syntax."""
    text = (SOURCES / "path_probe.py").read_text()
    assert "from __future__ import annotations" in text
    ast.parse(text, feature_version=(3, 8))


def test_the_path_probe_runs_alone() -> None:
    """Without our package, as on a machine that has nothing yet; a wrong secret gets nothing."""
    probe = SOURCES / "path_probe.py"
    command = [sys.executable, "-I", "-c", probe.read_text()]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "serve", "127.0.0.1", "0"], stdin=pipe, stdout=pipe, text=True) as server:
        assert server.stdout
        told = json.loads(server.stdout.readline())
        arguments = ["fetch", "127.0.0.1", str(told["port"]), "20000000", "5"]

        def fetch(secret: str) -> dict[str, object]:
            done = subprocess.run(
                [*command, *arguments], input=secret + "\n", capture_output=True, text=True, check=True
            )
            answer: dict[str, object] = json.loads(done.stdout)
            return answer

        with socket.create_server(("127.0.0.1", 0)) as node, socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))  # nothing listens there
            ports = [str(each.getsockname()[1]) for each in (node, bound)]
            closed = [closed_port("127.0.0.1", told["port"], [port]) for port in ports]
        measured, refused = fetch(told["secret"]), fetch("0" * 32)
        server.communicate()  # its standard input ends, and it stops
    assert 20_000_000 <= int(str(measured["bytes"])) < 40_000_000
    assert measured["interface"] == told["interface"]
    assert "ended" in str(refused["error"]) or "reset" in str(refused["error"])
    assert server.returncode == 0
    assert closed == ["", f"port {ports[1]}: Connection refused"]
