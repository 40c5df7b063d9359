"""`disagg cluster status`: what every machine's services say, asked over ssh alone."""

import asyncio
from collections.abc import Sequence

import msgspec

from disaggregated_inference.api import PathStatus
from disaggregated_inference.cluster.deploy.session import MachineSession
from disaggregated_inference.cluster.services import MANAGERS
from disaggregated_inference.cluster.services.report import ServiceReport
from disaggregated_inference.errors import DisaggError

_NOTHING = "{}: nothing is deployed there: run `disagg cluster deploy`"


class ServiceOverview(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    title: str
    role: str  # prefill, decode, both or gateway
    model: str
    is_running: bool
    restarts: int
    health: str
    why: str
    engine: str
    url: str
    paths: tuple[PathStatus, ...] = ()


class MachineOverview(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: why nothing else is known."""

    name: str
    system: str = ""
    release: str = ""
    previous: str = ""
    kind: str = ""
    note: str = ""
    services: tuple[ServiceOverview, ...] = ()
    error: str = ""

    @property
    def is_up(self) -> bool:
        return bool(self.services) and all(service.health == "healthy" for service in self.services)


async def look_at(session: MachineSession) -> MachineOverview:
    inventory = session.target.inventory
    system = f"{inventory.release or inventory.os}, {inventory.arch}"
    release, previous = await asyncio.gather(session.release(), session.release("previous"))
    if not release:
        return MachineOverview(name=session.name, system=system, error=_NOTHING.format(session.name))
    states = await session.states(release)
    try:
        reports = {report.name: report for report in await session.reports(release.services, with_views=True)}
    except DisaggError as error:
        return MachineOverview(
            name=session.name, system=system, release=release.id, kind=release.kind, error=str(error)
        )
    services = tuple(
        ServiceOverview(
            name=service.name,
            title=service.node or service.title,
            role=service.role or "gateway",
            model=service.model,
            is_running=states[service.name].is_running,
            restarts=states[service.name].restarts,
            health=_health(reports[service.name]) if states[service.name].is_running else "stopped",
            why=(reports[service.name].why or reports[service.name].view) if states[service.name].is_running else "",
            engine=reports[service.name].engine,
            url=service.url,
            paths=reports[service.name].paths,
        )
        for service in release.services
    )
    return MachineOverview(
        name=session.name,
        system=system,
        release=release.id,
        previous=previous.id if previous else "",
        kind=release.kind,
        note=MANAGERS[release.kind].note if release.kind in MANAGERS else "",
        services=services,
    )


def _health(report: ServiceReport) -> str:
    """A gateway that cannot use all of its nodes is degraded, even if the nodes are well: a token may be wrong."""
    return "degraded" if report.is_healthy and report.view else report.health


def path_in_use(paths: Sequence[PathStatus]) -> str:
    """The KV path with the youngest payload: `HOST:PORT`; empty: none had any yet."""
    used = [(path.idle_s, path) for path in paths if path.idle_s is not None]
    _, newest = min(used, key=lambda each: each[0], default=(None, None))
    return f"{newest.host}:{newest.port}" if newest else ""
