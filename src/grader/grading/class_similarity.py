"""Which submissions of a class are alike. Computed once for a class as it is, and kept in the grade book."""

import msgspec

from grader.notebook import read_notebook
from grader.similarity import Resemblance, compare
from grader.store import Assignment, Database, StoredSubmission, blob, class_report


def resemblances(
    database: Database, assignment: Assignment, everyone: list[StoredSubmission]
) -> tuple[Resemblance, ...]:
    """Named by pseudonyms. Evidence, never points."""
    about = ["similarity", assignment.template_sha, [(one.pseudonym, one.blob_sha) for one in everyone]]
    report = class_report(database, about, lambda: _compared(database, assignment, everyone))
    return msgspec.json.decode(report, type=tuple[Resemblance, ...])


def _compared(database: Database, assignment: Assignment, everyone: list[StoredSubmission]) -> str:
    notebooks = {one.pseudonym: read_notebook(blob(database, one.blob_sha), one.pseudonym) for one in everyone}
    sha = assignment.template_sha
    template = read_notebook(blob(database, sha), "template") if sha else None
    return msgspec.json.encode(compare(notebooks, template)).decode()
