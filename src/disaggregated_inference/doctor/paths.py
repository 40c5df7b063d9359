"""Paths between prefill and decode machines: measured one after the other, then judged."""

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.cluster.shell import Shell, path_word
from disaggregated_inference.doctor.findings import Finding, found, ok, unknown
from disaggregated_inference.doctor.path_probe import MAX_BYTES
from disaggregated_inference.errors import MachineError
from disaggregated_inference.timeouts import DoctorTimeouts

_SLOW_SHARE, _LOW_SHARE = 0.1, 0.5  # of the link's rate
_SLOW_ANSWER_S = 0.005
_FAST_MBPS, _JUMBO_BYTES = 25_000, 8_000
_FASTER = 1.5
_HEADERS_BYTES = 52  # of TCP and IPv4, with timestamps


class PathEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An interface, as far as its system tells."""

    name: str = ""
    mtu: int | None = None
    speed_mbps: int | None = None
    wifi: bool = False


class MeasuredPath(msgspec.Struct, frozen=True, kw_only=True):
    """From a prefill node's KV address to a decode node. `error`: there was no connection."""

    prefill: str
    decode: str
    address: str
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    round_trip_s: float = 0.0
    packet_bytes: int = 0
    closed_port: str = ""  # why the port of a node that runs does not answer
    sender: PathEnd = PathEnd()
    receiver: PathEnd = PathEnd()

    @property
    def gbps(self) -> float:
        return self.bytes * 8 / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def words(self) -> str:
        return f"{self.prefill} -> {self.decode} by {self.address}"


class PathMachine(msgspec.Struct, frozen=True):
    """A machine with an open shell, and the folder of its deployment."""

    shell: Shell
    folder: str

    def probe(self, *arguments: str) -> str:
        """The script that runs the probe: with the deployed Python, else with the system's."""
        source = shlex.quote((Path(__file__).parent / "path_probe.py").read_text(encoding="utf-8"))
        python = path_word(f"{self.folder}/current/venv/bin/python")
        choice = f'PY={python}; [ -x "$PY" ] || PY=python3; '
        return f'{choice}exec "$PY" -c {source} {" ".join(map(shlex.quote, arguments))}'


async def measure_path(
    sender: PathMachine,
    receiver: PathMachine,
    path: MeasuredPath,
    port: int,
    seconds: float,
    timeouts: DoctorTimeouts = DoctorTimeouts(),
) -> MeasuredPath:
    """The prefill machine listens at the address, the decode machine connects and receives, for `seconds` at most."""
    try:
        async with sender.shell.hold(sender.probe("serve", path.address, str(port))) as line:
            told = _decoded(line)
            if "error" in told:
                return _failed(path, f"{sender.shell.name} cannot listen there: {told['error']}")
            arguments = ("fetch", path.address, str(told["port"]), str(MAX_BYTES), str(seconds), str(port))
            secret = str(told["secret"]).encode() + b"\n"
            done = await receiver.shell.run(receiver.probe(*arguments), secret, timeouts.path_s)
    except MachineError as error:
        return _failed(path, str(error))
    measured = _decoded(done.stdout) if done.ok else {"error": done.last_words or "the probe failed"}
    if "error" in measured:
        return _failed(path, str(measured["error"]))
    ends = {"sender": msgspec.convert(told["interface"], PathEnd)}
    ends["receiver"] = msgspec.convert(measured.pop("interface"), PathEnd)
    return msgspec.structs.replace(path, **measured, **ends)


def _decoded(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:
        return {"error": "Python 3 is missing there, or could not run the probe"}
    return content if isinstance(content, dict) else {"error": "the probe answers something else"}


def _failed(path: MeasuredPath, error: str) -> MeasuredPath:
    return msgspec.structs.replace(path, error=error)


def judge_pair(paths: Sequence[MeasuredPath], link_gbps: float | None = None) -> Iterator[Finding]:
    """All paths of one pair of nodes, in their order of preference. `link_gbps`: of the cluster file."""
    open_paths = [path for path in paths if not path.error]
    for path in paths:
        if path.error:
            other = "another path works" if open_paths else "no path works between them"
            yield found("warning" if open_paths else "error", "path", f"{path.words}: {path.error}; {other}")
        else:
            yield from _judge_path(path, link_gbps)
    yield from _judge_order(open_paths)


def _judge_path(path: MeasuredPath, link_gbps: float | None) -> Iterator[Finding]:
    yield _judge_bandwidth(path, link_gbps or _rated_gbps(path))
    if path.closed_port:
        what = f"{path.words}: another port is open, and not the node's: {path.closed_port}"
        yield found("error", "path", what, "Open the port in the firewall of the prefill machine: see firewall")
    if path.round_trip_s > _SLOW_ANSWER_S:
        yield found("warning", "path-latency", f"{path.words}: an answer takes {path.round_trip_s * 1e3:.1f} ms")
    for end, machine in ((path.sender, path.prefill), (path.receiver, path.decode)):
        if end.wifi:
            yield found("warning", "path-wifi", f"{path.words}: {machine} uses Wi-Fi ({end.name}) for it")
    yield from _judge_packets(path)


def _judge_bandwidth(path: MeasuredPath, rated_gbps: float | None) -> Finding:
    measured = f"{path.words}: {path.gbps:.3g} Gb/s, {path.round_trip_s * 1e3:.2f} ms"
    if rated_gbps is None:
        return ok("path-bandwidth", f"{measured}; the system does not tell the rate of the link")
    compared = f"{measured}; the link has {rated_gbps:.3g} Gb/s"
    if path.gbps < _SLOW_SHARE * rated_gbps:
        return found("warning", "path-bandwidth", f"{compared}: less than a tenth arrives")
    if path.gbps < _LOW_SHARE * rated_gbps:
        return found("note", "path-bandwidth", f"{compared}: less than half arrives")
    return ok("path-bandwidth", compared)


def _rated_gbps(path: MeasuredPath) -> float | None:
    """Of the slower interface; None if one of them is unknown."""
    rates = (path.sender.speed_mbps, path.receiver.speed_mbps)
    return min(rate for rate in rates if rate) / 1000 if all(rates) else None


def _judge_packets(path: MeasuredPath) -> Iterator[Finding]:
    sizes = (path.sender.mtu, path.receiver.mtu)
    if all(sizes) and sizes[0] != sizes[1]:
        what = f"{path.words}: the MTU is {sizes[0]} on one side and {sizes[1]} on the other"
        yield found(
            "warning", "path-mtu", what, "Set the same MTU on both machines: sudo ip link set INTERFACE mtu 9000"
        )
    elif (_rated_gbps(path) or 0) * 1000 >= _FAST_MBPS and 0 < path.packet_bytes < _JUMBO_BYTES:
        yield found("note", "path-mtu", f"{path.words}: packets of {path.packet_bytes + _HEADERS_BYTES} bytes")


def _judge_order(paths: Sequence[MeasuredPath]) -> Iterator[Finding]:
    if len(paths) > 1:
        fastest = max(paths, key=lambda path: path.gbps)
        if fastest.gbps > _FASTER * paths[0].gbps:
            what = f"{fastest.words} has {fastest.gbps:.3g} Gb/s, {paths[0].address} before it {paths[0].gbps:.3g}"
            yield found("warning", "path-order", what)


def not_measured(path: MeasuredPath, reason: str) -> Finding:
    return unknown("path", f"{path.words}: {reason}")
