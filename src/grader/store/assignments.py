"""Assignments: rubric versions, solution, template and data files."""

import hashlib
import json
import sqlite3
import time
from collections.abc import Mapping

import msgspec

from grader.store.database import Database, GradeBookError


class RubricVersion(msgspec.Struct, frozen=True):
    id: int
    number: int
    hash: str
    content: str  # JSON


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    rubric: RubricVersion  # the newest
    solution_sha: str | None
    template_sha: str | None
    inputs: dict[str, str]  # name to sha256
    rerun: bool


def put_blob(connection: sqlite3.Connection, content: bytes) -> str:
    sha = hashlib.sha256(content).hexdigest()
    connection.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?)", (sha, content))
    return sha


def blob(database: Database, sha: str) -> bytes:
    found = database.row("SELECT content FROM blobs WHERE sha256 = ?", (sha,))
    assert found, sha
    content: bytes = found["content"]
    return content


def save_assignment(
    database: Database,
    name: str,
    rubric: str,
    *,
    solution: bytes | None = None,
    template: bytes | None = None,
    inputs: Mapping[str, bytes] | None = None,
    rerun: bool = False,
    note: str = "",
) -> Assignment:
    """A new assignment, or new content of one. `rubric`: its JSON; another content is another version."""
    with database.transaction() as connection:
        connection.execute("INSERT OR IGNORE INTO assignments (name, created_at) VALUES (?, ?)", (name, time.time()))
        for column, content in (("solution_sha", solution), ("template_sha", template)):
            if content is not None:
                _set(connection, name, column, put_blob(connection, content))
        if inputs is not None:
            _set(connection, name, "inputs", json.dumps({n: put_blob(connection, c) for n, c in inputs.items()}))
        _set(connection, name, "rerun", int(rerun))
        _add_version(connection, name, rubric, note)
    return assignment(database, name)


def _set(connection: sqlite3.Connection, name: str, column: str, value: object) -> None:
    connection.execute(f"UPDATE assignments SET {column} = ? WHERE name = ?", (value, name))


def save_rubric(database: Database, name: str, rubric: str, note: str = "") -> Assignment:
    """The same content again is the same version."""
    assignment(database, name)
    with database.transaction() as connection:
        _add_version(connection, name, rubric, note)
    return assignment(database, name)


def _add_version(connection: sqlite3.Connection, name: str, rubric: str, note: str) -> None:
    row = connection.execute("SELECT id FROM assignments WHERE name = ?", (name,)).fetchone()
    newest = connection.execute(
        "SELECT number, hash FROM rubric_versions WHERE assignment_id = ? ORDER BY number DESC", (row["id"],)
    ).fetchone()
    sha = hashlib.sha256(rubric.encode()).hexdigest()
    if newest is None or newest["hash"] != sha:
        number = newest["number"] + 1 if newest else 1
        connection.execute(
            "INSERT INTO rubric_versions (assignment_id, number, hash, content, note, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (row["id"], number, sha, rubric, note, time.time()),
        )


def assignment(database: Database, name: str) -> Assignment:
    row = database.row("SELECT * FROM assignments WHERE name = ?", (name,))
    if row is None:
        known = ", ".join(assignment_names(database)) or "none yet"
        raise GradeBookError(f"no assignment is named {name}; the grade book has: {known}")
    return Assignment(
        id=row["id"],
        name=row["name"],
        rubric=rubric_versions(database, row["id"])[-1],
        solution_sha=row["solution_sha"],
        template_sha=row["template_sha"],
        inputs=json.loads(row["inputs"]),
        rerun=bool(row["rerun"]),
    )


def assignment_names(database: Database) -> list[str]:
    return [row["name"] for row in database.rows("SELECT name FROM assignments ORDER BY name")]


def rubric_versions(database: Database, assignment_id: int) -> list[RubricVersion]:
    """Oldest first."""
    rows = database.rows("SELECT * FROM rubric_versions WHERE assignment_id = ? ORDER BY number", (assignment_id,))
    return [RubricVersion(row["id"], row["number"], row["hash"], row["content"]) for row in rows]


def rubric_version(database: Database, version_id: int) -> RubricVersion:
    row = database.row("SELECT * FROM rubric_versions WHERE id = ?", (version_id,))
    assert row, version_id
    return RubricVersion(row["id"], row["number"], row["hash"], row["content"])


def assignment_by_id(database: Database, assignment_id: int) -> Assignment:
    row = database.row("SELECT name FROM assignments WHERE id = ?", (assignment_id,))
    assert row, assignment_id
    return assignment(database, row["name"])
