"""A report as PDF: printed by a browser of the Chromium family, which has every script and font of the machine."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from grader.errors import GraderError
from grader.timeouts import ProgramTimeouts

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "microsoft-edge")
_MAC = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


class PrinterMissing(GraderError):
    """No program on this machine makes a PDF of a report."""


def find_browser() -> str | None:
    found = [path for name in _NAMES if (path := shutil.which(name))]
    found += [path for path in _MAC if Path(path).exists()]
    return found[0] if found else None


def write_pdf(html: str, path: Path) -> None:
    browser = find_browser()
    if browser is None:
        raise PrinterMissing(
            "PDF needs Chromium or Chrome on this machine: install it, or open the HTML report and print it"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "report.html"
        source.write_text(html, encoding="utf-8")
        _print(browser, source, path, folder)


def _print(browser: str, source: Path, path: Path, folder: str, timeouts: ProgramTimeouts = ProgramTimeouts()) -> None:
    command = [browser, "--headless", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}/profile"]
    command += ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # Chromium refuses root else
    command += ["--no-pdf-header-footer", f"--print-to-pdf={path}", source.as_uri()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeouts.print_s)
    except subprocess.TimeoutExpired:
        raise PrinterMissing(f"{browser} did not print {path.name} within {timeouts.print_s:g} s") from None
    if done.returncode or not path.is_file():
        raise PrinterMissing(f"{browser} could not print {path.name}: {done.stderr.strip()[-300:]}")
