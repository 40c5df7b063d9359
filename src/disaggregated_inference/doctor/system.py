"""Clock, disk, and processes that were left behind."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from disaggregated_inference.doctor.commands import find_program, output_of
from disaggregated_inference.doctor.findings import CannotRead, Finding, found, ok, unknown
from disaggregated_inference.doctor.plan import ExpectedMachine
from disaggregated_inference.models import default_home

_LOW_BYTES, _FULL_BYTES = 20e9, 2e9
_NODE = re.compile(r"\bdisagg(?:regated_inference)?\b.*?\s(serve|gateway)\b")
_SUPERVISOR = "supervise.py"  # of `disagg cluster`, where there is neither systemd nor launchd
_PORT = re.compile(r"--port[= ](\d+)")


def check_clock(plan: ExpectedMachine) -> Iterator[Finding]:
    if platform.system() == "Darwin":
        yield unknown(
            "clock-synchronized", "macOS shows it to administrators only: `sudo systemsetup -getusingnetworktime`"
        )
    elif not find_program("timedatectl"):
        yield unknown("clock-synchronized", "timedatectl is not installed")
    else:
        yield judge_clock(output_of("timedatectl", "show"))


def judge_clock(text: str) -> Finding:
    """From `timedatectl show`."""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    if values.get("NTPSynchronized") == "yes":
        return ok("clock-synchronized", "the clock is synchronized")
    state = "on, without an answer so far" if values.get("NTP") == "yes" else "off"
    return found("warning", "clock-synchronized", f"the clock is not synchronized: NTP is {state}")


def check_disk(plan: ExpectedMachine) -> Iterator[Finding]:
    places = [default_home(), Path.home(), Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()]
    seen: set[int] = set()
    for place in map(_existing, places):
        device = place.stat().st_dev
        if device not in seen:
            seen.add(device)
            yield judge_disk(place, shutil.disk_usage(place).free)


def _existing(place: Path) -> Path:
    return place if place.exists() else _existing(place.parent)


def judge_disk(place: Path, free_bytes: int) -> Finding:
    words = f"{free_bytes / 1e9:.1f} GB are free on the disk of {place}"
    if free_bytes < _FULL_BYTES:
        return found("error", "disk", words)
    return found("warning", "disk", words) if free_bytes < _LOW_BYTES else ok("disk", words)


class RunningNode(NamedTuple):
    pid: int
    what: str  # a node, or a gateway
    port: int | None
    is_service: bool  # systemd or launchd started it


def check_leftovers(plan: ExpectedMachine) -> Iterator[Finding]:
    planned = {server.port for server in plan.servers} | ({plan.gateway_port} if plan.gateway_port else set())
    nodes = running_nodes(output_of("ps", "-axo", "pid=,ppid=,command="))
    yield from judge_leftovers(nodes, planned)


def judge_leftovers(nodes: list[RunningNode], planned: set[int]) -> Iterator[Finding]:
    """Without a plan every node may be wanted: it is only named."""
    for node in nodes:
        words = f"process {node.pid} is {node.what}{f' at port {node.port}' if node.port else ''}"
        if planned and not node.is_service and node.port not in planned:
            yield found("warning", "leftovers", f"{words}; it is not in the cluster file", f"kill {node.pid}")
        elif planned and not node.is_service:
            yield found(
                "note", "leftovers", f"{words}; no service started it, so it does not come back after a restart"
            )
        else:
            yield ok("leftovers", words)
    if not nodes:
        yield ok("leftovers", "no node runs on this machine")


def running_nodes(listing: str) -> list[RunningNode]:
    """From `ps -axo pid=,ppid=,command=`."""
    rows = [line.split(maxsplit=2) for line in listing.splitlines()]
    commands = {int(pid): command for pid, _, command in rows}
    nodes = []
    for pid, parent, command in rows:
        match = _NODE.search(command)
        if match and int(pid) != os.getpid() and not _is_wrapper(command):
            is_service = _SUPERVISOR in commands.get(int(parent), "") or _is_service(int(pid))
            nodes.append(RunningNode(int(pid), _what(match[1]), _port(command), is_service))
    return nodes


def _what(command: str) -> str:
    return "a gateway" if command == "gateway" else "a node"


def _port(command: str) -> int | None:
    match = _PORT.search(command)
    return (int(match[1]) or None) if match else None


def _is_wrapper(command: str) -> bool:
    """A process that starts the node: a shell, env, or our supervisor."""
    return command.startswith(("sh ", "/bin/sh ", "env ")) or _SUPERVISOR in command


def _is_service(pid: int) -> bool:
    """Linux: the process is in the control group of a service. macOS: launchd is its parent."""
    try:
        if platform.system() == "Darwin":
            return output_of("ps", "-o", "ppid=", "-p", str(pid)).strip() == "1"
        return bool(re.search(r"disagg[^/]*\.service", Path(f"/proc/{pid}/cgroup").read_text()))
    except (OSError, CannotRead):
        return False
