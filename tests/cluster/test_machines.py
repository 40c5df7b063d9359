"""The machines of the cluster tests are what they claim to be, and nothing of them stays."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import NAMES, Machines, four_machines, why_not
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PING = "ping -c 1 -W 2 "
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5001)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, received = time.monotonic(), 0
    while part := connection.recv(1 << 16):
        received += len(part)
    print(received, time.monotonic() - began)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 5001)).sendall(bytes(int(sys.argv[2])))"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with four_machines() as machines:
        yield machines


def test_every_machine_is_its_own(machines: Machines) -> None:
    names = [machines.ssh(name, "hostname; touch /root/here; ls /root").stdout.split() for name in ("dgx1", "dgx2")]
    assert [words[0] for words in names] == ["dgx1", "dgx2"]
    assert machines.ssh("mac1", "ls /root /tmp").stdout.count("here") == 0
    assert machines.ssh("mac1", "systemctl is-active multi-user.target").stdout.strip() == "active"
    assert machines.ssh("mac1", "systemctl --user is-active default.target").stdout.strip() == "active"
    assert machines["dgx1"].path("/root/here").exists()
    assert len({machines.ssh(name, "cat /etc/ssh/*.pub").stdout for name in NAMES}) == 4


def test_ssh_checks_the_host_key(machines: Machines) -> None:
    known = machines.home / ".ssh/known_hosts"
    right = known.read_text()
    lines = right.splitlines()
    known.write_text(lines[0].rsplit(" ", 1)[0] + " " + lines[1].rsplit(" ", 1)[1] + "\n")
    refused = machines.ssh("dgx1", "true", check=False)
    known.write_text(right)
    assert refused.returncode == 255
    assert "Host key verification failed" in refused.stderr
    assert machines.ssh("dgx1", "true").returncode == 0


def test_a_cut_link_carries_nothing_and_the_other_path_does(machines: Machines) -> None:
    fast, slow = PING + machines["mac1"].address, PING + machines["mac1"].slow_address
    assert machines.ssh("dgx1", fast).returncode == 0
    machines.cut("mac1", "fast")
    assert machines.ssh("dgx1", fast, check=False).returncode != 0
    assert machines.ssh("dgx1", slow).returncode == 0
    assert machines.ssh("dgx2", PING + machines["dgx1"].address).returncode == 0
    machines.heal("mac1", "fast")
    assert until(lambda: machines.ssh("dgx1", fast, check=False).returncode == 0)


def test_a_shaped_link_is_no_faster_than_its_rate(machines: Machines) -> None:
    machines.shape("mac2", "40mbit")
    size_bytes = 4_000_000
    command = ["ssh", "mac2", "python3", "-c", f"'{RECEIVE}'", machines["mac2"].address]
    receiver = machines.start(*command, stdout=subprocess.PIPE)
    assert receiver.stdout
    assert receiver.stdout.readline() == "listening\n"
    machines.ssh("dgx2", "python3", "-c", f"'{SEND}'", machines["mac2"].address, str(size_bytes))
    received, seconds = receiver.communicate()[0].split()
    assert int(received) == size_bytes
    assert float(seconds) > 0.6 * size_bytes * 8 / 40e6  # the bucket's first 256 kB and what TCP holds are free
    machines.shape("mac2", machines.rates["fast"])


def test_killed_processes_are_gone_and_ssh_stays(machines: Machines) -> None:
    machines.ssh("dgx2", "systemd-run --unit=sleeper sleep 9876")
    assert len(machines["dgx2"].processes("sleep 9876")) == 1
    assert machines.kill_processes("dgx2", "sleep 9876") == 1
    assert until(lambda: machines["dgx2"].processes("sleep 9876") == [])
    assert machines.ssh("dgx2", "true").returncode == 0


def test_a_machine_keeps_its_files_when_it_is_switched_off(machines: Machines) -> None:
    machines.ssh("dgx1", "echo kept >/root/kept; echo kept >/etc/kept; sync")
    boot = machines.ssh(
        "dgx1", "cat /proc/sys/kernel/random/boot_id /proc/uptime; systemctl show -p UserspaceTimestamp"
    )
    machines.power_off("dgx1")
    assert machines.ssh("dgx1", "true", check=False).returncode == 255
    machines.power_on("dgx1")
    assert machines.ssh("dgx1", "cat /root/kept /etc/kept").stdout == "kept\nkept\n"
    assert machines.ssh("dgx1", "systemctl show -p UserspaceTimestamp").stdout not in boot.stdout


CRASHING = """
from tests.support.machines import four_machines
with four_machines() as machines:
    print(machines.base, machines.cgroup, machines["mac2"].pid, flush=True)
    input()
"""


def test_nothing_stays_after_a_crash() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CRASHING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    base, cgroup, init = map(str, process.stdout.readline().split())
    assert Path(base).exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    began = time.monotonic()
    assert until(lambda: not any(Path(path).exists() for path in (base, cgroup, f"/proc/{init}")), 60), began
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "fast-mac2" not in links
