"""`disagg cluster up | down | restart | rollback`, on one machine each."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.audit import AuditedRun, write_audit
from disaggregated_inference.cluster.deploy.lock import machine_lock
from disaggregated_inference.cluster.deploy.plan import MachinePlan
from disaggregated_inference.cluster.deploy.release import Release
from disaggregated_inference.cluster.deploy.rollout import roll_out, rolling_waves
from disaggregated_inference.cluster.deploy.service_start import (
    restart_services,
    start_services,
    stop_services,
    wait_healthy,
)
from disaggregated_inference.cluster.deploy.session import MachineOutcome, MachineSession, Tell, on_machines
from disaggregated_inference.cluster.services import Service
from disaggregated_inference.errors import CommandFailed, DeployRefused, DisaggError
from disaggregated_inference.timeouts import DeployTimeouts

_Work = Callable[[MachineSession, Release, Sequence[Service]], Awaitable[str]]


async def _up(session: MachineSession, release: Release, services: Sequence[Service]) -> str:
    starts = await start_services(session, release, services)
    await wait_healthy(session, release, services, starts)
    return "healthy"


async def _down(session: MachineSession, release: Release, services: Sequence[Service]) -> str:
    await stop_services(session, release, services)
    return "stopped"


async def _restart(session: MachineSession, release: Release, services: Sequence[Service]) -> str:
    starts = await restart_services(session, release, services)
    await wait_healthy(session, release, services, starts)
    return "healthy"


async def _rollback(session: MachineSession, release: Release, services: Sequence[Service]) -> str:
    previous = await session.release("previous")
    if not previous:
        raise DeployRefused(session.name, f"there is no earlier release than {release.id}")
    await roll_out(session, previous, release)
    return f"healthy, with {previous.id} again"


class ServiceChoice(NamedTuple):
    """Which services of a machine: all, those of a role, of a model, or both. The gateway is of no model."""

    role: str = ""  # prefill, decode or gateway
    model: str = ""  # as the cluster file names it

    def of(self, release: Release, config: ClusterConfig) -> list[Service]:
        return [each for each in release.services if self._takes(each.role or "gateway", each.model, config)]

    def may_be_on(self, plan: MachinePlan, config: ClusterConfig) -> bool:
        services = [(server.role, server.model) for server in plan.servers]
        return any(self._takes(*each, config) for each in [*services, *([("gateway", "")] if plan.has_gateway else [])])

    def _takes(self, role: str, model: str, config: ClusterConfig) -> bool:
        is_role = not self.role or role == self.role or (role == "both" and self.role != "gateway")
        return is_role and (not self.model or _model_name(model, config) == self.model)


_WORKS: dict[str, _Work] = {"up": _up, "down": _down, "restart": _restart, "rollback": _rollback}
_ROLLING = ("restart", "rollback")


def _model_name(model: str, config: ClusterConfig) -> str:
    """A release may have a model that the file has no more."""
    try:
        return config.resolve_model(model) if model else ""
    except DisaggError:
        return model


async def operate(
    command: str,
    plans: Sequence[MachinePlan],
    config: ClusterConfig,
    tell: Tell,
    chosen: ServiceChoice,
    timeouts: DeployTimeouts = DeployTimeouts(),
) -> list[MachineOutcome[str]]:
    """Nodes of one model change one after the other."""
    operation = AuditedRun(command)

    async def work(session: MachineSession) -> str:
        release = await session.release()
        if not release:
            raise DeployRefused(session.name, "nothing is deployed there: run `disagg cluster deploy` first")
        services = chosen.of(release, config)
        async with machine_lock(session.shell, session.place.lock, command):
            return await _recorded(session, operation, _WORKS[command], release, services)

    by_name = {plan.name: plan for plan in plans}
    everyone = frozenset(by_name) if command in _ROLLING else frozenset()
    outcomes: list[MachineOutcome[str]] = []
    for wave in rolling_waves({plan.name: plan.models for plan in plans}, everyone):
        failed = [by_name[each.machine] for each in outcomes if isinstance(each.error, CommandFailed)]
        left = {name: _same_model(by_name[name], failed) for name in wave}
        outcomes += [MachineOutcome(name, None, _left_out(name, other)) for name, other in left.items() if other]
        outcomes += await on_machines([by_name[name] for name in wave if not left[name]], config, work, tell, timeouts)
    return outcomes


def _same_model(plan: MachinePlan, failed: Iterable[MachinePlan]) -> str:
    """A machine that failed with a model of this one: what failed there is not tried here, too."""
    return next((other.name for other in failed if other.models & plan.models), "")


def _left_out(name: str, other: str) -> DeployRefused:
    return DeployRefused(name, f"left as it is, because {other} failed")


async def _recorded(
    session: MachineSession, operation: AuditedRun, work: _Work, release: Release, services: Sequence[Service]
) -> str:
    if not services:
        return "no such service here"
    session.tell(f"{operation.command} {', '.join(service.name for service in services)}")
    result = "ok"
    try:
        done = await work(session, release, services)
        session.tell(done)
        return done
    except DisaggError as error:
        result = str(error)
        raise
    finally:
        now = await session.release() or release
        await write_audit(session.shell, session.place.audit, operation.entry(now.id, result))
