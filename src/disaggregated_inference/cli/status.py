"""`disagg status`: one row per node, the links between nodes, and a verdict."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disaggregated_inference.cli.screen import mute_logs, speed, stdout_console
from disaggregated_inference.client import DisaggregatedClient

Status = dict[str, Any]  # the client's status()
Node = dict[str, Any]  # one entry of its `nodes`

_UP = "all up"
_AWAY = ("unreachable", "unauthorized")
_COLOURS = {"healthy": "green", "loading": "yellow", "draining": "yellow", "circuit half_open": "yellow"}
_TEXT_COLUMNS, _NUMBER_COLUMNS = ("node", "role", "engine", "state"), ("queue", "KV GiB", "prefill", "decode")
_LEGEND = "queue: waiting/running/slots; KV: used/limit; tok/s@prompt or batch size"


def run(config: str | None, watch_s: float | None, as_json: bool) -> bool:
    """Whether all nodes were up at the last poll."""
    mute_logs()
    verdict = ""
    with DisaggregatedClient(config) as client, _display(watch_s is not None, as_json) as show:
        try:
            for status in _poll(client, watch_s):
                show(status)
                verdict = status["verdict"]
        except KeyboardInterrupt:  # ends --watch with the usual exit code
            if not verdict:
                raise
    return verdict == _UP


def _poll(client: DisaggregatedClient, watch_s: float | None) -> Iterator[Status]:
    while True:
        client.health()
        yield client.status()
        if watch_s is None:
            return
        time.sleep(watch_s)


@contextmanager
def _display(watch: bool, as_json: bool) -> Iterator[Callable[[Status], None]]:
    """On a terminal --watch updates in place; elsewhere every status is printed below the last."""
    console = stdout_console()
    if as_json:
        indent = None if watch else 2
        yield lambda status: print(json.dumps(status, indent=indent), flush=True)
    elif watch and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(render(status), refresh=True)
    else:
        yield lambda status: console.print(render(status))


def render(status: Status) -> RenderableType:
    """Fits 80 columns with names of the usual length."""
    nodes: list[Node] = status["nodes"]
    reasons = [Text(f"{node['name']}: {_reason(node)}", _colour(node)) for node in nodes if node["why"]]
    reasons += [
        Text(f"{pair['decode']} refuses KV caches from {pair['prefill']}: {pair['why']}", "red")
        for pair in status["refusals"]
    ]
    links = ", ".join(_link(link) for link in status["links"])
    models = [_model(model, nodes) for model in status["models"]] + ([f"links: {links}"] if links else [])
    verdict = Text(status["verdict"], "bold green" if status["verdict"] == _UP else "bold red")
    return Group(_table(nodes), Text(_LEGEND, "dim"), *reasons, *map(Text, models), verdict)


def _table(nodes: list[Node]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in _TEXT_COLUMNS + _NUMBER_COLUMNS:  # the last column may wrap: it has two numbers
        table.add_column(
            name, no_wrap=name != _NUMBER_COLUMNS[-1], justify="left" if name in _TEXT_COLUMNS else "right"
        )
    for node in nodes:
        table.add_row(*_cells(node))
    return table


def _cells(node: Node) -> tuple[Text | str, ...]:
    texts = node["name"], node["role"], node["engine"] or "-", Text(node["state"], _colour(node))
    if node["state"] in _AWAY:  # old numbers no longer hold
        return *texts, *("-" for _ in _NUMBER_COLUMNS)
    rates = node["rates"]
    prefill, decode = rates["prefill"] or rates["local_prefill"], rates["decode"]
    return *texts, _queue(node), _memory(node["kv"]), _rates(prefill[-1:]), _rates([*decode[:1], *decode[1:][-1:]])


def _queue(node: Node) -> str:
    slots = node["slots"]  # `waiting` counts running requests, too
    return f"{max(0, node['waiting'] - slots['used'])}/{slots['used']}/{slots['most']}"


def _memory(kv: dict[str, int]) -> str:
    limit = kv.get("total_limit_bytes") or kv["limit_bytes"]
    return f"{_gib(kv['held_bytes'])}/{_gib(limit)}" if limit else "-"


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
    """Nodes that serve the model now, and nodes that should."""
    nodes = [node for node in nodes if node["model"] == name]
    parts = [_side(role, [node for node in nodes if node["role"] in (role, "both")]) for role in ("prefill", "decode")]
    return f"model {name}: {'; '.join(parts)}"


def _side(role: str, nodes: list[Node]) -> str:
    usable = ", ".join(node["name"] for node in nodes if node["usable"])
    missing = ", ".join(f"{node['name']} is {node['state']}" for node in nodes if not node["usable"])
    return f"{role} on {usable or 'none'}" + (f" ({missing})" if missing else "")
