"""Heartbeats: notices streams that have gone silent, all of them in one pass, a few times a second.

A decode node sends something on every stream four times a second. The node of a silent stream is probed: a busy machine
answers late, a frozen one does not answer.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

import aiohttp

from disaggregated_inference.timeouts import OrchestratorTimeouts


class StreamSilent(Exception):
    """A stream brought nothing. `node_alive`: its node answers probes. `timed_out`: the probe got no answer at all, so
    that the node may only be slow."""

    def __init__(self, message: str, *, node_alive: bool = False, timed_out: bool = True) -> None:
        super().__init__(message)
        self.node_alive, self.timed_out = node_alive, timed_out


class MonitoredStream:
    """One open stream. `last_data_at` is set for every token, so that costs next to nothing."""

    __slots__ = ("_probe", "_probing", "_timeouts", "last_data_at", "last_probe_at", "response")

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        probe: Callable[[], Awaitable[None]],
        now: float,
        timeouts: OrchestratorTimeouts,
    ) -> None:
        self.response, self.last_data_at, self.last_probe_at = response, now, now
        self._probe, self._timeouts = probe, timeouts
        self._probing: asyncio.Task[None] | None = None

    def check(self, now: float) -> None:
        silent = now - max(self.last_data_at, self.last_probe_at) > self._timeouts.silence_s
        if silent and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        since = self.last_data_at
        try:
            await self._probe()
            self.last_probe_at = asyncio.get_running_loop().time()
            if self.last_probe_at - self.last_data_at > self._timeouts.max_silence_s:
                self._fail(StreamSilent("its stream is silent, although the node answers", node_alive=True))
        except Exception as error:  # any failure of the probe is no answer
            if self.last_data_at == since:
                self._fail(StreamSilent(str(error), timed_out=getattr(error, "timed_out", False)))

    def _fail(self, error: StreamSilent) -> None:
        self.response.content.set_exception(error)


class Heartbeats:
    """All open streams of an orchestrator."""

    def __init__(self, timeouts: OrchestratorTimeouts = OrchestratorTimeouts()) -> None:
        self.timeouts = timeouts
        self.open: set[MonitoredStream] = set()
        self.held_up_at = -math.inf  # when this process itself was last paused

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self.timeouts.heartbeat_tick_s
            await asyncio.sleep(self.timeouts.heartbeat_tick_s)
            self.check(loop.time(), late=loop.time() > due + self.timeouts.late_tick_s)

    def check(self, now: float, late: bool) -> None:
        """After a late tick no stream is judged: this process did not read them."""
        if late:
            self.held_up_at = now
        for stream in self.open:
            if late:
                stream.last_probe_at = now
            else:
                stream.check(now)
