"""Reads chat messages: one line, lines continued with a backslash, or the text between two `\"\"\"`."""

import atexit
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from disaggregated_inference.private_files import make_private_file, make_private_folder

_QUOTES = '"""'
_HISTORY_LINES = 1000


class LineReader:
    """Reads from a terminal with line history, or from a file or pipe without prompts."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # a bad byte costs one line, not the chat
        if self.is_terminal:
            _load_history()

    def message(self) -> str | None:
        """The next message; None at the end of input."""
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
        if not sys.stdout.isatty():  # the input prompt must not end up in redirected output
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            return input(prompt)
        except EOFError:
            return None


def _load_history() -> None:
    try:
        import readline
    except ImportError:  # a Python without readline has no line history
        return
    path = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "disaggregated-inference/chat"
    readline.set_history_length(_HISTORY_LINES)
    with suppress(OSError):
        make_private_folder(path.parent)
        make_private_file(path)
        readline.read_history_file(path)

    def save() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)
