"""`disagg history`: the last requests and their outcome, and the history as CSV or JSON."""

import csv
import json
import logging
import sqlite3
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.cli.screen import one_line, speed, stdout_console
from disaggregated_inference.cluster import ClusterConfig, load_config
from disaggregated_inference.errors import BadRequest, ConfigError
from disaggregated_inference.orchestrator import (
    MOMENT_SHAPE,
    History,
    HistoryFilter,
    HistoryReader,
    PlainRecord,
    moment,
)
from disaggregated_inference.timeouts import HistoryTimeouts

_COLUMNS = ("#", "time", "model", "seconds", "ok", "prefill -> decode tok/s", "method")
_NUMBERS = ("#", "seconds")


_ALL = 10_000_000
_FEW, _MANY = 10, 1000  # rows of a table, if --count does not say
# Of a record, as columns of a CSV file. `error` is its code.
CSV_FIELDS = (
    *("number", "time", "request_id", "model", "node_model", "outcome", "error", "method"),
    *("prefill_node", "decode_node", "caller", "plan", "warning"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "total_time", "first_token_time", "prefill_time"),
    *("prefill_speed", "decode_time", "decode_speed", "queue_time", "exposed_transfer_time", "kv_bytes", "attempts"),
    *("transfer_time", "hidden_transfer_time", "output_token_time", "batch_size", "sequential_time"),
    *("predicted_first_token_time", "energy_j", "energy_source", "cost", "cost_without"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a cell begins that a spreadsheet would compute


class HistoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the command line. `count` None: ten, or all where a time is given or the output is CSV."""

    config: str | None = None
    count: int | None = None
    model: str | None = None
    node: str | None = None
    since: str = ""
    until: str = ""
    as_csv: bool = False
    as_json: bool = False


def run(options: HistoryOptions) -> None:
    if options.as_csv and options.as_json:
        raise BadRequest("--csv and --json exclude each other: give one of them")
    cluster = load_config(options.config)
    wanted, timed = _filter(cluster, options), bool(options.since or options.until)
    path = _file(cluster)
    if options.as_csv:
        with _records(path, wanted, options.count or _ALL, oldest_first=True) as records:
            _write_csv(records)
    elif options.as_json:
        with _records(path, wanted, options.count or (_ALL if timed else _FEW)) as records:
            _write_json(records)
    else:
        with _records(path, wanted, options.count or (_MANY + 1 if timed else _FEW)) as records:
            _write_table(list(records), timed, options.count or _MANY)


def _write_table(records: list[PlainRecord], timed: bool, most: int) -> None:
    if not records:
        print("no requests yet" if not timed else "no requests in this time")
        return
    stdout_console().print(_table(list(map(RequestRecord.of_row, records[:most]))))
    if len(records) > most:
        print(f"the newest {most:,}; --count shows more, --csv writes all", file=sys.stderr)


def _filter(cluster: ClusterConfig, options: HistoryOptions) -> HistoryFilter:
    now, names = time.time(), [server.name for server in cluster.servers]
    if options.node and options.node not in names:
        raise BadRequest(f"--node: no node has the name {options.node!r}; there are {', '.join(names)}")
    since = _moment(options.since, "--since", now) if options.since else 0.0
    until = _moment(options.until, "--until", now) if options.until else HistoryFilter().until
    if until <= since:
        raise BadRequest("--until is not after --since: there is no time between them")
    return HistoryFilter(
        since=since,
        until=until,
        model=cluster.resolve_model(options.model) if options.model else None,
        node=options.node,
    )


def _moment(text: str, option: str, now: float) -> float:
    found = moment(text, now)
    if found is None:
        raise BadRequest(f"{option}: {text!r} is no time; give {MOMENT_SHAPE}")
    return found


def _write_json(records: Iterable[PlainRecord]) -> None:
    """A list, one record after the other."""
    before = "["
    for record in records:
        print(before, textwrap.indent(json.dumps(record, indent=2), "  "), sep="\n", end="")
        before = ","
    print("[]" if before == "[" else "\n]")


def _write_csv(records: Iterable[PlainRecord]) -> None:
    """Oldest first, times in UTC."""
    writer = csv.writer(sys.stdout)
    writer.writerow(CSV_FIELDS)
    for record in records:
        writer.writerow([_csv_cell(name, record.get(name)) for name in CSV_FIELDS])


def _csv_cell(name: str, value: Any) -> Any:
    if name == "time" and isinstance(value, int | float):
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))
    if name == "error":
        value = (value or {}).get("code") if isinstance(value, dict) else value
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    if isinstance(value, str):
        value = one_line(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _file(config: ClusterConfig) -> Path:
    policies = config.policies
    if not policies.history_file or not policies.history:
        example = '"policies": {"history_file": "~/disagg-history.sqlite"}'
        raise ConfigError(f"{config.source} has no policies.history_file; set it to keep a history: {example}")
    return Path(policies.history_file).expanduser()


@contextmanager
def _records(
    path: Path, wanted: HistoryFilter, count: int, oldest_first: bool = False
) -> Iterator[Iterable[PlainRecord]]:
    if not path.exists():  # History would create it
        yield []
        return
    warnings = BufferingHandler(capacity=1000)  # History only logs that it cannot read its file: fail then
    warnings.setLevel(logging.WARNING)
    logger = logging.getLogger(History.__module__)
    logger.addHandler(warnings)
    try:
        History(1, str(path)).close()  # a file of an earlier version gets its columns
    finally:
        logger.removeHandler(warnings)
    if warnings.buffer:
        raise ConfigError(warnings.buffer[0].getMessage())
    try:
        with HistoryReader.of_file(path, HistoryTimeouts(read_s=HistoryTimeouts().export_s)) as reader:
            yield reader.each_record(wanted, count, oldest_first)
    except sqlite3.Error as error:
        raise ConfigError(f"the history file {path} cannot be read: {error}") from error


def _table(records: list[RequestRecord]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, overflow="fold", justify="right" if name in _NUMBERS else "left")
    for place, record in enumerate(records, 1):
        table.add_row(str(record.number or place), *_cells(record))
    return table


def _cells(record: RequestRecord) -> tuple[Text | str, ...]:
    seconds = f"{record.total_time:.2f}"
    speeds = f"{speed(record.prefill_speed)} -> {speed(record.decode_speed)}"
    return _when(record.time), _model(record), seconds, _outcome(record), speeds, one_line(record.method or "-")


def _model(record: RequestRecord) -> str:
    """With the node's own name of it, if that is another."""
    model, own = record.model or "-", record.node_model
    return one_line(f"{model} ({own})" if own and own != model else model)


def _when(at: float) -> str:
    """With the day, unless it is today."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%b %d %H:%M", then)


def _outcome(record: RequestRecord) -> Text:
    if record.ok:
        return Text("yes", "green")
    return Text(one_line(record.error.code if record.error else "no"), "red")
