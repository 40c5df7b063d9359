"""What an open dashboard costs the browser's machine: `python -m tests.support.page_cost`.

Chromium reports the CPU time of its own processes. An empty page is the baseline; then the overview and the charts are
open, without requests and while requests end all the time.
"""

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.support.browser import browser
from tests.support.gateway import gateway_process, simulated_config, simulated_pair

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MODEL, PROFILE = "simulated:tiny", "custom:prefill=20000,decode=100"
WINDOW_S = 20.0
EACH_S = 0.5  # a request this often
GOAL = 2.0


def _cpu_s(found: "Browser") -> float:
    """Of all processes of the browser."""
    session = found.new_browser_cdp_session()
    try:
        return float(sum(each["cpuTime"] for each in session.send("SystemInfo.getProcessInfo")["processInfo"]))
    finally:
        session.detach()


def _share(found: "Browser", page: "Page") -> float:
    """Per cent of a core."""
    page.wait_for_timeout(3000)  # what loading costs is over
    before, began = _cpu_s(found), time.monotonic()
    page.wait_for_timeout(1000 * WINDOW_S)
    return 100 * (_cpu_s(found) - before) / (time.monotonic() - began)


def _keep_asking(url: str, stop: threading.Event) -> None:
    number = 0
    with httpx.Client(timeout=60) as client:
        while not stop.wait(EACH_S):
            number += 1
            body = {"model": MODEL, "prompt": f"request {number}", "max_tokens": 10}
            client.post(f"{url}/v1/completions", json=body).raise_for_status()


def run(url: str) -> None:
    with browser() as found:
        page = found.new_page(viewport={"width": 1440, "height": 900})
        page.goto("about:blank")
        empty = _share(found, page)
        print(f"an empty page: {empty:.2f} % of a core")
        for view in ("overview", "time"):
            page.goto(f"{url}/dashboard#{view}")
            page.locator("header .connection", has_text="Live").wait_for()
            _report(f"{view}, no requests", _share(found, page), empty)
            stop = threading.Event()
            asking = threading.Thread(target=_keep_asking, args=(url, stop))
            asking.start()
            try:
                _report(f"{view}, {1 / EACH_S:g} requests a second", _share(found, page), empty)
            finally:
                stop.set()
                asking.join()
            page.goto("about:blank")


def _report(name: str, share: float, empty: float) -> None:
    verdict = "met" if share - empty < GOAL else "missed"
    print(f"{name}: {share:.2f} % of a core, {share - empty:.2f} more than an empty page; goal < {GOAL:g}: {verdict}")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_pair(PROFILE) as nodes,
        gateway_process(Path(folder), simulated_config(*nodes)) as gateway,
    ):
        run(gateway.url)
