"""Messages as people type them: a line, lines that go on after a backslash, or all that stands between two `\"\"\"`."""

import atexit
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

_QUOTES = '"""'
_MOST_REMEMBERED = 1000


class LineReader:
    """From a terminal, with what was typed in earlier chats at hand; or from a file or a pipe, silently."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # a bad byte is said, and costs one line
        if self.is_terminal:
            _recall()

    def message(self) -> str | None:
        """The next one; None at the end."""
        line = self._line(">>> ")
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return self._quoted(line.lstrip().removeprefix(_QUOTES))
        return self._continued(line)

    def _continued(self, line: str) -> str:
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line("... ") or "")
        return "\n".join(lines).strip()

    def _quoted(self, first: str) -> str:
        lines: list[str] = []
        line: str | None = first
        while line is not None and not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line("... ")
        last = (line or "").rstrip().removesuffix(_QUOTES)
        return "\n".join([*lines, last]).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if not self.is_terminal:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        if not sys.stdout.isatty():  # the answers go elsewhere; the prompt must not go with them
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            return None


def _recall() -> None:
    try:
        import readline
    except ImportError:  # a Python built without it: lines can still be typed
        return
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "disaggregated-inference/chat"
    readline.set_history_length(_MOST_REMEMBERED)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(0o600)
        readline.read_history_file(path)

    def keep() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(keep)
