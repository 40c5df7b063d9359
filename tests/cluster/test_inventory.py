"""What machines say of themselves: this one, and the recorded output of a Mac Studio and a DGX Spark."""

import asyncio
import subprocess

import pytest

from disaggregated_inference.cluster import inventory
from disaggregated_inference.cluster.inventory import Inventory, parse_inventory, take_inventory
from disaggregated_inference.cluster.shell import LocalShell
from disaggregated_inference.errors import CommandFailed

MAC = """Last login: Tue Nov 17
os\tDarwin
arch\tarm64
home\t/Users/ada
user\tada
uid\t501
release\tmacOS 15.1
chip\tApple M3 Ultra
memory_bytes\t549755813888
link\ten0 10.0.0.5 10Gbase-T <full-duplex>
root\tyes
uv\t/opt/homebrew/bin/uv
python\t3.9.6 /usr/bin/python3
python\t3.12.7 /opt/homebrew/bin/python3.12
disk_kib\t1000000
model\tmlx-community/gpt-oss-120b-MXFP4-Q8
"""
SPARK = """os\tLinux
arch\taarch64
home\t/home/ada
user\tada
uid\t1000
release\tUbuntu 24.04.1 LTS
memory_kib\t125829120
gpu\tNVIDIA GB10, [N/A]
systemd\tyes
systemd_user\tyes
python\t3.12.3 /usr/bin/python3
"""


def test_this_machine() -> None:
    found = asyncio.run(take_inventory(LocalShell("here")))
    assert found.os in ("Linux", "Darwin")
    assert found.memory_bytes > 0
    assert found.free_disk_bytes > 0
    assert found.python


def test_values_that_are_none() -> None:
    found = parse_inventory("os\tLinux\nhome\t/root\nuid\t²\npython\t3.x /a\npython\t\x1b[1m3.12.1 /b\x1b[0m\n")
    assert (found.uid, found.pythons, found.python) == (0, ("3.12.1 /b",), "/b")


def test_the_script_is_posix_shell() -> None:
    script = inventory.INVENTORY_SCRIPT.replace("@FOLDER@", "/x").replace("@PYTHONS@", "python3")
    assert subprocess.run(["sh", "-n", "-c", script], capture_output=True).returncode == 0


def test_a_mac() -> None:
    mac = parse_inventory(MAC)
    assert (mac.accelerator, mac.python, mac.service_kind) == ("metal", "/opt/homebrew/bin/python3.12", "launchd")
    assert mac.model_memory_bytes == 512 << 30
    assert mac.models == ("mlx-community/gpt-oss-120b-MXFP4-Q8",)


def test_a_spark_shares_its_memory() -> None:
    spark = parse_inventory(SPARK)
    assert (spark.accelerator, spark.service_kind) == ("cuda", "systemd-user")
    assert spark.model_memory_bytes == 120 << 30


@pytest.mark.parametrize(
    ("os", "tools", "kind"),
    [
        ("Linux", {"systemd", "root"}, "systemd"),
        ("Linux", {"systemd", "systemd_user"}, "systemd-user"),
        ("Linux", {"root"}, "background"),
        ("Darwin", set(), "launchd-user"),
    ],
)
def test_the_best_service_manager(os: str, tools: set[str], kind: str) -> None:
    assert Inventory(os=os, tools=frozenset(tools)).service_kind == kind


def test_a_machine_that_says_nothing() -> None:
    with pytest.raises(CommandFailed, match="spark-1: the machine did not say what it is: 'hello'; check its login"):
        parse_inventory("hello", "spark-1")
