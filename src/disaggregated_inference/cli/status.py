"""`disagg status`: a line per node, the links between them, and what it comes to."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disaggregated_inference.cli.screen import hush, speed, stdout_console
from disaggregated_inference.client import DisaggregatedClient

Status = dict[str, Any]  # as the client tells it
Node = dict[str, Any]  # one of its nodes

_UP = "all up"
_AWAY = ("unreachable", "unauthorized")
_COLOURS = {"healthy": "green", "loading": "yellow", "draining": "yellow", "circuit half_open": "yellow"}
_WORDS, _NUMBERS = ("node", "role", "engine", "state"), ("queue", "KV GiB", "read", "write")
_LEGEND = "queue: waiting/running/slots; KV: held/limit; tok/s@prompt or batch size"


def run(config: str | None, watch_s: float | None, as_json: bool) -> bool:
    """Whether all nodes were up when last asked."""
    hush()
    verdict = ""
    with DisaggregatedClient(config) as client, _shown(watch_s is not None, as_json) as show:
        try:
            for status in _news(client, watch_s):
                show(status)
                verdict = status["verdict"]
        except KeyboardInterrupt:  # the way to end a watch; it has its exit code like any other
            if not verdict:
                raise
    return verdict == _UP


def _news(client: DisaggregatedClient, watch_s: float | None) -> Iterator[Status]:
    while True:
        client.health()
        yield client.status()
        if watch_s is None:
            return
        time.sleep(watch_s)


@contextmanager
def _shown(again: bool, as_json: bool) -> Iterator[Callable[[Status], None]]:
    """Where nobody watches, one after the other."""
    console = stdout_console()
    if as_json:
        indent = None if again else 2
        yield lambda status: print(json.dumps(status, indent=indent), flush=True)
    elif again and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(board(status), refresh=True)
    else:
        yield lambda status: console.print(board(status))


def board(status: Status) -> RenderableType:
    """In 80 columns, for names and engines of the usual length."""
    nodes: list[Node] = status["nodes"]
    reasons = [Text(f"{node['name']}: {_reason(node)}", _colour(node)) for node in nodes if node["why"]]
    reasons += [
        Text(f"{no['decode']} takes no cache of {no['prefill']}: {no['why']}", "red") for no in status["refusals"]
    ]
    links = ", ".join(_link(link) for link in status["links"])
    about = [_model(model, nodes) for model in status["models"]] + ([f"links: {links}"] if links else [])
    verdict = Text(status["verdict"], "bold green" if status["verdict"] == _UP else "bold red")
    return Group(_table(nodes), Text(_LEGEND, "dim"), *reasons, *map(Text, about), verdict)


def _table(nodes: list[Node]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in _WORDS + _NUMBERS:  # the last one has two numbers: where room is short, one below the other
        table.add_column(name, no_wrap=name != _NUMBERS[-1], justify="left" if name in _WORDS else "right")
    for node in nodes:
        table.add_row(*_cells(node))
    return table


def _cells(node: Node) -> tuple[Text | str, ...]:
    who = node["name"], node["role"], node["engine"] or "-", Text(node["state"], _colour(node))
    if node["state"] in _AWAY:  # what it said when it was there is no longer so
        return *who, *("-" for _ in _NUMBERS)
    rates = node["rates"]
    reads, writes = rates["prefill"] or rates["local_prefill"], rates["decode"]
    return *who, _queue(node), _memory(node["kv"]), _rates(reads[-1:]), _rates([*writes[:1], *writes[1:][-1:]])


def _queue(node: Node) -> str:
    slots = node["slots"]  # who waits for one is among those who are not done
    return f"{max(0, node['waiting'] - slots['used'])}/{slots['used']}/{slots['most']}"


def _memory(kv: dict[str, int]) -> str:
    most = kv.get("total_limit_bytes") or kv["limit_bytes"]
    return f"{_gib(kv['held_bytes'])}/{_gib(most)}" if most else "-"


def _gib(size_bytes: int) -> str:
    size = size_bytes / 2**30
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _rates(rates: list[dict[str, Any]]) -> str:
    return " ".join(f"{speed(rate['tokens_per_s'])}@{rate['size']}" for rate in rates) or "-"


def _link(link: dict[str, Any]) -> str:
    return f"{link['prefill']} -> {link['decode']} {link['bytes_per_s'] * 8 / 1e9:.3g} Gb/s"


def _reason(node: Node) -> str:
    return str(node["why"]).removeprefix(f"{node['name']}: ")


def _colour(node: Node) -> str:
    return _COLOURS.get(node["state"], "red")


def _model(name: str, nodes: list[Node]) -> str:
    """Who is there for it now, and who should be."""
    its = [node for node in nodes if node["model"] == name]
    parts = [_side(role, [node for node in its if node["role"] in (role, "both")]) for role in ("prefill", "decode")]
    return f"model {name}: {'; '.join(parts)}"


def _side(role: str, nodes: list[Node]) -> str:
    there = ", ".join(node["name"] for node in nodes if node["usable"])
    missing = ", ".join(f"{node['name']} is {node['state']}" for node in nodes if not node["usable"])
    return f"{role} on {there or 'none'}" + (f" ({missing})" if missing else "")
