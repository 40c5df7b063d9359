"""Random faults, drawn with a seed. One node of each role stays undisturbed, unless everything may fail."""

import asyncio
import os
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

import aiohttp
import msgspec

from disaggregated_inference.chaos.clients import ChaosClients, wait_for
from disaggregated_inference.chaos.gate import Gate
from disaggregated_inference.chaos.line import LINE_FAULTS, DisturbedLine, LineFault
from disaggregated_inference.chaos.nodes import ChaosNode
from disaggregated_inference.chaos.settings import ChaosSettings
from disaggregated_inference.errors import DisaggError
from disaggregated_inference.local_nodes import Process

_DISK_BYTES = 4096  # no file grows beyond this while the disk is "full"
_KINDS = [*["kill"] * 3, *["freeze"] * 3, *["line"] * 10, "reload", "unload", *["disk full"] * 2]
_SHARED = ("reload", "unload", "disk full")  # faults that take no node away

Body = Callable[[float], Awaitable[int]]  # of a fault: gets its seconds, returns what it struck


class ChaosFault(msgspec.Struct, kw_only=True):
    """`struck`: what it hit: 1 for a process; connections, pieces or bits for a line; 0: nothing passed there."""

    kind: str
    where: str
    at_s: float
    seconds: float
    struck: int = 0
    settled_s: float | None = None  # until both orchestrators used the node again


class FaultMaker:
    """`problems`: nodes that did not come back."""

    def __init__(
        self, nodes: list[ChaosNode], gateway: Process, clients: ChaosClients, gate: Gate, settings: ChaosSettings
    ) -> None:
        self._nodes, self._gateway, self._clients, self._gate = nodes, gateway, clients, gate
        self._draw, self._everything = random.Random(settings.seed), settings.everything
        self._timeouts = settings.timeouts
        self._began_at = time.monotonic()
        self._busy: set[str] = set()  # nodes, and names of shared faults
        self._tasks: set[asyncio.Task[None]] = set()
        self.faults: list[ChaosFault] = []
        self.problems: list[str] = []

    @property
    def running(self) -> list[str]:
        return sorted(self._busy)

    def counts(self) -> Counter[tuple[str, str]]:
        return Counter((fault.kind, fault.where) for fault in self.faults if fault.struck)

    async def run(self, over: asyncio.Event) -> None:
        """Until `over`; then waits until every fault has ended."""
        self._began_at = time.monotonic()
        try:
            while not over.is_set():
                await _sleep(over, self._draw.uniform(self._timeouts.min_pause_s, self._timeouts.max_pause_s))
                if not over.is_set():
                    await self._begin()
        finally:
            await asyncio.gather(*self._tasks)

    async def _begin(self) -> None:
        """The draw does not depend on the cluster's state: a fault that is not allowed now is left out."""
        kind = self._draw.choice(_KINDS)
        node = self._draw.choice(self._nodes)
        seconds = self._draw.uniform(self._timeouts.min_fault_s, self._timeouts.max_fault_s)
        which = self._draw.random()
        if kind in _SHARED:
            await self._begin_shared(kind, node, seconds, which)
        elif await self._may_fail(node):
            self._begin_on(node, kind, seconds, which)

    def _begin_on(self, node: ChaosNode, kind: str, seconds: float, which: float) -> None:
        if kind == "line":
            line, fault = node.lines[int(which * len(node.lines))], self._draw.choice(LINE_FAULTS)
            self._start(fault, line.name, node.name, seconds, lambda lasts: _disturb(line, fault, lasts), node)
        elif node.process:
            body = {"kill": self._kill, "freeze": self._freeze}[kind]
            self._start(kind, node.name, node.name, seconds, lambda lasts: body(node, lasts), node)

    async def _begin_shared(self, kind: str, node: ChaosNode, seconds: float, which: float) -> None:
        if self._busy & {kind}:
            return
        if kind == "reload":
            self._start(kind, "gateway", kind, 0.0, self._reload)
        elif kind == "unload":
            self._start(kind, "all nodes", kind, 0.0, self._unload)
        elif kind == "disk full" and hasattr(resource, "prlimit"):
            process = node.process if which < 0.7 else self._gateway
            if process and node.name not in self._busy:
                where = node.name if process is node.process else "gateway"
                self._start(kind, where, kind, seconds, lambda lasts: _fill_disk(process, lasts))

    async def _may_fail(self, node: ChaosNode) -> bool:
        """Whether another node of each of its roles is up, and this one too: each fault is one of its own."""
        if self._everything:
            return node.name not in self._busy
        if node.name in self._busy:
            return False
        usable = await self.usable()
        others = [
            each for each in self._nodes if each is not node and each.name not in self._busy and each.name in usable
        ]
        return node.name in usable and all(any(role in each.roles for each in others) for role in node.roles)

    async def usable(self) -> set[str]:
        """Nodes that the library and the gateway both use."""
        mine = {node.name: node.usable for node in (await self._clients.core.cluster_status()).nodes}
        theirs = await self._clients.gateway_nodes()
        return {name for name, usable in mine.items() if usable and theirs.get(name)}

    def _start(
        self, kind: str, where: str, busy: str, seconds: float, body: Body, node: ChaosNode | None = None
    ) -> None:
        at_s = round(time.monotonic() - self._began_at, 2)
        fault = ChaosFault(kind=kind, where=where, at_s=at_s, seconds=round(seconds, 2))
        self.faults.append(fault)
        self._busy.add(busy)
        task = asyncio.create_task(self._last(fault, busy, body, node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _last(self, fault: ChaosFault, busy: str, body: Body, node: ChaosNode | None) -> None:
        try:
            fault.struck = await body(fault.seconds)
            if node:
                await self._settle(fault, node)
        except (DisaggError, OSError) as error:
            self.problems.append(f"{fault.kind} of {fault.where}: {error}")
        finally:
            self._busy.discard(busy)

    async def _settle(self, fault: ChaosFault, node: ChaosNode) -> None:
        since = time.monotonic()

        async def is_used() -> bool:
            return node.name in await self.usable()

        if not await wait_for(is_used, self._timeouts.settle_s):
            self.problems.append(f"{node.name} was not used again within {self._timeouts.settle_s:g} s of {fault.kind}")
        fault.settled_s = round(time.monotonic() - since, 2)

    async def _kill(self, node: ChaosNode, seconds: float) -> int:
        assert node.process
        node.process.kill()
        await asyncio.to_thread(node.process.stop)
        await asyncio.sleep(seconds / 2)
        await asyncio.to_thread(node.restart)
        return 1

    async def _freeze(self, node: ChaosNode, seconds: float) -> int:
        """A shell thaws the node: if this process is killed meanwhile, the node wakes up, notices, and ends too."""
        assert node.process
        os.kill(node.process.pid, signal.SIGSTOP)
        thaw = f"sleep {seconds:.2f}; kill -CONT {node.process.pid}"
        shell = await asyncio.create_subprocess_exec("sh", "-c", thaw, start_new_session=True)
        await shell.wait()
        return 1

    async def _reload(self, seconds: float) -> int:
        os.kill(self._gateway.pid, signal.SIGHUP)
        await asyncio.sleep(seconds)
        return 1

    async def _unload(self, seconds: float) -> int:
        """Clients pause until no request runs; then each node unloads its model, and loads it with the next request."""
        async with self._gate.closed() as is_idle:
            if not is_idle:
                return 0
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self._timeouts.unload_s)) as session:
                return sum([await _unloaded(session, node) for node in self._nodes if node.name not in self._busy])


async def _unloaded(session: aiohttp.ClientSession, node: ChaosNode) -> bool:
    token = node.entry.get("token")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with session.post(node.url + "/unload", headers=headers, ssl=node.tls or True) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False  # a fault has just begun there


async def _disturb(line: DisturbedLine, fault: LineFault, seconds: float) -> int:
    before = line.struck
    line.disturb(fault)
    try:
        await asyncio.sleep(seconds)
    finally:
        line.heal()
    return line.struck - before


async def _fill_disk(process: Process, seconds: float) -> int:
    """No file of the process can grow: what a full disk does, without the rights to make one."""
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_DISK_BYTES, before[1]))
    try:
        await asyncio.sleep(seconds)
    finally:
        with suppress(ProcessLookupError):  # it was killed meanwhile
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
    return 1


async def _sleep(over: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except TimeoutError:
        return
