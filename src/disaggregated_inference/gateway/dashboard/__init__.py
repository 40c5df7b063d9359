"""The dashboard: a page at `/dashboard` and its files. The browser reads `/cluster` and `/cluster/events`.

The files are the same for every gateway of this version and say nothing about the cluster: they need no key. The page
asks for one where the gateway has keys.
"""

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Message, Receive, Scope, Send

PATH = "/dashboard"
_FILES = Path(__file__).parent / "static"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text never becomes HTML or a script, not even by mistake
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the same: a gateway may be newer tomorrow
}
# The system's table may lack these, and browsers execute no script of another type.
for _type, _end in (("text/javascript", ".js"), ("text/javascript", ".mjs"), ("text/css", ".css")):
    mimetypes.add_type(_type, _end)


def is_dashboard(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def routes() -> list[BaseRoute]:
    return [
        Route(PATH, _page),
        Mount(PATH, routes=[Mount("/static", _Files(directory=_FILES)), Route("/", _without_slash)]),
    ]


async def _page(request: Request) -> Response:
    return FileResponse(_FILES / "index.html", headers=_HEADERS, media_type="text/html")


async def _without_slash(request: Request) -> Response:
    """Links in the page start at the folder above. Relative: behind a proxy the path may have a prefix."""
    return RedirectResponse("../dashboard", 308)


class _Files(StaticFiles):
    """With the page's headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await super().__call__(scope, receive, with_headers)
