"""`disagg cluster` on four machines with real systemd and sshd: deploy, faults, recovery. One lab for all tests, which
build on each other in their order; each leaves a healthy cluster."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployed import GPT_OSS, HF_TOKEN, MACHINES, NODES, QWEN, TOKEN, Lab, two_of_each
from tests.support.machines import four_machines, why_not
from tests.support.recorders import put_hub_wheel, put_ollama
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

UP = {QWEN: "all up", GPT_OSS: "all up"}
SCRIPT_CODES = {"all up": 0, "prefill down: decode-only": 1, "decode down: cannot serve": 2}  # of check_status.py
NODE = "^[^ ]*python -m disaggregated_inference serve"  # not its supervisor


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with four_machines(fast="1gbit", slow="4gbit") as machines:
        lab = Lab(machines)
        lab.first_deploy = lab.cluster("deploy")
        yield lab


def becomes(condition: Callable[[], bool]) -> bool:
    return until(condition, 90)


def test_deploy_brings_both_models_up(lab: Lab) -> None:
    output = lab.first_deploy.stdout
    assert output.count("healthy") >= 4
    assert "ok    DGX Spark 1 -> Mac Studio 2" in output  # each pair has proven itself
    assert "ok    DGX Spark 2 -> Mac Studio 1" in output
    assert all(f"ok    gateway, {model}: 8 tokens in " in output for model in (QWEN, GPT_OSS))
    assert "endpoint (on mac1): http://127.0.0.1:8080/v1" in output
    status = lab.status()
    assert status["models"] == UP
    assert {machine["name"]: machine["kind"] for machine in status["machines"]} == MACHINES
    curl = re.search(r"^curl (.*)$", output, re.MULTILINE)
    assert curl
    answered = lab.machines["mac1"].enter("sh", "-c", f"curl -s {curl[1]}")
    assert json.loads(answered.stdout)["choices"][0]["message"]["content"]


def test_cluster_test_is_green_with_figures(lab: Lab) -> None:
    found = json.loads(lab.cluster("test", "--json").stdout)
    figures = {check["name"]: check["figure"] for check in found["checks"]}
    assert found["passed"]
    assert figures["health"] == "4 nodes, all up"
    assert "transfer exposed" in figures[f"DGX Spark 1 -> Mac Studio 2, {QWEN}"]
    assert re.search(r"2 models in .* speedup \d", figures["all models at once"])
    assert "Using fallback mode - slower performance" in figures[f"fallback of {GPT_OSS}"]
    through = re.fullmatch(r"8 tokens in [\d.]+ s, request (\w+)", figures[f"gateway, {GPT_OSS}"])
    assert through
    assert "dgx2" in lab.cluster("logs", "--request", through[1]).stdout  # it went to the nodes


def test_a_second_deploy_changes_nothing(lab: Lab) -> None:
    before = {name: lab.machines[name].processes(NODE) for name in NODES}
    files = {name: _files(lab, name) for name in NODES}
    output = lab.cluster("deploy").stdout
    assert output.count("nothing to change") == 4
    assert {name: lab.machines[name].processes(NODE) for name in NODES} == before
    assert {name: _files(lab, name) for name in NODES} == files
    dry = lab.cluster("deploy", "--dry-run").stdout
    assert "\n+ " not in dry
    assert TOKEN not in dry


def _files(lab: Lab, name: str) -> str:
    """Names and times of all files of a release."""
    script = "find /root/.disagg /etc/systemd/system -path '*/logs' -prune -o -path '*/__pycache__*' -prune -o -type f"
    return lab.machines[name].enter("sh", "-c", f"{script} -printf '%p %T@\\n' | grep -v /run/ | sort").stdout


def test_the_token_is_nowhere_to_be_read(lab: Lab) -> None:
    """In no process list, no log, no file that others may read; and it is where it must be."""
    lab.ask(QWEN)
    for name, machine in lab.machines.all.items():
        secrets = machine.path("/root/.disagg/secrets")
        files = [path for path in secrets.rglob("*") if path.is_file()]
        assert any(TOKEN in path.read_text() for path in files), name
        assert all(path.stat().st_mode & 0o077 == 0 for path in [secrets, *files])
        commands = b"".join(path.read_bytes() for path in machine.path("/proc").glob("[0-9]*/cmdline") if path.exists())
        assert b"disaggregated_inference" in commands
        assert TOKEN.encode() not in commands
        assert TOKEN not in machine.enter("sh", "-c", "journalctl --no-pager -o cat").stdout
        readable = "find /root /etc/systemd /tmp /var/log /run -xdev -name site-packages -prune -o -type f -size -4M"
        found = machine.enter("sh", "-c", f"{readable} -exec grep -l {TOKEN} {{}} + || true").stdout.split()
        assert all(path.startswith("/root/.disagg/secrets/") for path in found), found
        assert all(machine.path(path).stat().st_mode & 0o077 == 0 for path in found)
    logs = lab.cluster("logs", "-n", "500").stdout
    assert "prefill started" in logs
    assert TOKEN not in logs + lab.first_deploy.stdout + lab.first_deploy.stderr


def test_logs_are_merged_by_time_and_found_by_request(lab: Lab) -> None:
    request = lab.ask(QWEN)["request_id"]
    lab.ask(QWEN)  # newer lines
    found = lab.cluster("logs", "--request", request, "--json", "-n", "1").stdout
    lines = [json.loads(line) for line in found.splitlines()]
    assert {line["machine"] for line in lines} >= {"dgx1", "mac2"}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_killed_nodes_come_back(lab: Lab) -> None:
    """By systemd, by the user's systemd, and by our own supervisor."""
    for name in ("dgx1", "mac2", "dgx2"):
        before = lab.machines[name].processes(NODE)
        assert lab.machines.kill_processes(name, NODE) > 0
        assert becomes(partial(_are_gone, lab, name, before))
    assert becomes(lambda: lab.status()["models"] == UP)
    assert lab.services()["DGX Spark 1"]["restarts"] >= 1
    assert lab.services()["DGX Spark 2"]["restarts"] >= 1
    assert lab.ask(QWEN)["method"] == "disaggregated_simulated"


def _are_gone(lab: Lab, name: str, before: list[int]) -> bool:
    return not set(lab.machines[name].processes(NODE)) & set(before)


def test_a_cut_link_is_left_for_the_second_path(lab: Lab) -> None:
    dgx1 = lab.machines["dgx1"]
    lab.ask(QWEN)
    assert lab.services()["Mac Studio 2"]["kv_path"] == f"{dgx1.slow_address}:8100"
    lab.machines.cut("dgx1", "slow")
    answer = lab.ask(QWEN)
    assert answer["method"] == "disaggregated_simulated"
    decode = lab.services()["Mac Studio 2"]
    assert decode["kv_path"] == f"{dgx1.address}:8100"
    shown = lab.cluster("status", check=False).stdout
    assert re.search(
        rf"Mac Studio 2 .*{re.escape(dgx1.address)}:8100.*{re.escape(dgx1.slow_address)}:8100 failed", shown
    )
    lab.machines.heal("dgx1", "slow")
    assert becomes(lambda: bool(lab.ask(QWEN)) and lab.services()["Mac Studio 2"]["kv_path"].startswith("10.77"))


def test_a_link_that_crawls_is_slow_and_serves(lab: Lab) -> None:
    for link in ("slow", "fast"):
        lab.machines.shape("mac2", "10mbit", link)
    answer = lab.ask(QWEN, words=200)  # 20 MB of KV
    for link in ("slow", "fast"):
        lab.machines.shape("mac2", lab.machines.rates[link], link)
    assert answer["completion_tokens"] == 4
    assert answer["method"] == "fallback" or answer["exposed_transfer_time"] > 1
    if answer["method"] != "fallback":
        assert "exposed" in lab.cluster("logs", "-m", "mac2").stdout


def test_verdicts(lab: Lab) -> None:
    """Those of the documentation; the fourth, with nothing up, is in the last test."""
    lab.cluster("down", "-m", "dgx1")
    assert _verdicts(lab) == {QWEN: "prefill down: decode-only", GPT_OSS: "all up"}
    assert lab.ask(QWEN)["warning"] == "Using fallback mode - slower performance"
    lab.cluster("up", "--role", "prefill")
    lab.cluster("down", "-m", "mac2")
    assert _verdicts(lab) == {QWEN: "decode down: cannot serve", GPT_OSS: "all up"}
    assert "Decode server unavailable - request failed" in lab.disagg("generate", "x", "-m", QWEN, check=False).stderr
    lab.cluster("up", "-m", "mac2")
    assert lab.status()["models"] == UP


def _verdicts(lab: Lab) -> dict[str, Any]:
    """As `cluster status` has them; and `scripts/check_status.py`, which asks by HTTP, says the same."""
    models: dict[str, Any] = lab.status()["models"]
    checked = lab.script("check_status.py")
    assert checked.returncode == SCRIPT_CODES[models[QWEN]], checked.stdout
    same = len(set(models.values())) == 1
    expected = models[QWEN] if same else "; ".join(f"{name}: {verdict}" for name, verdict in models.items())
    assert f"verdict: {expected}\n" in checked.stdout
    return models


def test_a_machine_comes_back_after_a_power_cut(lab: Lab) -> None:
    lab.machines.power_off("dgx1")
    status = lab.status()
    assert status["models"][QWEN] == "prefill down: decode-only"
    (error,) = [machine["error"] for machine in status["machines"] if machine["name"] == "dgx1"]
    assert re.fullmatch(r"dgx1: dgx1 cannot be reached by ssh: .*`ssh dgx1` works", error)
    with lab.follow_logs() as followed:
        assert followed.says(r"dgx1: dgx1 cannot be reached by ssh: .*; trying again every 5 s")
        assert followed.says("mac2  mac-studio-2 ")
        lab.machines.power_on("dgx1")
        assert followed.says("dgx1: is back")
    assert becomes(lambda: lab.status()["models"] == UP)


def test_a_release_that_does_not_start_is_taken_back(lab: Lab) -> None:
    good, processes = lab.content, lab.machines["dgx1"].path("/root/.disagg/current").readlink()
    bad = json.loads(json.dumps(good))
    bad["prefill_servers"][0]["arguments"] += ["--kv-memory", "nonsense"]
    lab.write(bad)
    failed = lab.cluster("deploy", "-m", "dgx1", check=False)
    lab.write(good)
    assert failed.returncode == 1
    why = "--kv-memory: 'nonsense' is not"
    assert re.search(
        rf"error: dgx1: disagg-dgx-spark-1 does not start: error: {why}.*; release \S+ runs again", failed.stderr
    )
    assert lab.machines["dgx1"].path("/root/.disagg/current").readlink() == processes
    assert lab.status()["models"] == UP


def test_rollback_returns_to_the_release_before_and_keeps_tokens(lab: Lab) -> None:
    """A token that leaked does not come back. A node that has another one than the gateway is seen."""
    good, first = lab.content, _release(lab, "dgx1")
    changed = json.loads(json.dumps(good))
    changed["prefill_servers"][0]["arguments"] += ["--queue", "17"]
    lab.write(changed)
    lab.cluster("deploy", "-m", "dgx1", token="another-token-of-this-lab")
    second = _release(lab, "dgx1")
    assert second != first
    assert "--queue" in _unit(lab, "dgx1")
    lab.cluster("rollback", "-m", "dgx1")
    assert becomes(lambda: lab.services()["gateway"]["health"] == "degraded")
    assert "prefill down: decode-only (DGX Spark 1: wrong bearer token" in lab.services()["gateway"]["why"]
    lab.write(good)
    assert _release(lab, "dgx1") == first
    assert "--queue" not in _unit(lab, "dgx1")
    audit = json.loads(lab.cluster("audit", "--json").stdout)
    assert [entry["command"] for entry in audit][-2:] == ["deploy", "rollback"]
    assert audit[-1]["releases"] == {"dgx1": first}
    assert audit[0]["releases"].keys() == NODES.keys()
    assert "changed: secrets, services" in lab.cluster("deploy", "-m", "dgx1").stdout
    assert becomes(lambda: lab.services()["gateway"]["health"] == "healthy")


def _release(lab: Lab, name: str) -> str:
    return Path(lab.machines[name].path("/root/.disagg/current").readlink()).name


def _unit(lab: Lab, name: str) -> str:
    return lab.machines[name].path("/etc/systemd/system/disagg-dgx-spark-1.service").read_text()


def test_a_half_finished_install_is_repaired(lab: Lab) -> None:
    """As a deploy leaves it whose connection broke: an environment without its end, no link to the release."""
    machine = lab.machines["dgx2"]
    lab.cluster("down", "-m", "dgx2")
    machine.enter(
        "sh", "-c", "cd /root/.disagg/environments/*/ && rm complete && rm -r venv/lib && rm -r ../../current"
    )
    assert lab.status()["models"][GPT_OSS] == "prefill down: decode-only"
    assert "environment" in lab.cluster("deploy", "-m", "dgx2").stdout
    assert lab.status()["models"] == UP


def test_old_and_missing_units_are_installed_again(lab: Lab) -> None:
    """As a deploy leaves them that was killed between the link to its release and the units."""
    machine = lab.machines["dgx1"]
    unit = "/etc/systemd/system/disagg-dgx-spark-1.service"
    old = f'sed -i \'s/"--drain" "60"/"--drain" "59"/\' {unit} && systemctl daemon-reload'
    machine.enter("sh", "-c", f"{old} && systemctl restart disagg-dgx-spark-1")
    assert machine.processes("serve .*--drain 59")
    assert "changed: services" in lab.cluster("deploy", "-m", "dgx1").stdout
    assert not machine.processes("serve .*--drain 59")
    assert '--drain" "60' in machine.path(unit).read_text()
    lab.cluster("down", "-m", "dgx1")
    machine.enter("sh", "-c", "rm /etc/systemd/system/disagg-*.service && systemctl daemon-reload")
    lab.cluster("deploy", "-m", "dgx1")
    assert lab.status()["models"] == UP


def test_one_machine_with_a_wrong_host_key_does_not_stop_the_others(lab: Lab) -> None:
    """The others are deployed and proven, and the endpoint is told."""
    known = lab.machines.home / ".ssh/known_hosts"
    right = known.read_text()
    lines = dict(line.split(" ", 1) for line in right.splitlines())
    dgx1, other = (next(hosts for hosts in lines if hosts.startswith(name)) for name in ("dgx1", "mac1"))
    known.write_text("".join(f"{hosts} {key}\n" for hosts, key in (lines | {dgx1: lines[other]}).items()))
    done = lab.cluster("deploy", check=False)
    known.write_text(right)
    assert done.returncode == 1
    assert re.search(r"error: dgx1: the host key of \S+ is not the one in your known_hosts", done.stderr)
    assert done.stderr.count("error:") == 1
    assert done.stdout.count("nothing to change") == 3
    assert "ok    DGX Spark 2 -> Mac Studio 1" in done.stdout
    assert "not proven, because their machines failed: DGX Spark 1\n" in done.stdout
    assert f"ok    gateway, {QWEN}" in done.stdout
    assert "endpoint (on mac1): http://127.0.0.1:8080/v1" in done.stdout


def test_faults_of_a_machine_are_one_line_each(lab: Lab) -> None:
    good, dgx1 = lab.content, lab.machines["dgx1"]
    dgx1.enter("sh", "-c", "mkdir -p /root/small && mount -t tmpfs -o size=20m small /root/small")
    faults = {
        r"dgx1: 0.0 GB are free in /root/small, and the packages need about 0.3 GB": {"folder": "/root/small"},
        r"dgx1: /opt/no-python is no Python 3.11 or newer: correct `python`": {"python": "/opt/no-python"},
    }
    for message, change in faults.items():
        content = json.loads(json.dumps(good))
        content["machines"]["dgx1"] |= change
        lab.write(content)
        done = lab.cluster("deploy", "-m", "dgx1", check=False)
        assert done.returncode == 1
        assert re.search(message, done.stderr), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    lab.write(good)
    assert lab.status()["models"] == UP


def test_models_come_by_every_way(lab: Lab) -> None:
    """On mac2: from the hub with a token, from Ollama, by rsync from dgx1, and by a command. Nothing runs with them."""
    good, mac2, dgx1 = lab.content, lab.machines["mac2"], lab.machines["dgx1"]
    put_ollama(mac2.path("/root"))
    put_hub_wheel(mac2.path("/root/wheels"))
    sources: dict[str, dict[str, str]] = {
        "hf": {"hf": "Org/Model"},
        "ollama": {"ollama": "small:1b"},
        "command": {"command": "mkdir -p /root/by && echo $HF_TOKEN > /root/by/a", "path": "~/by"},
    }
    if shutil.which("rsync"):
        sources["rsync"] = {"rsync": "dgx1:/root/model dir", "path": "/root/copied"}
        dgx1.enter("sh", "-c", "mkdir -p '/root/model dir' && echo weights > '/root/model dir/a.safetensors'")
        lab.machines.trust("mac2", "dgx1")
    content = json.loads(json.dumps(good))
    content["decode_servers"] += [
        {"name": way, "host": mac2.address, "machine": "mac2", "port": 9000 + at, "model": way, "engine": "simulated"}
        | {"source": source}
        for at, (way, source) in enumerate(sources.items())
    ]
    content["machines"]["dgx1"]["ssh"] = f"root@{dgx1.address}"
    pip_args = ["--no-deps", "--no-index", "--find-links", "/root/wheels"]
    content["machines"]["mac2"] |= {"secrets": {"HF_TOKEN": "${LAB_HF_TOKEN}"}, "pip_args": pip_args}
    lab.write(content)
    done = lab.cluster("deploy", "--no-start", "-m", "mac2")
    again = lab.cluster("deploy", "--no-start", "-m", "mac2", "--dry-run").stdout
    lab.write(good)
    calls = mac2.path("/root/calls").read_text().splitlines()
    assert f"hf download Org/Model token={HF_TOKEN}" in calls
    assert [call for call in calls if call.startswith("ollama")][:2] == [
        "ollama show small:1b token=none",
        "ollama pull small:1b token=none",
    ]
    assert mac2.path("/root/by/a").read_text() == f"{HF_TOKEN}\n"
    assert HF_TOKEN not in done.stdout + done.stderr + again
    assert mac2.path("/root/.disagg/secrets/environment").stat().st_mode & 0o777 == 0o600
    if "rsync" in sources:
        assert mac2.path("/root/copied/a.safetensors").read_text() == "weights\n"
        assert "= model /root/copied" in again
    assert "= model small:1b" in again
    assert "= model /root/by" in again


def test_init_looks_at_machines_over_ssh(lab: Lab) -> None:
    """Addresses are those where ssh reached them, not the names of the ssh config."""
    options = ["--model", "smollm2:135m", "-o", str(Path("~/new.toml").expanduser()), "--trusted-link", "lab"]
    output = lab.cluster("init", "--hosts", "dgx1,mac1", *options).stdout
    assert "prefill of smollm2:135m with torch" in output
    assert "services by systemd" in output
    written = (lab.machines.home / "new.toml").read_text()
    for name in ("dgx1", "mac1"):
        assert f'ssh = "{name}"' in written
        assert f'host = "{lab.machines[name].address}"' in written


def test_down_leaves_nothing_running(lab: Lab) -> None:
    lab.cluster("down")
    assert set(lab.status()["models"].values()) == {"nothing is up"}
    assert lab.script("check_status.py").returncode == 3
    assert all(not lab.machines[name].processes("disaggregated_inference") for name in NODES)


def test_two_nodes_of_each_role_serve_through_a_deploy(lab: Lab) -> None:
    """Requests through the gateway all the time, and none fails. The gateway itself did not change and goes on."""
    twins = two_of_each(lab.content)
    lab.write(twins)
    lab.cluster("deploy")
    gateway = lab.machines["mac1"].processes("disaggregated_inference gateway")
    before = {name: lab.machines[name].processes(NODE) for name in NODES}
    with lab.steady_requests(f"http://{lab.machines['mac1'].address}:8080", "qwen") as requests:
        for server in (*twins["prefill_servers"], *twins["decode_servers"]):
            server["arguments"] += ["--queue", "17"]
        lab.write(twins)
        lab.cluster("deploy")
    assert requests.failed == []
    assert requests.whole > 10
    assert all(not set(lab.machines[name].processes(NODE)) & set(before[name]) for name in NODES)
    assert lab.machines["mac1"].processes("disaggregated_inference gateway") == gateway


def test_remove_leaves_nothing(lab: Lab) -> None:
    asked = lab.cluster("remove", check=False)
    assert "error: nothing was removed: there is no terminal for the question; give --yes" in asked.stderr
    lab.cluster("remove", "--yes")
    for name in NODES:
        machine = lab.machines[name]
        assert not machine.processes("disaggregated_inference")
        assert not machine.path("/root/.disagg").exists()
        left = "find /etc/systemd /root/.config /var/lib/systemd -name '*disagg*' 2>/dev/null || true"
        assert machine.enter("sh", "-c", left).stdout == ""
