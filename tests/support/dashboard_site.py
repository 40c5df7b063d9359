"""A cluster of simulated nodes, a gateway in front of it, and a browser."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.support.browser import WatchedPage, browser, opened_page
from tests.support.cluster import Process, free_port
from tests.support.gateway import GatewayProcess, simulated_config, simulated_pair

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MODEL = "simulated:tiny"
PROFILE = "custom:prefill=20000,decode=400"
EVIL = "<img src=x onerror=alert(1)>"
LINE_RATE_GBPS = 0.1  # of the cluster file; loopback is faster, so that nothing warns of a slow link


class Site:
    """One cluster, one gateway at a fixed port, one browser."""

    def __init__(self, nodes: tuple[Process, Process], gateway: GatewayProcess, found: "Browser") -> None:
        self.nodes, self.gateway, self.browser = nodes, gateway, found

    @property
    def url(self) -> str:
        return self.gateway.url

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/cluster", timeout=30).json()
        return found


@contextmanager
def running_site(folder: Path) -> Iterator[Site]:
    with browser() as found, simulated_pair(PROFILE) as nodes:
        config = simulated_config(*nodes, history_file=str(folder / "history.db"))
        config["links"] = [{"prefill": nodes[0].name, "decode": nodes[1].name, "gbps": LINE_RATE_GBPS}]
        site = Site(nodes, GatewayProcess(folder, config, "--port", str(free_port())), found)
        try:
            site.gateway.ready()
            yield site
        finally:
            site.gateway.end()


def opened(
    site: Site, path: str = "/dashboard", url: str = "", wait: str = "Live", may_fail: tuple[str, ...] = ()
) -> AbstractContextManager[WatchedPage]:
    return opened_page(site.browser, (url or site.url) + path, wait, may_fail)


def ask(url: str, prompt: str, **headers: str) -> str:
    """Returns the id of the request."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]
