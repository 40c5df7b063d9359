"""From a command line to a running node: load, warm up, listen, say so."""

import ipaddress
import json
import sys
from functools import partial
from typing import Any

from disaggregated_inference.engines import Engine, load_engine, require_engine
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.kv.dtype import require_dtype
from disaggregated_inference.models import ModelFiles, ModelStore
from disaggregated_inference.nodes.decode import DecodeNode
from disaggregated_inference.nodes.http import DRAIN_S, decode_app, prefill_app, serve_app
from disaggregated_inference.nodes.listen import listen, parse_address
from disaggregated_inference.nodes.logs import log_to_stderr
from disaggregated_inference.nodes.prefill import PrefillNode
from disaggregated_inference.nodes.worker import EngineThread
from disaggregated_inference.wire.codecs import CODECS
from disaggregated_inference.wire.paths import Address, spoken


def run_prefill(
    model: str,
    engine: str,
    host: str,
    port: int,
    kv_port: int,
    kv_address: list[str],
    token: str,
    insecure: bool,
    dtype: str,
    chunk: int,
    lease_s: float,
    log_level: str,
) -> None:
    addresses = [parse_address(text, kv_port) for text in kv_address or [host]]
    _require_token([host, *(name for name, _ in addresses)], token, insecure)
    _require_free([(host, port), *addresses])
    files, worker = _load(model, engine, dtype, log_level)
    try:
        node = PrefillNode(worker, addresses, chunk, lease_s)
        listening = [spoken(address) for address in node.kv_addresses]
        say = partial(
            _ready,
            role="prefill",
            model=files.name,
            backend=engine,
            host=host,
            kv_port=node.kv_addresses[0][1],
            kv_addresses=listening,
        )
        try:
            serve_app(prefill_app(node, files, token or None), host, port, say)
        finally:
            node.close(drain_s=DRAIN_S)
    finally:
        worker.stop()


def run_decode(
    model: str,
    engine: str,
    host: str,
    port: int,
    token: str,
    insecure: bool,
    dtype: str,
    chunk: int,
    kv_streams: int,
    kv_codec: str,
    log_level: str,
) -> None:
    if kv_codec not in CODECS:
        raise BadRequest(f"no codec {kv_codec!r}; there are {', '.join(CODECS)}")
    _require_token([host], token, insecure)
    _require_free([(host, port)])
    files, worker = _load(model, engine, dtype, log_level)
    codecs = tuple(dict.fromkeys((kv_codec, "raw")))
    say = partial(_ready, role="decode", model=files.name, backend=engine, host=host)
    try:
        node = DecodeNode(worker, chunk, kv_streams, codecs)
        try:
            serve_app(decode_app(node, files, token or None), host, port, say)
        finally:
            node.close()
    finally:
        worker.stop()


def _require_token(hosts: list[str], token: str, insecure: bool) -> None:
    """Who reaches the HTTP port gets tickets, and a ticket's secret opens the KV port: one token guards both."""
    open_hosts = [host for host in hosts if not _is_loopback(host)]
    if open_hosts and not (token or insecure):
        raise BadRequest(
            f"refusing to listen on {open_hosts[0]} without a token: give --token, or --insecure if you mean it"
        )


def _require_free(addresses: list[Address]) -> None:
    """A port that is taken shows before a model is loaded for minutes, not after."""
    for address in addresses:
        listen(address).close()


def _load(model: str, engine: str, dtype: str, log_level: str) -> tuple[ModelFiles, EngineThread]:
    log_to_stderr(log_level)
    require_engine(engine)
    files = ModelStore().resolve(model)
    options: dict[str, Any] = {"dtype": require_dtype(dtype)} if dtype else {}
    worker = EngineThread(partial(load_engine, engine, files, **options))
    worker.call(lambda: _warm_up(worker.engine))
    return files, worker


def _warm_up(engine: Engine) -> None:
    """The first request must not pay for the libraries' first time."""
    for length in engine.warm_lengths:
        if length + 1 < engine.spec.context_window:
            _read_once(engine, length)
    engine.counters.prompt_tokens = engine.counters.step_tokens = 0


def _read_once(engine: Engine, length: int) -> None:
    sequence = engine.open(length + 1)
    tokens = engine.prefill(sequence, [index % 50 for index in range(length)], lambda piece: piece.wait()).greedy()
    engine.step([sequence], tokens).greedy().tolist()
    engine.close(sequence)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ready(port: int, **about: object) -> None:
    """One line on standard output that a person or a program can wait for."""
    sys.stdout.write(json.dumps({"event": "ready", "port": port, **about}) + "\n")
    sys.stdout.flush()
