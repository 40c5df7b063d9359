"""`python -m disaggregated_inference.cluster.services.report`: asks services of this machine how they are.

It runs on the machine itself, so that no port of it must be open to the machine that deploys. Standard input has a list
of services; standard output gets a list of reports, in JSON.
"""

import errno
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from disaggregated_inference.api import NodeStatus, PathStatus
from disaggregated_inference.cluster.services.gateway_probe import gateway_view, prompt_through
from disaggregated_inference.cluster.services.machine_http import Access, ask
from disaggregated_inference.cluster.services.service import Service
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.identity import open_identity
from disaggregated_inference.timeouts import ServiceTimeouts


class ServiceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`/health` of a node or of a gateway, of any version."""

    status: str = "unhealthy"
    reason: str = ""
    backend: str = ""
    model: str = ""
    epoch: str = ""


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    """`health`: what /health says, or `unreachable`. `paths`: KV paths of a decode node, as in its /status. `view`: why
    the gateway cannot use all nodes."""

    name: str
    health: str = "unreachable"
    why: str = ""
    engine: str = ""
    model: str = ""
    epoch: str = ""
    paths: tuple[PathStatus, ...] = ()
    view: str = ""

    @property
    def is_healthy(self) -> bool:
        return self.health == "healthy"


class ReportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`wait_s`: how long to wait for all of them to be healthy. `with_views`: ask the gateway for its nodes. `ports`:
    only say which addresses are in use. `models`: only send a prompt for each through the gateway."""

    services: tuple[Service, ...]
    wait_s: float = 0.0
    with_views: bool = False
    ports: tuple[tuple[str, int], ...] = ()
    models: tuple[str, ...] = ()
    api_key: str = ""  # of the gateway


def report_all(request: ReportRequest, timeouts: ServiceTimeouts = ServiceTimeouts()) -> list[ServiceReport]:
    deadline = time.monotonic() + request.wait_s
    while True:
        reports = [_report(service, request.with_views) for service in request.services]
        if all(report.is_healthy for report in reports) or time.monotonic() >= deadline:
            return reports
        time.sleep(timeouts.poll_s)


def _report(service: Service, with_view: bool = False) -> ServiceReport:
    try:
        access = _access(service)
        health = ask(f"{service.url}/health", access, ServiceHealth)
    except (OSError, ValueError, DisaggError) as error:
        return ServiceReport(name=service.name, why=str(getattr(error, "reason", error)))
    return ServiceReport(
        name=service.name,
        health="healthy" if health.status == "ok" else health.status,
        why=health.reason,
        engine=health.backend,
        model=health.model,
        epoch=health.epoch,
        paths=_paths(service, access) if service.role in ("decode", "both") else (),
        view=gateway_view(service) if with_view and not service.node else "",
    )


def _access(service: Service) -> Access:
    token_file = service.environment.get("DISAGG_TOKEN_FILE", "")
    token = Path(token_file).read_text().strip() if token_file and service.node else ""
    folder = service.environment.get("DISAGG_IDENTITY", "")
    identity = open_identity(folder) if folder and service.node else None
    return Access(token, identity.client_context if identity else None)


def _paths(service: Service, access: Access) -> tuple[PathStatus, ...]:
    try:
        return ask(f"{service.url}/status", access, NodeStatus).paths
    except (OSError, ValueError):
        return ()


def ports_in_use(addresses: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{host}:{port}" for host, port in addresses if not _can_listen(host, port)]


def _can_listen(host: str, port: int) -> bool:
    """An address that this machine does not have is another fault, which the node itself names."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except PermissionError:
        return True
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ReportRequest)
    sys.stdout.buffer.write(msgspec.json.encode(_answer(request)) + b"\n")


def _answer(request: ReportRequest) -> Any:
    if request.models:
        return [prompt_through(request.services[0], model, request.api_key) for model in request.models]
    return ports_in_use(request.ports) if request.ports else report_all(request)


if __name__ == "__main__":
    main()
