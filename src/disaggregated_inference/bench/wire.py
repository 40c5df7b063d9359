"""`disagg bench wire`: the KV sender and receiver, with checksums, compared with bare sockets in the same run."""

import json
import multiprocessing
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from disaggregated_inference.bench.processes import free_port
from disaggregated_inference.bench.report import Report, Row, progress
from disaggregated_inference.kv import Fingerprint, KVLayout, KVSlice, LayerPlan, Weights
from disaggregated_inference.kv_transfer import Connection, End, Hello, Outbox, Welcome, bytes_of, fetch_stream, serve

# Qwen3-30B-A3B's rows in chunks of 8,192 tokens: 16.8 MB a slice.
LAYOUT = KVLayout(layers=(LayerPlan(),) * 48, kv_heads=4, head_dim=128)
TOKENS = 8192
_VOCABULARY = 16
_BUFFERS = 12  # 201 MB: more than a processor's cache


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


def _send_raw(port: int, count: int, cpu: "multiprocessing.Queue[float]") -> None:
    """Only bytes: both sides know the length."""
    pieces = _slices(count)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started = time.process_time()
        for piece in pieces:
            sock.sendall(bytes_of(piece.keys))
            sock.sendall(bytes_of(piece.values))
        sock.recv(1)
        cpu.put(time.process_time() - started)


def _send_ours(port: int, count: int, cpu: "multiprocessing.Queue[float]") -> None:
    outbox = Outbox()
    for piece in _slices(count):
        outbox.put(piece)
    outbox.put_logits(np.zeros(_VOCABULARY, np.float32))
    outbox.finish(End(prompt_tokens=TOKENS))
    welcome = Welcome(epoch="", prompt_tokens=TOKENS, dtype="bfloat16", codec="raw", chunk_tokens=TOKENS)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        started = time.process_time()
        serve(Connection(sock), lambda hello: (welcome, outbox))
        cpu.put(time.process_time() - started)


def _receive_raw(sock: socket.socket, count: int) -> None:
    buffer = memoryview(bytearray(2 * TOKENS * 4 * 128 * 2))
    for _ in range(count):
        view = buffer
        while view:
            view = view[sock.recv_into(view) :]
    sock.send(b"k")
    sock.close()


def _receive_ours(sock: socket.socket, count: int) -> None:
    hello = Hello(ticket="", secret="", fetch="", fingerprint=_fingerprint())
    fetch_stream(Connection(sock), hello, LAYOUT, _VOCABULARY, TOKENS, lambda piece: None, lambda logits: None)


def _measure(send: Callable[..., None], receive: Callable[[socket.socket, int], None], count: int) -> Run:
    context = multiprocessing.get_context("spawn")
    cpu: multiprocessing.Queue[float] = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = context.Process(target=send, args=(listener.getsockname()[1], count, cpu))
        sender.start()
        sock, _ = listener.accept()
        started, used = time.perf_counter(), time.process_time()
        receive(sock, count)
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
    count = max(1, round(megabytes * 1e6 / LAYOUT.row_bytes("bfloat16") / TOKENS))
    size = count * TOKENS * LAYOUT.row_bytes("bfloat16")
    raw, ours = [], []
    for number in range(repeats):
        progress(f"wire: round {number + 1} of {repeats}, {size / 1e6:.0f} MB each")
        raw.append(_measure(_send_raw, _receive_raw, count))
        ours.append(_measure(_send_ours, _receive_ours, count))
    report = Report("wire, loopback, one connection, best of the rounds")
    goodput, bare = (size / min(r.seconds for r in runs) / 1e9 for runs in (ours, raw))
    report.add(Row("goodput, framed and checksummed", goodput, "GB/s", bare, "bare sockets", 0.8))
    cost, bare_cost = (min(r.cpu_seconds for r in runs) / size * 1e9 for runs in (ours, raw))
    report.add(Row("CPU, both sides", cost, "s/GB", bare_cost, "bare sockets"))
    if shutil.which("iperf3"):
        progress("wire: iperf3, 5 s")
        report.add(Row("goodput, framed and checksummed", goodput, "GB/s", _iperf3_bytes_s() / 1e9, "iperf3"))
    return report.publish(output / "wire.json")
