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
from disaggregated_inference.nodes.http import decode_app, prefill_app, serve_app
from disaggregated_inference.nodes.prefill import PrefillNode
from disaggregated_inference.nodes.worker import EngineThread


def run_prefill(
    model: str,
    engine: str,
    host: str,
    port: int,
    kv_port: int,
    token: str,
    insecure: bool,
    dtype: str,
    chunk: int,
    lease_s: float,
) -> None:
    files, worker = _load(model, engine, host, token, insecure, dtype)
    node = PrefillNode(worker, host, kv_port, chunk, lease_s)
    say = partial(_ready, role="prefill", model=files.name, backend=engine, host=host, kv_port=node.kv_address[1])
    try:
        serve_app(prefill_app(node, files, token or None), host, port, say)
    finally:
        node.close()
        worker.stop()


def run_decode(model: str, engine: str, host: str, port: int, token: str, insecure: bool, dtype: str) -> None:
    files, worker = _load(model, engine, host, token, insecure, dtype)
    say = partial(_ready, role="decode", model=files.name, backend=engine, host=host)
    try:
        serve_app(decode_app(DecodeNode(worker), files, token or None), host, port, say)
    finally:
        worker.stop()


def _load(
    model: str, engine: str, host: str, token: str, insecure: bool, dtype: str
) -> tuple[ModelFiles, EngineThread]:
    if not (token or insecure or _is_loopback(host)):
        raise BadRequest(f"refusing to listen on {host} without a token: give --token, or --insecure if you mean it")
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
