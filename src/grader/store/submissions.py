"""Submissions under pseudonyms. Names stay in one table; showing one is logged."""

import hashlib
import hmac
import json
import sqlite3
import time

import msgspec

from grader.store.assignments import put_blob
from grader.store.database import Database, GradeBookError


class StudentIdentity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a learning platform's file name or table says of a student. `key` identifies the student."""

    key: str
    name: str = ""
    lms_id: str = ""
    email: str = ""


class StoredSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """Without anything that names the student."""

    id: int
    assignment_id: int
    pseudonym: str
    blob_sha: str
    late_days: float
    current_key: str | None


class KnownFile(msgspec.Struct, frozen=True):
    """`name`: as the student named it, private. `counts`: it is the one that is graded."""

    blob_sha: str
    name: str
    counts: bool


def pseudonym_of(secret: bytes, key: str) -> str:
    digits = hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()[:8]
    return f"student-{digits}"


def add_submission(
    database: Database,
    assignment_id: int,
    identity: StudentIdentity,
    file_name: str,
    content: bytes,
    late_days: float = 0.0,
    counts: bool = True,
) -> StoredSubmission:
    """The same file of the same student again is the same submission. A file that `counts` takes the place of others;
    one that does not is kept beside them."""
    secret = database.secret("pseudonyms")
    again = "UPDATE SET late_days = excluded.late_days, file_name = excluded.file_name" if counts else "NOTHING"
    with database.transaction() as connection:
        student = _student(connection, identity, pseudonym_of(secret, identity.key))
        sha = put_blob(connection, content)
        connection.execute(
            "INSERT INTO submissions (assignment_id, student_id, blob_sha, file_name, late_days, added_at, superseded)"
            f" VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO {again}",
            (assignment_id, student, sha, file_name, late_days, time.time(), not counts),
        )
        if counts:
            connection.execute(
                "UPDATE submissions SET superseded = (blob_sha != ?) WHERE assignment_id = ? AND student_id = ?",
                (sha, assignment_id, student),
            )
        where = " WHERE assignment_id = ? AND student_id = ? AND blob_sha = ?"
        return _submission(connection.execute(_SELECT + where, (assignment_id, student, sha)).fetchone())


def _student(connection: sqlite3.Connection, identity: StudentIdentity, pseudonym: str) -> int:
    known = json.dumps(msgspec.to_builtins(identity))
    connection.execute(
        "INSERT INTO students (pseudonym, student_key, identity) VALUES (?, ?, ?)"
        " ON CONFLICT (student_key) DO UPDATE SET identity = excluded.identity",
        (pseudonym, identity.key, known),
    )
    found: int = connection.execute("SELECT id FROM students WHERE student_key = ?", (identity.key,)).fetchone()["id"]
    return found


_SELECT = "SELECT submissions.*, pseudonym FROM submissions JOIN students ON students.id = submissions.student_id"


def _submission(row: sqlite3.Row) -> StoredSubmission:
    return StoredSubmission(
        id=row["id"],
        assignment_id=row["assignment_id"],
        pseudonym=row["pseudonym"],
        blob_sha=row["blob_sha"],
        late_days=row["late_days"],
        current_key=row["current_key"],
    )


def submissions(database: Database, assignment_id: int) -> list[StoredSubmission]:
    """The newest of every student, by pseudonym."""
    where = " WHERE assignment_id = ? AND NOT superseded ORDER BY pseudonym"
    return [_submission(row) for row in database.rows(_SELECT + where, (assignment_id,))]


def known_files(database: Database, assignment_id: int, student_key: str) -> list[KnownFile]:
    """All that a student handed in, for programs: no person sees the names."""
    rows = database.rows(
        "SELECT blob_sha, file_name, superseded FROM submissions JOIN students ON students.id = student_id"
        " WHERE assignment_id = ? AND student_key = ?",
        (assignment_id, student_key),
    )
    return [KnownFile(row["blob_sha"], row["file_name"], not row["superseded"]) for row in rows]


def submission(database: Database, submission_id: int) -> StoredSubmission:
    row = database.row(_SELECT + " WHERE submissions.id = ?", (submission_id,))
    assert row, submission_id
    return _submission(row)


def find_submission(database: Database, assignment_id: int, pseudonym: str) -> StoredSubmission:
    """By pseudonym, or by its first digits."""
    found = [one for one in submissions(database, assignment_id) if _is_named(one.pseudonym, pseudonym)]
    if len(found) != 1:
        count = "no submission" if not found else f"{len(found)} submissions"
        raise GradeBookError(f"{count} of {pseudonym}: `disagg-grade status` lists the pseudonyms")
    return found[0]


def _is_named(pseudonym: str, given: str) -> bool:
    return pseudonym == given or pseudonym.removeprefix("student-").startswith(given.removeprefix("student-"))


def reveal(database: Database, submission_ids: list[int], who: str, why: str) -> dict[int, StudentIdentity]:
    """Who the students are, by submission. Every call is logged."""
    if not why.strip():
        raise GradeBookError("a reveal needs a reason: it is logged")
    with database.transaction() as connection:
        what = json.dumps(submission_ids)
        connection.execute(
            "INSERT INTO reveals (who, what, why, at) VALUES (?, ?, ?, ?)", (who, what, why, time.time())
        )
    rows = database.rows(
        "SELECT submissions.id AS id, identity FROM submissions JOIN students ON students.id = student_id"
    )
    wanted = set(submission_ids)
    return {
        row["id"]: msgspec.json.decode(row["identity"], type=StudentIdentity) for row in rows if row["id"] in wanted
    }


class Reveal(msgspec.Struct, frozen=True):
    who: str
    what: list[int]
    why: str
    at: float


def reveals(database: Database) -> list[Reveal]:
    """Newest first."""
    rows = database.rows("SELECT * FROM reveals ORDER BY id DESC")
    return [Reveal(row["who"], json.loads(row["what"]), row["why"], row["at"]) for row in rows]


def names_of(database: Database, submission_id: int) -> tuple[str, ...]:
    """All that names the student, to be kept out of prompts and logs. For programs: no person sees it."""
    row = database.row(
        "SELECT identity FROM submissions JOIN students ON students.id = student_id WHERE submissions.id = ?",
        (submission_id,),
    )
    assert row
    identity = msgspec.json.decode(row["identity"], type=StudentIdentity)
    words = identity.name.replace(",", " ").split()  # Canvas writes the last name first
    both = " ".join(words), " ".join(reversed(words))
    found = (identity.name, *both, identity.key, identity.email, identity.lms_id)
    return tuple(dict.fromkeys(name for name in found if name))
