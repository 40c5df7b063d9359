"""`disagg cluster logs`: the log lines of all machines, merged by their time."""

import asyncio
import heapq
from collections.abc import AsyncIterator, Sequence

from disaggregated_inference.cluster.deploy.log_lines import LogLine, parse_line
from disaggregated_inference.cluster.deploy.session import MachineSession
from disaggregated_inference.errors import DeployRefused
from disaggregated_inference.timeouts import DeployTimeouts


async def read_logs(session: MachineSession, count: int, request: str = "") -> list[LogLine]:
    """The last lines of each service; with a request, its lines in everything that is kept."""
    release = await session.release()
    if not release:
        raise DeployRefused(session.name, "nothing is deployed there: run `disagg cluster deploy` first")
    manager = session.manager(release)
    scripts = [
        manager.find_in_logs(service, request) if request else manager.logs(service, count, follow=False)
        for service in release.services
    ]
    outputs = await asyncio.gather(*(session.shell.run(script) for script in scripts))
    lines: list[LogLine] = []
    for service, output in zip(release.services, outputs, strict=True):
        last = ""
        for text in output.stdout.splitlines():
            if line := parse_line(text, session.name, service.name, last):
                last = line.time
                lines.append(line)
    return lines


def merged(lines: Sequence[LogLine]) -> list[LogLine]:
    """By time; lines of one service stay in their order."""
    return sorted(lines, key=lambda line: line.time)


async def follow_logs(session: MachineSession, count: int, queue: "asyncio.Queue[LogLine]") -> None:
    """Until it is cancelled, or the connection ends."""
    release = await session.release()
    if not release:
        return
    manager = session.manager(release)

    async def follow(name: str, script: str) -> None:
        last = ""
        async for text in session.shell.lines(script):
            if line := parse_line(text, session.name, name, last):
                last = line.time
                await queue.put(line)

    scripts = {service.name: manager.logs(service, count, follow=True) for service in release.services}
    await asyncio.gather(*(follow(name, script) for name, script in scripts.items()))


async def in_order(
    queue: "asyncio.Queue[LogLine]", hold_s: float = DeployTimeouts().log_order_s
) -> AsyncIterator[LogLine]:
    """Lines wait a moment, so that those of a slower machine come before them."""
    waiting: list[tuple[str, int, float, LogLine]] = []
    number = 0
    clock = asyncio.get_running_loop().time
    while True:
        try:
            async with asyncio.timeout(hold_s / 2 if waiting else None):
                line = await queue.get()
            number += 1
            heapq.heappush(waiting, (line.time, number, clock(), line))
        except TimeoutError:
            pass
        while waiting and clock() - waiting[0][2] >= hold_s:
            yield heapq.heappop(waiting)[3]
