"""`disagg top`: the cluster in a terminal, live. Reads a gateway; changes nothing."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live

from disaggregated_inference.cli.screen import stdout_console
from disaggregated_inference.cli.top_feed import TopFeed, TopState
from disaggregated_inference.cli.top_screen import render
from disaggregated_inference.cluster import read_token
from disaggregated_inference.errors import BadRequest

_PIPED_COLUMNS = 100  # without a terminal
_EVERYTHING = 1_000_000  # lines: nothing is left out
_QUIT_KEYS = (b"q", b"Q", b"\x03", b"\x04", b"\x1b")


def run(url: str, token_file: str, once: bool, as_json: bool) -> None:
    state, token = TopState(_checked(url)), read_token(file=token_file)
    if once or as_json or not sys.stdout.isatty():
        _print_once(state, token, as_json)
    else:
        asyncio.run(_show(state, token))


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"--url: {url!r} is no address of a gateway; give one such as http://127.0.0.1:8080")
    return url.rstrip("/")


def _print_once(state: TopState, token: str, as_json: bool) -> None:
    content = asyncio.run(TopFeed(state, token, lambda: None).once())
    if as_json:
        print(json.dumps(json.loads(content), indent=2))
        return
    console = stdout_console() if sys.stdout.isatty() else Console(width=_PIPED_COLUMNS, highlight=False, markup=False)
    console.print(render(state, console.width, _EVERYTHING))


async def _show(state: TopState, token: str) -> None:
    """Until a key quits. The terminal is left as it was, whatever happens."""
    console, changed, quitting = stdout_console(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    following = asyncio.create_task(TopFeed(state, token, changed.set).follow())
    following.add_done_callback(lambda _: quitting.set())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, quitting.set)
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    try:
        with _keys(quitting.set), Live(console=console, screen=True, auto_refresh=False) as live:
            while not quitting.is_set():
                live.update(render(state, console.width, console.height), refresh=True)
                await _either(changed, quitting)
                changed.clear()
    finally:
        following.cancel()
    with suppress(asyncio.CancelledError):
        await following  # raises what the gateway refused


async def _either(*events: asyncio.Event) -> None:
    waiting = {asyncio.create_task(event.wait()) for event in events}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


@contextmanager
def _keys(on_quit: Callable[[], None]) -> Iterator[None]:
    """Keys are read one by one, without an echo, while this lasts."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(terminal, 64)
        if typed in _QUIT_KEYS or not typed:
            on_quit()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
