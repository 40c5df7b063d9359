"""Layers 1 and 2 for one stored submission, with the sandboxed re-run where it is asked for."""

import tempfile
import threading
from pathlib import Path

import msgspec

from grader.errors import KernelUnavailable, SandboxUnavailable
from grader.grading.results import ChecksResult, GradeRecord
from grader.layers import Submission, check_items, submission_flags
from grader.notebook import Notebook, read_notebook
from grader.rubric import Rubric
from grader.sandbox import Rerun, code_tests_of, probes_of, rerun_for
from grader.store import Assignment, Database, StoredSubmission, blob, known_rerun, put_rerun
from grader.verdicts import Flag

_solution_lock = threading.Lock()  # many submissions wait for one run of the solution


def check_notebook(
    database: Database, assignment: Assignment, rubric: Rubric, work: StoredSubmission, wanted: bool
) -> ChecksResult:
    notebook = read_notebook(blob(database, work.blob_sha), work.pseudonym)
    given = Submission(
        notebook=notebook,
        solution=_file(database, assignment.solution_sha, "solution"),
        template=_file(database, assignment.template_sha, "template"),
    )
    refused: tuple[Flag, ...] = ()
    if notebook.readable and (wanted or rubric.rerun):
        given, refused = _with_reruns(database, assignment, rubric, work.blob_sha, given)
    flags = (*submission_flags(given), *_language_flag(rubric, notebook), *refused)
    return ChecksResult(verdicts=check_items(rubric, given), flags=flags, readable=notebook.readable)


def _language_flag(rubric: Rubric, notebook: Notebook) -> tuple[Flag, ...]:
    if not notebook.readable or rubric.language in ("any", notebook.language):
        return ()
    found = notebook.kernel[:40] or notebook.language
    return (Flag(code="wrong_language", message=f"The kernel is {found}; the assignment is in {rubric.language}."),)


def _file(database: Database, sha: str | None, name: str) -> Notebook | None:
    return read_notebook(blob(database, sha), name) if sha else None


def _with_reruns(
    database: Database, assignment: Assignment, rubric: Rubric, sha: str, given: Submission
) -> tuple[Submission, tuple[Flag, ...]]:
    """Without a sandbox or a kernel nothing runs: a flag says so, and tests go to review."""
    try:
        own = _rerun(database, assignment, rubric, sha, given.notebook)
        with _solution_lock:
            model = given.solution and _rerun(database, assignment, rubric, assignment.solution_sha, given.solution)
    except (SandboxUnavailable, KernelUnavailable) as error:
        return given, (Flag(code="not_rerun", message=str(error)),)
    return msgspec.structs.replace(given, rerun=own, solution_rerun=model), ()


def rerun_of(database: Database, assignment: Assignment, rubric: Rubric, sha: str) -> Rerun | None:
    """The kept re-run of a file. None: it was not run."""
    known = known_rerun(database, sha, _rerun_settings(assignment, rubric))
    return msgspec.json.decode(known, type=Rerun) if known else None


def rerun_behind(database: Database, assignment: Assignment, rubric: Rubric, record: GradeRecord) -> Rerun | None:
    """The re-run whose outputs a grade rests on. None: it rests on those in the file."""
    if not (record.settings.get("rerun") or rubric.rerun):
        return None
    then = msgspec.structs.replace(assignment, inputs=record.inputs)
    return rerun_of(database, then, rubric, record.notebook_sha)


def _rerun_settings(assignment: Assignment, rubric: Rubric) -> object:
    """What the run depends on. Titles, points and tolerances are not among it: they run no student code again."""
    return msgspec.to_builtins([rubric.limits, assignment.inputs, code_tests_of(rubric), probes_of(rubric)])


def _rerun(database: Database, assignment: Assignment, rubric: Rubric, sha: str | None, notebook: Notebook) -> Rerun:
    """The same file with the same limits, data, tests and probes runs once."""
    assert sha
    settings = _rerun_settings(assignment, rubric)
    if known := known_rerun(database, sha, settings):
        return msgspec.json.decode(known, type=Rerun)
    with tempfile.TemporaryDirectory() as folder:
        for name, content_sha in assignment.inputs.items():
            (Path(folder) / name).write_bytes(blob(database, content_sha))
        result = rerun_for(rubric, notebook, Path(folder))
    put_rerun(database, sha, settings, msgspec.json.encode(result).decode())
    return result
