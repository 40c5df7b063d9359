"""Debian's Chromium, driven by Playwright. Playwright's own download is not needed."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
    """A page whose errors are kept. Failed connections are what some tests are about: they are kept apart."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self._keep(message.type, message.text))

    def _keep(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            self.errors.append(text)


@contextmanager
def opened_page(found: "Browser", url: str, wait: str = "Live") -> Iterator[WatchedPage]:
    """A page of the dashboard that must log no error while it is open. `wait`: for this state of its connection."""
    page = found.new_page()
    page.set_default_timeout(SOON_MS)
    watched = WatchedPage(page)
    try:
        page.goto(url)
        if wait:
            page.locator("header .connection", has_text=wait).wait_for()
        yield watched
        assert not watched.errors
    finally:
        page.close()
