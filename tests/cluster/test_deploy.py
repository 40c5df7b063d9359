"""Whole deploys to this machine, without ssh."""

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cli.machines import how_to
from disaggregated_inference.identity import Authority, Identity
from tests.support.command import disagg
from tests.support.deploy_plans import cluster
from tests.support.deployed import machine_settings
from tests.support.identities import ask
from tests.support.waiting import until


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture
def free_port() -> int:
    return _free_port()


@pytest.fixture
def file(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of one simulated node on this machine, which is stopped at the end. uv makes its environment. The name
    of its folder has a space."""
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}")
    server = {"host": "127.0.0.1", "port": free_port, "model": "simulated:gpt-oss-120b", "engine": "simulated"}
    server |= {"role": "both", "machine": "here", "name": "node", "arguments": ["--kv-port", "0"]}
    machine = machine_settings("background", ssh="local", folder=str(tmp_path / "my disagg"))
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"decode_servers": [server], "machines": {"here": machine}}))
    yield path
    disagg("cluster", "down", "-c", str(path))


@pytest.mark.slow
def test_a_deploy_to_this_machine_with_venv(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    done = disagg("cluster", "deploy", "-c", str(file))
    assert done.returncode == 0, done.stderr
    assert "not after a reboot of the machine: run `disagg cluster up` then" in done.stdout
    folder = tmp_path / "my disagg"
    release = (folder / "current").resolve()
    assert (release / "venv" / "bin" / "python").exists()
    assert "disaggregated-inference" in (release / "venv").resolve().with_name("lock.txt").read_text().replace("_", "-")
    again = disagg("cluster", "deploy", "-c", str(file))
    assert "nothing to change" in again.stdout
    assert json.loads(disagg("cluster", "status", "-c", str(file), "--json").stdout)["models"] == {
        "simulated:gpt-oss-120b": "all up"
    }
    refused = disagg("cluster", "rollback", "-c", str(file))
    assert refused.returncode == 1
    assert f"error: here: there is no earlier release than {release.name}" in refused.stderr


@pytest.mark.slow
def test_keys_and_a_gateway_are_deployed(file: Path, tmp_path: Path) -> None:
    """All lines are TLS: of the health check, of the gateway to the node, of this client."""
    authority = Authority.create(tmp_path / "home" / "keys")
    authority.issue("here", ["127.0.0.1"])
    content = json.loads(file.read_text()) | {"identity": str(authority.issue("operator", ()))}
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        content["gateway"] = {"machine": "here", "port": sock.getsockname()[1]}
    file.write_text(json.dumps(content))
    done = disagg("cluster", "deploy", "-c", str(file), home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "my disagg" / "secrets" / "identity"
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "node.key", "node.pem", "revoked.pem"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    services = json.loads(disagg("cluster", "status", "-c", str(file), "--json").stdout)["machines"][0]["services"]
    assert [(each["health"], each["url"][:5]) for each in services] == [("healthy", "https"), ("healthy", "http:")]
    _rotated(authority, file, services[0]["url"], tmp_path / "home")
    curl = re.search(r"^curl (\S+)/v1", done.stdout, re.MULTILINE)
    assert curl
    body = json.dumps({"model": "simulated:gpt-oss-120b", "prompt": "hello", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{curl[1]}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 2


def _rotated(authority: Authority, file: Path, url: str, home: Path) -> None:
    """The next deploy copies the new certificate, and the same process serves it: its epoch is the same."""
    place, operator = ("127.0.0.1", int(url.rpartition(":")[2])), Identity(authority.folder / "operator")
    epoch = ask(f"{url}/status", operator)[1]["epoch"]
    before = ssl.get_server_certificate(place)
    new = (authority.rotate("here") / "node.pem").read_text()
    done = disagg("cluster", "deploy", "-c", str(file), home=home)
    assert done.returncode == 0, done.stderr
    assert until(lambda: ssl.get_server_certificate(place) != before, 30)
    assert ssl.get_server_certificate(place).split() == new.split()
    assert ask(f"{url}/status", operator)[1]["epoch"] == epoch


@pytest.mark.slow
def test_a_kv_port_in_use_stops_nothing_and_tokens_survive_a_rollback(file: Path, tmp_path: Path) -> None:
    """The port is found before the release that runs is touched. The gateway keeps the nodes' tokens, too."""
    content = json.loads(file.read_text()) | {"token": "first-token-of-this-test"}
    content["gateway"] = {"machine": "here", "port": _free_port()}
    file.write_text(json.dumps(content))
    assert "ok    gateway, simulated:gpt-oss-120b: 8 tokens in" in _deployed(file)
    first = (tmp_path / "my disagg" / "current").resolve()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        content["decode_servers"][0]["arguments"] = ["--kv-port", str(taken.getsockname()[1])]
        file.write_text(json.dumps(content))
        refused = disagg("cluster", "deploy", "-c", str(file))
    assert re.search(
        r"error: here: KV port \d+ of 127.0.0.1 is in use.*another `kv_addresses` for node", refused.stderr
    )
    assert _healths(file) == ["healthy", "healthy"]
    content["decode_servers"][0]["arguments"] = ["--kv-port", "0", "--queue", "9"]
    file.write_text(json.dumps(content | {"token": "second-token-of-this-test"}))
    _deployed(file)
    assert disagg("cluster", "rollback", "-c", str(file)).returncode == 0
    assert (tmp_path / "my disagg" / "current").resolve() == first
    assert _healths(file) == ["healthy", "healthy"]
    found = subprocess.run(["grep", "-rlE", "(first|second)-token", str(tmp_path / "my disagg")], capture_output=True)
    files = [Path(name) for name in found.stdout.decode().splitlines()]
    assert {path.relative_to(tmp_path / "my disagg").parts[0] for path in files} == {"secrets"}
    assert disagg("cluster", "remove", "--yes", "-c", str(file)).returncode == 0
    assert not (tmp_path / "my disagg").exists()


def _deployed(file: Path) -> str:
    done = disagg("cluster", "deploy", "-c", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _healths(file: Path) -> list[str]:
    """A gateway that has just started asks its nodes first."""
    for _ in range(20):
        told = json.loads(disagg("cluster", "status", "-c", str(file), "--json").stdout)
        found = [service["health"] for service in told["machines"][0]["services"]]
        if "degraded" not in found:
            break
    return found


@pytest.mark.slow
def test_a_port_in_use_leaves_nothing_running(file: Path, tmp_path: Path, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        done = disagg("cluster", "deploy", "-c", str(file))
    assert done.returncode == 1
    in_use = (
        rf"error: here: port {free_port} of 127.0.0.1 is in use.*: stop that program, or choose another `port` for node"
    )
    assert re.search(in_use + ".*; nothing is left running there", done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "my disagg" / "current").exists()
    status = disagg("cluster", "status", "-c", str(file))
    assert status.returncode == 1
    assert "nothing is deployed there" in status.stdout
    up = disagg("cluster", "up", "-c", str(file))
    assert "error: here: nothing is deployed there: run `disagg cluster deploy` first" in up.stderr


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(file: Path, tmp_path: Path) -> None:
    """The lock goes with the command."""
    content = json.loads(file.read_text())
    content["decode_servers"][0]["source"] = {"command": f"touch {tmp_path}/begun; sleep 600", "path": "/missing"}
    file.write_text(json.dumps(content))
    command = [sys.executable, "-m", "disaggregated_inference", "cluster", "deploy", "-c", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert until((tmp_path / "begun").exists, 200)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=200)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted: some services may be stopped" in said
    assert "`disagg cluster deploy` again finishes it" in said
    assert until(lambda: not (tmp_path / "my disagg" / "lock").is_symlink(), 60)


@pytest.mark.slow
def test_where_nothing_is_deployed(file: Path) -> None:
    """Every command says so."""
    for command, words in (
        ("logs", "error: here: nothing is deployed there: run `disagg cluster deploy` first"),
        ("restart", "error: here: nothing is deployed there: run `disagg cluster deploy` first"),
    ):
        done = disagg("cluster", command, "-c", str(file))
        assert (done.returncode, done.stderr.strip()) == (1, words)
    assert "nothing was deployed there yet" in disagg("cluster", "audit", "-c", str(file)).stdout


@pytest.mark.slow
def test_a_machine_that_cannot_be_asked_is_an_error_of_every_command(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    servers = [{"host": "127.0.0.1", "machine": "away", "model": "q"}]
    path.write_text(json.dumps({"decode_servers": servers, "machines": {"away": {"ssh": "nobody@127.0.0.1:1"}}}))
    for words in (["audit"], ["status"], ["logs"], ["up"], ["deploy"], ["remove", "--yes"]):
        done = disagg("cluster", *words, "-c", str(path))
        assert done.returncode == 1, words
        assert "away: nobody@127.0.0.1:1 cannot be reached by ssh: Connection refused" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("gateway", "ssh", "url"),
    [
        ({}, "ada@10.0.0.1", "http://127.0.0.1:8080"),
        ({"host": "0.0.0.0"}, "ada@spark.lan:2222", "http://192.168.100.1:8080"),
        ({"host": "0.0.0.0", "machine": "desk"}, "ada@[fe80::1]:22", "http://[fe80::1]:8080"),
        ({"host": "::", "machine": "desk"}, "local", "http://127.0.0.1:8080"),
    ],
)
def test_the_endpoint_is_where_users_reach_it(gateway: dict[str, Any], ssh: str, url: str) -> None:
    """Not where ssh does: that may be a name of the ssh config, or have a port of its own."""
    machines = {"spark": {"ssh": ssh}, "desk": {"ssh": ssh}}
    config = cluster(machines=machines, gateway={"machine": "spark"} | gateway)
    assert f": {url}/v1 (OpenAI)" in how_to(config)


def test_dry_run_changes_nothing(file: Path, tmp_path: Path) -> None:
    done = disagg("cluster", "deploy", "--dry-run", "-c", str(file))
    assert done.returncode == 0, done.stderr
    assert "+ wheel and lock file" in done.stdout
    assert "serve --role both" in done.stdout
    assert not (tmp_path / "my disagg").exists()


def test_without_asyncssh_the_command_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"decode_servers": [{"host": "127.0.0.1", "model": "q"}]}))
    code = (
        "import sys; sys.modules['asyncssh'] = None; sys.argv = ['disagg', 'cluster', 'status', '-c', sys.argv[1]];"
        "from disaggregated_inference.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert "pip install 'disaggregated-inference[deploy]'" in done.stdout
