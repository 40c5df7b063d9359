"""The history of finished requests: the latest in memory, and many more in an SQLite file if the config names one.

No request waits for the file. A thread of its own writes it; records that it cannot keep up with are counted and left
out. A file that is damaged or cannot be written costs a warning, never a request. Records that a locked file or a full
disk did not take are tried again with the next ones.
"""

import logging
import math
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

from disaggregated_inference.api import RequestRecord
from disaggregated_inference.orchestrator import history_table
from disaggregated_inference.orchestrator.history_reader import HistoryReader
from disaggregated_inference.orchestrator.history_record import HistoryRecord, PlainRecord
from disaggregated_inference.orchestrator.history_table import SqlRow, is_number
from disaggregated_inference.private_files import make_folders, make_private, make_private_file
from disaggregated_inference.timeouts import HistoryTimeouts

log = logging.getLogger(__name__)

_FILE_TIMES = 100  # as many rows in the file as there are in memory
_LAST = "SELECT json FROM requests ORDER BY id DESC LIMIT ?"
_DAY_S = 86400.0


class History:
    """Thread-safe. Only the constructor and `reader` wait for the file. The file keeps `rows` requests (0: a hundred
    times `size`) of the last `days` (0: of any age)."""

    def __init__(
        self,
        size: int,
        file: str = "",
        timeouts: HistoryTimeouts = HistoryTimeouts(),
        rows: int = 0,
        days: int = 0,
        max_pending: int = 4096,
        max_unwritten: int = 1000,
    ) -> None:
        """At most `max_pending` records wait for the writer, which drops new ones; and `max_unwritten` of those that it
        failed to write, of which it drops the oldest."""
        self.lost = 0  # records that could not be written to the file
        self._size, self._timeouts = size, timeouts
        self._max_pending, self._max_unwritten = max_pending, max_unwritten
        self._rows, self._days = rows or _FILE_TIMES * size, days
        self._path: Path | None = None  # of the file, while it is in use
        self._recent: deque[HistoryRecord] = deque(maxlen=size)
        self._changed = threading.Condition()
        self._pending: deque[HistoryRecord] = deque()
        self._closing = False
        self._is_failing = False
        self._writer: threading.Thread | None = None
        self._number = 0  # of the last request
        if file and size:
            self._open(Path(file).expanduser())

    def next_number(self) -> int:
        """Of the next request. It goes on where the file ends."""
        with self._changed:
            self._number += 1
            return self._number

    def add(self, record: PlainRecord | RequestRecord, caller: str = "") -> None:
        """Known fields: time (now, if not given), model, ok, total_time. The caller is kept to filter by, and not part
        of the records that are given out."""
        kept = HistoryRecord(record, caller)
        with self._changed:
            self._recent.append(kept)
            if self._writer is None or self._closing:
                return
            if len(self._pending) < self._max_pending:
                self._pending.append(kept)
                self._changed.notify()
            else:
                self.lost += 1

    def recent(self, count: int, model: str | None = None, caller: str | None = None) -> list[PlainRecord]:
        """Newest first, for clients; those of one model, those of one caller."""
        return [each.shown() for each in self._newest(count, model, caller)]

    def records(self, count: int, model: str | None = None, caller: str | None = None) -> list[RequestRecord]:
        """The same, to compute with."""
        return [each.record for each in self._newest(count, model, caller)]

    def _newest(self, count: int, model: str | None, caller: str | None) -> Iterator[HistoryRecord]:
        wanted = (each for each in reversed(self._of(model)) if caller in (None, each.caller))
        return islice(wanted, max(0, count))

    def find(self, request_id: str, caller: str | None = None) -> PlainRecord | None:
        """The newest in memory with this id; of one caller, unless that is None."""
        for each in reversed(self._of(None)):
            if each.record.request_id == request_id and caller in (None, each.caller):
                return dict(each.row)
        return None

    def total_time_percentiles(self, model: str | None = None) -> dict[str, float]:
        """p50, p95 and p99 of the answered requests in memory; empty if there are none. Refusals and failures end
        early, and would make the answers look quick."""
        answered = (each.record for each in self._of(model) if each.record.ok)
        values = sorted(record.total_time for record in answered if is_number(record.total_time) and record.total_time)
        return {f"p{share}": _percentile(values, share / 100) for share in (50, 95, 99)} if values else {}

    def reader(self) -> HistoryReader:
        """Reads the file, or what is in memory where no file can be used. It blocks: call it on a thread, and close
        it there."""
        if self._path and not self._is_failing:
            return HistoryReader.of_file(self._path, self._timeouts)
        return HistoryReader.of_records(self._of(None))

    def adopt(self, old: "History") -> None:
        """Take over what `old` has in memory, as far as there is room. Records that both read from one file are kept
        once. The file is not changed."""
        theirs = old._of(None)
        known = {_identity(each) for each in theirs}
        with self._changed:
            self._number = max(self._number, old._number)
            mine = [each for each in self._recent if _identity(each) not in known]
            self._recent.clear()
            self._recent.extend(sorted(mine + theirs, key=_time))

    def close(self) -> None:
        """Write what is pending, for a limited time. Later records stay in memory."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._writer is None or self._writer is threading.current_thread():
            return
        timeout_s = self._timeouts.close_s
        self._writer.join(timeout_s)
        if self._writer.is_alive():
            log.warning("the history file was not written within %s s: its last records are lost", timeout_s)

    def _of(self, model: str | None) -> list[HistoryRecord]:
        """Oldest first."""
        with self._changed:
            kept = list(self._recent)
        return [each for each in kept if model in (None, each.record.model)]

    def _open(self, path: Path) -> None:
        try:
            make_folders(path.parent)
            make_private_file(path)  # SQLite gives its -wal and -shm files the same mode
            make_private(*(path.with_name(path.name + end) for end in ("-wal", "-shm")))
            database = sqlite3.connect(path, timeout=self._timeouts.lock_s, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            return _warn(path, error)
        try:
            self._recent.extend(_read(database, self._size))
            numbers = (_number(each) for each in self._recent)
            self._number = max(numbers, default=0) or history_table.last_id(database)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            database.close()
            return _warn(path, error)
        self._path = path
        self._writer = threading.Thread(target=self._write, args=(path, database), name="history", daemon=True)
        self._writer.start()

    def _write(self, path: Path, database: sqlite3.Connection) -> None:
        unwritten: Sequence[SqlRow] = ()
        with closing(database):
            self._complete(path, database)
            while batch := self._next_batch():
                new = [row for kept in batch if (row := _row(kept))]
                unwritten = self._store(path, database, [*unwritten, *new], keep=self._max_unwritten)
            if unwritten:
                self._store(path, database, unwritten, keep=0)

    def _complete(self, path: Path, database: sqlite3.Connection) -> None:
        """Brings the rows of an earlier version up to date. A failure costs figures, no record."""
        try:
            while not self._closing and history_table.complete_rows(database):
                pass
        except (sqlite3.Error, UnicodeDecodeError) as error:
            log.warning("old rows of the history file %s stay without figures: %s", path, error)

    def _next_batch(self) -> list[HistoryRecord]:
        """Empty when closed and done."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            batch = list(self._pending)
            self._pending.clear()
        return batch

    def _store(self, path: Path, database: sqlite3.Connection, rows: Sequence[SqlRow], keep: int) -> Sequence[SqlRow]:
        """Returns the rows to try again, `keep` at most: a full disk or a locked file may pass, other errors do not.
        One warning per failure is enough."""
        try:
            with database:
                history_table.insert(database, rows)
                history_table.prune(database, self._rows, time.time() - self._days * _DAY_S if self._days else 0.0)
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


def _identity(stored: HistoryRecord) -> tuple[float, str]:
    return _time(stored), stored.record.request_id


def _time(stored: HistoryRecord) -> float:
    """A file may hold anything: a record without a time counts as old."""
    found = stored.record.time
    return found if is_number(found) else 0.0


def _number(stored: HistoryRecord) -> int:
    found = stored.record.number or 0
    return found if 0 < found < 1 << 53 else 0


def _warn(path: Path, error: Exception) -> None:
    remedy = "name another file in policies.history_file"
    log.warning("the history file %s cannot be used, memory only: %s; %s", path, error, remedy)


def _read(database: sqlite3.Connection, size: int) -> list[HistoryRecord]:
    """Creates the table if needed. Oldest first."""
    database.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not block each other
    database.execute("PRAGMA synchronous = NORMAL")
    with database:
        history_table.create(database)
    found = [history_table.decoded(text) for (text,) in database.execute(_LAST, (size,))]
    return [HistoryRecord(row) for row in reversed(found) if row is not None]


def _row(stored: HistoryRecord) -> SqlRow | None:
    """None, with a warning, for a record that cannot be written."""
    try:
        return history_table.row_of(stored)
    except Exception as error:  # the next record is written all the same
        log.warning("a record cannot be written to the history file: %s", error)
        return None


def _percentile(values: Sequence[float], share: float) -> float:
    """Interpolated, as numpy does."""
    place = share * (len(values) - 1)
    below, above = values[math.floor(place)], values[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))
