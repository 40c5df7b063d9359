"""`disagg bench wire`: the KV sender and receiver, with checksums, compared with bare sockets in the same run; the same
with TLS, and the authenticated mode compared with the plain one."""

import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from disaggregated_inference.bench.processes import free_port
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.bench.security_overhead import add_handover
from disaggregated_inference.identity import Authority, Identity
from disaggregated_inference.kv import Fingerprint, KVLayout, KVSlice, LayerPlan, Weights
from disaggregated_inference.kv_transfer import (
    Connection,
    End,
    Hello,
    Outbox,
    Welcome,
    bytes_of,
    fetch_stream,
    serve,
    start_tls,
)
from disaggregated_inference.timeouts import BenchTimeouts

# Qwen3-30B-A3B's rows in chunks of 8,192 tokens: 16.8 MB a slice.
LAYOUT = KVLayout(layers=(LayerPlan(),) * 48, kv_heads=4, head_dim=128)
TOKENS = 8192
_VOCABULARY = 16
_BUFFERS = 12  # 201 MB: more than a processor's cache


class WireLink(NamedTuple):
    """How the two sides talk. `identity`: a folder, for TLS."""

    identity: str = ""
    secret: str = ""  # for the authenticated mode

    def bare(self, sock: socket.socket, server: bool) -> socket.socket:
        """As a program without our code would do it."""
        if not self.identity:
            return sock
        identity = Identity(Path(self.identity))
        context = identity.server_context if server else identity.kv_client_context
        return context.wrap_socket(sock, server_side=server)

    def connection(self, sock: socket.socket, server: bool) -> Connection:
        if not self.identity:
            return Connection(sock)
        identity = Identity(Path(self.identity))
        context = identity.server_context if server else identity.kv_client_context
        return Connection(start_tls(sock, context, BenchTimeouts().handshake_s, server))


class Run(NamedTuple):
    seconds: float
    cpu_seconds: float  # of both processes


def _fingerprint() -> Fingerprint:
    return Fingerprint(
        architecture="bench",
        layout=LAYOUT,
        rope_frequencies=(1.0,),
        rope_scale=1.0,
        vocabulary=_VOCABULARY,
        tokenizer="",
        chat_template="",
        weights=Weights(norms="", format="", sample=""),
    )


def _slices(count: int) -> list[KVSlice]:
    """Not all from the same memory: it would stay in the processor's cache, where checksums are cheap."""
    memory = np.random.default_rng(0).integers(0, 1 << 16, (min(count, _BUFFERS), 2, TOKENS, 4, 128), np.uint16)
    rows = [memory[number % len(memory)] for number in range(count)]
    return [KVSlice(layer % 48, 0, "bfloat16", keys, values) for layer, (keys, values) in enumerate(rows)]


def _send_raw(port: int, count: int, link: WireLink, cpu: "multiprocessing.Queue[float]") -> None:
    """Only bytes: both sides know the length."""
    pieces = _slices(count)
    with link.bare(socket.create_connection(("127.0.0.1", port)), server=True) as sock:
        started = time.process_time()
        for piece in pieces:
            sock.sendall(bytes_of(piece.keys))
            sock.sendall(bytes_of(piece.values))
        sock.recv(1)
        cpu.put(time.process_time() - started)


def _send_ours(port: int, count: int, link: WireLink, cpu: "multiprocessing.Queue[float]") -> None:
    outbox = Outbox()
    for piece in _slices(count):
        outbox.put(piece)
    outbox.put_logits(np.zeros(_VOCABULARY, np.float32))
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="", prompt_tokens=TOKENS, dtype="bfloat16", codec="raw", chunk_tokens=TOKENS)
    connection = link.connection(socket.create_connection(("127.0.0.1", port)), server=True)
    started = time.process_time()
    serve(
        connection,
        lambda hello: (welcome, outbox),
        secret_of=(lambda ticket: link.secret) if link.secret else None,
    )
    cpu.put(time.process_time() - started)


def _receive_raw(sock: socket.socket, count: int, link: WireLink) -> Callable[[], None]:
    buffer = memoryview(bytearray(2 * TOKENS * 4 * 128 * 2))
    sock = link.bare(sock, server=False)

    def receive() -> None:
        for _ in range(count):
            view = buffer
            while view:
                view = view[sock.recv_into(view) :]
        sock.send(b"k")
        sock.close()

    return receive


def _receive_ours(sock: socket.socket, count: int, link: WireLink) -> Callable[[], None]:
    keyed = True if link.secret else msgspec.UNSET
    hello = Hello(ticket="", secret=link.secret, fetch="", fingerprint=_fingerprint(), keyed=keyed)
    connection = link.connection(sock, server=False)

    def receive() -> None:
        fetch_stream(connection, hello, LAYOUT, _VOCABULARY, TOKENS, lambda piece: None, lambda logits: None)

    return receive


Receive = Callable[[socket.socket, int, WireLink], Callable[[], None]]


def _measure(send: Callable[..., None], receive: Receive, count: int, link: WireLink) -> Run:
    context = multiprocessing.get_context("spawn")
    cpu: multiprocessing.Queue[float] = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = context.Process(target=send, args=(listener.getsockname()[1], count, link, cpu))
        sender.start()
        sock, _ = listener.accept()
        work = receive(sock, count, link)
        started, used = time.perf_counter(), time.process_time()
        work()
        seconds, used = time.perf_counter() - started, time.process_time() - used
        used += cpu.get(timeout=30)
        sender.join()
    return Run(seconds, used)


def _iperf3_bytes_s() -> float:
    """One connection on loopback without Python."""
    port = str(free_port())
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        command = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "5", "-J"]
        for _ in range(20):
            result = subprocess.run(command, capture_output=True)
            if result.returncode == 0:
                break
            time.sleep(0.1)  # the server has not started yet
        return float(json.loads(result.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
    finally:
        server.terminate()
        server.wait()


def run(megabytes: int, repeats: int, output: Path) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        identity = str(Authority.create(Path(folder) / "keys").issue("bench", ("127.0.0.1",)))
        report = _throughput(megabytes, repeats, identity)
        progress("wire: hand-over with and without TLS")
        add_handover(report, identity, 20 * repeats)
    return report.publish(output / "wire.json")


def _throughput(megabytes: int, repeats: int, identity: str) -> Report:
    count = max(1, round(megabytes * 1e6 / LAYOUT.row_bytes("bfloat16") / TOKENS))
    size = count * TOKENS * LAYOUT.row_bytes("bfloat16")
    bare, ours = (_send_raw, _receive_raw), (_send_ours, _receive_ours)
    plain, tls, keyed = WireLink(), WireLink(identity), WireLink(secret="secret")
    contenders = {
        "bare": (*bare, plain),
        "ours": (*ours, plain),
        "keyed": (*ours, keyed),
        "bare TLS": (*bare, tls),
        "our TLS": (*ours, tls),
    }
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for number in range(repeats):
        progress(f"wire: round {number + 1} of {repeats}, {size / 1e6:.0f} MB each")
        for name in list(contenders) if number % 2 else reversed(contenders):
            send, receive, link = contenders[name]
            runs[name].append(_measure(send, receive, count, link))
    goodput = {name: [size / run.seconds / 1e9 for run in each] for name, each in runs.items()}
    cost = {name: [run.cpu_seconds / size * 1e9 for run in each] for name, each in runs.items()}
    report = Report("wire, loopback, one connection, median of the rounds and of their ratios")
    framed = "goodput, framed and checksummed"
    report.add(_compared(framed, "GB/s", goodput["ours"], goodput["bare"], "bare sockets", 0.8))
    report.add(_compared("CPU, both sides", "s/GB", cost["ours"], cost["bare"], "bare sockets"))
    report.add(_compared("goodput, authenticated", "GB/s", goodput["keyed"], goodput["ours"], "plain", 0.8))
    tls_sockets = "bare TLS sockets"
    report.add(_compared("goodput, TLS", "GB/s", goodput["our TLS"], goodput["bare TLS"], tls_sockets, 0.85))
    report.add(_compared("CPU, TLS, both sides", "s/GB", cost["our TLS"], cost["bare TLS"], tls_sockets))
    if shutil.which("iperf3"):
        progress("wire: iperf3, 5 s")
        report.add(Row(framed, statistics.median(goodput["ours"]), "GB/s", _iperf3_bytes_s() / 1e9, "iperf3"))
    return report


def _compared(
    what: str, unit: str, ours: list[float], baseline: list[float], against: str, goal: float | None = None
) -> Row:
    """Both ran in each round one after the other: other load on the machine hits both, and the median drops the rounds
    in which it did not. The best round of each would compare two different moments."""
    ratios = tuple(mine / theirs for mine, theirs in zip(ours, baseline, strict=True))
    return Row(what, statistics.median(ours), unit, statistics.median(baseline), against, goal, ratios=ratios)
