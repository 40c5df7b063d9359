"""`disagg-grade web` as a process, and its pages in a real browser."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.support.browser import WatchedPage, browser
from tests.support.cluster import free_port
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PASSWORD = "open sesame"
SOON_MS = 60_000
MODELS_S = 300.0  # for the embedded model on a busy machine; it takes seconds on a quiet one
EVIL = "<img src=x onerror=window.taken=1><script>window.taken=1</script>[link](javascript:window.taken=1) **bold** $x$"


@contextmanager
def web(book: Path, config: str = "") -> Iterator[str]:
    """The command itself, as a process."""
    port = free_port()
    command = [sys.executable, "-m", "grader.cli", "web", "--book", str(book), "--port", str(port), "--who", "teacher"]
    environ = os.environ | {"GRADER_WEB_PASSWORD": PASSWORD}
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*command, *(["--config", config] if config else [])], env=environ)
    try:
        assert until(lambda: _answers(url), 120)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/login", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def opened(url: str) -> Iterator["Page"]:
    """Logged in. Nothing that a student wrote may run, or become a picture or a link."""
    with browser() as found:
        page = found.new_page(viewport={"width": 1024, "height": 900}, accept_downloads=True)
        page.set_default_timeout(SOON_MS)
        watched = WatchedPage(page)
        page.goto(url)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Open").click()
        page.get_by_role("heading", name="Assignments").wait_for()
        yield page
        assert page.evaluate("window.taken") is None
        assert not [error for error in watched.errors if "taken" in error]


def visit(page: "Page", name: str) -> None:
    """By the navigation, as a person does: the session stays."""
    page.get_by_test_id("stSidebarNav").get_by_role("link", name=name).click()
    page.get_by_role("heading", name=name, level=1).wait_for()
    settle(page)


def settle(page: "Page") -> None:
    page.locator("[data-testid=stApp][data-test-script-state=notRunning]").wait_for()


def fill(page: "Page", field: "Locator", value: str) -> None:
    field.fill(value)
    field.press("Control+Enter" if field.evaluate("each => each.tagName") == "TEXTAREA" else "Enter")
    settle(page)


def upload(page: "Page", label: str, name: str, content: bytes) -> None:
    box = page.get_by_test_id("stFileUploader").filter(has_text=label)
    given = {"name": name, "mimeType": "application/octet-stream", "buffer": content}
    box.locator("input[type=file]").set_input_files(given)  # type: ignore[arg-type]
    box.get_by_text(name).first.wait_for()
    settle(page)


def press(page: "Page", name: str) -> None:
    page.get_by_role("button", name=name, exact=True).first.click()
    settle(page)
