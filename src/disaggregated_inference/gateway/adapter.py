"""A public API of the gateway, as the app sees it."""

from typing import Any, Protocol

from starlette.requests import HTTPConnection
from starlette.routing import Route


class Adapter(Protocol):
    """The `routes` module of each API is one."""

    NAME: str  # in the OpenAPI document
    ID_HEADER: str  # the response header in which its clients look for the request's id

    def owns(self, connection: HTTPConnection) -> bool:
        """Whether an error of this request has the shape of this API. No route may have matched."""

    def routes(self) -> list[Route]: ...

    def error_body(self, error: Exception, id: str = "") -> dict[str, Any]:
        """`id`: the request's. Unexpected errors are for the log, not for the client."""
