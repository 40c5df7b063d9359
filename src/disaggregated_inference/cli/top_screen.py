"""The screen of `disagg top`: what fits, the most important first. Pure: a state and a size make a picture."""

import time
from collections.abc import Sequence
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disaggregated_inference.cli.screen import one_line, speed
from disaggregated_inference.cli.top_feed import TopState
from disaggregated_inference.orchestrator import is_cached

Record = dict[str, Any]
Cells = dict[str, str | Text]

_CARD = 26  # columns of a card
_LEAST = 16  # of a column with names
# The most important first, and where each stands on the screen.
_NODE_COLUMNS = ("node", "state", "power", "cpu", "mem", "gpu", "temp", "queue", "role", "address")
_SPEEDS = "prefill -> decode t/s"
_REQUEST_COLUMNS = ("model", "seconds", "ok", _SPEEDS, "#", "energy", "time", "way")
_PLACES = (
    *("#", "time", "node", "model", "role", "state", "queue", "seconds", "ok", _SPEEDS),
    *("address", "cpu", "mem", "gpu", "power", "temp", "way", "energy"),
)
_NUMBERS = ("#", "queue", "cpu", "mem", "gpu", "power", "temp", "seconds", "energy")
_CARD_LINES = 5
_STATES = {"healthy": "green", "loading": "yellow", "draining": "yellow", "circuit half_open": "yellow"}
_NONE = "-"
_GIB = 1 << 30
_HELP = "q quits"


def render(state: TopState, width: int, height: int, now: float | None = None) -> RenderableType:
    """Exactly one screen: `height` lines at most."""
    lines: list[RenderableType] = [_title(state, width, time.time() if now is None else now)]
    notes = _notes(state)
    lines += notes[: max(1, height // 6)]
    if state.status is None:
        return Group(*lines)
    left = height - len(lines)
    if left >= _CARD_LINES + 3:
        lines.append(_cards(state, width))
        left -= _CARD_LINES
    nodes: Sequence[Record] = state.status["nodes"]
    shown = min(len(nodes), max(1, left - 4)) if len(nodes) > left - 3 else len(nodes)
    lines.append(_nodes(nodes[:shown], width, hidden=len(nodes) - shown))
    left -= shown + (2 if shown < len(nodes) else 1)
    if left >= 2:
        lines.append(_requests(list(state.requests)[: left - 1], width))
    return Group(*lines)


def _title(state: TopState, width: int, now: float) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(now))
    if state.trouble:
        word = "connecting" if state.status is None else "reconnecting"
        verdict, colour = f"{word}: {one_line(state.trouble)}" if state.trouble != word else word, "bold yellow"
    else:
        assert state.status
        verdict = one_line(state.status["verdict"])
        colour = "bold green" if verdict == "all up" else "bold red"
    text = Text.assemble(("disagg top  ", "bold"), (verdict, colour), "  ", one_line(state.url))
    text.truncate(max(1, width - len(at) - len(_HELP) - 4), overflow="ellipsis", pad=True)
    text.append(f"  {at}  {_HELP}", "dim").truncate(width)
    return text


def _notes(state: TopState) -> list[RenderableType]:
    """Alarms first, then why nodes are down, one line each."""
    found = [
        f"{alarm['what']}: {_figure(alarm)}; {alarm['why']}" for alarm in state.alarms if alarm["state"] == "alarm"
    ]
    notes = [Text(one_line(f"ALARM {text}"), "bold red", no_wrap=True, overflow="ellipsis") for text in found]
    nodes = state.status["nodes"] if state.status else []
    down = [f"{node['name']}: {node['why']}" for node in nodes if node["why"]]
    return [*notes, *(Text(one_line(text), "yellow", no_wrap=True, overflow="ellipsis") for text in down)]


def _figure(alarm: Record) -> str:
    return f"{alarm['measured']:.3g} {alarm['unit']}, limit {alarm['limit']:g}"


def _cards(state: TopState, width: int) -> RenderableType:
    """As many as fit: the models, and the last place for all of them together."""
    assert state.status
    models, places = list(state.status["models"]), max(1, width // _CARD)
    shown = models[: max(0, places - 1)] if places > 1 else []
    figures = state.summary.get("models", {})
    cards = [_card(model, _model_lines(figures.get(model, {}))) for model in shown]
    more = f" of {len(models)} models" if len(models) > max(1, len(shown)) else ""
    cards.append(_card(f"All requests{more}", _combined_lines(state.summary.get("combined", {}))))
    each = min(width // len(cards), 2 * _CARD)
    table = Table.grid(padding=0)
    for _ in cards:
        table.add_column(width=each)
    table.add_row(*cards)
    return table


def _card(title: str, lines: list[str]) -> Panel:
    body = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    return Panel(Group(*body), title=Text(one_line(title), "bold", no_wrap=True, overflow="ellipsis"), padding=0)


def _model_lines(figures: Record) -> list[str]:
    """Medians, as the gateway computes them for every screen."""
    if not figures.get("answered"):
        return ["no answer yet", "", ""]
    read = "   cached" if figures.get("all_cached") else f"{_rate(figures, 'prefill_speed'):>5} t/s"
    return [
        f"Prefill {_seconds(figures.get('prefill_time')):>6} {read}",
        f"Decode  {_seconds(figures.get('decode_time')):>6} {_rate(figures, 'decode_speed'):>5} t/s",
        f"Total   {_seconds(figures.get('total_time')):>6} med of {figures['answered']}",
    ]


def _combined_lines(figures: Record) -> list[str]:
    """The time in which at least one of the last requests ran, and how much longer one after the other would take."""
    if not figures.get("busy_time"):
        return ["no answer yet", "", ""]
    return [
        f"Total   {_seconds(figures['busy_time']):>6}  last {figures['answered']}",
        f"Speedup {figures['speedup']:>5.2f}x",
        f"Output  {_rate(figures, 'tokens_per_s'):>6} t/s",
    ]


def _rate(figures: Record, name: str) -> str:
    return speed(figures.get(name) or 0.0)


def _nodes(nodes: Sequence[Record], width: int, hidden: int) -> RenderableType:
    table = fitted([_node_cells(node) for node in nodes], _NODE_COLUMNS, ("node",), width)
    return Group(table, Text(f"+{hidden} more", "dim", no_wrap=True)) if hidden else table


def _node_cells(node: Record) -> Cells:
    readings, colour = node.get("readings") or {}, _STATES.get(node["state"], "red")
    gpu: Record = next(iter(readings.get("gpus") or ()), {})
    slots = node["slots"]  # `waiting` counts those in a slot, too
    queue = f"{max(0, node['waiting'] - slots['used'])}/{slots['used']}/{slots['most']}"
    return {
        "node": one_line(node["name"]),
        "role": node["role"],
        "state": Text(f"{'●' if node['usable'] else '○'} {one_line(node['state'])}", colour),
        "queue": queue,
        "address": one_line(node["url"].partition("//")[2]),
        "cpu": _share(readings.get("cpu_share")),
        "mem": _memory(readings),
        "gpu": _share(gpu.get("utilisation")),
        "power": _power(readings),
        "temp": _NONE if gpu.get("temperature_c") is None else f"{gpu['temperature_c']:.0f}°C",
    }


def _power(readings: Record) -> str:
    return _NONE if readings.get("power_w") is None else f"{readings['power_w']:.0f}W"


def _memory(readings: Record) -> str:
    used, total = readings.get("memory_used_bytes"), readings.get("memory_total_bytes")
    return _NONE if used is None or not total else f"{used / _GIB:.0f}/{total / _GIB:.0f}G"


def _requests(requests: list[Record], width: int) -> RenderableType:
    if not requests:
        return Text("no requests yet", "dim", no_wrap=True, overflow="ellipsis")
    return fitted([_request_cells(request) for request in requests], _REQUEST_COLUMNS, ("model", "way"), width)


def _request_cells(request: Record) -> Cells:
    ok, method = request.get("ok"), str(request.get("method") or _NONE)
    code = one_line(str((request.get("error") or {}).get("code") or request.get("outcome")))
    prefill = "cached" if is_cached(request) else speed(request.get("prefill_speed") or 0.0)
    energy_j, source = request.get("energy_j"), request.get("energy_source") or ""
    return {
        "#": str(request.get("number") or _NONE),
        "time": time.strftime("%H:%M:%S", time.localtime(request.get("time") or 0)),
        "model": one_line(str(request.get("model"))),
        "seconds": f"{request.get('total_time') or 0:.2f}",
        "ok": Text("yes", "green") if ok else Text(code, "red"),
        _SPEEDS: f"{prefill} -> {speed(request.get('decode_speed') or 0.0)}",
        "way": one_line(method).replace("disaggregated_", "handed over "),
        "energy": _NONE if energy_j is None else f"{_joules(energy_j)} {source[:4]}",
    }


def fitted(rows: list[Cells], columns: Sequence[str], flexible: Sequence[str], width: int) -> Table:
    """Numbers stay whole. Where the screen is narrow, the last columns go, then the flexible ones are cut."""
    widths = {name: max([len(name), *(cell_len(str(row[name])) for row in rows)]) for name in columns}
    order = sorted(columns, key=_PLACES.index)
    while sum(_least(name, widths, flexible) + 1 for name in order) > width + 1 and len(order) > 2:
        order.remove(next(name for name in reversed(columns) if name in order))
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    spare = width + 1 - sum(_least(name, widths, flexible) + 1 for name in order)
    for name in order:
        least = _least(name, widths, flexible)
        more = min(widths[name] - least, max(0, spare))
        spare -= more
        justify: Literal["left", "right"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, width=least + more, no_wrap=True, overflow="ellipsis", justify=justify)
    for row in rows:
        table.add_row(*(row[name] for name in order))
    return table


def _least(name: str, widths: dict[str, int], flexible: Sequence[str]) -> int:
    return min(widths[name], _LEAST) if name in flexible else widths[name]


def _joules(value: float) -> str:
    return f"{value:.3g}J" if value < 999.5 else f"{value / 1000:.3g}kJ"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.0f}%"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.2f}s" if value < 100 else f"{value:.0f}s"
