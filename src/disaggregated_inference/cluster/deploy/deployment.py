"""`disagg cluster deploy`: prepare every machine in parallel, then change them in waves, each onto health."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec

from disaggregated_inference.cluster.config import ClusterConfig
from disaggregated_inference.cluster.deploy.audit import AuditedRun, write_audit
from disaggregated_inference.cluster.deploy.install import Installation, Package, plan_installation, require_disk
from disaggregated_inference.cluster.deploy.lock import machine_lock
from disaggregated_inference.cluster.deploy.plan import MachinePlan
from disaggregated_inference.cluster.deploy.release import Release, link_script, prune_script
from disaggregated_inference.cluster.deploy.rollout import roll_out, rolling_waves
from disaggregated_inference.cluster.deploy.service_start import (
    outdated_services,
    restart_services,
    start_services,
    wait_healthy,
)
from disaggregated_inference.cluster.deploy.session import MachineOutcome, MachineSession, Tell, named, open_machine
from disaggregated_inference.cluster.deploy.steps import CommandStep, Step
from disaggregated_inference.errors import CommandFailed, DisaggError
from disaggregated_inference.timeouts import DeployTimeouts

_MADE_ANEW = "environment ("  # how the title begins of the step that replaces packages
_RESTARTING = ("release", "environment")  # how the titles of steps begin after whose change services restart


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one machine."""

    release: str
    changed: tuple[str, ...] = ()  # titles of the steps that had something to do
    previous: str = ""
    note: str = ""


class _Prepared(msgspec.Struct, kw_only=True):
    session: MachineSession
    installation: Installation
    old: Release | None
    runs: bool  # any service of the old release
    changed: list[str]


class Deployment:
    """One run of the command. `start` False: everything is prepared, and nothing that runs is touched."""

    def __init__(
        self,
        plans: Sequence[MachinePlan],
        config: ClusterConfig,
        package: Package,
        tell: Tell,
        start: bool = True,
        timeouts: DeployTimeouts = DeployTimeouts(),
    ) -> None:
        self._plans, self._config, self._package, self._tell = plans, config, package, tell
        self._start, self._timeouts = start, timeouts
        self._operation = AuditedRun("deploy")
        self._errors: dict[str, DisaggError] = {}
        self._not_healthy: set[str] = set()  # machines whose new release failed, not those that cannot be reached

    async def run(self) -> list[MachineOutcome[Deployed]]:
        done: dict[str, Deployed] = {}
        async with AsyncExitStack() as stack:
            found = await asyncio.gather(*(self._prepare(plan, stack) for plan in self._plans))
            prepared = {each.session.name: each for each in found if each}
            running = frozenset(name for name, each in prepared.items() if each.runs)
            models = {name: each.session.target.plan.models for name, each in prepared.items()}
            for wave in rolling_waves(models, running):
                finished = await asyncio.gather(*(self._finish(prepared[name]) for name in wave))
                done |= {name: deployed for name, deployed in zip(wave, finished, strict=True) if deployed}
        return [MachineOutcome(plan.name, done.get(plan.name), self._errors.get(plan.name)) for plan in self._plans]

    async def _prepare(self, plan: MachinePlan, stack: AsyncExitStack) -> _Prepared | None:
        """The shell and the lock stay until the end of the command."""
        try:
            session = await stack.enter_async_context(self._locked(plan))
            installation = plan_installation(session.target, self._package, self._timeouts)
            is_installed = await _is_installed(session, installation)
            require_disk(session.target, installation, is_installed)
            changed = await run_steps(session, installation.steps)
            old = await session.release()
            runs = any(state.is_running for state in (await session.states(old)).values()) if old else False
            return _Prepared(session=session, installation=installation, old=old, runs=runs, changed=changed)
        except Exception as error:  # of one machine, whatever it is: the others go on
            self._fail(plan.name, named(error, plan.name))
            return None

    @asynccontextmanager
    async def _locked(self, plan: MachinePlan) -> AsyncIterator[MachineSession]:
        async with (
            open_machine(plan, self._config, self._tell, self._timeouts) as session,
            machine_lock(session.shell, session.place.lock, "deploy"),
        ):
            yield session

    async def _finish(self, each: _Prepared) -> Deployed | None:
        session, new, old = each.session, each.installation.release, each.old
        blocked, is_new = self._failed_with_the_same_model(session), not old or old.id != new.id
        try:
            if blocked:
                raise CommandFailed(session.name, f"left at its release, because {blocked} failed")
            await self._change(each)
            if is_new or each.changed:
                await self._record(session, new, "ok")
        except Exception as error:
            self._not_healthy.add(session.name)
            self._fail(session.name, named(error, session.name))
            with suppress(DisaggError, OSError):  # of a machine that is gone
                await self._record(session, new, str(error))
            return None
        return Deployed(
            release=new.id,
            changed=tuple(each.changed) + (("services",) if is_new and self._start else ()),
            previous=old.id if old and is_new else "",
            note=session.target.manager.note,
        )

    async def _change(self, each: _Prepared) -> None:
        session, new, old = each.session, each.installation.release, each.old
        if self._start:  # not earlier: what runs must not find new tokens when it starts again by itself
            each.changed += await run_steps(session, (each.installation.secrets,))
        if not self._start:
            session.tell(f"prepared {new.id}; `disagg cluster deploy` makes it the current release")
        elif old and old.id == new.id and not any(title.startswith(_RESTARTING) for title in each.changed):
            await self._mend(each)
        else:
            session.tell(f"starting release {new.id}")
            await roll_out(session, new, old, keep=not any(title.startswith(_MADE_ANEW) for title in each.changed))
            await session.shell.check(prune_script(session.place), what="removing old releases")
        if self._start:
            session.tell("healthy")

    async def _mend(self, each: _Prepared) -> None:
        """The release is the current one: start what does not run, and anew what runs with older settings."""
        session, release = each.session, each.installation.release
        starts = await session.before_start(release, release.services)
        states, outdated = await session.states(release), await outdated_services(session, release)
        idle = [service for service in release.services if not states[service.name].is_running]
        outdated = [service for service in outdated if service not in idle]
        if idle or outdated:
            session.tell(f"starting {', '.join(service.name for service in (*idle, *outdated))} anew")
            each.changed.append("services")
        await start_services(session, release, idle)
        await restart_services(session, release, outdated)
        await wait_healthy(session, release, release.services, starts)

    def _failed_with_the_same_model(self, session: MachineSession) -> str:
        """A release that fails on one node of a model is not tried on the next one."""
        models = session.target.plan.models
        return next((each.name for each in self._plans if each.name in self._not_healthy and each.models & models), "")

    def _fail(self, name: str, error: DisaggError) -> None:
        self._errors[name] = error
        self._tell(name, "failed")

    async def _record(self, session: MachineSession, release: Release, result: str) -> None:
        await write_audit(session.shell, session.place.audit, self._operation.entry(release.id, result))


async def _is_installed(session: MachineSession, installation: Installation) -> bool:
    first = next(step for step in installation.steps if isinstance(step, CommandStep))  # the environment
    return await first.is_done(session.shell)


async def run_steps(session: MachineSession, steps: Sequence[Step]) -> list[str]:
    """The titles of those that had something to do."""
    changed = []
    for step in steps:
        if await step.is_done(session.shell):
            continue
        session.tell(step.title)
        await step.do(session.shell)
        changed.append(step.title)
    return changed


async def describe_deploy(session: MachineSession, package: Package, timeouts: DeployTimeouts) -> list[str]:
    """Every command and file of a deploy; what is done already is marked."""
    installation = plan_installation(session.target, package, timeouts)
    lines = []
    for step in (*installation.steps, installation.secrets):
        mark = "=" if await step.is_done(session.shell) else "+"
        lines += [f"{mark} {step.title}", *(f"    {line}" for line in step.describe())]
    old, new, manager = await session.release(), installation.release, session.target.manager
    if old and old.id == new.id:
        return [*lines, f"= release {new.id} is the current one", *await _describe_mending(session, new)]
    lines.append(f"+ release {new.id}" + (f", after {old.id}" if old else ""))
    for service in old.services if old else ():
        lines.append(f"    {session.manager(old).stop(service)}" if old else "")
    lines.append(f"    {link_script(session.place, new, old)}")
    for service in new.services:
        lines += [f"    {manager.install(service, new.folder(session.place))}", f"    {manager.start(service)}"]
        lines += [f"    | {line}" for line in manager.file(service).content.splitlines()]
    return [*lines, *(f"    {line}" for line in prune_script(session.place).splitlines())]


async def _describe_mending(session: MachineSession, release: Release) -> list[str]:
    """Services that a deploy would start anew."""
    states, outdated = await session.states(release), await outdated_services(session, release)
    wrong = [each for each in release.services if each in outdated or not states[each.name].is_running]
    manager = session.manager(release)
    lines = [(f"+ {each.name} anew", f"    {manager.stop(each)}", f"    {manager.start(each)}") for each in wrong]
    return [line for three in lines for line in three]
