"""`disagg bench serve`: a node and mlx_lm.server, one after the other on this machine, the same clients for both."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from disaggregated_inference.bench.report import Report, Row, percentile
from disaggregated_inference.cli.progress import steps
from disaggregated_inference.cluster.local_nodes import LocalNode, shared_cores
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.models import ModelFiles, ModelStore

_TEXT = "Tell me about number {number}: where it appears in nature, in mathematics and in the history of people. "

_STREAMED = 256  # tokens, of an engine that takes no time: for what each of them costs


class ServeResult(NamedTuple):
    """One request as its client saw it."""

    first_token_s: float
    total_s: float
    tokens: int


Ask = Callable[[str, int], ServeResult]


def run(model_name: str, clients: int, each: int, tokens: int, output: Path) -> Report:
    console = Console()
    with steps() as fetching:
        model = ModelStore().resolve(model_name, fetching)
    report = Report(
        f"{clients} clients x {each} requests, about 60 tokens in, {tokens} out, mlx, {model.name}, float32"
    )

    def measured(name: str, ask: Ask) -> tuple[list[ServeResult], float]:
        console.print(name, style="dim", highlight=False)
        ask(_prompt(10_000), 4)
        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            served = list(pool.map(lambda number: ask(_prompt(number), tokens), range(clients * each)))
        return served, time.perf_counter() - started

    with _ours("mlx", "--model", str(model.path), "--dtype", "float32") as ask:
        ours = measured("our node", ask)
    with _theirs(model) as ask:
        theirs = measured("mlx_lm.server", ask)
    _rows(report, ours, theirs)
    console.print("our node around a simulated engine that takes no time", style="dim", highlight=False)
    with _ours("simulated", "--model", "simulated:tiny", "--profile", "instant") as ask:
        _overhead_rows(report, ask)
    report.show(console)
    path = output / "serve.json"
    report.save(path)
    console.print(f"saved {path}", style="dim", highlight=False)
    return report


def _prompt(number: int) -> str:
    return _TEXT.format(number=number) * 2


def _rows(report: Report, ours: tuple[list[ServeResult], float], theirs: tuple[list[ServeResult], float]) -> None:
    against = "mlx_lm.server"
    rates = [sum(each.tokens for each in served) / seconds for served, seconds in (ours, theirs)]
    report.add(Row("throughput", rates[0], "tok/s", rates[1], against))
    for name, field in (("first token", "first_token_s"), ("whole answer", "total_s")):
        for share in (50, 95, 99):
            pair = [percentile([getattr(each, field) for each in served], share) for served, _ in (ours, theirs)]
            report.add(Row(f"{name}, p{share}", pair[0], "s", pair[1], against))


def _overhead_rows(report: Report, ask: Ask) -> None:
    """All of it is the server: HTTP, admission, the batch, text and delivery; one client, one thing at a time."""
    ask("a", 1)
    short, long = (percentile([ask("a", tokens).total_s for _ in range(50)], 50) for tokens in (1, _STREAMED))
    report.add(Row("the server around the engine, a request of one token, p50", short * 1e3, "ms"))
    report.add(Row("the server around the engine, each further token", (long - short) / (_STREAMED - 1) * 1e6, "µs"))


@contextmanager
def _ours(engine: str, *arguments: str) -> Iterator[Ask]:
    node = LocalNode("decode", engine, "--prefix-memory", "0", *arguments)
    try:
        port = node.ready()

        def ask(prompt: str, tokens: int) -> ServeResult:
            body = {"prompt": prompt, "max_new_tokens": tokens, "ignore_eos": True, "stream": True}
            return _stream(port, "/generate", body, lambda event: "token" in event)

        yield ask
    finally:
        node.stop()


@contextmanager
def _theirs(model: ModelFiles) -> Iterator[Ask]:
    command = shutil.which("mlx_lm.server", path=str(Path(sys.executable).parent)) or shutil.which("mlx_lm.server")
    if not command:
        raise DisaggError("mlx_lm.server is not installed: pip install 'disaggregated-inference[mlx]'")
    port = _free_port()
    arguments = ["--model", str(model.path), "--port", str(port), "--log-level", "ERROR"]
    process = subprocess.Popen(
        [sys.executable, "-c", _WITH_BLAS, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=shared_cores() | os.environ,  # as many threads as our node has
    )
    eos = model.spec.eos_tokens

    def ask(prompt: str, tokens: int) -> ServeResult:
        bias = {str(token): -100.0 for token in eos}  # it knows no ignore_eos
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0.0, "logit_bias": bias}
        return _stream(port, "/v1/completions", body, lambda event: bool(event.get("choices")))

    try:
        _await_server(port, process)
        yield ask
    finally:
        process.terminate()
        process.wait()


# Its Linux build carries a BLAS sixty times slower than ours: both get the same one.
_WITH_BLAS = """
import sys
from disaggregated_inference.engines.mlx.blas import load_blas
load_blas()
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


def _await_server(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise DisaggError("mlx_lm.server did not start")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _posted(port: int, path: str, body: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Some servers let five clients wait to be accepted and reset the rest: those come again."""
    for _ in range(100):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            connection.close()
            time.sleep(0.05)
    raise DisaggError(f"port {port} accepts no connection")


def _stream(port: int, path: str, body: dict[str, Any], is_token: Callable[[dict[str, Any]], bool]) -> ServeResult:
    started, first, tokens = time.perf_counter(), 0.0, 0
    connection, response = _posted(port, path, json.dumps(body))
    if response.status != 200:
        raise DisaggError(f"{path}: {response.status} {response.read(300)!r}")
    for line in response:
        if line.startswith(b"data: {") and is_token(json.loads(line[6:])):
            first = first or time.perf_counter() - started
            tokens += 1
    connection.close()
    return ServeResult(first, time.perf_counter() - started, tokens)
