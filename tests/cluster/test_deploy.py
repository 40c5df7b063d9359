"""Deploys to this machine, without ssh: plans, steps, locks, the environment, and every error that stops one."""

import asyncio
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
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import pytest

from disaggregated_inference.api import PathStatus
from disaggregated_inference.cli.machines import _how_to
from disaggregated_inference.cluster import load_config
from disaggregated_inference.cluster.deploy import (
    AuditEntry,
    MachinePlan,
    MachineSession,
    ServiceChoice,
    merge_audits,
    on_machines,
    operate,
    pack_wheel,
    path_in_use,
    pin_dependencies,
    plan_machines,
    read_wheel,
    removal_scripts,
)
from disaggregated_inference.cluster.deploy.install import Package, plan_installation
from disaggregated_inference.cluster.deploy.lock import machine_lock
from disaggregated_inference.cluster.deploy.log_lines import LogLine, parse_line
from disaggregated_inference.cluster.deploy.log_stream import in_order, merged
from disaggregated_inference.cluster.deploy.memory_fit import FitStep
from disaggregated_inference.cluster.deploy.plan import extras_of, services_of
from disaggregated_inference.cluster.deploy.rollout import rolling_waves
from disaggregated_inference.cluster.deploy.steps import CommandStep, FilesStep, RemoteFile
from disaggregated_inference.cluster.deploy.target import MachineTarget
from disaggregated_inference.cluster.deploy.wheel import Wheel
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.services import Place, manager_of
from disaggregated_inference.cluster.shell import LocalShell
from disaggregated_inference.errors import CommandFailed, ConfigError, DeployRefused
from disaggregated_inference.identity import Authority, Identity
from disaggregated_inference.timeouts import DeployTimeouts
from tests.support.command import disagg
from tests.support.deployed import machine_settings
from tests.support.identities import ask
from tests.support.waiting import until

PLACE = Place("/home/ada", "/home/ada/.disagg", "ada", 1000)
SPARK = {"host": "192.168.100.1", "model": "qwen3-coder:30b", "name": "Spark 1", "machine": "spark"}
Result = TypeVar("Result")


def cluster(server: dict[str, Any] | None = None, machine: dict[str, Any] | None = None, **more: Any) -> Any:
    content = {"decode_servers": [SPARK | (server or {})], "machines": {"spark": machine or {}}}
    return load_config(content | more, environ={})


def only_plan(config: Any) -> MachinePlan:
    (plan,) = plan_machines(config)
    return plan


# Plans


def test_without_machines_every_host_is_one() -> None:
    config = load_config(Path(__file__).parents[2] / "src/disaggregated_inference/cluster/samples/cluster.json")
    plans = plan_machines(config)
    assert {plan.target for plan in plans} == {f"169.254.150.{number}" for number in (101, 102, 103, 104)}
    assert {extras_of(plan) for plan in plans} == {("torch",), ("mlx",)}


def test_a_machine_is_found_by_its_address() -> None:
    config = load_config(
        {"decode_servers": [{"host": "10.0.0.1", "model": "q"}], "machines": {"mac": {"ssh": "ada@10.0.0.1:22"}}}, {}
    )
    assert only_plan(config).name == "mac"


def test_a_server_on_no_machine() -> None:
    config = load_config({"decode_servers": [{"host": "10.0.0.1", "model": "q"}], "machines": {"mac": {}}}, {})
    with pytest.raises(ConfigError, match=r"10.0.0.1:8001: no machine has the address 10.0.0.1: write its `machine`"):
        plan_machines(config)


def test_machines_are_chosen_by_name() -> None:
    with pytest.raises(ConfigError, match=r'no machine has the name "sparc"; did you mean "spark"\?'):
        plan_machines(cluster(), ["sparc"])
    config = cluster(machines={"spark": {}, "idle": {}})
    with pytest.raises(ConfigError, match='nothing runs on idle: write `machine = "idle"` at a server'):
        plan_machines(config, ["idle"])


def test_the_command_of_a_node() -> None:
    config = cluster(
        {"role": "both", "engine": "torch", "kv_addresses": ["10.0.0.1:9000"], "arguments": ["--kv-memory", "8G"]},
        {"environment": {"A": "1"}},
        token="secret",
        trusted_link="one cable",
    )
    (service,) = services_of(only_plan(config), config, PLACE)
    assert service.name == "disagg-spark-1"
    assert " ".join(service.arguments) == (
        "serve --role both --model qwen3-coder:30b --host 192.168.100.1 --port 8001 --engine torch"
        " --kv-address 10.0.0.1:9000 --trusted-link one cable --drain 60 --log-level info --kv-memory 8G"
    )
    token_file = "/home/ada/.disagg/secrets/disagg-spark-1.token"
    assert service.environment == {"A": "1", "DISAGG_TOKEN_FILE": token_file}
    assert "secret" not in str(service).replace("/secrets/", "")


def test_links_with_a_mode_of_their_own_reach_both_nodes() -> None:
    prefill = {"host": "10.0.0.7", "model": "m", "name": "p", "machine": "other"}
    ends = {"prefill": "p", "decode": "Spark 1"}
    content = {"prefill_servers": [prefill], "machines": {"spark": {}, "other": {}}, "links": [ends]}
    for security, identity, expected in (
        ("authenticated", "/keys", "tls,authenticated"),
        ("plain", "", "plain"),
        (None, "/keys", ""),
    ):
        links = [ends | ({"security": security} if security else {})]
        config = load_config(content | {"decode_servers": [SPARK], "links": links, "identity": identity}, environ={})
        services = [service for plan in plan_machines(config) for service in services_of(plan, config, PLACE)]
        assert len(services) == 2
        for service in services:
            assert ("--kv-security" in service.arguments) == bool(expected)
            assert f"--kv-security {expected} " in " ".join(service.arguments) or not expected


@pytest.mark.parametrize(
    ("source", "model"),
    [
        ({}, "qwen3-coder:30b"),
        ({"hf": "Qwen/X"}, "Qwen/X"),
        ({"ollama": "qwen:7b"}, "qwen:7b"),
        ({"path": "~/models/x"}, "/home/ada/models/x"),
        ({"command": "make x", "path": "/data/x"}, "/data/x"),
    ],
)
def test_where_a_model_comes_from(source: dict[str, str], model: str) -> None:
    config = cluster({"source": source})
    (service,) = services_of(only_plan(config), config, PLACE)
    assert service.arguments[service.arguments.index("--model") + 1] == model


def _steps(config: Any, **facts: Any) -> str:
    known: dict[str, Any] = {
        "os": "Linux",
        "home": "/home/ada",
        "user": "ada",
        "uid": 1000,
        "pythons": ("3.12.3 /usr/bin/python3",),
    }
    target = MachineTarget(
        only_plan(config), config, Inventory(**known | facts), PLACE, manager_of("background", PLACE)
    )
    package = Package(Wheel("disaggregated_inference-1.0-py3-none-any.whl", b"x", "1.0"), "aiohttp==3\n")
    steps = plan_installation(target, package, DeployTimeouts()).steps
    return "\n".join(line for step in steps for line in [step.title, *step.describe()])


def test_commands_that_fetch_models_and_packages() -> None:
    steps = _steps(cluster({"source": {"hf": "Qwen/X"}}, {"pip_args": ["--index-url", "http://i"]}))
    assert "-m pip install --quiet --disable-pip-version-check --constraint" in steps
    assert re.search(r"--index-url http://i \S+whl\[mlx\]' huggingface_hub", steps)
    assert "venv/bin/hf download Qwen/X" in steps
    file = {"rsync": "spark:/data/x", "path": "~/models/x.gguf"}
    port = _steps(cluster({"source": file}, {"ssh": "ada@10.0.0.9:2222"}))
    assert "rsync -a --partial -e 'ssh -p 2222' ada@10.0.0.9:/data/x /home/ada/models/x.gguf" in port
    assert "ollama pull qwen:7b" in _steps(cluster({"source": {"ollama": "qwen:7b"}, "engine": "ollama"}))
    rsync = {"rsync": "spark:/data/x", "path": "~/models/x"}
    assert "rsync -a --partial -e ssh spark:/data/x/ /home/ada/models/x/" in _steps(cluster({"source": rsync}))
    command = _steps(cluster({"source": {"command": "make x", "path": "/data/x"}}))
    assert "env sh -c 'make x'" in command
    with_uv = _steps(cluster(machine={"extras": ["torch", "llamacpp"]}), uv="/opt/uv", pythons=())
    assert "/opt/uv venv --quiet --python 3.12" in with_uv
    assert "whl[torch,llamacpp]" in with_uv


def test_no_python() -> None:
    with pytest.raises(
        DeployRefused, match=r"spark: no Python 3.11 or newer \(found: 3.9.6\): `apt install python3.12"
    ):
        _steps(cluster(), pythons=("3.9.6 /usr/bin/python3",))
    with pytest.raises(
        DeployRefused, match=r"spark: no Python 3.11 or newer: `brew install python@3.12`, or install uv"
    ):
        _steps(cluster(), pythons=(), os="Darwin")


def test_keys_of_a_machine_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_HOME", str(tmp_path))
    config = cluster({"kv_addresses": ["10.0.0.1:9000"]}, identity=str(tmp_path))
    issue = r"`disagg cluster keys issue spark --host 192.168.100.1 --host 10.0.0.1`"
    with pytest.raises(ConfigError, match=rf"spark: no key for this machine .*: {issue}"):
        _steps(config)


def test_ports_where_a_node_listens() -> None:
    def ports(**server: Any) -> list[tuple[str, int]]:
        config = cluster({"role": "both", "engine": "torch", "host": "10.0.0.1"} | server)
        (service,) = services_of(only_plan(config), config, PLACE)
        return list(service.listens)

    assert ports() == [("10.0.0.1", 8001), ("10.0.0.1", 8100)]
    assert ports(arguments=["--kv-port", "9000"]) == [("10.0.0.1", 8001), ("10.0.0.1", 9000)]
    assert ports(arguments=["--kv-port=0"]) == [("10.0.0.1", 8001)]
    addresses = ["10.1.0.1", "[fe80::1]:9001"]
    assert ports(kv_addresses=addresses) == [("10.0.0.1", 8001), ("10.1.0.1", 8100), ("fe80::1", 9001)]
    assert ports(engine="ollama") == [("10.0.0.1", 8001)]


def test_secret_variables(tmp_path: Path) -> None:
    """They go to a file of mode 0600, which commands and services read. No command and no message has them."""
    (tmp_path / "token").write_text("hf_secret\n")
    config = cluster({"source": {"hf": "Qwen/X"}}, {"secrets": {"HF_TOKEN": str(tmp_path / "token")}})
    steps = _steps(config)
    assert "hf_secret" not in steps
    assert "write /home/ada/.disagg/secrets/environment (21 bytes, mode 600, secret, not shown)" in steps
    assert "set -a; . /home/ada/.disagg/secrets/environment; set +a; env /home/ada" in steps
    (service,) = services_of(only_plan(config), config, PLACE)
    unit = manager_of("systemd", PLACE).file(service).content
    assert "EnvironmentFile=/home/ada/.disagg/secrets/environment\n" in unit
    assert (
        "--environment /home/ada/.disagg/secrets/environment" in manager_of("background", PLACE).file(service).content
    )
    missing = cluster(machine={"secrets": {"HF_TOKEN": "${NOT_SET_HERE}"}})
    with pytest.raises(ConfigError, match=r"machines.spark.secrets.HF_TOKEN: NOT_SET_HERE is not set"):
        _steps(missing)
    with pytest.raises(ConfigError, match=r"machines.spark.secrets.HF_TOKEN: the secret itself must not be in this"):
        cluster(machine={"secrets": {"HF_TOKEN": "hf_secret"}})
    with pytest.raises(ConfigError, match=r"machines.spark.environment.HF_TOKEN: .*write it under `secrets`"):
        cluster(machine={"environment": {"HF_TOKEN": "hf_secret"}})


def test_an_index_with_a_password_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"machines.spark.pip_args: a password must not be on a command line"
    ) as error:
        cluster(machine={"pip_args": ["--index-url", "https://ada:hunter2@index.lan/simple"]})
    assert "hunter2" not in str(error.value)
    assert cluster(machine={"pip_args": ["--index-url", "https://index.lan:8443/simple/@team"]})


@pytest.mark.parametrize("folder", ["~/a;b", "/srv/$HOME", "/srv/a\nb", '/srv/"a"', "/srv/100%"])
def test_names_of_folders_that_not_everything_takes(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"machines.spark.folder: use letters, digits, spaces and /._-\+@, got"):
        cluster(machine={"folder": folder})


def test_what_a_removal_takes_away() -> None:
    def scripts(source: dict[str, str], models: bool = True, **server: Any) -> list[str]:
        config = cluster({"source": source} | server)
        return removal_scripts(only_plan(config), config, PLACE, models)[:-1]

    hub = '"${HF_HUB_CACHE:-${HF_HOME:-$HOME/.cache/huggingface}/hub}"'
    assert scripts({"hf": "Qwen/X"}) == [f"rm -rf {hub}/models--Qwen--X"]
    assert scripts({"hf": "Qwen/X"}, models=False) == []
    assert scripts({"command": "make", "path": "~/x y"}) == ["rm -rf '/home/ada/x y'"]
    assert scripts({"ollama": "q:7b"}) == ["ollama rm q:7b"]
    assert scripts({"path": "/data/mine"}) == scripts({}) == []  # they were there before


def test_waves_keep_a_model_up() -> None:
    models = {"d1": frozenset("q"), "d2": frozenset("q"), "m1": frozenset("g"), "m2": frozenset("gq")}
    assert rolling_waves(models, frozenset()) == [["d1", "d2", "m1", "m2"]]
    assert rolling_waves(models, frozenset(models)) == [["d1", "m1"], ["d2"], ["m2"]]
    assert rolling_waves(models, frozenset({"d1"})) == [["d2", "m1", "m2"], ["d1"]]


# The wheel


def test_the_wheel_has_everything_and_is_always_the_same() -> None:
    wheel = pack_wheel()
    assert wheel.digest == pack_wheel().digest
    names = set(zipfile.ZipFile(BytesIO(wheel.content)).namelist())
    assert {"disaggregated_client.py", "disaggregated_inference/cluster/reference.md"} <= names
    assert f"disaggregated_inference-{wheel.version}.dist-info/entry_points.txt" in names
    files = {"index.html", "style.css", "vendor/uPlot.iife.min.js", "vendor/uplot-LICENSE.txt"}
    assert {f"disaggregated_inference/gateway/dashboard/static/{name}" for name in files} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_pinned_versions_have_no_engine() -> None:
    pinned = dict(line.split("==") for line in pin_dependencies().splitlines())
    assert {"aiohttp", "msgspec", "starlette"} <= pinned.keys()
    assert not {"torch", "mlx", "asyncssh"} & pinned.keys()


def test_a_file_that_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--wheel: x.whl is no wheel of disaggregated-inference"):
        read_wheel(str(tmp_path / "x.whl"))
    with pytest.raises(ConfigError, match=r"--wheel: .* cannot be read: No such file"):
        read_wheel(str(tmp_path / "disaggregated_inference-1.0-py3-none-any.whl"))


# Steps, locks, audits, logs


def local(work: Callable[[LocalShell], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        return await work(LocalShell("spark"))

    return asyncio.run(run())


def test_files_are_written_once_and_corrected(tmp_path: Path) -> None:
    secret = RemoteFile(str(tmp_path / "a" / "token"), b"secret", is_secret=True)
    step = FilesStep("secrets", [secret, RemoteFile(str(tmp_path / "b"), b"", 0o644)])

    async def work(shell: LocalShell) -> None:
        assert not await step.is_done(shell)
        await step.do(shell)
        assert await step.is_done(shell)
        (tmp_path / "a" / "token").chmod(0o644)
        assert not await step.is_done(shell)
        await step.do(shell)
        assert (tmp_path / "a" / "token").stat().st_mode & 0o777 == 0o600

    local(work)
    assert "secret, not shown" in step.describe()[0]
    assert step.describe()[1].startswith(f"write {tmp_path}/b (0 bytes, mode 644, sha256")


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this container does not allow mounts")
    try:
        step = FilesStep("wheel", [RemoteFile(str(tmp_path / "wheel"), bytes(1 << 20))])
        with pytest.raises(CommandFailed, match="No space left on device; the disk is full: free some space there"):
            local(step.do)
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        (
            "The virtual environment was not created because ensurepip is not available.",
            "install the package python3-v",
        ),
        ("ERROR: No matching distribution found for aiohttp", "the machine reaches no package index: give it one by"),
        ("OSError: [Errno 28] No space left on device", "the disk is full: free some space there"),
    ],
)
def test_installs_that_fail_say_what_to_do(stderr: str, remedy: str) -> None:
    from disaggregated_inference.cluster.deploy.install import _install_remedy

    step = CommandStep("environment", f"echo {stderr!r} >&2; exit 1", "false", remedy=_install_remedy)
    with pytest.raises(CommandFailed, match=rf"spark: environment failed \(exit code 1\): .*{re.escape(remedy)}"):
        local(step.do)


def test_a_model_that_does_not_fit() -> None:
    config = cluster({"model": "simulated:gpt-oss-120b", "engine": "llamacpp"})
    inventory = Inventory(os="Linux", memory_bytes=1 << 30)
    step = FitStep(only_plan(config), config, inventory, PLACE, sys.executable)
    with pytest.raises(
        DeployRefused, match=r"spark: weights and KV cache need [\d.]+ GB .*, and the machine has 1.1 GB"
    ):
        local(step.is_done)
    enough = FitStep(only_plan(config), config, Inventory(os="Linux", memory_bytes=1 << 40), PLACE, sys.executable)
    assert local(enough.is_done)


def test_one_deploy_at_a_time(tmp_path: Path) -> None:
    lock = tmp_path / "d" / "lock"

    async def work(shell: LocalShell) -> None:
        async with machine_lock(shell, str(lock), "deploy"):
            assert lock.is_symlink()
            with pytest.raises(DeployRefused, match=r"spark: another command is at work there: \S+@\S+, deploy, since"):
                async with machine_lock(LocalShell("spark"), str(lock), "down"):
                    pass
        assert not lock.is_symlink()
        lock.symlink_to("999999999 ada@desk, deploy, since yesterday")  # the machine was switched off meanwhile
        async with machine_lock(shell, str(lock), "deploy"):
            pass
        assert not lock.is_symlink()

    local(work)


def test_one_of_several_takes_an_old_lock(tmp_path: Path) -> None:
    """They all find it at the same time. None leaves before all have tried."""
    lock, tries = tmp_path / "lock", 6

    async def work() -> int:
        held, tried, all_tried = 0, 0, asyncio.Event()

        async def attempt() -> None:
            nonlocal held, tried
            try:
                async with machine_lock(LocalShell("spark"), str(lock), "deploy"):
                    held, tried = held + 1, tried + 1
                    if tried == tries:
                        all_tried.set()
                    await all_tried.wait()
            except DeployRefused:
                tried += 1
                if tried == tries:
                    all_tried.set()

        lock.symlink_to("999999999 ada@desk, deploy, since yesterday")
        await asyncio.gather(*(attempt() for _ in range(tries)))
        return held

    for _ in range(3):
        assert asyncio.run(work()) == 1
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_written() -> None:
    async def work(shell: LocalShell) -> None:
        async with machine_lock(shell, "/proc/none/lock", "deploy"):
            pass

    with pytest.raises(DeployRefused, match="spark: /proc/none/lock cannot be written"):
        local(work)


def test_audits_are_merged() -> None:
    def entry(id: str, time: float, release: str) -> AuditEntry:
        return AuditEntry(id=id, time=time, who="ada@desk", command="deploy", release=release)

    merged = merge_audits(
        {"a": [entry("2", 9, "1.0-ff-a2"), entry("1", 3, "1.0-ee-a1")], "b": [entry("2", 8, "1.0-ff-b")]}
    )
    assert [(each.id, each.time, each.release) for each in merged] == [("1", 3, "1.0-ee"), ("2", 8, "1.0-ff")]
    assert merged[1].releases == {"a": "1.0-ff-a2", "b": "1.0-ff-b"}


def test_lines_of_journals_and_of_our_own_logs() -> None:
    head = "2026-11-17T05:47:00.123456+0000 dgx1 python[812]: "
    plain = parse_line(head + "Traceback", "dgx1", "x", "")
    assert plain == LogLine("2026-11-17T05:47:00.123Z", "dgx1", "x", "Traceback")
    own = parse_line(head + '{"time": "2026-11-17T05:46:59.000Z", "request_id": "r1"}', "dgx1", "x", "")
    assert own
    assert own.time == "2026-11-17T05:46:59.000Z"
    assert own.concerns("r1")
    assert not own.concerns("r2")
    assert parse_line("-- No entries --", "dgx1", "x", "") is None
    assert [line.text for line in merged([plain, own])] == [own.text, "Traceback"]


def test_an_unforeseen_error_is_of_one_machine() -> None:
    config = load_config(
        {
            "decode_servers": [{"host": "10.0.0.1", "machine": "a", "model": "q"}],
            "prefill_servers": [{"host": "10.0.0.2", "machine": "b", "model": "q"}],
            "machines": {"a": {"ssh": "local"}, "b": {"ssh": "local"}},
        },
        {},
    )

    async def work(session: MachineSession) -> str:
        return {"b": "fine"}[session.name]

    outcomes = asyncio.run(on_machines(plan_machines(config), config, work, lambda machine, text: None))
    assert [(each.machine, each.result) for each in outcomes] == [("a", None), ("b", "fine")]
    reported = r"a: unexpected error, please report it: KeyError at test_deploy.py:\d+: 'a'"
    assert re.fullmatch(reported, str(outcomes[0].error))


def test_a_rolling_command_stops_at_a_model_whose_first_machine_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [{"host": f"10.0.0.{at}", "machine": name, "model": "q"} for at, name in enumerate("ab")]
    content = {"decode_servers": servers, "machines": {name: {"ssh": "local"} for name in "ab"}}
    config, asked = load_config(content, {}), []

    async def release(session: MachineSession, link: str = "current") -> None:
        asked.append(session.name)
        raise CommandFailed(session.name, "does not start")

    monkeypatch.setattr(MachineSession, "release", release)
    done = operate("restart", plan_machines(config), config, lambda machine, text: None, ServiceChoice())
    errors = [str(outcome.error) for outcome in asyncio.run(done)]
    assert errors == ["a: does not start", "b: left as it is, because a failed"]
    assert asked == ["a"]


def test_followed_lines_of_a_slower_machine_find_their_place() -> None:
    async def run() -> list[str]:
        queue: asyncio.Queue[LogLine] = asyncio.Queue()
        for time in ("3", "1", "2"):
            queue.put_nowait(LogLine(time, "m", "s", time))
        lines: AsyncIterator[LogLine] = in_order(queue)
        return [(await anext(lines)).text for _ in range(3)]

    assert asyncio.run(run()) == ["1", "2", "3"]


def test_the_kv_path_in_use_is_the_last_that_had_payload() -> None:
    paths = [PathStatus(host="10.0.0.1", port=1, idle_s=9.0), PathStatus(host="10.0.0.2", port=2, idle_s=0.5)]
    assert path_in_use([*paths, PathStatus(host="x", port=3)]) == "10.0.0.2:2"
    assert path_in_use([]) == ""


# Whole deploys to this machine


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


def test_where_nothing_is_deployed(file: Path) -> None:
    """Every command says so."""
    for command, words in (
        ("logs", "error: here: nothing is deployed there: run `disagg cluster deploy` first"),
        ("restart", "error: here: nothing is deployed there: run `disagg cluster deploy` first"),
    ):
        done = disagg("cluster", command, "-c", str(file))
        assert (done.returncode, done.stderr.strip()) == (1, words)
    assert "nothing was deployed there yet" in disagg("cluster", "audit", "-c", str(file)).stdout


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
    assert f": {url}/v1 (OpenAI)" in _how_to(config)


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
