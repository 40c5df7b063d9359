"""`disagg serve --engine ollama`: from a command line to a running node in front of an Ollama."""

import asyncio
from urllib.parse import urlsplit

from disaggregated_inference.api import StartLine
from disaggregated_inference.http import Announce, HttpServer, is_loopback, require_free_port
from disaggregated_inference.node import NodeSettings, open_trust, peer_tls, require_token, require_trusted_link
from disaggregated_inference.observe import ReadingsSampler
from disaggregated_inference.ollama_node.client import OllamaClient
from disaggregated_inference.ollama_node.node import OllamaNode
from disaggregated_inference.ollama_node.routes import ollama_app
from disaggregated_inference.timeouts import NodeTimeouts


def run_ollama_node(
    settings: NodeSettings, port: int, announce: Announce, readings_s: float = NodeTimeouts().readings_s
) -> None:
    """Serve until a signal. Memory, queue and cache are Ollama's."""
    ollama = OllamaClient(settings.ollama_host, settings.model)
    node = OllamaNode(
        ollama,
        settings.role,
        settings.ollama_context,
        settings.keep_alive,
        slots=settings.ollama_slots,
        queue=settings.queue,
    )
    trust = open_trust(settings)
    require_trusted_link([settings.host], [], trust)
    require_token([settings.host], trust, settings.insecure)
    node.identity, node.trusted_link = trust.identity.name if trust.identity else "", trust.trusted_link
    here = is_loopback(urlsplit(ollama.url).hostname or "")
    node.readings = ReadingsSampler("gpu" if here else "elsewhere", readings_s).start()
    require_free_port(settings.host, port)
    asyncio.run(node.require_model())

    def on_ready(port: int) -> None:
        ready = StartLine(
            event="ready",
            port=port,
            host=settings.host,
            scheme="https" if trust.identity else "http",
            role=settings.role,
            model=settings.model,
            backend="ollama",
            ollama=ollama.url,
        )
        announce(ready)

    def on_stop() -> None:
        announce(StartLine(event="stopping"))
        node.drain()

    HttpServer(
        ollama_app(node, settings.token or None),
        settings.host,
        port,
        settings.drain_s,
        on_ready=on_ready,
        on_stop=on_stop,
        lifespan="auto",
        **peer_tls(trust.identity),
    ).run()
