"""What `disagg serve` and `disagg gateway` print: sentences on a terminal, lines of JSON in a pipe."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from disaggregated_inference.api import StartLine
from disaggregated_inference.http import Announce, announce_as_json

_SHORT_S = 0.1  # steps that took less are not worth a line
_STOP = "Ctrl-C stops it when its running requests are done; a second Ctrl-C stops it at once"


@contextmanager
def announcing() -> Iterator[Announce]:
    """For standard output. The display ends with the block, so that an error is printed below it."""
    if not sys.stdout.isatty():
        yield announce_as_json
        return
    start = TerminalStart(Console(highlight=False, markup=False, emoji=False))
    try:
        yield start.announce
    finally:
        start.close()


def spinner(console: Console) -> Progress:
    """One line per step that runs, with its seconds; nothing of it stays."""
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


class TerminalStart:
    """Prints a line when a step ends, and shows the one that runs. Threads call `announce`."""

    def __init__(self, console: Console) -> None:
        self._console, self._progress = console, spinner(console)
        self._task: TaskID | None = None
        self._step, self._began_at = "", 0.0

    def announce(self, line: StartLine) -> None:
        if line.event == "start":
            self._console.print(_title(line), soft_wrap=True)
            self._progress.start()
        elif line.event == "step":
            self._show(line.step, line.part)
        elif line.event == "ready":
            self.close()
            self._console.print("\n".join(_ready(line)), soft_wrap=True)
        elif line.event == "stopping":
            self.close()
            self._console.print("\nstopping")  # the terminal shows ^C on this line

    def _show(self, step: str, part: float | None = None) -> None:
        if step != self._step:
            self._end_step()
            self._step, self._began_at = step, time.monotonic()
            self._task = self._progress.add_task(step, total=None)
        assert self._task is not None
        self._progress.update(self._task, description=step if part is None else f"{step} {part:.0%}")

    def _end_step(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            if (seconds := time.monotonic() - self._began_at) >= _SHORT_S:
                self._console.print(f"  {self._step}: {seconds:.1f} s", style="dim")

    def close(self) -> None:
        self._end_step()
        self._progress.stop()


def _title(line: StartLine) -> str:
    name = "node for prefill and decode" if line.role == "both" else f"{line.role} node"
    simulated = f": SIMULATED ({line.profile or 'instant'}), no inference" if line.engine == "simulated" else ""
    return f"{name}: {line.model} with {line.engine}{simulated}"


def _ready(line: StartLine) -> Iterator[str]:
    seconds = "" if line.seconds is None else f" after {line.seconds} s"
    yield f"ready{seconds}: {line.url or _url(line)}"
    if line.dashboard:
        yield f"  dashboard: {line.dashboard}"
    if line.kv_addresses:
        yield f"  KV transfers: {', '.join(line.kv_addresses)}"
    if line.kv_limit_bytes:
        yield f"  KV memory: {line.kv_limit_bytes / 2**30:.1f} GiB"
    if line.ollama:
        yield f"  Ollama: {line.ollama}"
    yield _STOP


def _url(line: StartLine) -> str:
    host = f"[{line.host}]" if ":" in line.host else line.host
    return f"{line.scheme}://{host}:{line.port}"
