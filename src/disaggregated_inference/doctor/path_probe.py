"""Measures one path between two machines: connection, latency, bandwidth, interface, packet size.

This file runs alone: the doctor sends it to both machines by ssh, where our package may be missing, so it uses only the
standard library of Python 3.8. The prefill machine serves and sends, the decode machine connects and receives, as KV
transfers do. Time and bytes are bounded on both sides, and the listener takes only clients that know its secret.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import re
import secrets
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

MAX_BYTES, MAX_S = 1_000_000_000, 10.0  # longer tests have frozen machines
STREAMS, ROUND_TRIPS = 4, 32
BLOCK = 1 << 20
WAIT_S = 15.0  # for the other side
SECRET_BYTES = 32


def serve(host: str, port: int) -> None:
    """Answer measurements at `host` until standard input ends. The port is a free one if `port` is taken."""
    server = _listen(host, port)
    secret = secrets.token_hex(SECRET_BYTES // 2)
    print(json.dumps({"port": server.getsockname()[1], "secret": secret, "interface": interface_of(host)}), flush=True)
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, secret), daemon=True).start()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=16)
    except OSError:
        return socket.create_server((host, 0), family=family, backlog=16)


def _answer(connection: socket.socket, secret: str) -> None:
    with connection:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if hmac.compare_digest(_exactly(connection, SECRET_BYTES), secret.encode()):
                _echo(connection)
                _send(connection)
        except OSError:
            pass  # the client has enough


def _echo(connection: socket.socket) -> None:
    for _ in range(ROUND_TRIPS):
        connection.sendall(_exactly(connection, 1))


def _send(connection: socket.socket) -> None:
    _exactly(connection, 1)
    block, deadline, sent = bytes(BLOCK), time.monotonic() + MAX_S, 0
    while time.monotonic() < deadline and sent < MAX_BYTES // STREAMS:
        connection.sendall(block)
        sent += BLOCK


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise OSError("the connection ended")
        content += part
    return content


def fetch(host: str, port: int, secret: str, most_bytes: int, most_s: float) -> dict[str, Any]:
    """Measure the path to a `serve`: round trips first, then all streams together."""
    streams = [_connect(host, port, secret) for _ in range(STREAMS)]
    first = streams[0]
    try:
        trips = [_round_trip(first) for _ in range(ROUND_TRIPS)]
        for stream in streams[1:]:
            for _ in range(ROUND_TRIPS):
                _round_trip(stream)
        size_bytes, seconds = _receive(streams, min(most_bytes, MAX_BYTES), min(most_s, MAX_S))
        return {
            "bytes": size_bytes,
            "seconds": seconds,
            "round_trip_s": statistics.median(trips),
            "packet_bytes": first.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG),
            "interface": interface_of(first.getsockname()[0]),
        }
    finally:
        for stream in streams:
            stream.close()


def _connect(host: str, port: int, secret: str) -> socket.socket:
    stream = socket.create_connection((host, port), timeout=5.0)
    stream.settimeout(WAIT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sendall(secret.encode())
    return stream


def closed_port(host: str, port: int, node_port: list[str]) -> str:
    """Why the port of the node itself, which runs, does not answer although another does; empty if it does."""
    if not node_port or int(node_port[0]) == port:
        return ""
    try:
        socket.create_connection((host, int(node_port[0])), timeout=5.0).close()
    except OSError as error:
        return f"port {node_port[0]}: {error.strerror or error}"
    return ""


def _round_trip(stream: socket.socket) -> float:
    began = time.perf_counter()
    stream.sendall(b"?")
    _exactly(stream, 1)
    return time.perf_counter() - began


def _receive(streams: list[socket.socket], most_bytes: int, most_s: float) -> tuple[int, float]:
    """Bytes and seconds from the first byte on, until either limit."""
    counts, end = [0] * len(streams), threading.Event()
    times: list[float] = []
    ended: list[int] = []

    def read(place: int) -> None:
        view = memoryview(bytearray(BLOCK))
        try:
            while not end.is_set():
                part = streams[place].recv_into(view)
                times.append(time.perf_counter())
                counts[place] += part
                if sum(counts) >= most_bytes:
                    end.set()
                if not part:
                    break
        except OSError:
            pass  # what the others receive counts
        ended.append(place)
        if len(ended) == len(streams):
            end.set()

    threads = [threading.Thread(target=read, args=(place,), daemon=True) for place in range(len(streams))]
    began = time.perf_counter()
    for stream, thread in zip(streams, threads):  # noqa: B905  Python 3.8
        stream.sendall(b"!")
        thread.start()
    end.wait(most_s)
    end.set()
    total, last = sum(counts), max(times, default=began)
    return total, max(last - began, 1e-6)


def interface_of(address: str) -> dict[str, Any]:
    """The interface that has this address: name, mtu, speed_mbps and wifi, as far as the system tells."""
    try:
        found = _mac_interface(address) if platform.system() == "Darwin" else _linux_interface(address)
    except (OSError, ValueError, subprocess.SubprocessError):
        found = None
    return found or {"name": "", "mtu": None, "speed_mbps": None, "wifi": False}


def local_addresses() -> list[str]:
    """Every address of this machine; none if the system does not tell."""
    try:
        if platform.system() == "Darwin":
            return re.findall(r"^\s+inet6? ([0-9a-fA-F.:]+)", _output("ifconfig"), re.MULTILINE)
        return re.findall(r"inet6? ([0-9a-fA-F.:]+)/", _output("ip", "-o", "address"))
    except (OSError, subprocess.SubprocessError):
        return []


def _linux_interface(address: str) -> dict[str, Any] | None:
    for line in _output("ip", "-o", "address").splitlines():
        fields = line.split()
        if fields[3].partition("/")[0] == address:
            return linux_facts(fields[1].partition("@")[0])
    return None


def linux_facts(name: str, root: str = "/sys/class/net") -> dict[str, Any]:
    folder = os.path.join(root, name)
    return {
        "name": name,
        "mtu": _number(os.path.join(folder, "mtu")),
        "speed_mbps": _number(os.path.join(folder, "speed")),
        "wifi": any(os.path.exists(os.path.join(folder, part)) for part in ("wireless", "phy80211")),
    }


def _number(path: str) -> int | None:
    """None: the driver does not tell; it also writes -1 for that."""
    try:
        with open(path) as file:
            number = int(file.read())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _mac_interface(address: str) -> dict[str, Any] | None:
    return mac_facts(address, _output("ifconfig"), _output("networksetup", "-listallhardwareports"))


def mac_facts(address: str, ifconfig: str, hardware_ports: str) -> dict[str, Any] | None:
    """From the output of `ifconfig` and `networksetup -listallhardwareports`."""
    wifi = {
        match[2] for match in re.finditer(r"Hardware Port: (.+)\nDevice: (\S+)", hardware_ports) if "Wi-Fi" in match[1]
    }
    for block in re.split(r"\n(?=\S)", ifconfig):
        if re.search(r"\sinet6? " + re.escape(address) + r"[ %]", block):
            name = block.partition(":")[0]
            mtu = re.search(r"\bmtu (\d+)", block)
            speed = re.search(r"media: .*?\((\d+)(G?)[bB]ase", block)
            rate = int(speed[1]) * (1000 if speed[2] else 1) if speed else None
            return {"name": name, "mtu": int(mtu[1]) if mtu else None, "speed_mbps": rate, "wifi": name in wifi}
    return None


def _output(program: str, *arguments: str) -> str:
    path = os.environ.get("PATH", "") + ":/sbin:/usr/sbin:/usr/bin:/bin"
    done = subprocess.run(
        [program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=10, env={"PATH": path}
    )
    return done.stdout.decode(errors="replace")


def main(arguments: list[str]) -> int:
    action, host, port = arguments[:3]
    if action == "serve":
        try:
            serve(host, int(port))
        except OSError as error:
            print(json.dumps({"error": error.strerror or str(error), "errno": error.errno or 0}), flush=True)
        return 0
    secret, most_bytes, most_s = sys.stdin.readline().strip(), int(arguments[3]), float(arguments[4])
    try:
        measured = fetch(host, int(port), secret, most_bytes, most_s)
        print(json.dumps({**measured, "closed_port": closed_port(host, int(port), arguments[5:])}))
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error), "errno": error.errno or 0}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
