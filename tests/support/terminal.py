"""The `disagg` command in a terminal of its own, and what it draws there."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading

from rich.cells import cell_len

from tests.support.waiting import until

_CODES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


class Terminal:
    """A child process on a pty of its own."""

    def __init__(self, *arguments: str, columns: int = 80, lines: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, lines, None)
        command = [sys.executable, "-m", "disaggregated_inference", *arguments]
        environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "70", "LINES": "20"}  # as of another window
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        self.settings = termios.tcgetattr(theirs)
        self._theirs, self.shown, self._done = theirs, b"", threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._done.is_set():
            if select.select([self._ours], [], [], 0.05)[0]:
                self.shown += os.read(self._ours, 65536)

    def resize(self, columns: int, lines: int, pid: int | None) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if pid:
            os.kill(pid, signal.SIGWINCH)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def sees(self, text: str, since: int = 0) -> bool:
        """After the first `since` bytes of what it showed."""
        return until(lambda: text.encode() in self.shown[since:], 60)

    def screens(self, since: int = 0) -> list[list[str]]:
        """Lines of every picture that it drew in full."""
        drawn = self.shown[since:].decode(errors="replace").split("\x1b[H")[1:]
        return [_CODES.sub("", each).splitlines() for each in drawn]

    def draws(self, columns: int, lines: int, since: int) -> bool:
        """A whole picture of just this size."""

        def fits() -> bool:
            screen = next(reversed(self.screens(since)), [])
            return (len(screen), {*map(cell_len, screen)}) == (lines, {columns})

        return until(fits, 60)

    def ended(self) -> int:
        return self.process.wait(60)

    def is_as_before(self) -> bool:
        return bool(termios.tcgetattr(self._theirs) == self.settings)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._done.set()
        self._reader.join()
        os.close(self._ours)
        os.close(self._theirs)
