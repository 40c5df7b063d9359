"""The SQLite table of finished requests: whole records as JSON, and the figures of each in columns of their own.

The columns make it possible to aggregate many requests in SQLite itself, without Python and its lock. A file of an
earlier version gets them when it is opened.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

import msgspec

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.orchestrator.history_record import HistoryRecord, PlainRecord
from disaggregated_inference.orchestrator.waterfall import WAITING_PHASES

SqlRow = tuple[Any, ...]

_BASE = ("time", "model", "ok", "total_time", "json")


class Figure(NamedTuple):
    """A column beside the base columns."""

    kind: str  # of its values, in SQL
    read: Callable[[RequestRecord], Any]


# `figures` is 1 in rows that have them.
_FIGURES = {
    "request_id": Figure("TEXT", lambda record: record.request_id),
    "caller": Figure("TEXT", lambda record: record.caller or None),
    "outcome": Figure("TEXT", lambda record: record.outcome),
    "error_code": Figure("TEXT", lambda record: record.error.code if record.error else None),
    "kind": Figure("TEXT", lambda record: "local" if record.kind == "whole" else record.kind),  # one node alone
    "prefill_node": Figure("TEXT", lambda record: record.prefill_node),
    "decode_node": Figure("TEXT", lambda record: record.decode_node),
    "first_token_time": Figure("REAL", lambda record: record.first_token_time),
    "output_token_time": Figure("REAL", lambda record: record.output_token_time),
    "wait_time": Figure("REAL", lambda record: waited_s(record)),
    "prompt_tokens": Figure("INTEGER", lambda record: record.prompt_tokens),
    "completion_tokens": Figure("INTEGER", lambda record: record.completion_tokens),
    "cached_tokens": Figure("INTEGER", lambda record: record.cached_tokens),
    "prompt_tokens_recomputed": Figure("INTEGER", lambda record: record.prompt_tokens_recomputed),
    "kv_bytes": Figure("INTEGER", lambda record: record.kv_bytes),
    "exposed_transfer_time": Figure("REAL", lambda record: record.exposed_transfer_time),
    "stall_s": Figure("REAL", lambda record: longest_stall_s(record)),
    "prefill_time": Figure("REAL", lambda record: record.prefill_time),
    "decode_time": Figure("REAL", lambda record: record.decode_time),
    "energy_j": Figure("REAL", lambda record: record.energy_j),
    "measured_j": Figure("REAL", lambda record: _measured_j(record)),
    "cost": Figure("REAL", lambda record: record.cost),
    "cost_is_partial": Figure("INTEGER", lambda record: cost_is_partial(record)),
    "sequential_time": Figure("REAL", lambda record: record.sequential_time),
    "prefill_machine_time": Figure("REAL", lambda record: record.prefill_machine_time),
    "decode_machine_time": Figure("REAL", lambda record: record.decode_machine_time),
    "figures": Figure("INTEGER", lambda record: 1),
}
# Fields that every record has by default, and a row of an earlier version may lack: unknown there, not 0.
_MAY_BE_UNKNOWN = tuple(
    field.name
    for field in msgspec.structs.fields(RequestRecord)
    if field.name in _FIGURES and field.default is not None and field.name != "caller"
)
COLUMNS = (*_BASE, *_FIGURES)
_TABLE = """CREATE TABLE IF NOT EXISTS requests
    (id INTEGER PRIMARY KEY, time REAL, model TEXT, ok INTEGER, total_time REAL, json TEXT)"""
_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
# With all figures: aggregating reads this index alone, not the JSON of each row.
_INDEXED = ("time", "model", "ok", "total_time", *(name for name in _FIGURES if name not in ("request_id", "figures")))
_INDEXES = (
    "DROP INDEX IF EXISTS requests_figures",  # of an earlier version, with fewer columns
    f"CREATE INDEX IF NOT EXISTS requests_all_figures ON requests ({', '.join(_INDEXED)})",
    "CREATE INDEX IF NOT EXISTS requests_request_id ON requests (request_id)",
)
_OLD = "SELECT id, json FROM requests WHERE figures IS NULL LIMIT ?"
_UPDATE = f"UPDATE requests SET {', '.join(f'{name} = ?' for name in _FIGURES)} WHERE id = ?"
_MANY = 200  # rows of an earlier version that are brought up to date at a time


def create(database: sqlite3.Connection) -> None:
    """The table with all its columns. Raises sqlite3.Error for a file that another program made."""
    database.execute("BEGIN IMMEDIATE")  # fails now if it cannot be written
    database.execute(_TABLE)
    present = {row[1] for row in database.execute("PRAGMA table_info(requests)")}
    if missing := set(_BASE) - present:
        raise sqlite3.DatabaseError(f"its table requests has no column {min(missing)}")
    for name, figure in _FIGURES.items():
        if name not in present:
            database.execute(f"ALTER TABLE requests ADD COLUMN {name} {figure.kind}")
    for index in _INDEXES:
        database.execute(index)


def insert(database: sqlite3.Connection, rows: Iterable[SqlRow]) -> None:
    database.executemany(_INSERT, rows)


def prune(database: sqlite3.Connection, rows: int, before: float) -> None:
    """Keep the last `rows`, and of these the requests since `before`."""
    database.execute("DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - ?", (rows,))
    database.execute("DELETE FROM requests WHERE time < ?", (before,))


def last_id(database: sqlite3.Connection) -> int:
    """Of the newest row; 0: there is none. Rows of an earlier version have no number of their own."""
    ((found,),) = database.execute("SELECT MAX(id) FROM requests")
    return found or 0


def complete_rows(database: sqlite3.Connection) -> bool:
    """Some rows of an earlier version get their figures; returns whether there may be more of them."""
    old = database.execute(_OLD, (_MANY,)).fetchall()
    with database:
        database.executemany(_UPDATE, [(*figures_of(HistoryRecord(decoded(text) or {})), id) for id, text in old])
    return bool(old)


def row_of(stored: HistoryRecord) -> SqlRow:
    """Raises an exception of any kind for a record that cannot be written."""
    record, row = stored.record, stored.row
    total_s = _number(record.total_time) if _has(stored, "total_time", record.total_time) else None
    base = (float(row["time"]), _text(record.model), record.ok, total_s)
    return (*base, json.dumps(row, default=str), *figures_of(stored))


def decoded(text: Any) -> PlainRecord | None:
    try:
        record = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_number(value: Any) -> TypeGuard[float]:
    """A finite one; math.isfinite fails for integers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def figures_of(stored: HistoryRecord) -> SqlRow:
    """In the order of `_FIGURES`."""
    record = stored.record
    values = {name: figure.read(record) for name, figure in _FIGURES.items()}
    for name in _MAY_BE_UNKNOWN:
        if not _has(stored, name, values[name]):
            values[name] = None
    return tuple(
        _text(values[name]) if figure.kind == "TEXT" else _number(values[name]) for name, figure in _FIGURES.items()
    )


def waited_s(record: RequestRecord) -> float:
    return sum(phase.seconds for phase in record.waterfall if phase.name in WAITING_PHASES)


def longest_stall_s(record: RequestRecord) -> float | None:
    stalls = (failover.stall_s for failover in record.failovers)
    return max((stall_s for stall_s in stalls if stall_s is not None), default=None)


def cost_is_partial(record: RequestRecord) -> bool | None:
    """None: no cost is known."""
    return None if record.cost is None else bool(record.cost_without)


def _measured_j(record: RequestRecord) -> float:
    return sum(share.joules for share in record.energy if share.source == "measured")


def _has(stored: HistoryRecord, name: str, value: Any) -> bool:
    """Whether the row itself has this value; else it is a default."""
    return name in stored.row and bool(stored.row[name] == value)


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """SQLite holds no larger integers."""
    if isinstance(value, bool):
        return int(value)
    return value if is_number(value) and (type(value) is float or abs(value) < 1 << 63) else None
