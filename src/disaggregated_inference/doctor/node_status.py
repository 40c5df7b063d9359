"""What running nodes say of themselves."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec

from disaggregated_inference.api import ErrorBody, NodeStatus
from disaggregated_inference.cluster import ClusterConfig, Server
from disaggregated_inference.doctor.findings import Finding, found, ok
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.identity import open_identity
from disaggregated_inference.timeouts import DoctorTimeouts

_MOST_BYTES = 1 << 22


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A node's /status, or why there is none."""

    status: NodeStatus | None = None
    error: str = ""


def read_status(config: ClusterConfig, server: Server, timeouts: DoctorTimeouts = DoctorTimeouts()) -> NodeAnswer:
    """`/status`, with the token and the identity of the cluster file."""
    headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
    request = urllib.request.Request(server.url + "/status", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeouts.connect_s, context=_tls(config, server)) as response:
            return NodeAnswer(status=msgspec.json.decode(response.read(_MOST_BYTES), type=NodeStatus))
    except urllib.error.HTTPError as error:
        with error:
            return NodeAnswer(error=_refusal(error, server))
    except (OSError, ValueError, DisaggError) as error:
        return NodeAnswer(error=str(getattr(error, "reason", error)))


def _tls(config: ClusterConfig, server: Server) -> ssl.SSLContext | None:
    identity = open_identity(config.identity) if server.tls else None
    return identity.client_context if identity else None


def _refusal(error: urllib.error.HTTPError, server: Server) -> str:
    if error.code == 401:
        return "it refuses the token" if server.token else "it needs a token: set DISAGG_TOKEN"
    try:
        return msgspec.json.decode(error.read(1 << 16), type=ErrorBody).error.message
    except (ValueError, OSError):
        return f"HTTP {error.code}: is it another program?"


def judge_node(server: Server, answer: NodeAnswer) -> Finding:
    where, status = f"{server.name} at {server.address}", answer.status
    if status is None:
        return found("error", "node-answers", f"{where}: {answer.error}")
    if status.status != "healthy":
        reason = f": {status.reason}" if status.reason else ""
        return found("warning", "node-answers", f"{where} is {status.status}{reason}")
    return ok("node-answers", f"{where} is healthy, {status.backend}")


def judge_local_network(server: Server, answer: NodeAnswer) -> Iterator[Finding]:
    """A node that has no route to a prefill node, although it answers us over the same network."""
    for path in answer.status.paths if answer.status else ():
        if path.last_error_code == "no_route":
            what = f"{server.name} has no route to {path.host}"
            yield found("warning", "local-network", f"{what}: if it is a Mac that reaches it by ssh, macOS forbids it")
