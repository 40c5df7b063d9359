"""The screen of `disagg top`: what fits, the most important first. Pure: a state and a size make a picture."""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import (
    Alarm,
    ClusterNode,
    ClusterStatus,
    CombinedSummary,
    GpuReading,
    ModelSummary,
    ModelVerdict,
    Readings,
    RequestRecord,
)
from disaggregated_inference.cli.screen import one_line, speed
from disaggregated_inference.cli.top_feed import TopState
from disaggregated_inference.cli.top_links import links_part
from disaggregated_inference.cli.top_table import NONE, SPEEDS, Cells, fitted, share
from disaggregated_inference.cli.top_targets import targets_part
from disaggregated_inference.orchestrator import is_cached

_CARD = 26  # columns of a card
# The most important first.
_NODE_COLUMNS = ("node", "state", "power", "cpu", "mem", "gpu", "temp", "queue", "role", "address")
_REQUEST_COLUMNS = ("model", "seconds", "ok", SPEEDS, "#", "energy", "time", "way")
_CARD_LINES = 5
_CARDS_SHARE = 3  # more than one row of cards: on a third of the screen at most
_REQUESTS = 5  # are shown before links and targets
_STATES = {"healthy": "green", "loading": "yellow", "draining": "yellow", "circuit half_open": "yellow"}
_GB = 1e9
_JOULES = ("J", "kJ", "MJ", "GJ")
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
        cards, taken = _cards(state, width, max(1, left // _CARDS_SHARE // _CARD_LINES))
        lines.append(cards)
        left -= taken
    nodes = state.status.nodes
    shown = min(len(nodes), max(1, left - 4)) if len(nodes) > left - 3 else len(nodes)
    lines.append(_nodes(nodes[:shown], width, hidden=len(nodes) - shown))
    left -= shown + (2 if shown < len(nodes) else 1)
    return Group(*lines, *_below(state, width, left))


def _below(state: TopState, width: int, left: int) -> list[RenderableType]:
    """Some requests, then links and targets as far as they fit; more requests on the lines that are left."""
    if left < 2:
        return []
    room = left - 1 - min(_REQUESTS, len(state.requests))  # below the head of the requests
    links, taken = links_part(state, width, room - (1 if state.targets else 0))
    targets, also_taken = targets_part(state.targets, width, room - taken)
    requests = _requests(list(state.requests)[: left - 1 - taken - also_taken], width)
    return [requests, *(part for part in (links, targets) if part is not None)]


def _title(state: TopState, width: int, now: float) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(now))
    if state.trouble:
        word = "connecting" if state.status is None else "reconnecting"
        verdict, colour = f"{word}: {one_line(state.trouble)}" if state.trouble != word else word, "bold yellow"
    else:
        assert state.status
        verdict = one_line(state.status.verdict)
        colour = "bold green" if _is_up(state.status) else "bold red"
    text = Text.assemble(("disagg top  ", "bold"), (verdict, colour), "  ", one_line(state.url))
    text.truncate(max(1, width - len(at) - len(_HELP) - 4), overflow="ellipsis", pad=True)
    text.append(f"  {at}  {_HELP}", "dim").truncate(width)
    return text


def _is_up(status: ClusterStatus) -> bool:
    verdicts = status.models.values()
    return all(each is ModelVerdict.ALL_UP for each in verdicts) and not any(node.warning for node in status.nodes)


def _notes(state: TopState) -> list[RenderableType]:
    """Alarms first, below the reason why there are no newer ones; then why nodes are down or refuse each other, then
    warnings, one line each."""
    found = [f"{alarm.what}: {_figure(alarm)}; {alarm.why}" for alarm in state.alarms if alarm.state == "alarm"]
    notes = [Text(one_line(f"ALARM {text}"), "bold red", no_wrap=True, overflow="ellipsis") for text in found]
    if state.targets_trouble and not state.trouble:
        what = "targets and alarms are those of before" if state.targets else "targets and alarms are not known"
        text = one_line(f"{what}: {state.targets_trouble}")
        notes.insert(0, Text(text, "bold yellow", no_wrap=True, overflow="ellipsis"))
    nodes = state.status.nodes if state.status else ()
    down = [f"{node.name}: {node.why}" for node in nodes if node.why]
    refusals = state.status.refusals if state.status else ()
    down += [f"{each.decode} refuses KV of {each.prefill}: {each.why}" for each in refusals]
    down += state.status.warnings if state.status else ()
    return [*notes, *(Text(one_line(text), "yellow", no_wrap=True, overflow="ellipsis") for text in down)]


def _figure(alarm: Alarm) -> str:
    return f"{alarm.measured or 0.0:.3g} {alarm.unit}, limit {alarm.limit:g}"


def _cards(state: TopState, width: int, most: int) -> tuple[RenderableType, int]:
    """As many as fit in `most` rows: the models, and the last place for all of them together. Also their lines."""
    assert state.status
    models, across = list(state.status.models), max(1, width // _CARD)
    shown = models[: across * most - 1]
    figures = state.summary.models
    cards = [_card(model, _model_lines(figures.get(model, ModelSummary()))) for model in shown]
    title = f"All of {len(models)} models" if len(models) > max(1, len(shown)) else "All requests"
    cards.append(_card(title, _combined_lines(state.summary.combined)))
    across = min(across, len(cards))
    table = Table.grid(padding=0)
    for _ in range(across):
        table.add_column(width=min(width // across, 2 * _CARD))
    rows = [cards[first : first + across] for first in range(0, len(cards), across)]
    for row in rows:
        table.add_row(*row)
    return table, _CARD_LINES * len(rows)


def _card(title: str, lines: list[str]) -> Panel:
    body = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
    return Panel(Group(*body), title=Text(one_line(title), "bold", no_wrap=True, overflow="ellipsis"), padding=0)


def _model_lines(figures: ModelSummary) -> list[str]:
    """Medians, as the gateway computes them for every screen."""
    if not figures.answered:
        return ["no answer yet", "", ""]
    read = "   cached" if figures.all_cached else f"{_rate(figures.prefill_speed):>5} t/s"
    return [
        f"Prefill {_seconds(figures.prefill_time):>6} {read}",
        f"Decode  {_seconds(figures.decode_time):>6} {_rate(figures.decode_speed):>5} t/s",
        f"Total   {_seconds(figures.total_time):>6} med of {figures.answered}",
    ]


def _combined_lines(figures: CombinedSummary) -> list[str]:
    """The time in which at least one of the last requests ran, and how much longer one after the other would take."""
    if not figures.busy_time:
        return ["no answer yet", "", ""]
    return [
        f"Total   {_seconds(figures.busy_time):>6}  last {figures.answered}",
        f"Speedup {figures.speedup or 0.0:>5.2f}x",
        f"Output  {_rate(figures.tokens_per_s):>6} t/s",
    ]


def _rate(per_s: float | None) -> str:
    return speed(per_s or 0.0)


def _nodes(nodes: Sequence[ClusterNode], width: int, hidden: int) -> RenderableType:
    table = fitted([_node_cells(node) for node in nodes], _NODE_COLUMNS, ("node",), width)
    return Group(table, Text(f"+{hidden} more", "dim", no_wrap=True)) if hidden else table


def _node_cells(node: ClusterNode) -> Cells:
    readings, colour = node.readings or Readings(), _STATES.get(node.state, "red")
    gpu = next(iter(readings.gpus), GpuReading())
    slots = node.slots  # `waiting` counts those in a slot, too
    queue = f"{max(0, node.waiting - slots.used)}/{slots.used}/{slots.most}"
    return {
        "node": one_line(node.name),
        "role": node.role,
        "state": Text(f"{'●' if node.usable else '○'} {one_line(node.state)}", colour),
        "queue": queue,
        "address": one_line(node.url.partition("//")[2]),
        "cpu": share(readings.cpu_share),
        "mem": _memory(readings),
        "gpu": share(gpu.utilisation),
        "power": _power(readings),
        "temp": NONE if gpu.temperature_c is None else f"{gpu.temperature_c:.0f}°C",
    }


def _power(readings: Readings) -> str:
    return NONE if readings.power_w is None else f"{readings.power_w:.0f}W"


def _memory(readings: Readings) -> str:
    used, total = readings.memory_used_bytes, readings.memory_total_bytes
    return NONE if used is None or not total else f"{used / _GB:.0f}/{total / _GB:.0f}GB"


def _requests(requests: list[RequestRecord], width: int) -> RenderableType:
    if not requests:
        return Text("no requests yet", "dim", no_wrap=True, overflow="ellipsis")
    return fitted([_request_cells(request) for request in requests], _REQUEST_COLUMNS, ("model", "way"), width)


def _request_cells(request: RequestRecord) -> Cells:
    code = one_line(request.error.code if request.error else request.outcome)
    prefill = "cached" if is_cached(request) else speed(request.prefill_speed)
    return {
        "#": str(request.number or NONE),
        "time": time.strftime("%H:%M:%S", time.localtime(request.time)),
        "model": one_line(request.model),
        "seconds": f"{request.total_time:.2f}",
        "ok": Text("yes", "green") if request.ok else Text(code, "red"),
        SPEEDS: f"{prefill} -> {speed(request.decode_speed)}",
        "way": "handed over" if request.handed_over else one_line(request.method or NONE),
        "energy": _energy(request.energy_j, request.energy_source or ""),
    }


def _energy(joules: float | None, source: str) -> str:
    return NONE if joules is None else f"{_joules(joules)} {source[:4]}"


def _joules(value: float) -> str:
    power = 0
    while value >= 999.5 and power < len(_JOULES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{_JOULES[power]}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.2f}s" if value < 100 else f"{value:.0f}s"
