"""Heartbeats: notices requests and streams that have gone silent, all of them in one pass, a few times a second.

A decode node sends something on every stream four times a second. The node of a silent stream is probed: a busy machine
answers late, a frozen one does not answer. So is a node whose response does not begin.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from disaggregated_inference.orchestrator.leg_errors import LegFailed
from disaggregated_inference.timeouts import OrchestratorTimeouts


class StreamSilent(Exception):
    """A stream brought nothing. `node_alive`: its node answers probes. `timed_out`: the probe got no answer at all, so
    that the node may only be slow."""

    def __init__(self, message: str, *, node_alive: bool = False, timed_out: bool = True) -> None:
        super().__init__(message)
        self.node_alive, self.timed_out = node_alive, timed_out


class PendingRequest:
    """A request whose response has not begun: `with` around the wait. The node may take its time, but it must not be
    frozen or stuck meanwhile: then the wait ends with the error of the probe."""

    __slots__ = ("_cancelling", "_error", "_heartbeats", "_probe", "_probing", "_task", "last_probe_at")

    def __init__(self, heartbeats: "Heartbeats", probe: Callable[[], Awaitable[None]]) -> None:
        self._heartbeats, self._probe = heartbeats, probe
        self._probing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._error: Exception | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task
        self._cancelling, self.last_probe_at = self._task.cancelling(), self._task.get_loop().time()
        self._heartbeats.open.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._heartbeats.open.discard(self)
        task, self._task = self._task, None  # from here on, no probe cancels it
        if self._error and task and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._taken_error() from None
        self._error = None  # its traceback holds this object

    def _taken_error(self) -> Exception:
        error, self._error = self._error, None
        assert error
        return error

    def check(self, now: float) -> None:
        due = now - self.last_probe_at > self._heartbeats.timeouts.watch_s
        if due and (self._probing is None or self._probing.done()):
            self._probing = asyncio.create_task(self._verify())

    async def _verify(self) -> None:
        try:
            await self._probe()
            self.last_probe_at = asyncio.get_running_loop().time()
        except Exception as error:  # any failure of the probe is no answer
            if self._task:
                self._error = error
                self._task.cancel()


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
                self._fail(_silence(error))

    def _fail(self, error: StreamSilent) -> None:
        self.response.content.set_exception(error)


def _silence(error: Exception) -> StreamSilent:
    if isinstance(error, LegFailed):
        return StreamSilent(error.message, timed_out=error.timed_out)
    return StreamSilent(str(error))


class Heartbeats:
    """All open requests and streams of an orchestrator."""

    def __init__(self, timeouts: OrchestratorTimeouts = OrchestratorTimeouts()) -> None:
        self.timeouts = timeouts
        self.open: set[MonitoredStream | PendingRequest] = set()
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
