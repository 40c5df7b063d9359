"""What stands before every request: the node's token, and an id to find the request by."""

import hmac
import re
import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SANE_ID = re.compile(rb"[\w.:-]{1,100}")


class RequestId:
    """The caller's `X-Request-Id`, or a new one; back in the response and in every line of the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if _SANE_ID.fullmatch(given) else secrets.token_hex(8).encode()
        scope.setdefault("state", {})["request_id"] = name.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, named)


def request_id(request: Request) -> str:
    name: str = request.scope["state"]["request_id"]
    return name


class Bearer:
    """Everything but /health needs the node's token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = JSONResponse({"error": {"code": "unauthorized", "message": "a bearer token is needed"}}, 401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)
