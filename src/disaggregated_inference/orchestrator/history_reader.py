"""Reads the history: requests by time, model, node and caller, and figures over many of them.

SQLite does the work in C, without Python's lock: the event loop beside it keeps its pace.
"""

import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from disaggregated_inference.orchestrator import history_table
from disaggregated_inference.orchestrator.history_record import HistoryRecord, PlainRecord
from disaggregated_inference.timeouts import HistoryTimeouts

Shares = tuple[float, ...]
Sums = dict[str, Any]  # by the names that the caller gives to SQL expressions
Figures = TypeVar("Figures", bound=msgspec.Struct)

_EQUAL = ("model", "caller", "outcome", "kind")
_SHARES = """SELECT json_extract(share.value, '$.node'), json_extract(share.value, '$.source'),
        SUM(json_extract(share.value, '$.joules')), COUNT(DISTINCT requests.id)
    FROM requests,
        json_each(CASE WHEN json_valid(requests.json) THEN requests.json ELSE '{}' END, '$.energy') AS share
    WHERE energy_j IS NOT NULL AND"""
_STEPS = 100_000  # of SQLite's machine, between two looks at the clock


class HistoryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests: came from `since` until before `until`; of one model, one node in either role, one caller, one
    outcome. None: all."""

    since: float = 0.0
    until: float = math.inf
    model: str | None = None
    node: str | None = None
    caller: str | None = None
    outcome: str | None = None
    kind: str | None = None  # disaggregated, local or fallback

    @property
    def condition(self) -> str:
        parts = ["time >= :since", "time < :until"]
        parts += [f"{name} = :{name}" for name in _EQUAL if getattr(self, name) is not None]
        if self.node is not None:
            parts.append("(prefill_node = :node OR decode_node = :node)")
        return " AND ".join(parts)

    @property
    def values(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self) | {"until": min(self.until, 1e300)}


_ALL = HistoryFilter()


class HistoryReader:
    """Of one thread. Use it as a context manager."""

    def __init__(self, database: sqlite3.Connection, is_file: bool = False) -> None:
        self._database, self._is_file = database, is_file

    @classmethod
    def of_file(cls, path: Path, timeouts: HistoryTimeouts = HistoryTimeouts()) -> "HistoryReader":
        """Raises sqlite3.Error if there is no such file, or no history in it, or reading takes longer than `read_s`."""
        database = sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=timeouts.lock_s)
        database.execute("PRAGMA query_only = ON")
        until = time.monotonic() + timeouts.read_s
        database.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
        return cls(database, is_file=True)

    @classmethod
    def of_records(cls, records: Iterable[HistoryRecord]) -> "HistoryReader":
        database = sqlite3.connect(":memory:", isolation_level=None)
        history_table.create(database)
        history_table.insert(database, [row for each in records if (row := _row(each))])
        database.execute("COMMIT")
        return cls(database)

    def __enter__(self) -> "HistoryReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def records(self, wanted: HistoryFilter, limit: int) -> list[PlainRecord]:
        """Newest first."""
        query = f"SELECT json FROM requests WHERE {wanted.condition} ORDER BY time DESC, id DESC LIMIT :limit"
        found = (history_table.decoded(text) for (text,) in self._rows(query, wanted.values | {"limit": limit}))
        return [record for record in found if record is not None]

    def each_record(self, wanted: HistoryFilter, limit: int, oldest_first: bool = False) -> Iterator[PlainRecord]:
        """The newest `limit`, one after the other: a large history does not fit into memory at once."""
        newest = f"SELECT id FROM requests WHERE {wanted.condition} ORDER BY time DESC, id DESC LIMIT :limit"
        ids = [id for (id,) in self._rows(newest, wanted.values | {"limit": limit})]
        for id in reversed(ids) if oldest_first else ids:
            for (text,) in self._rows("SELECT json FROM requests WHERE id = :id", {"id": id}):
                record = history_table.decoded(text)
                if record is not None:
                    yield record

    def record(self, request_id: str, caller: str | None = None) -> PlainRecord | None:
        """The newest with this id; of one caller, unless that is None."""
        owner = "" if caller is None else "AND caller = :caller"
        query = f"SELECT json FROM requests WHERE request_id = :id {owner} ORDER BY id DESC LIMIT 1"
        rows = self._rows(query, {"id": request_id, "caller": caller})
        return history_table.decoded(rows[0][0]) if rows else None

    def figures(self, wanted: HistoryFilter, kind: type[Figures], limit: int) -> list[Figures]:
        """Of each request the columns that `kind` has as fields, newest first."""
        names = ", ".join(kind.__struct_fields__)
        query = f"SELECT {names} FROM requests WHERE {wanted.condition} ORDER BY time DESC, id DESC LIMIT :limit"
        return [kind(*row) for row in self._rows(query, wanted.values | {"limit": limit})]

    def grouped(self, wanted: HistoryFilter, by: str, columns: Mapping[str, str], **values: Any) -> dict[Any, Sums]:
        """`columns`: names, and what each is in SQL. `by`: an SQL expression."""
        wishes = ", ".join(columns.values())
        query = f"SELECT {by} AS part, {wishes} FROM requests WHERE {wanted.condition} GROUP BY part ORDER BY part"
        rows = self._rows(query, wanted.values | values)
        return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}

    def busy_seconds(self, wanted: HistoryFilter, by: str) -> dict[Any, float]:
        """Of each group: the time in which at least one of its requests ran."""
        query = f"""WITH spans AS (
            SELECT {by} AS part, time, time + total_time AS until,
                MAX(time + total_time) OVER (
                    PARTITION BY {by} ORDER BY time, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
            FROM requests WHERE {wanted.condition} AND total_time IS NOT NULL)
            SELECT part, SUM(MAX(0, until - MAX(time, COALESCE(before, time)))) FROM spans GROUP BY part"""
        return dict(self._rows(query, wanted.values))

    def percentiles(
        self, wanted: HistoryFilter, column: str, shares: Shares, by: str = "0", **values: Any
    ) -> dict[Any, list[float]]:
        """Of each group, in the order of `shares`, interpolated as numpy does. A group without a value is absent."""
        places = {
            f"place{number}_{side}": f"CAST(last * {share!r} AS INTEGER) + {side}"
            for number, share in enumerate(shares)
            for side in (0, 1)
        }
        query = f"""WITH ranked AS (
            SELECT {by} AS part, {column} AS value,
                ROW_NUMBER() OVER (PARTITION BY {by} ORDER BY {column}) - 1 AS place,
                COUNT(*) OVER (PARTITION BY {by}) - 1 AS last
            FROM requests WHERE {wanted.condition} AND {column} IS NOT NULL)
            SELECT part, place, last, value FROM ranked WHERE place IN ({", ".join(places.values())})"""
        found: dict[Any, dict[int, float]] = {}
        lasts: dict[Any, int] = {}
        for part, place, last, value in self._rows(query, wanted.values | values):
            found.setdefault(part, {})[place], lasts[part] = value, last
        return {part: [_interpolated(found[part], lasts[part] * share) for share in shares] for part in found}

    def energy_shares(self, wanted: HistoryFilter) -> list[tuple[str, str, float, int]]:
        """Node, source, joules, requests."""
        return self._rows(f"{_SHARES} {wanted.condition} GROUP BY 1, 2 ORDER BY 1, 2", wanted.values)

    def kept(self, wanted: HistoryFilter = _ALL) -> dict[str, Any]:
        """How much there is to read."""
        query = f"SELECT COUNT(*), MIN(time) FROM requests WHERE {wanted.condition}"
        ((count, oldest),) = self._rows(query, wanted.values)
        return {"requests": count, "oldest": oldest, "file": self._is_file}

    def _rows(self, query: str, values: Mapping[str, Any]) -> list[Any]:
        return self._database.execute(query, values).fetchall()


def _row(stored: HistoryRecord) -> history_table.SqlRow | None:
    try:
        return history_table.row_of(stored)
    except Exception:  # as in the file: the others can be read all the same
        return None


def _interpolated(values: Mapping[int, float], place: float) -> float:
    below = values[math.floor(place)]
    return below + (values.get(math.floor(place) + 1, below) - below) * (place - math.floor(place))
