"""Completions go to standard output, everything else to standard error, so that completions can be piped."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters are removed: a model must not move the cursor or rename the window.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
# In tables also those that turn the direction of the text: a name must not change how the rest of its line reads.
_UNSEEN = _CONTROLS | {code: None for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_SIZE_ONCE = ("COLUMNS", "LINES")
_PIPED_COLUMNS = 1000  # without a terminal, every table row stays on one line


def plain(text: str) -> str:
    """Text that does nothing to a terminal."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """Text of a node or a client, fit for one line of a terminal."""
    return text.translate(_UNSEEN).replace("\n", " ").replace("\t", " ")


def mute_logs() -> None:
    """Log lines would break up the completion; `--metrics` and `disagg status` show the same facts."""
    logging.getLogger("disaggregated_inference").addHandler(logging.NullHandler())


def stdout_console() -> Console:
    """As wide as the terminal is now: a shell or readline may have exported the size that it had once."""
    is_terminal = sys.stdout.isatty()
    environ = {name: value for name, value in os.environ.items() if not (is_terminal and name in _SIZE_ONCE)}
    width = None if is_terminal else _PIPED_COLUMNS
    return PlainConsole(highlight=False, markup=False, emoji=False, width=width, _environ=environ)


class PlainConsole(Console):
    """Text of nodes and clients cannot draw: rich's own control codes are the only ones."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(segment.text.translate(_UNSEEN), segment.style)


class Screen:
    def __init__(self) -> None:
        self._stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._is_terminal = sys.stdout.isatty()
        self._is_line_open = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # terminals without UTF-8 show a question mark

    def write(self, text: str) -> None:
        text = plain(text) if self._is_terminal else text
        if text:
            self._is_line_open = not text.endswith("\n")
            sys.stdout.write(text)
            sys.stdout.flush()

    def end_line(self) -> None:
        if self._is_line_open:
            self.write("\n")

    def note(self, text: str, style: str = "") -> None:
        self.end_line()
        self._stderr.print(text, style=style, soft_wrap=True)

    def show_metrics(self, metrics: dict[str, Any], *, verbose: bool) -> None:
        """Warnings are always printed, the rest only if `verbose`."""
        for line in summary(metrics) if verbose else ():
            self.note(line, "dim")
        for warning in metrics.get("warnings", ()):
            reason = metrics.get("warning_reason") if warning == metrics["warning"] else None
            self.note(f"warning: {warning}{f': {reason}' if reason else ''}", "yellow")


def summary(metrics: dict[str, Any]) -> list[str]:
    return [_prefill(metrics), _decode(metrics), *map(_failover, metrics["failovers"])]


def _prefill(metrics: dict[str, Any]) -> str:
    """Tokens from the prefix cache are not counted as prefilled."""
    prompt, computed = metrics["prompt_tokens"], round(metrics["prefill_speed"] * metrics["prefill_time"])
    tokens = f"{computed} of {prompt} tokens" if 0 < computed < prompt else f"{prompt} tokens"
    rate = f", {speed(metrics['prefill_speed'])} tok/s" if metrics["prefill_speed"] else ""
    time = f"{metrics['prefill_time']:.3f} s{rate}"
    exposed_s = metrics["exposed_transfer_time"] or 0.0
    handed_over = metrics["prefill_node"] != metrics["decode_node"]
    moved = f"; transfer: {exposed_s * 1e3:.1f} ms exposed" if handed_over else ""
    return f"prefill on {metrics['prefill_node']}: {tokens}, {time}{moved}"


def _decode(metrics: dict[str, Any]) -> str:
    cut = ", cut at max tokens" if metrics.get("finish_reason") == "length" else ""
    written = f"{metrics['completion_tokens']} tokens{cut}, {speed(metrics['decode_speed'])} tok/s"
    return f"decode on {metrics['decode_node']}: {written}; {metrics['method']}, {metrics['plan']}"


def _failover(failover: dict[str, Any]) -> str:
    stalled = "" if failover["stall_s"] is None else f", {failover['stall_s']:.2f} s without a token"
    return f"failover: {failover['node']}: {failover['message']} ({failover['code']}){stalled}"


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"
