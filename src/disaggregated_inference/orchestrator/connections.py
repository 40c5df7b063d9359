"""Connections to nodes. They are kept between requests, and a node may close one just when the next request goes in.

Such a request was not accepted: the node had closed its side before it came. So it is sent again, and the caller sees
nothing of it. Were it accepted all the same, because a line broke at that very moment, then a ticket makes the node
refuse the second one, and a request without a ticket ends when the node sees that its client has left. The caller gets
one response in each case, and all of it from one of the two.
"""

import asyncio
from contextvars import ContextVar
from typing import Any

import aiohttp

_MOST_CLOSED = 64  # kept connections that one request may find closed
_dialled: ContextVar[bool] = ContextVar("dialled")  # whether this task's request has a new connection


class NodeConnector(aiohttp.TCPConnector):
    """Tells `post` of new connections."""

    async def _create_connection(self, *arguments: Any, **options: Any) -> Any:
        _dialled.set(True)
        return await super()._create_connection(*arguments, **options)


async def post(session: aiohttp.ClientSession, url: str, closed_s: float, **options: Any) -> aiohttp.ClientResponse:
    """Returns when the response begins. A kept connection that breaks within `closed_s` was closed before."""
    return await send(session, "POST", url, closed_s, **options)


async def send(
    session: aiohttp.ClientSession, method: str, url: str, closed_s: float, **options: Any
) -> aiohttp.ClientResponse:
    loop, keeps = asyncio.get_running_loop(), isinstance(session.connector, NodeConnector)
    for _ in range(_MOST_CLOSED):
        sent_at = loop.time()
        _dialled.set(not keeps)
        try:
            response = await session.request(method, url, **options)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if _dialled.get() or loop.time() - sent_at > closed_s:
                raise
        else:
            if _dialled.get() or not _is_unwelcome(response):
                return response
            response.close()
    return await session.request(method, url, **options)


def _is_unwelcome(response: aiohttp.ClientResponse) -> bool:
    """The node ends this connection in place of an answer, because the certificate with which it began was revoked: we
    may have a new one. The request was not accepted."""
    return response.status == 403 and response.headers.get("Connection", "").lower() == "close"


def without_frames(error: Exception) -> Exception:
    """aiohttp and asyncio keep the error of a failed connection in a frame, which its traceback holds. Only a garbage
    collection would free them, and with them a TLS connection, which has more than 256 KiB."""
    errors: list[BaseException | None] = [error]
    while errors:
        if (each := errors.pop()) and each.__traceback__:
            each.__traceback__ = None
            errors += each.__cause__, each.__context__
    return error
