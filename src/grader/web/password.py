"""The password before everything: pages, the page's socket, uploads and downloads."""

import asyncio
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from grader.timeouts import PagesTimeouts

COOKIE = "disagg_grade"
_LOGIN, _LOGOUT = "/login", "/logout"
_LONGEST_FORM_BYTES = 4096
_MOST_WAITING = 8  # guesses of one address
_MOST_ADDRESSES = 1024
_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Grade book</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:16px system-ui,sans-serif;background:#f5f6f8;color:#222;display:grid;place-items:center;height:90vh}}
form{{background:#fff;padding:2rem;border:1px solid #ddd;border-radius:8px;width:20rem}}h1{{font-size:1.2rem;margin:0}}
input,button{{font:inherit;width:100%;box-sizing:border-box;padding:.5rem;margin-top:1rem}}
button{{background:#1f5fbf;color:#fff;border:0;border-radius:4px}}.wrong{{color:#a00}}p{{margin:.7rem 0 0}}</style>
<form method="post" action="/login"><h1>Grade book</h1><p>{note}</p>
<input type="password" name="password" aria-label="Password" placeholder="Password" autofocus required>
<button>Open</button></form></html>"""
_ASK = "The password is in the terminal that started this page, or in the file that it was given."


@dataclass(slots=True)
class _Guesses:
    """Of one address: one at a time, in turn."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


class PasswordGate:
    """An ASGI middleware. Who knows the password gets a cookie. It ends with this process, or when it was not used for
    half a day."""

    def __init__(
        self,
        app: ASGIApp,
        password: str,
        clock: Callable[[], float] = time.monotonic,
        timeouts: PagesTimeouts = PagesTimeouts(),
    ) -> None:
        self._app, self._password, self._clock = app, password.encode(), clock
        self._timeouts = timeouts
        self._sessions: dict[str, float] = {}  # when each was last used
        self._guesses: dict[str, _Guesses] = {}  # by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (self._is_known(scope) and scope["path"] not in (_LOGIN, _LOGOUT)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        token, now = _cookie(scope), self._clock()
        if token not in self._sessions or now - self._sessions[token] > self._timeouts.session_s:
            return False
        self._sessions[token] = now
        return True

    async def _answer(self, request: Request) -> Response:
        if request.url.path == _LOGOUT:
            self._sessions.pop(_cookie(request.scope), None)
            return RedirectResponse(_LOGIN, 303)
        if request.url.path != _LOGIN:
            wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
            return RedirectResponse(_LOGIN, 303) if wants_page else Response("log in first", 401)
        if request.method != "POST":
            return HTMLResponse(_FORM.format(note=escape(_ASK)))
        return await self._login(request)

    async def _login(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._timeouts.form_s):
                given = await _given_password(request)
        except TimeoutError:
            return Response("the form did not arrive in time", 408, {"Connection": "close"})
        guesses = self._guesses_of(request)
        if guesses.waiting >= _MOST_WAITING:
            return Response("too many guesses from this address: wait some seconds", 429)
        guesses.waiting += 1
        try:
            async with guesses.turn:
                if hmac.compare_digest(given, self._password):
                    return self._admit()
                await asyncio.sleep(self._timeouts.wrong_s)
        finally:
            guesses.waiting -= 1
        return HTMLResponse(_FORM.format(note='<span class="wrong">This is not the password.</span>'), 403)

    def _guesses_of(self, request: Request) -> _Guesses:
        if len(self._guesses) >= _MOST_ADDRESSES:
            self._guesses = {name: each for name, each in self._guesses.items() if each.waiting}
        return self._guesses.setdefault(request.client.host if request.client else "", _Guesses())

    def _admit(self) -> Response:
        now, token = self._clock(), secrets.token_urlsafe(32)
        self._sessions = {name: used for name, used in self._sessions.items() if now - used <= self._timeouts.session_s}
        self._sessions[token] = now
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response


def _cookie(scope: Scope) -> str:
    sent = b"; ".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1")
    try:
        found = SimpleCookie(sent).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


async def _given_password(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _LONGEST_FORM_BYTES:
            return b""
    return parse_qs(body.decode("latin-1"), encoding="utf-8").get("password", [""])[0].encode()
