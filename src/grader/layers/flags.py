"""What a human should see of a submission, besides its points."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from grader.code import without_magics
from grader.injection import find_attempts
from grader.layers.cells import at_line
from grader.layers.submission import Submission
from grader.notebook import Cell, Notebook
from grader.verdicts import Evidence, Flag

# Attributes of IPython and sys that change how failures are shown or what runs.
_TAMPERING = frozenset(
    ("showtraceback", "_showtraceback", "showsyntaxerror", "set_custom_exc", "excepthook", "settrace", "setprofile")
)
_HIDDEN_TESTS = re.compile(r"###\s*BEGIN HIDDEN TESTS.*?###\s*END HIDDEN TESTS", re.DOTALL)


def submission_flags(submission: Submission) -> tuple[Flag, ...]:
    """Of the file, of its re-run, of changed given cells, of tampering and of injection; each once."""
    rerun = submission.rerun.flags if submission.rerun else ()
    found = [
        *submission.notebook.flags,
        *rerun,
        *_given_cells(submission),
        *_tampering(submission.notebook),
        *find_attempts(submission.notebook, submission.template),
    ]
    return tuple(dict.fromkeys(found))


def _given_cells(submission: Submission) -> Iterator[Flag]:
    """nbgrader's locked cells and tests must be as the instructor gave them. The grader runs its own tests anyway."""
    given = submission.template or submission.solution
    if given is None or not submission.notebook.readable:
        return
    counts = Counter(cell.grade_id for cell in submission.notebook.cells if cell.grade_id)
    mine = {cell.grade_id: cell for cell in submission.notebook.cells if cell.grade_id}
    for cell in given.cells:
        if not _is_given(cell):
            continue
        found = mine.get(cell.grade_id)
        if found is None:
            yield Flag(code="given_cell_missing", message=f"The given cell `{cell.grade_id}` is missing.")
        elif counts[cell.grade_id] > 1 or found.kind != cell.kind or _text(found) != _text(cell):
            message = f"The given cell `{cell.grade_id}` was changed."
            yield Flag(code="given_cell_changed", message=message, evidence=(at_line(found, 1),))


def _is_given(cell: Cell) -> bool:
    data = cell.metadata.get("nbgrader")
    return isinstance(data, dict) and bool(data.get("locked") or (data.get("grade") and not data.get("solution")))


def _text(cell: Cell) -> str:
    return "\n".join(line.rstrip() for line in _HIDDEN_TESTS.sub("", cell.source).split("\n")).strip()


def _tampering(notebook: Notebook) -> Iterator[Flag]:
    for cell in notebook.code_cells if notebook.language == "python" else ():
        for name, line in _suspicious(cell):
            place: Evidence = at_line(cell, line)
            message = f"The code touches `{name}`, on which failures and tests rely."
            yield Flag(code="tampering", message=message, evidence=(place,))


def _suspicious(cell: Cell) -> Iterator[tuple[str, int]]:
    if not any(name in cell.source for name in (*_TAMPERING, "assert", "AssertionError", "builtins")):
        return
    try:
        tree = ast.parse(without_magics(cell.source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (node.attr in _TAMPERING or _is_patched(node)):
            yield node.attr, node.lineno
        if isinstance(node, ast.Name) and node.id == "AssertionError" and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def _is_patched(node: ast.Attribute) -> bool:
    """A new value for a built-in, or for a library's assertion."""
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    return isinstance(node.ctx, ast.Store) and (node.attr.startswith("assert") or owner.strip("_") == "builtins")
