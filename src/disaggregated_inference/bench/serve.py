"""`disagg bench serve`: a node and mlx_lm.server, one after the other on this machine, with the same clients."""

import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disaggregated_inference.bench.processes import free_port
from disaggregated_inference.bench.prompts import resolve_model
from disaggregated_inference.bench.report import Report, Row, percentile, progress
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import ClientView, LocalNode, Process, running, shared_cores
from disaggregated_inference.models import ModelFiles

_TEXT = "Tell me about number {number}: where it appears in nature, in mathematics and in the history of people. "
_STREAMED = 256  # tokens of a simulated engine, for the server's cost per token

# The Linux build of mlx_lm comes with a BLAS that is sixty times slower than ours: both servers get the same one.
_WITH_BLAS = """
import sys
from disaggregated_inference.engines.mlx.blas import load_blas
load_blas()
from mlx_lm.server import main
sys.argv[0] = "mlx_lm.server"
main()
"""


Client = Callable[[str, int], ClientView]
Measured = tuple[list[ClientView], float]  # results, seconds of all


def run(model_name: str, clients: int, each: int, tokens: int, output: Path) -> Report:
    model = resolve_model(model_name)
    report = Report(
        f"{clients} clients x {each} requests, about 60 tokens in, {tokens} out, mlx, {model.name}, float32"
    )

    def measure(name: str, client: Client) -> Measured:
        progress(name)
        client(_prompt(10_000), 4)
        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            results = list(pool.map(lambda number: client(_prompt(number), tokens), range(clients * each)))
        return results, time.perf_counter() - started

    # mlx_lm.server cannot ignore the end of a text, so both get the same bias against its token.
    length = {"logit_bias": {str(token): -100.0 for token in model.spec.eos_tokens}, "temperature": 0.0}
    with _our_node("mlx", "--model", str(model.path), "--dtype", "float32", **length) as client:
        ours = measure("our node", client)
    with _mlx_server(model, length) as client:
        theirs = measure("mlx_lm.server", client)
    _rows(report, ours, theirs)
    progress("our node with a simulated engine that takes no time")
    with _our_node("simulated", "--model", "simulated:tiny", "--profile", "instant", ignore_eos=True) as client:
        _overhead_rows(report, client)
    return report.publish(output / "serve.json")


def _prompt(number: int) -> str:
    return _TEXT.format(number=number) * 2


def _rows(report: Report, ours: Measured, theirs: Measured) -> None:
    against = "mlx_lm.server"
    rates = [sum(result.tokens for result in results) / seconds for results, seconds in (ours, theirs)]
    report.add(Row("throughput", rates[0], "tok/s", rates[1], against))
    for name, field in (("first token", "first_token_s"), ("whole answer", "total_s")):
        for share in (50, 95, 99):
            pair = [percentile([getattr(result, field) for result in results], share) for results, _ in (ours, theirs)]
            report.add(Row(f"{name}, p{share}", pair[0], "s", pair[1], against))


def _overhead_rows(report: Report, client: Client) -> None:
    """All of it is the server: HTTP, admission, the batch, text and delivery; one client, one request at a time."""
    client("a", 1)
    short, long = (percentile([client("a", tokens).total_s for _ in range(50)], 50) for tokens in (1, _STREAMED))
    report.add(Row("the server around the engine, a request of one token, p50", short * 1e3, "ms"))
    report.add(Row("the server around the engine, each further token", (long - short) / (_STREAMED - 1) * 1e6, "µs"))


@contextmanager
def _our_node(engine: str, *arguments: str, **params: Any) -> Iterator[Client]:
    node = LocalNode("decode", engine, "--prefix-memory", "0", *arguments)

    def client(prompt: str, tokens: int) -> ClientView:
        body = {"prompt": prompt, "max_new_tokens": tokens, "stream": True} | params
        return _stream(node.url, "/generate", body, lambda event: "token" in event)

    with running([node]):
        yield client


@contextmanager
def _mlx_server(model: ModelFiles, params: dict[str, Any]) -> Iterator[Client]:
    if not (shutil.which("mlx_lm.server", path=str(Path(sys.executable).parent)) or shutil.which("mlx_lm.server")):
        raise DisaggError("mlx_lm.server is not installed: pip install 'disaggregated-inference[mlx]'")
    port = free_port()
    arguments = ["--model", str(model.path), "--port", str(port), "--log-level", "ERROR"]
    command = [sys.executable, "-c", _WITH_BLAS, *arguments]
    server = Process("mlx_lm.server", command, port, shared_cores() | os.environ)  # threads as our node

    def client(prompt: str, tokens: int) -> ClientView:
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True} | params
        return _stream(server.url, "/v1/completions", body, lambda event: bool(event.get("choices")))

    with running([server]):
        yield client


def _post(url: str, path: str, body: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Some servers accept five waiting clients and reset the rest: those retry."""
    for _ in range(100):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            return connection, connection.getresponse()
        except (ConnectionError, http.client.RemoteDisconnected):
            connection.close()
            time.sleep(0.05)
    raise DisaggError(f"{url} accepts no connection")


def _stream(url: str, path: str, body: dict[str, Any], is_token: Callable[[dict[str, Any]], bool]) -> ClientView:
    view = ClientView()
    connection, response = _post(url, path, json.dumps(body))
    if response.status != 200:
        raise DisaggError(f"{path}: {response.status} {response.read(300)!r}")
    for line in response:
        if line.startswith(b"data: {") and is_token(json.loads(line[6:])):
            view.add_token()
    connection.close()
    view.end()
    return view
