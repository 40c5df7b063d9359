"""Starts the pages: Streamlit as an ASGI application behind the password, served by uvicorn."""

import os
import secrets
from pathlib import Path

from grader.errors import GraderError
from grader.store import Database
from grader.web.settings import WebSettings, configure

PASSWORD_VARIABLE = "GRADER_WEB_PASSWORD"
_SHORTEST = 8
_LARGEST_UPLOAD_MIB = 500
# No telemetry, nothing from other machines, no menu of a developer, no line for every request.
_STREAMLIT: dict[str, object] = {
    "browser.gatherUsageStats": False,
    "client.showErrorDetails": "none",
    "client.toolbarMode": "minimal",
    "logger.level": "error",
    "logger.hideWelcomeMessage": True,
    "runner.fastReruns": False,  # see clicks.py
    "server.fileWatcherType": "none",
    "server.headless": True,
    "server.maxUploadSize": _LARGEST_UPLOAD_MIB,
    "theme.base": "light",
    "theme.primaryColor": "#1f5fbf",
}


class WebUnavailable(GraderError):
    """The pages cannot be started."""


def run_web(settings: WebSettings, host: str, port: int, password_file: Path | None) -> None:
    Database.create(settings.book)
    password, is_new = choose_password(password_file)
    configure(settings)
    try:
        import streamlit
    except ImportError:
        raise WebUnavailable(
            "the web page needs Streamlit: pip install 'disaggregated-inference[grader,grader-web]'"
        ) from None
    from starlette.middleware import Middleware

    from grader.web.clicks import keep_every_click
    from grader.web.password import PasswordGate

    keep_every_click()

    page = Path(__file__).with_name("app.py")
    app = streamlit.App(page, middleware=[Middleware(PasswordGate, password=password)])
    print(f"grade book {settings.book}: http://{host}:{port}", flush=True)
    if is_new:
        print(f"password (shown once; set {PASSWORD_VARIABLE} or --password-file to choose it): {password}", flush=True)
    app.run(config=_STREAMLIT | {"server.address": host, "server.port": port})


def choose_password(file: Path | None) -> tuple[str, bool]:
    """From the file, else from the environment, else a new one. Whether it is new."""
    if file is not None:
        given = file.read_text(encoding="utf-8").strip()
        source = str(file)
    else:
        given, source = os.environ.get(PASSWORD_VARIABLE, ""), PASSWORD_VARIABLE
        if not given:
            return secrets.token_urlsafe(12), True
    if len(given) < _SHORTEST:
        raise WebUnavailable(f"the password in {source} has {len(given)} characters; at least {_SHORTEST} are needed")
    return given, False
