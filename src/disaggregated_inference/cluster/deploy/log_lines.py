"""Lines of logs: of our own programs, which are JSON with a time, of others, and with journalctl's head."""

import json
import re
from typing import Any, NamedTuple


class LogLine(NamedTuple):
    time: str  # as in the line; that of the line before, where it has none
    machine: str
    service: str
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        return _fields(self.text)

    def concerns(self, request: str) -> bool:
        return not request or self.fields.get("request_id") == request or request in self.text


# journalctl's own head of a line: its time is that of lines without one.
_JOURNAL = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})\d*[+-][\d:]+ \S+ \S+: (.*)", re.DOTALL)


def parse_line(text: str, machine: str, service: str, last: str) -> LogLine | None:
    """`last`: the time of the line before, for lines without one."""
    if text.startswith("-- "):  # journalctl's remarks
        return None
    if head := _JOURNAL.fullmatch(text):
        last, text = f"{head[1]}Z", head[2]
    return LogLine(str(_fields(text).get("time", last)), machine, service, text)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def find_error(log: str) -> tuple[str, str]:
    """The last line that says an error, and the last line; empty: there is none. The supervisor's own are left out."""
    lines = [line for text in log.splitlines() if (line := parse_line(text.strip(), "", "", "")) and line.text]
    said = [line for line in lines if line.fields.get("logger") != "supervise"]
    errors = [_words(line) for line in said if _is_error(line)]
    return errors[-1] if errors else "", _words(said[-1]) if said else ""


def _words(line: LogLine) -> str:
    return str(line.fields.get("message", line.text))


def _is_error(line: LogLine) -> bool:
    words = _words(line)
    return line.fields.get("level") == "error" or words.startswith("error:") or "Error:" in words
