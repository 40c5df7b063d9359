"""A page of another site, in a browser on this machine, calls servers on loopback that need no key."""

import asyncio
import http.client
from typing import Any

import httpx
import pytest

from disaggregated_inference.errors import ForeignSite
from disaggregated_inference.gateway.app import gateway_app
from disaggregated_inference.gateway.auth import Keys
from disaggregated_inference.gateway.key_file import keys_of
from disaggregated_inference.http import require_own_site
from disaggregated_inference.orchestrator import DisaggregatedInference
from tests.support.gateway import served
from tests.support.recorded_ollama import Front

EVIL, PAGE = "evil.example:8080", "https://page.example"
AWAY: Any = {"decode_servers": [{"host": "127.0.0.1", "port": 9, "model": "away"}]}


def check(
    host: str | None, origin: str | None = None, server: str = "127.0.0.1", allowed: tuple[str, ...] = ()
) -> None:
    given = {"host": host, "origin": origin}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    require_own_site({"type": "http", "server": (server, 8080), "headers": headers}, "use a key", allowed)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8080", "127.1.2.3", "[::1]:8080", "192.168.1.7:8080", "localhost:8080", "LOCALHOST", "localhost."),
        *("app.localhost:1", "mac1:8000", "studio.local", "host.docker.internal:8080", "x", None),
    ],
)
def test_names_of_this_machine(host: str | None) -> None:
    check(host)


@pytest.mark.parametrize(
    "host",
    ["evil.example", EVIL, "127.0.0.1.evil.example", "localhost.evil.example:8080", "evil.example.", "[::1", "a@b.c"],
)
def test_names_that_a_site_can_have(host: str) -> None:
    with pytest.raises(ForeignSite, match="use a key"):
        check(host)
    check(host, server="10.0.0.5")  # no browser of this machine
    check(host, allowed=(f"https://{host}",))


@pytest.mark.parametrize(
    "origin",
    [
        "http://127.0.0.1:8080",
        "http://localhost:3000",
        "https://a.localhost",
        "http://mac1:8080",
        "chrome-extension://abc",
    ],
)
def test_pages_of_this_machine(origin: str) -> None:
    check("mac1:8080", origin)


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "", "http://203.0.113.9", "https://localhost.evil.example", "http://[::1"]
)
def test_pages_of_other_sites(origin: str) -> None:
    if not origin:
        return check("127.0.0.1:8080", origin)  # the header is empty: no browser sends that
    with pytest.raises(ForeignSite):
        check("127.0.0.1:8080", origin)
    check("127.0.0.1:8080", origin, allowed=(origin,))
    check("127.0.0.1:8080", origin, allowed=("*",))


def ask(port: int, method: str, path: str, **headers: str) -> int:
    """As a browser does: `Host` is the name in its address bar. A simple request needs no permission before it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "text/plain"} | headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_gateway_without_keys() -> None:
    with served(AWAY, cors=(PAGE,)) as url:
        port = httpx.URL(url).port or 0
        for path in (
            "/cluster",
            "/cluster/events",
            "/cluster/history",
            "/metrics",
            "/ready",
            "/v1/models",
            "/dashboard",
        ):
            assert ask(port, "GET", path, Host=EVIL) == 403
        for path in ("/v1/chat/completions", "/api/chat", "/v1/messages", "/tokenize"):
            assert ask(port, "POST", path, Origin="https://evil.example") == 403
            assert ask(port, "POST", path, Origin=PAGE) != 403
        assert ask(port, "GET", "/cluster") == 200
        assert ask(port, "GET", "/dashboard", Host="localhost") == 200
        assert ask(port, "GET", "/health", Host=EVIL) == 200


def test_keys_are_enough() -> None:
    """A page of another site has no key. A reverse proxy may pass on any name."""

    async def run() -> None:
        keys = Keys(keys_of([{"name": "ann", "key_hash": "0" * 64}], "keys"))
        async with DisaggregatedInference(AWAY) as core:
            transport = httpx.ASGITransport(gateway_app(core, keys))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080") as client:
                assert (await client.get("/cluster", headers={"Host": EVIL})).status_code == 401
                assert (await client.get("/dashboard", headers={"Host": EVIL})).status_code == 200

    asyncio.run(run())


def test_a_node_without_a_token() -> None:
    """A page could unload its model, or end it."""
    node = Front("http://127.0.0.1:1")
    try:
        for path in ("/drain", "/unload", "/load", "/generate"):
            assert ask(node.port, "POST", path, Origin="https://evil.example") == 403
            assert ask(node.port, "POST", path, Host=EVIL) == 403
        assert ask(node.port, "GET", "/status", Host=EVIL) == 403
        assert ask(node.port, "GET", "/health", Host=EVIL) in (200, 503)
        assert ask(node.port, "GET", "/model") != 403
    finally:
        node.end()
