"""What `disagg top` shows, from a gateway: first all of it, then its events. Reconnects when the gateway restarts."""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from disaggregated_inference.api import (
    Alarm,
    ClusterLink,
    ClusterPage,
    ClusterStatus,
    RequestRecord,
    Summary,
    Target,
    TargetsPage,
)
from disaggregated_inference.errors import BadRequest, DisaggError, NotForThisKey, Unauthorized
from disaggregated_inference.timeouts import TopTimeouts

Content = TypeVar("Content")

_KEPT = 50  # requests
_LEAST_S = 0.5  # over which KV is counted: an event may follow another at once
_MAX_EVENT_BYTES = 64 << 20
_LOST = (aiohttp.ClientError, OSError, ValueError)  # no answer, or none of a gateway
_START = "start one with `disagg gateway` or `disagg up`, or give its address with --url"


class TopState:
    """The last that is known. `trouble`: why nothing newer came; empty while connected. `targets_trouble`: the same of
    targets and alarms, which the gateway may be unable to tell while it tells all else."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.status: ClusterStatus | None = None
        self.requests: deque[RequestRecord] = deque(maxlen=_KEPT)  # newest first
        self.summary = Summary()  # of the last requests: the figures of the cards
        self.targets: tuple[Target, ...] = ()
        self.alarms: tuple[Alarm, ...] = ()
        self.flows: dict[tuple[str, str], float] = {}  # KV bytes per second from a prefill to a decode node, now
        self.trouble, self.targets_trouble = "connecting", ""
        self.heard_at = self._status_at = time.time()

    def began(self, cluster: ClusterPage) -> None:
        self.requests = deque(map(RequestRecord.of_row, cluster.history), maxlen=_KEPT)
        self.summary = cluster.summary
        self.status, self.trouble, self.heard_at = cluster, "", time.time()
        self.flows, self._status_at = {}, self.heard_at

    def judged(self, page: TargetsPage) -> None:
        self.targets, self.alarms, self.targets_trouble = page.targets, page.alarms, ""

    def happened(self, event: str, content: bytes) -> None:
        """`content`: JSON."""
        self.heard_at = time.time()
        if event == "status":
            status = _decoded(content, ClusterStatus)
            self._measure_flows(status.links)
            self.status = status
        elif event == "request":
            self.requests.appendleft(RequestRecord.of_row(_decoded(content, dict)))
        elif event == "summary":
            self.summary = _decoded(content, Summary)

    def _measure_flows(self, links: Sequence[ClusterLink]) -> None:
        """KV that arrived since the last status."""
        before = _moved(self.status.links) if self.status else {}
        seconds, self._status_at = max(_LEAST_S, self.heard_at - self._status_at), self.heard_at
        more = {pair: moved - before.get(pair, moved) for pair, moved in _moved(links).items()}
        self.flows = {pair: each / seconds for pair, each in more.items() if each > 0}


def _moved(links: Sequence[ClusterLink]) -> dict[tuple[str, str], int]:
    return {(link.prefill, link.decode): link.payload_bytes for link in links}


class TopFeed:
    """`changed` is called after every change of the state."""

    def __init__(
        self, state: TopState, token: str, changed: Callable[[], None], timeouts: TopTimeouts = TopTimeouts()
    ) -> None:
        self.state, self._changed, self._timeouts = state, changed, timeouts
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def once(self) -> bytes:
        """Everything, now: the gateway's own JSON. Raises DisaggError if the gateway does not give it."""
        async with self._session() as session:
            try:
                content = await self._get(session, "/cluster")
                self.state.began(_decoded(content, ClusterPage))
                self.state.judged(await self._targets(session))
            except _LOST as error:
                raise DisaggError(f"{self.state.url}: no gateway answers there: {_reason(error)}; {_START}") from error
        return content

    async def follow(self) -> None:
        """For ever. Raises DisaggError if the gateway refuses: trying again would not help."""
        while True:
            try:
                async with self._session() as session:
                    await self._connected(session)
                self.state.trouble = "the gateway ended the connection"
            except _LOST as error:
                self.state.trouble = _reason(error)
            self._changed()
            await asyncio.sleep(self._timeouts.retry_s)

    async def _connected(self, session: aiohttp.ClientSession) -> None:
        self.state.began(_decoded(await self._get(session, "/cluster"), ClusterPage))
        await self._judge(session)
        judging = asyncio.create_task(self._keep_judging(session))
        try:
            async for event, content in self._events(session):
                self.state.happened(event, content)
                self._changed()
        finally:
            judging.cancel()
            await asyncio.gather(judging, return_exceptions=True)

    async def _keep_judging(self, session: aiohttp.ClientSession) -> None:
        """Targets and alarms are no events: they change slowly."""
        while True:
            await asyncio.sleep(self._timeouts.targets_s)
            await self._judge(session)

    async def _judge(self, session: aiohttp.ClientSession) -> None:
        """A gateway that cannot read its history refuses them, and the screen says so until it answers again. Where it
        is gone, or takes the key no more, the events end, too."""
        try:
            self.state.judged(await self._targets(session))
        except (*_LOST, DisaggError) as error:
            self.state.targets_trouble = _reason(error)
        self._changed()

    async def _targets(self, session: aiohttp.ClientSession) -> TargetsPage:
        return _decoded(await self._get(session, "/cluster/targets"), TargetsPage)

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeouts.dial_s, sock_read=self._timeouts.silence_s
        )
        return aiohttp.ClientSession(timeout=timeout, headers=self._headers)

    async def _get(self, session: aiohttp.ClientSession, path: str) -> bytes:
        async with session.get(self.state.url + path) as response:
            self._require_answer(response)
            return await response.read()

    async def _events(self, session: aiohttp.ClientSession) -> AsyncIterator[tuple[str, bytes]]:
        async with session.get(f"{self.state.url}/cluster/events") as response:
            self._require_answer(response)
            waiting = b""
            async for piece in response.content.iter_any():
                *whole, waiting = (waiting + piece).split(b"\n\n")
                for event in whole:
                    if found := _parsed(event):
                        yield found
                if len(waiting) > _MAX_EVENT_BYTES:
                    raise ValueError("an event is too long")

    def _require_answer(self, response: aiohttp.ClientResponse) -> None:
        url = self.state.url
        if response.status == 401 and self._headers:
            raise Unauthorized(f"{url} refuses the API key in --token-file, else DISAGG_TOKEN: give one of its keys")
        if response.status == 401:
            raise Unauthorized(f"{url} needs an API key: set DISAGG_TOKEN, or give --token-file FILE")
        if response.status == 403:
            raise NotForThisKey(f"{url}: this API key is limited to some models, and the whole cluster is shown here")
        if response.status == 404:
            raise BadRequest(f"{url} is no gateway of this version: it has no {response.url.path}")
        response.raise_for_status()


def _decoded(content: bytes, kind: type[Content]) -> Content:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"it answers as no gateway of ours: {error}") from error


def _parsed(event: bytes) -> tuple[str, bytes] | None:
    """None: a comment."""
    fields = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line and not line.startswith(b":"))
    return (fields[b"event"].decode(), fields[b"data"]) if b"data" in fields else None


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.os_error.errno) if error.os_error.errno else str(error.os_error)
    return str(error) or type(error).__name__
