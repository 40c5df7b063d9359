"""What every request to a node passes: it gets an id, shows the node's token, and always gets an answer in JSON."""

import asyncio
import hmac
import logging
import re
import secrets
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disaggregated_inference.errors import ForeignSite, NodeDraining, Unauthorized
from disaggregated_inference.http.cross_site import require_own_site
from disaggregated_inference.http.responses import error_response

log = logging.getLogger(__name__)

_VALID_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)


def request_id(request: HTTPConnection) -> str:
    """The id in responses, logs and history: the caller's, or a new one. It stays the same for one request."""
    state: dict[str, Any] = request.scope.setdefault("state", {})
    if "request_id" not in state:
        given = request.headers.get("x-request-id") or request.headers.get("x-correlation-id") or ""
        state["request_id"] = given if _VALID_ID.fullmatch(given) else secrets.token_hex(8)
    found: str = state["request_id"]
    return found


class RequestId:
    """Puts the request id into the response. Turns errors that no handler caught into responses, where the id is
    known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name, started = request_id(HTTPConnection(scope)), False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server stops, and its drain time is over
            if started:
                raise
            await error_response(NodeDraining("this node is stopping; try elsewhere"))(scope, receive, send_with_id)
        except Exception as error:
            log.exception("a request failed", extra={"request_id": name, "path": scope["path"]})
            if not started:
                await error_response(error)(scope, receive, send_with_id)


class OwnSite:
    """For a node without a token: everything but /health is refused to pages of other sites."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            try:
                require_own_site(scope, "to use this name, give the node a token (DISAGG_TOKEN)")
            except ForeignSite as error:
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


class Bearer:
    """Everything but /health needs the node's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            sent = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, token = sent.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
                problem = "wrong" if sent else "missing"
                error = Unauthorized(f"{problem} bearer token: set DISAGG_TOKEN, or `token` in the cluster file")
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)
