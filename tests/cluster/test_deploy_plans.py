"""Plans of a deploy: which machine runs what, with which commands, packages and secrets; and the wheel."""

import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from disaggregated_inference.cluster import load_config
from disaggregated_inference.cluster.deploy import (
    pack_wheel,
    pin_dependencies,
    plan_machines,
    read_wheel,
    removal_scripts,
)
from disaggregated_inference.cluster.deploy.install import Package, plan_installation
from disaggregated_inference.cluster.deploy.plan import extras_of, services_of
from disaggregated_inference.cluster.deploy.rollout import rolling_waves
from disaggregated_inference.cluster.deploy.target import MachineTarget
from disaggregated_inference.cluster.deploy.wheel import Wheel
from disaggregated_inference.cluster.inventory import Inventory
from disaggregated_inference.cluster.services import manager_of
from disaggregated_inference.errors import ConfigError, DeployRefused
from disaggregated_inference.timeouts import DeployTimeouts
from tests.support.deploy_plans import PLACE, SPARK, cluster, only_plan


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
