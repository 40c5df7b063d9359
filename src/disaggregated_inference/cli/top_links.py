"""The links of `disagg top`: from each prefill node to the decode nodes of its model, as the dashboard draws them."""

from collections.abc import Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from disaggregated_inference.api import ClusterLink, ClusterNode
from disaggregated_inference.cli.screen import one_line
from disaggregated_inference.cli.top_feed import TopState
from disaggregated_inference.cli.top_table import NONE, Cells, fitted, share, size

Word = Literal["refused", "flowing", "down", "quiet"]

_COLUMNS = ("link", "measured", "line rate", "reached", "state", "now", "moved")
_COLOURS: dict[Word, str] = {"refused": "red", "flowing": "green", "down": "red", "quiet": ""}


def links_part(state: TopState, width: int, room: int) -> tuple[RenderableType | None, int]:
    """The table, and its lines: `room` at most. Those that were used, or refuse, come first."""
    rows = sorted(_rows(state), key=lambda row: row[0])
    shown = len(rows) if len(rows) < room else room - 2
    if not rows or shown < 1:
        return None, 0
    table = fitted([cells for _, cells in rows[:shown]], _COLUMNS, ("link",), width)
    if shown == len(rows):
        return table, shown + 1
    return Group(table, Text(f"+{len(rows) - shown} more links", "dim", no_wrap=True, overflow="ellipsis")), shown + 2


def _rows(state: TopState) -> Iterator[tuple[bool, Cells]]:
    """Each with whether nothing is to be said of it yet."""
    assert state.status
    known = {(link.prefill, link.decode): link for link in state.status.links}
    refused = {(each.prefill, each.decode) for each in state.status.refusals}
    nodes = state.status.nodes
    for prefill, decode in ((p, d) for p in nodes for d in nodes if _is_link(p, d)):
        pair = prefill.name, decode.name
        link, flow = known.get(pair), 0.0 if state.trouble else state.flows.get(pair, 0.0)
        word = _word(pair in refused, flow, prefill.usable and decode.usable)
        simulated = prefill.engine == decode.engine == "simulated"
        yield word != "refused" and not (link and link.measured), _cells(pair, link, flow, word, simulated)


def _is_link(prefill: ClusterNode, decode: ClusterNode) -> bool:
    return prefill.role == "prefill" and decode.role != "prefill" and prefill.model == decode.model


def _word(refused: bool, flow: float, usable: bool) -> Word:
    if refused:
        return "refused"
    return "flowing" if flow else "quiet" if usable else "down"


def _cells(pair: tuple[str, str], link: ClusterLink | None, flow: float, word: Word, simulated: bool) -> Cells:
    line, measured = (link.line_rate_bytes_s, link.bytes_per_s if link.measured else None) if link else (None, None)
    return {
        "link": one_line(f"{pair[0]} -> {pair[1]}"),
        "state": Text(word, _COLOURS[word]),
        "now": f"{size(flow)}/s" if flow else NONE,
        "measured": Text(f"{size(measured)}/s" if measured else "not yet", "yellow" if link and link.warning else ""),
        "line rate": f"{'simulated ' if simulated else ''}{size(line)}/s" if line else NONE,
        "reached": share(measured / line) if measured and line and not simulated else NONE,
        "moved": size(link.payload_bytes if link else 0),
    }
