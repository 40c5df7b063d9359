"""The grade book: one SQLite file that only its owner may read. Any number of threads and processes share it."""

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grader.errors import GraderError
from grader.store.schema import TABLES, VERSION
from grader.timeouts import ProgramTimeouts

FILE_NAME = "gradebook.sqlite"


class GradeBookError(GraderError):
    """The grade book is missing, or has nothing of this name."""


class Database:
    """A connection for every thread. Each change is one transaction: a process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()

    @classmethod
    def create(cls, folder: Path) -> "Database":
        """Made if it is missing."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / FILE_NAME
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # SQLite's other files follow it
        database = cls(path)
        with database.transaction() as connection:
            _lay_out(connection)
        return database

    @classmethod
    def open(cls, folder: Path) -> "Database":
        path = folder / FILE_NAME
        if not path.is_file():
            raise GradeBookError(f"{folder} has no grade book: disagg-grade init {folder}")
        database = cls(path)
        database._require_version()
        return database

    def _require_version(self) -> None:
        try:
            found = self.connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError:
            raise GradeBookError(f"{self.path} is not a grade book: it may be damaged") from None
        if found != VERSION:
            raise GradeBookError(f"{self.path} has version {found} of the grade book; this program needs {VERSION}")

    @property
    def connection(self) -> sqlite3.Connection:
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = _connect(self.path)
        return found

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block, or nothing. Writers take turns."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk may have ended it already
                connection.execute("ROLLBACK")
            raise

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self.connection.execute(query, parameters).fetchall()

    def row(self, query: str, parameters: Sequence[Any] = ()) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self.connection.execute(query, parameters).fetchone()
        return found

    def secret(self, name: str) -> bytes:
        found = self.row("SELECT value FROM secrets WHERE name = ?", (name,))
        assert found, name
        value: bytes = found["value"]
        return value

    def close(self) -> None:
        """The connection of this thread."""
        if (connection := getattr(self._local, "connection", None)) is not None:
            connection.close()
            self._local.connection = None


def _connect(path: Path, timeouts: ProgramTimeouts = ProgramTimeouts()) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=timeouts.database_s, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    return connection


def _lay_out(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA user_version").fetchone()[0]:
        return
    for statement in TABLES.split(";\n"):
        if statement.strip():
            connection.execute(statement)
    for name in ("pseudonyms", "fences"):
        connection.execute("INSERT INTO secrets VALUES (?, ?)", (name, secrets.token_bytes(32)))
    connection.execute(f"PRAGMA user_version = {VERSION}")
