"""Finds the route of a path without parameters at once. The gateway has some forty routes, and starlette tries them one
after the other."""

from collections.abc import Sequence

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send


class RouteIndex(BaseRoute):
    """The first of an app's routes. It passes a request to that of `routes` which serves it, in their order. Requests
    that it does not know go on to the next route of the app: with parameters in their path, with a wrong method, or
    where another kind of route may decide by more than path and method."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        plain = [route for route in routes if isinstance(route, Route) and not route.param_convertors]
        places = {(method, route.path) for route in plain for method in route.methods or ()}
        found = {place: _first(routes, *place) for place in places}
        self._found = {place: route for place, route in found.items() if type(route) is Route}

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope.get("root_path"):
            return Match.NONE, {}
        route = self._found.get((scope["method"], scope["path"]))
        return route.matches(scope) if route else (Match.NONE, {})

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._found[scope["method"], scope["path"]].handle(scope, receive, send)


def _first(routes: Sequence[BaseRoute], method: str, path: str) -> BaseRoute | None:
    """The first that may serve it."""
    for route in routes:
        if not isinstance(route, Route):
            regex = getattr(route, "path_regex", None)
            if regex is None or regex.match(path):
                return route
        elif route.path_regex.match(path) and method in (route.methods or (method,)):
            return route
    return None
