"""From one release to another on a machine, and only onto health: a release that does not come up is taken back."""

from disaggregated_inference.cluster.deploy.release import Release, link_script, unlink_script
from disaggregated_inference.cluster.deploy.service_start import (
    outdated_services,
    require_free_ports,
    start_services,
    stop_services,
    wait_healthy,
)
from disaggregated_inference.cluster.deploy.session import MachineSession
from disaggregated_inference.cluster.services import Service
from disaggregated_inference.errors import CommandFailed, DisaggError, MachineError


async def switch(session: MachineSession, new: Release, old: Release | None, keep: bool = True) -> None:
    """Stop the old services and link the new release. Running code must not see its files change, so they stop first;
    with `keep`, those that are the same in both go on."""
    if old:
        old_manager = session.manager(old)
        names = {service.name for service in new.services} if old.kind == new.kind else set()
        same = await _unchanged(session, new, old) if keep else []
        await stop_services(session, old, [service for service in old.services if service not in same])
        for service in old.services:
            if service.name not in names:
                await session.shell.check(old_manager.remove(service), what=f"removing {service.name}")
    await session.shell.check(link_script(session.place, new, old), what="linking the release")


async def _unchanged(session: MachineSession, new: Release, old: Release) -> list[Service]:
    """Such as the gateway, when the settings of a node beside it changed."""
    if old.id == new.id or (old.kind, old.environment) != (new.kind, new.environment):
        return []
    outdated = await outdated_services(session, old)
    return [
        service
        for service in old.services
        if service in new.services and service not in outdated and (service.node or old.settings == new.settings)
    ]


async def roll_out(session: MachineSession, new: Release, old: Release | None, keep: bool = True) -> None:
    """To the new release; back to the old one if a service does not come up. A port that another program has is found
    before anything stops."""
    if old:
        ours = {address for service in old.services for address in service.listens}
        await require_free_ports(session, new, new.services, ours)
    try:
        await switch(session, new, old, keep)
        starts = await start_services(session, new, new.services)
        await wait_healthy(session, new, new.services, starts)
    except DisaggError as error:
        session.tell("did not come up; taking it back")
        back = await _take_back(session, new, old)
        kind, reason = (type(error), error.reason) if isinstance(error, MachineError) else (CommandFailed, str(error))
        raise kind(session.name, f"{reason}; {back}") from None


async def _take_back(session: MachineSession, new: Release, old: Release | None) -> str:
    manager = session.manager(new)
    try:
        if old and old.id != new.id:
            await switch(session, old, new)
            starts = await start_services(session, old, old.services)
            await wait_healthy(session, old, old.services, starts)
            return f"release {old.id} runs again"
        await stop_services(session, new, new.services)
        for service in new.services:
            await session.shell.run(manager.remove(service))
        if not old:
            await session.shell.run(unlink_script(session.place))
        return "nothing is left running there"
    except DisaggError as error:
        return f"and the way back failed, too: {error}"


def rolling_waves(machines: dict[str, frozenset[str]], running: frozenset[str]) -> list[list[str]]:
    """Machines that may change at the same time. `machines`: the models of each. Two that serve the same model go one
    after the other, if they run now: the model stays up. Those that do not run yet are all in the first wave."""
    waves: list[list[str]] = [[name for name in machines if name not in running]]
    for name in (name for name in machines if name in running):
        for wave in waves[1:]:
            if all(not machines[name] & machines[other] for other in wave):
                wave.append(name)
                break
        else:
            waves.append([name])
    return [wave for wave in waves if wave]
