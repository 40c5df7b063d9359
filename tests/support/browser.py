"""Debian's Chromium, driven by Playwright. Playwright's own download is not needed."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

SOON_MS = 30_000  # for what a page shows soon, on a busy machine
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str | None:
    """Where it is; None: not installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser() -> Iterator["Browser"]:
    """Headless. Skips the test where there is no browser, or no Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = chromium()
    if not path:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=path, args=list(_FLAGS))
        try:
            yield found
        finally:
            found.close()


class WatchedPage:
    """A page whose errors are kept: of its scripts, and resources that it did not get. `may_fail`: paths whose failure
    the test is about."""

    def __init__(self, page: "Page", *may_fail: str) -> None:
        self.page, self.may_fail = page, may_fail
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._keep)

    def _keep(self, message: "ConsoleMessage") -> None:
        if message.type not in ("error", "warning"):
            return
        url = str(message.location.get("url"))
        if "Failed to load resource" not in message.text or urlsplit(url).path not in self.may_fail:
            self.errors.append(f"{message.text} ({url})")


@contextmanager
def opened_page(found: "Browser", url: str, wait: str = "Live", may_fail: Sequence[str] = ()) -> Iterator[WatchedPage]:
    """A page of the dashboard that must log no error while it is open. `wait`: for this state of its connection.
    `may_fail`: paths."""
    page = found.new_page()
    page.set_default_timeout(SOON_MS)
    watched = WatchedPage(page, *may_fail)
    try:
        page.goto(url)
        if wait:
            page.locator("header .connection", has_text=wait).wait_for()
        yield watched
        assert not watched.errors
    finally:
        page.close()
