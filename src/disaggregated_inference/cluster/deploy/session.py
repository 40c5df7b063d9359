"""The machines of one command: a shell to each, what it has, and its service manager. Work on them runs in parallel;
a machine that fails is reported, and the others go on."""

import asyncio
import shlex
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, NamedTuple, TypeVar

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.log_lines import find_error
from disaggregated_inference.cluster.deploy.plan import MachinePlan, place_of
from disaggregated_inference.cluster.deploy.release import Release, read_release
from disaggregated_inference.cluster.deploy.target import MachineTarget
from disaggregated_inference.cluster.inventory import take_inventory
from disaggregated_inference.cluster.services import Service, ServiceManager, ServiceState, manager_of
from disaggregated_inference.cluster.services.report import ReportRequest, ServiceReport
from disaggregated_inference.cluster.shell import Shell
from disaggregated_inference.cluster.ssh import open_shell
from disaggregated_inference.errors import CommandFailed, DisaggError, MachineError
from disaggregated_inference.timeouts import DeployTimeouts

Tell = Callable[[str, str], None]  # (machine, text)
Result = TypeVar("Result")

_UNEXPECTED = "unexpected error, please report it"
_REPORT = "disaggregated_inference.cluster.services.report"


class MachineOutcome(NamedTuple, Generic[Result]):
    """What became of the work on one machine: a result, or an error."""

    machine: str
    result: Result | None
    error: DisaggError | None


class ServiceStart(NamedTuple):
    """What was there before a service was started."""

    restarts: int
    log_end: str  # as its manager names it


class MachineSession:
    """One machine of a command."""

    def __init__(self, target: MachineTarget, shell: Shell, tell: Tell) -> None:
        self.target, self.shell, self._tell = target, shell, tell
        self.name, self.place = target.plan.name, target.place

    def tell(self, text: str) -> None:
        self._tell(self.name, text)

    async def release(self, link: str = "current") -> Release | None:
        return await read_release(self.shell, self.place, link)

    def manager(self, release: Release) -> ServiceManager:
        """Of the kind that the release was made for."""
        return manager_of(release.kind, self.place, self.shell.timeouts)

    async def states(self, release: Release) -> dict[str, ServiceState]:
        manager = self.manager(release)
        scripts = [f'echo "$({manager.state(service)})"' for service in release.services]
        lines = (await self.shell.run("\n".join(scripts))).stdout.split("\n")
        states = [ServiceState.parse(line) for line in lines]
        return {service.name: state for service, state in zip(release.services, states, strict=False)}

    async def reports(
        self, services: Sequence[Service], wait_s: float = 0.0, with_views: bool = False
    ) -> list[ServiceReport]:
        """What the services say of themselves, asked on the machine."""
        request = ReportRequest(services=tuple(services), wait_s=wait_s, with_views=with_views)
        return msgspec.json.decode(await self.ask(request), type=list[ServiceReport])

    async def ask(self, request: ReportRequest, python: str = "", more_s: float = 0.0) -> str:
        variables = "".join(f"{self._exported(name)} " for name in self.target.plan.machine.environment)
        script = f"{variables}exec {shlex.quote(python or self.place.python)} -m {_REPORT}"
        timeout_s = request.wait_s + more_s + self.shell.timeouts.command_s
        return await self.shell.check(script, msgspec.json.encode(request), timeout_s, "asking the services")

    def _exported(self, name: str) -> str:
        return f"{name}={shlex.quote(self.target.plan.machine.environment[name])}"

    async def before_start(self, release: Release, services: Sequence[Service]) -> dict[str, ServiceStart]:
        """To be asked before services are started: what comes later is of this start."""
        manager, states = self.manager(release), await self.states(release)
        ends = (await self.shell.run("\n".join(f'echo "$({manager.log_end(each)})"' for each in services))).stdout
        return {
            service.name: ServiceStart(states[service.name].restarts, end.strip())
            for service, end in zip(services, ends.split("\n"), strict=False)
        }

    async def last_words(self, service: Service, manager: ServiceManager, start: ServiceStart) -> str:
        """Of this start. A service that ended a moment ago may have its error still on the way to the log."""
        deadline = time.monotonic() + self.shell.timeouts.last_words_s
        while True:
            lines = (await self.shell.run(manager.logs_after(service, start.log_end))).stdout
            error, last = find_error(lines)
            if error or time.monotonic() > deadline:
                return (error or last or "it said nothing")[:500]
            await asyncio.sleep(self.shell.timeouts.poll_s)


@asynccontextmanager
async def open_machine(
    plan: MachinePlan, config: ClusterConfig, tell: Tell, timeouts: DeployTimeouts
) -> AsyncIterator[MachineSession]:
    shell = await open_shell(plan.name, plan.target, timeouts)
    try:
        inventory = await take_inventory(shell, plan.machine.folder, plan.machine.python)
        place = place_of(plan, inventory)
        kind = inventory.service_kind if plan.machine.service == "auto" else plan.machine.service
        manager = manager_of(kind, place, timeouts)
        yield MachineSession(MachineTarget(plan, config, inventory, place, manager), shell, tell)
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeouts.close_s):  # a machine that is gone answers nothing
                await shell.close()


async def on_machines(
    plans: Sequence[MachinePlan],
    config: ClusterConfig,
    work: Callable[[MachineSession], Awaitable[Result]],
    tell: Tell,
    timeouts: DeployTimeouts = DeployTimeouts(),
) -> list[MachineOutcome[Result]]:
    """The work on every machine, all at once."""

    async def one(plan: MachinePlan) -> MachineOutcome[Result]:
        try:
            async with open_machine(plan, config, tell, timeouts) as session:
                return MachineOutcome(plan.name, await work(session), None)
        except Exception as error:  # of one machine, whatever it is: the others go on
            return MachineOutcome(plan.name, None, named(error, plan.name))

    return list(await asyncio.gather(*(one(plan) for plan in plans)))


def named(error: Exception, machine: str) -> MachineError:
    """An error whose message names the machine; an unforeseen one also names its place in the code."""
    if isinstance(error, MachineError) and error.machine == machine:
        return error
    if isinstance(error, DisaggError | OSError):
        return CommandFailed(machine, str(error))
    at = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" at {frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in at)
    return CommandFailed(machine, f"{_UNEXPECTED}: {type(error).__name__}{place}: {error}")
