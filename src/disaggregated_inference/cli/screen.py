"""Answers on standard output, words about them on standard error: so that an answer can be piped on."""

import io
import logging
import sys
from typing import Any

from rich.console import Console

# Whatever a model writes, it does not get to move the cursor or to rename the window.
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}
_PIPED_COLUMNS = 1000  # where nobody watches, a row is a line, however long


def hush() -> None:
    """Nodes that come and go are in the metrics and on the board; a log line amid an answer helps nobody."""
    logging.getLogger("disaggregated_inference").addHandler(logging.NullHandler())


def stdout_console() -> Console:
    width = None if sys.stdout.isatty() else _PIPED_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)


class Screen:
    def __init__(self) -> None:
        self._aside = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._is_terminal = sys.stdout.isatty()
        self._is_line_open = False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # an old terminal shows a question mark; that is no error

    def write(self, text: str) -> None:
        shown = text.translate(_CONTROLS) if self._is_terminal else text
        if shown:
            self._is_line_open = not shown.endswith("\n")
            sys.stdout.write(shown)
            sys.stdout.flush()

    def end_line(self) -> None:
        if self._is_line_open:
            self.write("\n")

    def note(self, words: str, style: str = "") -> None:
        self.end_line()
        self._aside.print(words, style=style, soft_wrap=True)

    def about(self, metrics: dict[str, Any], *, wanted: bool) -> None:
        """That things are not as they should be is said in any case."""
        for line in summary(metrics) if wanted else ():
            self.note(line, "dim")
        if warning := metrics.get("warning"):
            self.note(f"warning: {warning}", "yellow")


def summary(metrics: dict[str, Any]) -> list[str]:
    return [_reading(metrics), _writing(metrics), *map(_failover, metrics["failovers"])]


def _reading(metrics: dict[str, Any]) -> str:
    """What its reader held already was not read."""
    prompt, read = metrics["prompt_tokens"], round(metrics["prefill_speed"] * metrics["prefill_time"])
    tokens = f"{read} of {prompt} tokens" if 0 < read < prompt else f"{prompt} tokens"
    known = f", {speed(metrics['prefill_speed'])} tok/s" if metrics["prefill_speed"] else ""
    pace = f"{metrics['prefill_time']:.3f} s{known}"
    exposed_s = metrics["exposed_transfer_time"] or 0.0
    handed_over = metrics["prefill_server"] != metrics["decode_server"]
    moved = f"; transfer: {exposed_s * 1e3:.1f} ms exposed" if handed_over else ""
    return f"prefill on {metrics['prefill_server']}: {tokens}, {pace}{moved}"


def _writing(metrics: dict[str, Any]) -> str:
    cut = ", cut at max tokens" if metrics.get("finish_reason") == "length" else ""
    written = f"{metrics['completion_tokens']} tokens{cut}, {speed(metrics['decode_speed'])} tok/s"
    return f"decode on {metrics['decode_server']}: {written}; {metrics['method']}, {metrics['plan']}"


def _failover(failover: dict[str, Any]) -> str:
    stalled = "" if failover["stall_s"] is None else f", {failover['stall_s']:.2f} s without a token"
    return f"failover: {failover['message']} ({failover['code']}){stalled}"


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"
