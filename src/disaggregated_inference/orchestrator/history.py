"""The history of finished requests: the latest in memory, and many more in an SQLite file if the config names one.

No request waits for the file. A thread of its own writes it; records that it cannot keep up with are counted and left
out. A file that is damaged or cannot be written costs a warning, never a request. Records that a locked file or a full
disk did not take are tried again with the next ones.
"""

import json
import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeGuard

from disaggregated_inference.private_files import make_private, make_private_file

log = logging.getLogger(__name__)

Record = dict[str, Any]  # a `RequestRecord` as plain values; a file may hold rows of other versions
Row = tuple[float, str, bool, float | None, str]

_CALLER = "caller"
_MAX_PENDING = 4096
_MAX_UNWRITTEN = 1000  # after failed writes; beyond it the oldest are dropped
_FILE_TIMES = 100  # as many rows in the file as there are in memory
_TABLE = """CREATE TABLE IF NOT EXISTS requests
    (id INTEGER PRIMARY KEY, time REAL, model TEXT, ok INTEGER, total_time REAL, json TEXT)"""
_INSERT = "INSERT INTO requests (time, model, ok, total_time, json) VALUES (?, ?, ?, ?, ?)"
_LAST = "SELECT json FROM requests ORDER BY id DESC LIMIT ?"
_PRUNE = "DELETE FROM requests WHERE id <= (SELECT max(id) FROM requests) - ?"


class History:
    """Thread-safe. Only the constructor waits for the file, which it reads."""

    def __init__(self, size: int, file: str = "", lock_s: float = 2.0) -> None:
        self.lost = 0  # records that could not be written to the file
        self._size, self._lock_s = size, lock_s
        self._recent: deque[Record] = deque(maxlen=size)
        self._changed = threading.Condition()
        self._pending: deque[Record] = deque()
        self._closing = False
        self._is_failing = False
        self._writer: threading.Thread | None = None
        if file and size:
            self._open(Path(file).expanduser())

    def add(self, record: Record, caller: str = "") -> None:
        """Known fields: time (now, if not given), model, ok, total_time. The caller is kept to filter by, and not part
        of the records that are given out."""
        kept = {"time": time.time()} | record | ({_CALLER: caller} if caller else {})
        with self._changed:
            self._recent.append(kept)
            if self._writer is None or self._closing:
                return
            if len(self._pending) < _MAX_PENDING:
                self._pending.append(kept)
                self._changed.notify()
            else:
                self.lost += 1

    def recent(self, count: int, model: str | None = None, caller: str | None = None) -> list[Record]:
        """Newest first; those of one model, those of one caller."""
        kept = [record for record in self._of(model) if caller is None or record.get(_CALLER) == caller]
        newest = kept[::-1][: max(0, count)]
        return [{name: value for name, value in record.items() if name != _CALLER} for record in newest]

    def percentiles(self, field: str, model: str | None = None) -> dict[str, float]:
        """p50, p95 and p99 of a field over the records in memory that have it; empty if none has."""
        values = sorted(value for record in self._of(model) if _is_number(value := record.get(field)))
        return {f"p{share}": _percentile(values, share / 100) for share in (50, 95, 99)} if values else {}

    def adopt(self, old: "History") -> None:
        """Take over what `old` has in memory, as far as there is room. Records that both read from one file are kept
        once. The file is not changed."""
        theirs = old._of(None)
        known = {_identity(record) for record in theirs}
        with self._changed:
            mine = [record for record in self._recent if _identity(record) not in known]
            self._recent.clear()
            self._recent.extend(sorted(mine + theirs, key=_time))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is pending, for `timeout_s` at most. Later records stay in memory."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._writer is None or self._writer is threading.current_thread():
            return
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.warning("the history file was not written within %s s: its last records are lost", timeout_s)

    def _of(self, model: str | None) -> list[Record]:
        with self._changed:
            kept = list(self._recent)
        return [dict(record) for record in kept if model is None or record.get("model") == model]

    def _open(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private_file(path)  # SQLite gives its -wal and -shm files the same mode
            make_private(*(path.with_name(path.name + end) for end in ("-wal", "-shm")))
            database = sqlite3.connect(path, timeout=self._lock_s, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            return _warn(path, error)
        try:
            self._recent.extend(_read(database, self._size))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            database.close()
            return _warn(path, error)
        self._writer = threading.Thread(target=self._write, args=(path, database), name="history", daemon=True)
        self._writer.start()

    def _write(self, path: Path, database: sqlite3.Connection) -> None:
        unwritten: Sequence[Row] = ()
        with closing(database):
            while batch := self._next_batch():
                new = [row for record in batch if (row := _row(record))]
                unwritten = self._store(path, database, [*unwritten, *new], keep=_MAX_UNWRITTEN)
            if unwritten:
                self._store(path, database, unwritten, keep=0)

    def _next_batch(self) -> list[Record]:
        """Empty when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            batch = list(self._pending)
            self._pending.clear()
        return batch

    def _store(self, path: Path, database: sqlite3.Connection, rows: Sequence[Row], keep: int) -> Sequence[Row]:
        """Returns the rows to try again, `keep` at most: a full disk or a locked file may pass, other errors do not.
        One warning per failure is enough."""
        try:
            with database:
                database.executemany(_INSERT, rows)
                database.execute(_PRUNE, (_FILE_TIMES * self._size,))
            self._is_failing = False
            return ()
        except sqlite3.Error as error:
            if not self._is_failing:
                _warn(path, error)
            self._is_failing = True
            given_up = max(0, len(rows) - keep) if isinstance(error, sqlite3.OperationalError) else len(rows)
        with self._changed:
            self.lost += given_up
        return rows[given_up:]


def _identity(record: Record) -> tuple[float, str]:
    return _time(record), str(record.get("request_id", ""))


def _time(record: Record) -> float:
    """A file may hold anything: a record without a time counts as old."""
    found = record.get("time")
    return found if _is_number(found) else 0.0


def _warn(path: Path, error: Exception) -> None:
    remedy = "name another file in policies.history_file"
    log.warning("the history file %s cannot be used, memory only: %s; %s", path, error, remedy)


def _read(database: sqlite3.Connection, size: int) -> list[Record]:
    """Creates the table if needed. Oldest first."""
    database.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not block each other
    database.execute("PRAGMA synchronous = NORMAL")
    with database:
        database.execute("BEGIN IMMEDIATE")  # fails now if it cannot be written
        database.execute(_TABLE)
    found = [_record(text) for (text,) in database.execute(_LAST, (size,))]
    return [record for record in reversed(found) if record is not None]


def _record(text: Any) -> Record | None:
    try:
        record = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _row(record: Record) -> Row | None:
    """None, with a warning, for a record that cannot be written."""
    try:
        model = str(record.get("model", "")).encode("utf-8", "replace").decode()
        total = record.get("total_time")
        total_s = float(total) if _is_number(total) else None
        return float(record["time"]), model, bool(record.get("ok", True)), total_s, json.dumps(record, default=str)
    except Exception as error:  # the next record is written all the same
        log.warning("a record cannot be written to the history file: %s", error)
        return None


def _is_number(value: Any) -> TypeGuard[float]:
    """A finite one; math.isfinite fails for integers that no float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _percentile(values: Sequence[float], share: float) -> float:
    """Interpolated, as numpy does."""
    place = share * (len(values) - 1)
    below, above = values[math.floor(place)], values[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))
