"""`disagg cluster init`: roles, engines and models that fit, and the file that is written."""

from pathlib import Path

import pytest

from disaggregated_inference.cli.cluster_init import machine_names
from disaggregated_inference.cluster import load_config
from disaggregated_inference.cluster.deploy import plan_machines
from disaggregated_inference.cluster.inventory import Gpu, Inventory
from disaggregated_inference.cluster.proposal import ProposedNode, cluster_toml, propose
from disaggregated_inference.errors import ConfigError
from tests.support.command import disagg

GIB = 1 << 30


def spark(address: str) -> Inventory:
    links = (f"enP7s7 {address} 10000 Mb/s", "enp1s0f0 192.168.100.1 200000 Mb/s", "docker0 172.17.0.1 -1 Mb/s")
    return Inventory(
        os="Linux",
        arch="aarch64",
        address=address,
        memory_bytes=128 * GIB,
        gpus=(Gpu("NVIDIA GB10", 0),),
        links=links,
        models=("Qwen/Qwen3-Coder-30B-A3B-Instruct",),
        pythons=("3.12.3 /usr/bin/python3",),
    )


def mac(address: str, memory_gib: int) -> Inventory:
    return Inventory(os="Darwin", arch="arm64", chip="Apple M3 Ultra", address=address, memory_bytes=memory_gib * GIB)


USERS_MACHINES = {
    "spark-1": spark("169.254.150.103"),
    "spark-2": spark("169.254.150.104"),
    "mac-1": mac("169.254.150.101", 512),
    "mac-2": mac("169.254.150.102", 128),
}
MODELS = ("qwen3-coder:30b", "gpt-oss:120b")


def roles(chosen: list[ProposedNode]) -> dict[str, str]:
    return {each.machine: f"{each.role} {each.model.name} {each.checkpoint.engine}" for each in chosen}


def test_the_documented_machines_get_the_documented_roles() -> None:
    assert roles(propose(USERS_MACHINES, MODELS)) == {
        "spark-1": "prefill qwen3-coder:30b torch",
        "spark-2": "prefill gpt-oss:120b llamacpp",
        "mac-1": "decode gpt-oss:120b llamacpp",
        "mac-2": "decode qwen3-coder:30b mlx",
    }


def test_two_machines_share_both_models_and_a_smaller_checkpoint_is_taken() -> None:
    two = {"spark-1": spark("10.0.0.1"), "mac-2": mac("10.0.0.2", 128)}
    chosen = propose(two, MODELS)
    assert [(each.machine, each.port) for each in chosen] == [
        ("spark-1", 8000),
        ("mac-2", 8001),
        ("spark-1", 8010),
        ("mac-2", 8011),
    ]
    assert chosen[2].checkpoint.repository.endswith("-FP8")  # bf16 does not fit beside the other model


def test_one_machine_does_both() -> None:
    (only,) = propose({"desk": Inventory(os="Linux", memory_bytes=8 * GIB)}, ["smollm2:135m"])
    assert (only.role, only.checkpoint.engine) == ("both", "torch")


def test_what_does_not_fit_and_what_is_not_known() -> None:
    small = {"spark-1": spark("10.0.0.1"), "mac": mac("10.0.0.2", 16)}
    with pytest.raises(
        ConfigError, match=r"gpt-oss:120b fits no machine as a decode node \(.*mac: 15 GB left\): choose"
    ):
        propose(small, MODELS)
    with pytest.raises(ConfigError, match=r"no sizes are known for llama:8b: choose of qwen3-coder:30b, "):
        propose(small, ["llama:8b"])


def test_the_file_is_complete_and_commented(tmp_path: Path) -> None:
    targets = {name: f"ada@{found.address}" for name, found in USERS_MACHINES.items()}
    text = cluster_toml(USERS_MACHINES, targets, propose(USERS_MACHINES, MODELS), "", "the cables of the lab")
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    config = load_config(path, {"DISAGG_TOKEN": "t"})
    assert not config.warnings
    assert {plan.target for plan in plan_machines(config)} == set(targets.values())
    assert config.gateway.machine == "mac-1"
    assert config.servers_of("qwen3-coder:30b")[0].source.hf == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert "61 of weights (already there)" in text
    assert '# kv_addresses = ["192.168.100.1", "169.254.150.103"]' in text
    assert "172.17.0.1" not in text


def test_init_looks_at_this_machine(tmp_path: Path) -> None:
    """Without ssh, with keys of its own."""
    output = tmp_path / "cluster.toml"
    command = ["cluster", "init", "--hosts", "local", "--model", "smollm2:135m", "-o", str(output)]
    done = disagg(*command, home=tmp_path)
    assert done.returncode == 0, done.stderr
    config = load_config(output, {})
    assert config.servers[0].role == "both"
    assert Path(config.identity).name == "operator"
    assert (tmp_path / "keys" / plan_machines(config)[0].name / "node.key").exists()
    again = disagg(*command, home=tmp_path)
    assert again.returncode == 1
    assert "is there already: give another name with --output, or --force" in again.stderr
    none = disagg("cluster", "init", "-o", str(tmp_path / "other.toml"))
    assert "no machines: give their ssh addresses, such as --hosts spark-1,spark-2" in none.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "local", "-o", "missing folder/c.toml"], "there is no folder missing folder; make it, or choose"),
        (["--hosts", "local", "--model", "nix"], "no sizes are known for nix: choose of qwen3-coder:30b"),
    ],
)
def test_init_finds_mistakes_before_it_asks_machines(options: list[str], words: str, tmp_path: Path) -> None:
    done = disagg("cluster", "init", *options, home=tmp_path)
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []  # no keys


def test_init_names_every_machine_that_fails(tmp_path: Path) -> None:
    done = disagg("cluster", "init", "--hosts", "a@127.0.0.1:1,local,b@127.0.0.1:1", "-o", str(tmp_path / "c.toml"))
    assert done.returncode == 1
    assert [line.split(":1 cannot")[0] for line in done.stderr.splitlines()] == [
        "error: a@127.0.0.1:1: a@127.0.0.1",
        "error: b@127.0.0.1:1: b@127.0.0.1",
    ]


def test_a_machine_that_says_strange_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers do not act on the terminal, are no lines of the file, and have an end."""
    programs = tmp_path / ".local" / "bin"
    programs.mkdir(parents=True)
    strange = r"printf '\033]0;owned\007\033[2J\033[31mDar\"win # \177 %s' \"$(head -c 100000 /dev/zero | tr '\0' x)\""
    for name, script in {"uname": strange, "id": "echo ada", "python3.13": "echo 3.x.y"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = tmp_path / "cluster.toml"
    done = disagg("cluster", "init", "--hosts", "local", "--model", "smollm2:135m", "-o", str(output), home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    assert len(done.stdout) < 10_000
    (name,) = load_config(output, {}).machines
    assert name.startswith("dar-win-x")
    assert len(name) <= 50


def test_machines_with_the_same_name_are_all_there() -> None:
    """Two new Macs both call themselves `Mac-Studio.local`."""
    found = {
        "ada@10.0.0.1": Inventory(os="Darwin", host="Mac-Studio.local"),
        "ada@10.0.0.2": Inventory(os="Darwin", host="Mac-Studio.local"),
        "ada@10.0.0.3": Inventory(os="Linux", host="mac-studio-2"),
    }
    assert machine_names(found) == {
        "mac-studio": "ada@10.0.0.1",
        "mac-studio-2": "ada@10.0.0.2",
        "mac-studio-2-2": "ada@10.0.0.3",
    }
