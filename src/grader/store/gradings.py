"""Results of the machine: one row for a submission and a key. Raw prompts and answers beside it."""

import hashlib
import json
import sqlite3
from collections.abc import Callable

import msgspec

from grader.store.database import Database


class Grading(msgspec.Struct, frozen=True, kw_only=True):
    """`record`, `checks` and `models` are JSON. None: that stage is not done."""

    submission_id: int
    key: str
    rubric_version_id: int
    record: str
    checks: str | None
    models: str | None
    made_at: float


class StoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    layer: str
    reading: int
    model: str
    prompt: str
    answer: str
    error: str
    figures: str
    at: float


def put_checks(connection: sqlite3.Connection, grading: Grading) -> None:
    connection.execute(
        "INSERT INTO gradings (submission_id, key, rubric_version_id, record, checks, made_at)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (
            grading.submission_id,
            grading.key,
            grading.rubric_version_id,
            grading.record,
            grading.checks,
            grading.made_at,
        ),
    )


def put_models(connection: sqlite3.Connection, submission_id: int, key: str, models: str) -> None:
    connection.execute(
        "UPDATE gradings SET models = ? WHERE submission_id = ? AND key = ?", (models, submission_id, key)
    )


def grading(database: Database, submission_id: int, key: str | None) -> Grading | None:
    row = database.row("SELECT * FROM gradings WHERE submission_id = ? AND key = ?", (submission_id, key))
    return _grading(row) if row else None


def gradings(database: Database, submission_id: int) -> list[Grading]:
    """Newest first."""
    rows = database.rows("SELECT * FROM gradings WHERE submission_id = ? ORDER BY made_at DESC", (submission_id,))
    return [_grading(row) for row in rows]


def _grading(row: sqlite3.Row) -> Grading:
    return Grading(**{name: row[name] for name in Grading.__struct_fields__})


def put_answer(database: Database, submission_id: int, key: str, answer: StoredAnswer) -> None:
    columns = msgspec.structs.asdict(answer)
    names = ", ".join(columns)
    marks = ", ".join("?" * len(columns))
    with database.transaction() as connection:
        connection.execute(
            f"INSERT INTO answers (submission_id, key, {names}) VALUES (?, ?, {marks})",
            (submission_id, key, *columns.values()),
        )


def answers(database: Database, submission_id: int, key: str) -> list[StoredAnswer]:
    """Oldest first."""
    rows = database.rows("SELECT * FROM answers WHERE submission_id = ? AND key = ? ORDER BY id", (submission_id, key))
    return [StoredAnswer(**{name: row[name] for name in StoredAnswer.__struct_fields__}) for row in rows]


def recent_answers(database: Database, assignment_id: int, count: int) -> list[StoredAnswer]:
    """About all submissions of an assignment, newest first. An answer that a later grading has too counts once."""
    rows = database.rows(
        "SELECT answers.* FROM answers JOIN submissions ON submissions.id = submission_id WHERE assignment_id = ?"
        " GROUP BY submission_id, layer, reading, at ORDER BY max(answers.id) DESC LIMIT ?",
        (assignment_id, count),
    )
    return [StoredAnswer(**{name: row[name] for name in StoredAnswer.__struct_fields__}) for row in rows]


def known_answer(database: Database, submission_id: int, layer: str, reading: int, prompt: str) -> StoredAnswer | None:
    """To the very same question about the same submission."""
    row = database.row(
        "SELECT * FROM answers WHERE submission_id = ? AND layer = ? AND reading = ? AND prompt = ? AND error = ''"
        " ORDER BY id DESC",
        (submission_id, layer, reading, prompt),
    )
    return StoredAnswer(**{name: row[name] for name in StoredAnswer.__struct_fields__}) if row else None


def put_rerun(database: Database, blob_sha: str, settings: object, result: str) -> None:
    with database.transaction() as connection:
        connection.execute("INSERT OR REPLACE INTO reruns VALUES (?, ?, ?)", (blob_sha, _hash(settings), result))


def known_rerun(database: Database, blob_sha: str, settings: object) -> str | None:
    """The same file with the same limits, data and tests ran before."""
    row = database.row(
        "SELECT result FROM reruns WHERE blob_sha = ? AND settings_hash = ?", (blob_sha, _hash(settings))
    )
    return row["result"] if row else None


def class_report(database: Database, about: object, make: Callable[[], str]) -> str:
    """Made once for what it is about, and then kept."""
    row = database.row("SELECT content FROM class_reports WHERE hash = ?", (_hash(about),))
    if row:
        found: str = row["content"]
        return found
    content = make()
    with database.transaction() as connection:
        connection.execute("INSERT OR REPLACE INTO class_reports VALUES (?, ?)", (_hash(about), content))
    return content


def _hash(settings: object) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
