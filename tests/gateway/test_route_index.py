"""The index of routes finds what starlette finds."""

import pytest
from starlette.routing import Match, Mount, Route

from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.route_index import RouteIndex
from disaggregated_inference.orchestrator import DisaggregatedInference

NODE = {"host": "h", "model": "m"}
ANTHROPIC = [(b"anthropic-version", b"2023-06-01")]


@pytest.mark.parametrize("headers", [[], ANTHROPIC])
def test_it_finds_what_starlette_finds(headers: list[tuple[bytes, bytes]]) -> None:
    app = gateway_app(DisaggregatedInference({"prefill_servers": [NODE], "decode_servers": [NODE]}), Keys())
    index, *routes = app.routes
    assert isinstance(index, RouteIndex)
    paths = {route.path for route in routes if isinstance(route, Route | Mount)} | {"/v1/models/m", "/nothing", ""}
    found = 0
    for path in paths:
        for method in ("GET", "POST", "DELETE", "HEAD", "PUT"):
            scope = {"type": "http", "method": method, "path": path, "headers": headers}
            match, child = index.matches(dict(scope))
            if match is Match.FULL:
                first = next(route for route in routes if route.matches(dict(scope))[0] is Match.FULL)
                assert child["endpoint"] is first.matches(dict(scope))[1]["endpoint"], (method, path)
                found += 1
            else:
                assert match is Match.NONE
    assert found > 30
