"""Four machines on this one: namespaces with the documented addresses, a real systemd and a real sshd in each.

Every machine hangs on two switches: `fast` (169.254.150.0/24) and `slow` (10.77.0.0/24). The switches are in the
controller's namespaces, from which `disagg` runs with its own home folder: `machines.run("disagg", "cluster", "up")`. A
test cuts, heals and shapes single links, kills what runs on a machine, and switches machines off and on.

Nothing stays: one process holds all namespaces, ends when the test process does, however that ends, and what started it
then removes the folders.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.support.machine_boot import BOOT, SYSTEMD, cgroup_root, exposed_paths, make_key, prepare_root
from tests.support.waiting import until

NAMES = ("mac1", "mac2", "dgx1", "dgx2")
NETWORKS = {"fast": "169.254.150", "slow": "10.77.0"}
RATES = {"fast": "4gbit", "slow": "400mbit"}
PROGRAMS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "nsenter", "unshare", "pivot_root", "ping")
HOME = Path(pwd.getpwuid(0).pw_dir)
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])

# The lab ends with its input: then `cat` ends, the kernel ends every process of the lab, and the folders go.
LAB = r"""
base=$1; cgroup=$2
unshare --net --mount --pid --fork --kill-child sh -c "$3" lab "$@"
sleep 0.1
find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null
rm -rf "$base"
"""
LAB_INIT = r"""
set -e
base=$1; home=$4; shift 4
mount --make-rprivate /
mount -t proc proc /proc
for shared in "$@"; do
    case "$shared" in "$home"/*)
        inside="$base/controller${shared#"$home"}"; mkdir -p "$inside"; mount --rbind "$shared" "$inside";;
    esac
done
mount --rbind "$base/controller" "$home"
ip link set lo up
trap '' CHLD
echo ready
exec cat >/dev/null
"""

# Whether this kernel and this container allow what the machines need.
TRIAL = ["unshare", "--net", "--mount", "--pid", "--uts", "--cgroup", "--fork", "--propagation", "private", "sh", "-ec"]
TRIAL_SCRIPT = """
ip link add switch type bridge
ip link add port type veth peer name cable
tc qdisc add dev cable root tbf rate 1mbit burst 9k latency 9ms
mount -t cgroup2 cgroup2 /mnt
"""


@cache
def why_not() -> str:
    """Why the machines cannot be built here; empty when they can."""
    if os.geteuid() != 0:
        return "machines in network namespaces need root"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if missing or not SYSTEMD.exists():
        names = [*missing, *([] if SYSTEMD.exists() else ["systemd"])]
        return f"machines in network namespaces need {', '.join(names)} (apt install iproute2 openssh-server systemd)"
    if not os.access(cgroup_root() / "cgroup.procs", os.W_OK) or os.statvfs(cgroup_root()).f_flag & os.ST_RDONLY:
        return "machines in network namespaces need a cgroup2 hierarchy that can be written"
    done = subprocess.run([*TRIAL, TRIAL_SCRIPT], capture_output=True, text=True, env=os.environ | {"PATH": PATH})
    return (
        f"this kernel or container does not allow namespaces with links: {done.stderr.strip()}"
        if done.returncode
        else ""
    )


class Machine:
    """One machine: `address` on the fast link, `slow_address` on the other, and its files under `path`."""

    def __init__(self, name: str, number: int, base: Path) -> None:
        self.name, self.base = name, base / name
        self.addresses = {link: f"{network}.{number}" for link, network in NETWORKS.items()}
        # The same after a restart, as on a real machine: the others remember it for a while.
        self.hardware_addresses = {link: f"02:00:00:00:{place:02x}:{number:02x}" for place, link in enumerate(NETWORKS)}
        self.address, self.slow_address = self.addresses["fast"], self.addresses["slow"]
        self.pid = 0

    def path(self, path: str) -> Path:
        """A file of the machine, as this process can open it."""
        return Path(f"/proc/{self.pid}/root") / path.lstrip("/")

    def enter(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine as its root, without ssh."""
        return _enter(self.pid, ["-u", "-i", "-C"], command, {"HOME": "/root", "PATH": PATH}, **options)

    def processes(self, word: str) -> list[int]:
        """The machine's own numbers of its processes that have this word on their command line."""
        found = self.enter("pgrep", "-f", word, check=False).stdout.split()
        return [int(number) for number in found]


class Machines:
    """The four machines and the controller."""

    def __init__(self, base: Path, rates: Mapping[str, str], expose: Sequence[Path] = ()) -> None:
        self.base, self.home = base, base / "controller"
        self.rates = dict(rates)
        self.cgroup = cgroup_root() / base.name
        self._exposed = exposed_paths(*expose)
        self._boots: dict[str, subprocess.Popen[str]] = {}
        self.all = {name: Machine(name, 101 + place, base) for place, name in enumerate(NAMES)}

    def __getitem__(self, name: str) -> Machine:
        return self.all[name]

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller, which reaches all machines by ssh and has its own home folder."""
        return _enter(self._pid, [], command, self.environment(), **options)

    def start(self, *command: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a command on the controller."""
        full = [*_nsenter(self._pid, []), *map(str, command)]
        return subprocess.Popen(full, env=self.environment() | options.pop("env", {}), text=True, **options)

    def environment(self) -> dict[str, str]:
        return os.environ | {"HOME": str(HOME), "PATH": PATH}

    def ssh(self, name: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", name, *command, **options)

    def cut(self, name: str, link: str = "fast") -> None:
        """Pull the machine's cable out of a switch."""
        self.run("ip", "link", "set", f"{link}-{name}", "down")

    def heal(self, name: str, link: str = "fast") -> None:
        self.run("ip", "link", "set", f"{link}-{name}", "up")

    def shape(self, name: str, rate: str, link: str = "fast") -> None:
        """Limit a machine's link in both directions, for example to `100mbit`."""
        limit = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
        self.run("tc", "qdisc", "replace", "dev", f"{link}-{name}", *limit)
        self[name].enter("tc", "qdisc", "replace", "dev", f"{link}0", *limit)

    def trust(self, name: str, other: str) -> None:
        """Let one machine reach another by ssh."""
        folder, address = self[name].path("/root/.ssh"), self[other].address
        key = make_key(folder / "id_ed25519")
        with self[other].path("/root/.ssh/authorized_keys").open("a") as file:
            file.write(f"{key}\n")
        host_key = self[other].path("/etc/ssh/ssh_host_ed25519_key.pub").read_text()
        (folder / "known_hosts").write_text(f"{address} {host_key}")

    def kill_processes(self, name: str, word: str = "disagg") -> int:
        """Kill the machine's processes that have this word on their command line; returns how many there were."""
        numbers = self[name].processes(word)
        self[name].enter("kill", "-KILL", *map(str, numbers), check=False) if numbers else None
        return len(numbers)

    def power_off(self, name: str) -> None:
        """Switch a machine off without a warning; its files stay."""
        os.kill(self[name].pid, signal.SIGKILL)
        boot = self._boots.pop(name)
        boot.wait(timeout=30)
        _close(boot)

    def power_on(self, name: str) -> None:
        self._boot(self[name])
        self._wait([name])

    def open(self) -> None:
        for folder in (self.home / ".ssh", self.cgroup):
            folder.mkdir(parents=True, mode=0o700)
        self._start_lab()
        self._write_ssh({name: prepare_root(machine.base, self._key) for name, machine in self.all.items()})
        for link, network in NETWORKS.items():
            self.run("ip", "link", "add", link, "type", "bridge")
            self.run("ip", "address", "add", f"{network}.100/24", "dev", link)
            self.run("ip", "link", "set", link, "up")
        for machine in self.all.values():
            self._boot(machine)
        self._wait(self.all)

    def close(self) -> None:
        """End every process of the lab and remove its folders."""
        self._lab.communicate()
        for boot in self._boots.values():
            boot.wait(timeout=30)
            _close(boot)

    def _start_lab(self) -> None:
        self._key = make_key(self.home / ".ssh/id_ed25519")
        command = [
            "sh",
            "-c",
            LAB,
            "lab",
            str(self.base),
            str(self.cgroup),
            LAB_INIT,
            str(HOME),
            *map(str, self._exposed),
        ]
        self._lab = _piped(command)
        assert self._lab.stdout
        assert self._lab.stdout.readline() == "ready\n"
        self._pid = _init_below(self._lab.pid)

    def _write_ssh(self, host_keys: Mapping[str, str]) -> None:
        hosts, known = [], []
        for name, machine in self.all.items():
            hosts.append(f"Host {name}\n    HostName {machine.address}\n")
            known.append(f"{name},{machine.address},{machine.slow_address} {host_keys[name]}\n")
        everywhere = f"Host {' '.join(NAMES)} {NETWORKS['fast']}.* {NETWORKS['slow']}.*\n    User root\n"
        (self.home / ".ssh/config").write_text("".join(hosts) + everywhere)
        (self.home / ".ssh/known_hosts").write_text("".join(known))

    def _boot(self, machine: Machine) -> None:
        cgroup = self.cgroup / machine.name
        cgroup.mkdir(exist_ok=True)
        unshare = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--cgroup", "--fork"]
        enter_cgroup = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup)]
        script = ["sh", "-c", BOOT, "boot", str(machine.base), machine.name, *map(str, self._exposed)]
        command = [*_nsenter(self._pid, []), *enter_cgroup, *unshare, *script]
        boot = self._boots[machine.name] = _piped(command)
        assert boot.stdin
        assert boot.stdout
        assert boot.stdout.readline() == "booting\n"
        machine.pid = _init_below(boot.pid)
        for link in NETWORKS:
            self._connect(machine, link)
        boot.stdin.write("\n")
        boot.stdin.flush()

    def _connect(self, machine: Machine, link: str) -> None:
        port = f"{link}-{machine.name}"
        self.run("ip", "link", "delete", port, check=False)  # of a machine that was switched off just now
        add = ["ip", "link", "add", port, "type", "veth", "peer", "name", f"{link}0"]
        place = ["address", machine.hardware_addresses[link], "netns", str(machine.pid)]
        subprocess.run([*_nsenter(self._pid, [], pid_too=False), *add, *place], check=True)
        self.run("ip", "link", "set", port, "master", link, "up")
        machine.enter("ip", "link", "set", "lo", "up")
        machine.enter("ip", "address", "add", f"{machine.addresses[link]}/24", "dev", f"{link}0")
        machine.enter("ip", "link", "set", f"{link}0", "up")
        self.shape(machine.name, self.rates[link], link)

    def _wait(self, names: Iterable[str]) -> None:
        for name in names:
            assert until(partial(self._answers, name), 60), self._trouble(name)

    def _answers(self, name: str) -> bool:
        return self.ssh(name, "true", check=False).returncode == 0

    def _trouble(self, name: str) -> str:
        tried = self.ssh(name, "true", check=False).stderr
        return f"{name} did not boot: {tried}\n{self[name].enter('ps', 'ax', check=False).stdout}"


@contextmanager
def four_machines(expose: Sequence[Path] = (), **rates: str) -> Iterator[Machines]:
    """The machines, booted and reachable by ssh. They see the folders `expose` read-only. `fast="1gbit"` changes the
    rate of all fast links."""
    base = Path(tempfile.mkdtemp(prefix="disagg-machines-"))
    machines = Machines(base, RATES | rates, expose)
    try:
        machines.open()
        yield machines
    finally:
        machines.close()
        shutil.rmtree(base, ignore_errors=True)


def _nsenter(pid: int, more: Sequence[str], *, pid_too: bool = True) -> list[str]:
    return ["nsenter", "-t", str(pid), "-n", "-m", *(["-p"] if pid_too else []), *more]


def _enter(
    pid: int, more: Sequence[str], command: Sequence[str | Path], environment: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    options = {"check": True, "capture_output": True, "timeout": 120} | options
    environment = dict(environment) | options.pop("env", {})
    full = [*_nsenter(pid, more), *map(str, command)]
    return subprocess.run(full, env=environment, text=True, stdin=subprocess.DEVNULL, **options)


def _piped(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def _init_below(pid: int) -> int:
    """The process below this one that is the first of a namespace of processes, by its number out here."""
    while (inside := _namespace_numbers(pid))[-1] != 1 or len(inside) == 1:
        (pid,) = _children(pid)
    return pid


def _namespace_numbers(pid: int) -> list[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next([int(part) for part in line.split()[1:]] for line in lines if line.startswith("NSpid"))


def _children(pid: int) -> list[int]:
    return [int(part) for part in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
