"""Services of a machine: install, start, stop, restart, and wait until they are healthy.

A stamp says what a service was last started with: the release and the secrets. Certificates are no part of it: a
service loads changed ones by itself, and a rotation must not end its connections. A service with another stamp, or
whose file is of another release, runs with old settings: a deploy that was killed half-way may leave one.
"""

import asyncio
import shlex
import time
from collections.abc import Container, Mapping, Sequence

import msgspec

from disaggregated_inference.cluster.deploy.release import Release
from disaggregated_inference.cluster.deploy.session import MachineSession, ServiceStart
from disaggregated_inference.cluster.services import Place, Service
from disaggregated_inference.cluster.services.report import ReportRequest
from disaggregated_inference.errors import CommandFailed, DeployRefused

ServiceStarts = Mapping[str, ServiceStart]

_LOADED_AGAIN = ("node.pem", "node.key", "revoked.pem")  # of an identity: every service looks for changes
_MOST_RESTARTS = 2  # of a service that starts: then its own error is the cause


async def start_services(session: MachineSession, release: Release, services: Sequence[Service]) -> ServiceStarts:
    states = await session.states(release)
    await require_free_ports(session, release, [each for each in services if not states[each.name].is_running])
    starts = await session.before_start(release, services)
    for service in services:
        await session.shell.check(_start_script(session, release, service), what=f"starting {service.name}")
    return starts


def _start_script(session: MachineSession, release: Release, service: Service) -> str:
    """It installs the service's file, too: what is there may be of another release."""
    manager, folder, stamp = session.manager(release), release.folder(session.place), _stamp(session.place, release)
    path = shlex.quote(session.place.stamp(service.name))
    written = f"umask 077; mkdir -p {shlex.quote(f'{session.place.folder}/run')} && echo {stamp} > {path}"
    return f"{manager.install(service, folder)} && {manager.start(service)} && {{ {written}; }}"


def _stamp(place: Place, release: Release) -> str:
    """A word of a script, in double quotes."""
    others = " ".join(f"! -path '*/identity/{name}'" for name in _LOADED_AGAIN)
    files = f"find {shlex.quote(place.secrets)} -type f {others} 2>/dev/null | LC_ALL=C sort"
    digest = f'{files} | while IFS= read -r f; do cat "$f"; done | {{ sha256sum 2>/dev/null || shasum -a 256; }}'
    return f'"{release.id} $({digest} | cut -c1-16)"'


async def outdated_services(session: MachineSession, release: Release) -> list[Service]:
    """Those that run with the file, the release or the secrets of another time."""
    manager, folder, stamp = session.manager(release), release.folder(session.place), _stamp(session.place, release)
    scripts = [f"stamp={stamp}"]
    for service in release.services:
        same = f'test "$(cat {shlex.quote(session.place.stamp(service.name))} 2>/dev/null)" = "$stamp"'
        scripts.append(f"if {manager.is_installed(service, folder)} && {same}; then echo new; else echo old; fi")
    found = (await session.shell.run("\n".join(scripts))).stdout.split()
    return [service for service, word in zip(release.services, found, strict=False) if word == "old"]


async def stop_services(session: MachineSession, release: Release, services: Sequence[Service]) -> None:
    manager, limit_s = session.manager(release), session.shell.timeouts.stop_s + session.shell.timeouts.command_s
    scripts = [session.shell.check(manager.stop(each), b"", limit_s, f"stopping {each.name}") for each in services]
    await asyncio.gather(*scripts)


async def restart_services(session: MachineSession, release: Release, services: Sequence[Service]) -> ServiceStarts:
    """In one script each: a connection that breaks in between leaves nothing stopped."""
    manager, limit_s = session.manager(release), session.shell.timeouts.stop_s + session.shell.timeouts.command_s
    starts = await session.before_start(release, services)
    for service in services:
        script = f"{manager.stop(service)}\n{_start_script(session, release, service)}"
        await session.shell.check(script, b"", limit_s, f"restarting {service.name}")
    return starts


async def wait_healthy(
    session: MachineSession, release: Release, services: Sequence[Service], starts: ServiceStarts
) -> None:
    """Until all are healthy. A service that keeps ending is not waited for: its last words are the error."""
    manager, deadline = session.manager(release), time.monotonic() + session.shell.timeouts.healthy_s
    restarts = {name: start.restarts for name, start in starts.items()}
    shown = ""
    while True:
        reports = await session.reports(services, wait_s=session.shell.timeouts.report_s)
        waiting = [report for report in reports if not report.is_healthy]
        if not waiting:
            return
        if ended := await _keeps_ending(session, release, services, restarts):
            words = await session.last_words(ended, manager, starts[ended.name])
            raise CommandFailed(session.name, f"{ended.name} does not start: {words}")
        text = ", ".join(f"{report.name}: {report.health}" for report in waiting)
        if text != shown:
            session.tell(text)
        shown = text
        if time.monotonic() > deadline:
            first = next(service for service in services if service.name == waiting[0].name)
            words = await session.last_words(first, manager, starts[first.name])
            raise CommandFailed(
                session.name, f"not healthy after {session.shell.timeouts.healthy_s:.0f} s: {text}: {words}"
            )


async def _keeps_ending(
    session: MachineSession, release: Release, services: Sequence[Service], before: dict[str, int]
) -> Service | None:
    """`before`: restarts before this start. A manager that counts anew from a start has fewer then."""
    states = await session.states(release)
    for service in services:
        now = states[service.name].restarts
        before[service.name] = min(before[service.name], now)
        if now - before[service.name] >= _MOST_RESTARTS:
            return service
    return None


async def require_free_ports(
    session: MachineSession, release: Release, services: Sequence[Service], ours: Container[tuple[str, int]] = ()
) -> None:
    """HTTP and KV ports of services that do not run yet. `ours`: addresses of services that will make room."""
    addresses = {address: service for service in services for address in service.listens if address not in ours}
    if not addresses:
        return
    python = f"{release.folder(session.place)}/venv/bin/python"
    taken = msgspec.json.decode(await session.ask(ReportRequest(services=(), ports=tuple(addresses)), python))
    for (host, port), service in addresses.items():
        if f"{host}:{port}" in taken:
            owner = (await session.shell.run(_owner_script(port))).stdout.strip().splitlines()
            by = f" by {owner[0]}" if owner else ""
            kind, field = ("port", "port") if (host, port) == service.listens[0] else ("KV port", "kv_addresses")
            raise DeployRefused(
                session.name,
                f"{kind} {port} of {host} is in use{by}: stop that program, or choose another"
                f" `{field}` for {service.title}",
            )


def _owner_script(port: int) -> str:
    """The program that listens on a port, where the system tells."""
    lsof = f'lsof -nP -iTCP:{port} -sTCP:LISTEN 2>/dev/null | awk \'NR==2 {{print $1 " (process " $2 ")"}}\''
    ss = (
        f"ss -Hltnp 'sport = :{port}' 2>/dev/null | sed -n"
        ' \'s/.*users:(("\\([^"]*\\)",pid=\\([0-9]*\\).*/\\1 (process \\2)/p\' | head -1'
    )
    return f"{{ command -v lsof >/dev/null && {lsof}; }} || {ss}"
