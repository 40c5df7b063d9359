"""What stands before every request: an id to find it by, the node's token, and an answer in JSON whatever happens."""

import asyncio
import hmac
import logging
import re
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.errors import DisaggError, NodeDraining

log = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[\w.:-]{1,100}")


def describe(error: BaseException) -> dict[str, Any]:
    code = error.code if isinstance(error, DisaggError) else "internal_error"
    return {"error": {"code": code, "message": str(error)}}


class RequestId:
    """The caller's `X-Request-Id`, or a new one; back in the response and in every line of the log. What nobody else
    caught becomes an answer here, where the id is known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if _SANE_ID.fullmatch(given) else secrets.token_hex(8).encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except asyncio.CancelledError:  # the server stops and has waited long enough
            if started:
                raise
            stopping = describe(NodeDraining("this node is stopping; try elsewhere"))
            await JSONResponse(stopping, 503, {"Retry-After": "1"})(scope, receive, named)
        except Exception as error:
            log.exception("a request failed", extra={"request_id": name.decode(), "path": scope["path"]})
            if not started:
                await JSONResponse(describe(error), 500)(scope, receive, named)


def request_id(request: Request) -> str:
    name: str = request.scope["state"]["request_id"]
    return name


class Bearer:
    """Everything but /health needs the node's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            scheme, _, given = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not given.strip():
                return await _refuse("a bearer token is needed", scope, receive, send)
            if not hmac.compare_digest(given.strip(), self._expected):
                return await _refuse("this is not the token of this node", scope, receive, send)
        await self._app(scope, receive, send)


async def _refuse(reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    message = f"{reason}; set `token` in the config"
    await JSONResponse({"error": {"code": "unauthorized", "message": message}}, 401)(scope, receive, send)
