"""The SQLite table of finished requests: whole records as JSON, and the figures of each in columns of their own.

The columns make it possible to aggregate many requests in SQLite itself, without Python and its lock. A file of an
earlier version gets them when it is opened.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

from disaggregated_inference.orchestrator.recorder import FALLBACK_WARNING
from disaggregated_inference.orchestrator.waterfall import WAITING_PHASES

Record = dict[str, Any]  # a `RequestRecord` as plain values; a file may hold rows of other versions
Row = tuple[Any, ...]

_BASE = ("time", "model", "ok", "total_time", "json")
# Beside the base columns: name and type. `figures` is 1 in rows that have them.
_FIGURES = {
    "request_id": "TEXT",
    "caller": "TEXT",
    "outcome": "TEXT",
    "error_code": "TEXT",
    "kind": "TEXT",  # disaggregated, local or fallback
    "prefill_node": "TEXT",
    "decode_node": "TEXT",
    "first_token_time": "REAL",
    "output_token_time": "REAL",  # seconds per output token of one choice, after the first
    "wait_time": "REAL",
    "prompt_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "prompt_tokens_recomputed": "INTEGER",
    "kv_bytes": "INTEGER",
    "exposed_transfer_time": "REAL",
    "stall_s": "REAL",  # the longest gap over a failover
    "prefill_time": "REAL",
    "decode_time": "REAL",
    "energy_j": "REAL",
    "measured_j": "REAL",  # the part of it that a meter measured
    "cost": "REAL",
    "cost_is_partial": "INTEGER",  # a price is missing, or the energy
    "sequential_time": "REAL",
    "prefill_machine_time": "REAL",
    "decode_machine_time": "REAL",
    "figures": "INTEGER",
}
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
    for name, kind in _FIGURES.items():
        if name not in present:
            database.execute(f"ALTER TABLE requests ADD COLUMN {name} {kind}")
    for index in _INDEXES:
        database.execute(index)


def insert(database: sqlite3.Connection, rows: Iterable[Row]) -> None:
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
        database.executemany(_UPDATE, [(*figures_of(decoded(text) or {}), id) for id, text in old])
    return bool(old)


def row_of(record: Record) -> Row:
    """Raises an exception of any kind for a record that cannot be written."""
    model = _text(str(record.get("model", "")))
    total = record.get("total_time")
    base = (float(record["time"]), model, bool(record.get("ok", True)), float(total) if is_number(total) else None)
    return (*base, json.dumps(record, default=str), *figures_of(record))


def decoded(text: Any) -> Record | None:
    try:
        record = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_number(value: Any) -> TypeGuard[float]:
    """A finite one; math.isfinite fails for integers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def figures_of(record: Record) -> Row:
    """In the order of `_FIGURES`. A file may hold anything: what is no text or number counts as unknown."""
    values: Record = {name: record.get(name) for name in _FIGURES}
    values["error_code"] = _item(record.get("error"), "code")
    values["kind"] = _kind(record)
    values["output_token_time"] = _output_token_time(record)
    values["wait_time"] = _total(
        _item(phase, "seconds") for phase in _items(record, "waterfall") if _item(phase, "name") in WAITING_PHASES
    )
    values["stall_s"] = max(_numbers(_item(each, "stall_s") for each in _items(record, "failovers")), default=None)
    values["measured_j"] = _total(
        _item(share, "joules") for share in _items(record, "energy") if _item(share, "source") == "measured"
    )
    values["cost_is_partial"] = int(bool(record.get("cost_without"))) if is_number(record.get("cost")) else None
    values["figures"] = 1
    return tuple(_text(values[name]) if kind == "TEXT" else _number(values[name]) for name, kind in _FIGURES.items())


def _kind(record: Record) -> str | None:
    method = record.get("method")
    if method == "fallback" or record.get("warning") == FALLBACK_WARNING:
        return "fallback"
    if str(method).startswith("whole_"):  # one node served it alone
        return "local"
    return "disaggregated" if str(method).startswith("disaggregated") else "local" if method == "local" else None


def _output_token_time(record: Record) -> float | None:
    """A row of an earlier version has the decode speed alone."""
    if "output_token_time" in record:
        return _number(record["output_token_time"])
    speed, choices = record.get("decode_speed"), record.get("n", 1)
    return choices / speed if is_number(speed) and speed > 0 and is_number(choices) else None


def _items(record: Record, name: str) -> Sequence[Any]:
    found = record.get(name)
    return found if isinstance(found, list | tuple) else ()


def _item(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def _numbers(values: Iterable[Any]) -> list[float]:
    return [value for value in values if is_number(value)]


def _total(values: Iterable[Any]) -> float:
    return sum(_numbers(values))


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _number(value: Any) -> float | None:
    """SQLite holds no larger integers."""
    return value if is_number(value) and (type(value) is float or abs(value) < 1 << 63) else None
