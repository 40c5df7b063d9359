"""What the command gives to the pages. One grade book for each process."""

from pathlib import Path

import msgspec


class WebSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`who`: the name in the history of changes."""

    book: Path
    who: str
    config: str = ""  # a cluster file


_given: list[WebSettings] = []


def configure(settings: WebSettings) -> None:
    _given[:] = [settings]


def settings() -> WebSettings:
    assert _given, "configure() comes first"
    return _given[0]
