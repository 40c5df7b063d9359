"""The nodes of the vLLM tests over HTTP, and a gateway before them, all in this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette

from disaggregated_inference.http import HttpServer
from disaggregated_inference.models import ModelFiles
from disaggregated_inference.node import DecodeNode, Node, node_app
from disaggregated_inference.vllm_node.attached import AttachedVllm
from disaggregated_inference.vllm_node.client import VllmClient
from disaggregated_inference.vllm_node.generation import WholeAnswers
from disaggregated_inference.vllm_node.node import VllmNode, vllm_app
from tests.support.gateway import served
from tests.support.vllm_nodes import VllmHome
from tests.support.vllm_server import BUSY_S


@contextmanager
def vllm_over_http(home: VllmHome) -> Iterator[str]:
    """URL of the prefill node."""
    server = AttachedVllm(home.server.address.url, "")
    server.start()
    client = VllmClient(lambda: home.server.address)
    node = VllmNode(
        model=home.model,
        kv_memory=home.node.kv_memory,
        prefill=home.node,
        server=server,
        answers=WholeAnswers(client, home.model, lambda: str(home.model.path)),
        attached=home.node.trouble,
    )
    try:
        with _serving(vllm_app(node, None)) as port:
            yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@contextmanager
def cluster_over_http(home: VllmHome, decode: DecodeNode) -> Iterator[dict[str, Any]]:
    """The config of a cluster of the prefill node and the decode node."""
    writer = node_app(Node(home.model, decode.kv_memory, None, decode), None)
    with vllm_over_http(home) as reading, _serving(writer) as port:
        yield {
            "prefill_servers": [_entry(home.model, int(reading.rpartition(":")[2]), "spark-1")],
            "decode_servers": [_entry(home.model, port, "mac-1")],
            "policies": {"local": "never", "poll_s": 0.5},
        }


@contextmanager
def gateway_over_http(home: VllmHome, decode: DecodeNode) -> Iterator[str]:
    """URL of a gateway before that cluster."""
    with cluster_over_http(home, decode) as config, served(config) as url:
        yield url


def _entry(model: ModelFiles, port: int, name: str) -> dict[str, object]:
    return {"host": "127.0.0.1", "port": port, "name": name, "model": model.name}


@contextmanager
def _serving(app: Starlette) -> Iterator[int]:
    """Its port."""
    ready: Future[int] = Future()
    server = HttpServer(app, "127.0.0.1", 0, 1, on_ready=ready.set_result, on_stop=lambda: None)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield ready.result(BUSY_S)
    finally:
        server.stop()
        thread.join(BUSY_S)
