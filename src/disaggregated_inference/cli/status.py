"""`disagg status`: one row per node, the links between nodes, and a verdict."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import ClusterLink, ClusterNode, ClusterStatus, KVMemoryStatus, ModelVerdict, Rate
from disaggregated_inference.cli.screen import mute_logs, speed, stdout_console
from disaggregated_inference.client import DisaggregatedClient
from disaggregated_inference.cluster import load_config

_AWAY = ("unreachable", "wrong token", "loading")
_COLOURS = {"healthy": "green", "loading": "yellow", "draining": "yellow", "circuit half_open": "yellow"}
_TEXT_COLUMNS, _NUMBER_COLUMNS = ("node", "role", "engine", "state"), ("queue", "KV GiB", "prefill", "decode")
_COLUMN_SETS = (_TEXT_COLUMNS + _NUMBER_COLUMNS, (*_TEXT_COLUMNS, "queue", "KV GiB"), _TEXT_COLUMNS, ("node", "state"))
_UNBOUNDED = 10_000
_LEGEND = "queue: waiting/running/slots; KV: used/limit; tok/s@prompt or batch size"


def run(config: str | None, token_file: str, watch_s: float | None, as_json: bool) -> bool:
    """Whether all nodes were up at the last poll."""
    mute_logs()
    all_up: bool | None = None
    cluster = load_config(config, token_file=token_file)
    with DisaggregatedClient(cluster) as client, _display(watch_s is not None, as_json) as show:
        try:
            for status in _poll(client, watch_s):
                show(status)
                all_up = _is_up(status)
        except KeyboardInterrupt:  # ends --watch with the usual exit code
            if all_up is None:
                raise
    return bool(all_up)


def _poll(client: DisaggregatedClient, watch_s: float | None) -> Iterator[ClusterStatus]:
    while True:
        client.health()
        yield client.cluster_status()
        if watch_s is None:
            return
        time.sleep(watch_s)


@contextmanager
def _display(watch: bool, as_json: bool) -> Iterator[Callable[[ClusterStatus], None]]:
    """On a terminal --watch updates in place; elsewhere every status is printed below the last."""
    console = stdout_console()
    if as_json:
        indent = None if watch else 2
        yield lambda status: print(_as_json(status, indent), flush=True)
    elif watch and console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda status: live.update(render(status), refresh=True)
    else:
        yield lambda status: console.print(render(status))


def _as_json(status: ClusterStatus, indent: int | None) -> str:
    return json.dumps(msgspec.to_builtins(status), indent=indent)


def render(status: ClusterStatus) -> RenderableType:
    """Fits 80 columns with names of the usual length; narrower terminals get fewer columns."""
    nodes = status.nodes
    reasons = [Text(f"{node.name}: {_reason(node)}", _colour(node)) for node in nodes if node.why]
    reasons += [
        Text(f"{pair.decode} refuses KV caches from {pair.prefill}: {pair.why}", "red") for pair in status.refusals
    ]
    reasons += [
        Text(f"{node.name}: plain, on a link declared trusted: {node.trusted_link}", "yellow")
        for node in nodes
        if node.trusted_link and not node.identity
    ]
    links = ", ".join(_link(link) for link in status.links)
    models = [_model(model, nodes) for model in status.models] + ([f"links: {links}"] if links else [])
    warnings = [Text(f"warning: {warning}", "yellow") for warning in status.warnings]
    colour = "red" if not _is_up(status) else "yellow" if warnings else "green"
    verdict = Text(status.verdict, f"bold {colour}")
    return Group(_NodeTable(nodes), *reasons, *warnings, *map(Text, models), verdict)


def _is_up(status: ClusterStatus) -> bool:
    """A warning does not count: with `strict_models` the node would be down."""
    return all(verdict == ModelVerdict.ALL_UP for verdict in status.models.values())


class _NodeTable:
    """As many columns as fit. Name and state are always whole, role and rates go first."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._nodes = nodes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=_UNBOUNDED)
        for names in _COLUMN_SETS:
            table = _table(self._nodes, names)
            narrowest = _table(self._nodes, names, separator="\n")
            if Measurement.get(console, unbounded, narrowest).maximum <= options.max_width:
                break
        yield table
        if _NUMBER_COLUMNS[0] in names:
            yield Text(_LEGEND, "dim")


def _table(nodes: Sequence[ClusterNode], names: tuple[str, ...], separator: str = " ") -> Table:
    """`separator`: between the two decode rates, where the last column may wrap."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    may_wrap = names if len(names) == 2 else _NUMBER_COLUMNS[-1:]  # two columns are never cut
    for name in names:
        table.add_column(name, no_wrap=name not in may_wrap, justify="left" if name in _TEXT_COLUMNS else "right")
    for node in nodes:
        cells = dict(zip(_TEXT_COLUMNS + _NUMBER_COLUMNS, _cells(node, separator), strict=True))
        table.add_row(*(cells[name] for name in names))
    return table


def _cells(node: ClusterNode, separator: str) -> tuple[Text | str, ...]:
    texts = node.name, node.role, node.engine or "-", Text(node.state, _colour(node))
    if node.state in _AWAY and not node.usable:  # old numbers no longer hold
        return *texts, *("-" for _ in _NUMBER_COLUMNS)
    rates = node.rates
    prefill, decode = rates.prefill or rates.local_prefill, rates.decode
    both = [*decode[:1], *decode[1:][-1:]]
    return *texts, _queue(node), _memory(node.kv), _rates(prefill[-1:], separator), _rates(both, separator)


def _queue(node: ClusterNode) -> str:
    slots = node.slots  # `waiting` counts running requests, too
    return f"{max(0, node.waiting - slots.used)}/{slots.used}/{slots.most}"


def _memory(kv: KVMemoryStatus) -> str:
    limit = kv.total_limit_bytes or kv.limit_bytes
    return f"{_gib(kv.held_bytes)}/{_gib(limit)}" if limit else "-"


def _gib(size_bytes: int) -> str:
    size = size_bytes / 2**30
    return f"{size:.2f}" if size < 10 else f"{size:.1f}"


def _rates(rates: Sequence[Rate], separator: str) -> str:
    return separator.join(f"{speed(rate.tokens_per_s)}@{rate.size}" for rate in rates) or "-"


def _link(link: ClusterLink) -> str:
    return f"{link.prefill} -> {link.decode} {link.bytes_per_s * 8 / 1e9:.3g} Gb/s"


def _reason(node: ClusterNode) -> str:
    place = f" ({node.url})" if node.state in _AWAY else ""
    return node.why + place


def _colour(node: ClusterNode) -> str:
    return _COLOURS.get(node.state, "red")


def _model(name: str, nodes: Sequence[ClusterNode]) -> str:
    """Nodes that serve the model now, and nodes that should."""
    nodes = [node for node in nodes if node.model == name]
    parts = [_side(role, [node for node in nodes if node.role in (role, "both")]) for role in ("prefill", "decode")]
    own = ", ".join(dict.fromkeys(node.node_model for node in nodes if node.node_model and node.node_model != name))
    return f"model {name}{f' (on nodes: {own})' if own else ''}: {'; '.join(parts)}"


def _side(role: str, nodes: Sequence[ClusterNode]) -> str:
    usable = ", ".join(node.name for node in nodes if node.usable)
    missing = ", ".join(f"{node.name}: {node.state}" for node in nodes if not node.usable)
    return f"{role} on {usable or 'none'}" + (f" ({missing})" if missing else "")
