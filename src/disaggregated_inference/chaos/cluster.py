"""The cluster of a chaos run: nodes, lines, a gateway and the cluster file that leads through the lines."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from disaggregated_inference.chaos.keys import ChaosKeys
from disaggregated_inference.chaos.nodes import ChaosNode, given_nodes, own_nodes
from disaggregated_inference.chaos.settings import ChaosSettings
from disaggregated_inference.cluster import load_config
from disaggregated_inference.errors import BadRequest
from disaggregated_inference.local_nodes import Process, disagg, stopping
from disaggregated_inference.timeouts import ChaosTimeouts

_POLICIES = {
    "local": "never",
    "queue": 4096,
    "poll_s": 0.5,
}


class ChaosCluster:
    def __init__(self, nodes: list[ChaosNode], gateway: Process, config: dict[str, Any]) -> None:
        self.nodes, self.gateway, self.config = nodes, gateway, config
        self.model: str = nodes[0].entry["model"]

    def processes(self) -> dict[str, int]:
        """Names and process ids; this process runs the library."""
        nodes = {node.name: node.process.pid for node in self.nodes if node.process}
        return nodes | {"gateway": self.gateway.pid, "library": os.getpid()}

    def last_words(self) -> dict[str, str]:
        """The last lines of every log."""
        started = {node.name: node.process for node in self.nodes if node.process}
        return {name: process.last_words() for name, process in (started | {"gateway": self.gateway}).items()}


@contextmanager
def chaos_cluster(settings: ChaosSettings) -> Iterator[ChaosCluster]:
    """Started, and stopped at the end with all that it started."""
    if settings.tls and settings.config:
        raise BadRequest("--tls is for nodes that chaos starts; with --config, `identity` in the cluster file counts")
    with TemporaryDirectory(prefix="disagg-chaos-") as temporary, ExitStack() as stack:
        folder = Path(temporary)  # which others cannot read
        keys = ChaosKeys(folder / "keys") if settings.tls else None
        given = load_config(settings.config) if settings.config else None
        nodes = given_nodes(given, settings) if given else _started(own_nodes(settings, folder, keys), stack)
        if settings.faults:
            for number, node in enumerate(nodes):
                node.connect(settings.seed * 100 + 10 * number)
                stack.callback(node.close)
        identity = str(keys.client.folder) if keys else given.identity if given else ""
        config = _config(nodes, folder, identity, settings.timeouts)
        path = folder / "cluster.json"
        path.write_text(json.dumps(config))
        gateway = Process("the gateway", disagg("gateway", "--config", str(path), "--port", "0", "--drain", "2"))
        stack.enter_context(stopping([gateway]))
        gateway.ready()
        yield ChaosCluster(nodes, gateway, config)


def _started(nodes: list[ChaosNode], stack: ExitStack) -> list[ChaosNode]:
    stack.callback(_stop, nodes)
    for node in nodes:
        assert node.process
        node.process.ready()
    return nodes


def _stop(nodes: list[ChaosNode]) -> None:
    """The processes of now: some were started again."""
    with stopping([node.process for node in nodes if node.process]):
        pass


def _config(nodes: list[ChaosNode], folder: Path, identity: str, timeouts: ChaosTimeouts) -> dict[str, Any]:
    """Of the policies of a given cluster file none counts: its history and time limits are for its own users."""
    policies = _POLICIES | {
        "prefill_timeout_s": timeouts.prefill_s,
        "decode_timeout_s": timeouts.request_s - timeouts.prefill_s,
        "history_file": str(folder / "history.db"),
    }
    return {
        "prefill_servers": [node.server for node in nodes if node.role == "prefill"],
        "decode_servers": [node.server for node in nodes if node.role != "prefill"],
        "policies": policies,
    } | ({"identity": identity} if identity else {})
