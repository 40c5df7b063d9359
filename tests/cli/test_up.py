"""`disagg up`: one command, three processes, one Ctrl-C."""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cli.local_cluster import LocalServer, cluster_file, read_cluster_file, short_name
from disaggregated_inference.cli.up import UpSettings, _Plan, run
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import load_config
from disaggregated_inference.engines.simulated import line_gbps, parse_profile
from disaggregated_inference.errors import BadRequest, DisaggError
from disaggregated_inference.local_nodes import LocalNode, Process, as_ready, stopping
from tests.support.cluster import free_port
from tests.support.command import read_output
from tests.support.waiting import until

LONG_S = 120.0


class Up:
    """`disagg up` as a child process with a store of its own."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home, self.port = home, free_port()
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in end
        self.process = subprocess.Popen(
            [sys.executable, "-m", "disaggregated_inference", "up", "--port", str(self.port), *arguments],
            stdout=self._output,
            stderr=self._output,
            env=os.environ | {"DISAGG_HOME": str(home), "DISAGG_TOKEN": "must not matter"},
            start_new_session=True,
        )
        assert until(lambda: "Ctrl-C stops all" in self.said() or self.process.poll() is not None, LONG_S)
        assert self.process.poll() is None, self.said()
        self.config = json.loads((home / "up" / "cluster.json").read_text())

    def said(self) -> str:
        return read_output(self._output)

    @property
    def ports(self) -> list[int]:
        servers = self.config["prefill_servers"] + self.config["decode_servers"]
        return [self.port, *(server["port"] for server in servers)]

    def nothing_left(self) -> bool:
        return not any(map(accepts, self.ports))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()


def accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LONG_S) as response:
        return json.loads(response.read())


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path, "--simulated", "instant,instant")
    yield up
    up.end()


@pytest.fixture
def real(tmp_path: Path, tiny_folder: Any) -> Iterator[Up]:
    up = Up(tmp_path, "--model", str(tiny_folder("llama")), "--prefill-engine", "torch", "--decode-engine", "mlx")
    yield up
    up.end()


@pytest.mark.slow
def test_a_cluster_of_real_engines(real: Up, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    up, said, folder = real, real.said(), tiny_folder("llama")
    for line in (
        f"{folder} on this machine: torch prefills, mlx decodes",
        f"the gateway: http://127.0.0.1:{up.port}, ready after ",
        f"ready: http://127.0.0.1:{up.port}/v1 (OpenAI), http://127.0.0.1:{up.port} (Anthropic, Ollama)",
        f"export DISAGG_CONFIG={up.home}/up/{up.process.pid}.json",
    ):
        assert line in said
    assert "SIMULATED" not in said
    curl = shlex.split(next(line for line in said.splitlines() if line.startswith("curl")))
    answer = post(curl[1], json.loads(curl[-1]) | {"max_tokens": 5})
    assert answer["usage"]["completion_tokens"] == 5
    monkeypatch.setenv("DISAGG_HOME", str(up.home))
    assert json.loads(read_cluster_file()) == up.config
    with DisaggregatedClient(up.config) as client:
        client.health()
        assert client.status()["verdict"] == "all up"
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(LONG_S) == 0
    assert up.said().endswith("\nstopping\nstopped: the gateway, the decode node and the prefill node\n")
    assert up.nothing_left()


@pytest.mark.slow
def test_a_process_that_ends_ends_the_others(simulated: Up) -> None:
    assert "SIMULATED, no inference: instant prefills and instant decodes simulated:qwen3-30b-a3b" in simulated.said()
    assert "SIMULATED: the answers are numbers in brackets" in simulated.said()
    assert [server["name"] for server in simulated.config["decode_servers"]] == ["decode-instant"]
    post(f"http://127.0.0.1:{simulated.config['decode_servers'][0]['port']}/drain", {})
    assert simulated.process.wait(LONG_S) == 1
    assert "error: the decode node has ended (exit code 0)" in simulated.said()
    assert simulated.nothing_left()


@pytest.mark.slow
def test_the_processes_end_when_up_is_killed(simulated: Up) -> None:
    assert all(map(accepts, simulated.ports))
    simulated.process.kill()
    assert until(simulated.nothing_left, LONG_S)


@pytest.mark.slow
def test_sigterm_ends_all(simulated: Up) -> None:
    simulated.process.send_signal(signal.SIGTERM)
    assert simulated.process.wait(LONG_S) == 0
    assert simulated.nothing_left()


@pytest.mark.slow
def test_a_node_that_does_not_start_says_why() -> None:
    node = LocalNode("decode", "simulated", "--model", "simulated:tiny", "--profile", "abacus")
    reason = r"the decode node did not start:[\s\S]*error: unknown profile 'abacus': choose dgx-spark"
    with stopping([node]), pytest.raises(DisaggError, match=reason):
        list(as_ready([node]))


def is_alive(process: Process) -> bool:
    try:
        process.require_alive()
    except DisaggError:
        return False
    return True


def test_a_killed_process_is_named_with_its_last_lines() -> None:
    script = "import sys, os; print('too warm', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    process = Process("the oven", [sys.executable, "-c", script])
    with stopping([process]):
        assert until(lambda: not is_alive(process), LONG_S)
        with pytest.raises(DisaggError, match=r"^the oven has ended \(killed by SIGKILL\); its last lines:\ntoo warm$"):
            process.require_alive()


def test_the_gateways_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(BadRequest, match=rf"cannot listen on 127.0.0.1:{port}: the port is in use; .* --port$"):
            run(UpSettings(port=port))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (UpSettings(simulated="m3-ultra"), "give two machines, such as dgx-spark,m3-ultra"),
        (UpSettings(simulated="m3-ultra,abacus"), "unknown profile 'abacus': choose dgx-spark"),
        (UpSettings(simulated="h200,h200", model="simulated:gpt-oss-120b"), "no figures for gpt-oss-120b on h200"),
        (UpSettings(simulated="h200,h200", decode_engine="mlx"), "leave out --prefill-engine and --decode-engine"),
        (UpSettings(simulated="h200,h200", model="smollm2"), "cannot serve smollm2:135m: leave out --model"),
        (UpSettings(model="simulated:tiny"), "simulated:tiny has no weights: add --simulated dgx-spark,m3-ultra"),
        (UpSettings(prefill_engine="sglang"), "--prefill-engine sglang: choose torch, mlx, llamacpp, vllm"),
        (UpSettings(model="no-such-model"), "no model 'no-such-model'"),
    ],
)
def test_settings_that_cannot_work(settings: UpSettings, says: str, smollm2: Any) -> None:
    with pytest.raises(DisaggError, match=says):
        _Plan.make(settings)


def test_the_cluster_file_of_a_machine_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    config = load_config(json.loads(read_cluster_file()))
    assert [(server.name, server.port, server.model) for server in config.servers] == [
        ("prefill", 8000, "smollm2:135m"),
        ("decode", 8001, "smollm2:135m"),
    ]
    server = LocalServer("decode", 9001, "/models/tiny/", "mlx")
    with cluster_file(LocalServer("prefill", 9000, "/models/tiny/", "torch"), server) as path:
        assert load_config(path).resolve_model("tiny") == "/models/tiny/"
        assert read_cluster_file() == path.read_text()
        text = path.read_text()
    assert short_name("qwen3-coder:30b") == "qwen3-coder:30b"
    assert read_cluster_file() == text, "of the last one"
    assert not path.exists()


def test_simulated_machines_have_published_watts_and_a_line_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    spark, ultra = (parse_profile(name, "qwen3-30b-a3b") for name in ("dgx-spark", "m3-ultra"))
    made = [
        LocalServer(name, port, "tiny", "simulated", power_w=machine.power_w, idle_power_w=machine.idle_power_w)
        for name, port, machine in (("p", 9000, spark), ("d", 9001, ultra))
    ]
    with cluster_file(made[0], made[1], line_gbps(spark, ultra)) as path:
        config = load_config(path)
    assert [(server.power_w, server.idle_power_w) for server in config.servers] == [(140, None), (295, 10)]
    assert [(link.prefill, link.decode, link.gbps) for link in config.links] == [("p", "d", 10)], "the slower port"
    custom = parse_profile("custom:prefill=2000,decode=50", "tiny")
    assert (custom.power_w, line_gbps(custom, ultra)) == (None, None), "nothing is published of it"


def test_a_second_cluster_leaves_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway reads the file again on SIGHUP."""
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    first, other = (LocalServer("prefill", port, "tiny", "torch") for port in (9000, 9100))
    with cluster_file(first, first) as path:
        (tmp_path / "up" / "cluster.json").write_text("of another process, which has ended")
        assert json.loads(path.read_text())["prefill_servers"][0]["port"] == 9000
        assert json.loads(read_cluster_file())["prefill_servers"][0]["port"] == 9000
    with cluster_file(other, other):
        assert json.loads(read_cluster_file())["prefill_servers"][0]["port"] == 9100


def test_options_that_cannot_be() -> None:
    for settings, reason in (
        (
            UpSettings(prefill_engine="ollama"),
            "--prefill-engine ollama: choose torch, mlx, llamacpp, vllm; ",
        ),
        (UpSettings(decode_engine="simulated"), "--decode-engine simulated: choose mlx, torch, llamacpp"),
        (UpSettings(simulated="dgx-spark"), "give two machines, such as dgx-spark,m3-ultra"),
    ):
        with pytest.raises(BadRequest, match=reason):
            _Plan.make(settings)
    plan = _Plan.make(UpSettings(simulated="dgx-spark, custom:prefill=100,decode=50"))
    assert plan.profiles == {"prefill": "dgx-spark", "decode": "custom:prefill=100,decode=50"}
    assert "published" not in plan.title
