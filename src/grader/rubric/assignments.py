"""Assignments of nbgrader (cell metadata) and otter (raw cells) become rubrics. Neither package is needed."""

import ast
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import yaml

from grader.errors import ImportRefused
from grader.notebook import Cell, Notebook
from grader.points import apportioned
from grader.rubric.checks import CodeTests, Manual, Where
from grader.rubric.imported import Imported, item_id, points_of, step_for
from grader.rubric.schema import Item, Rubric

_HIDDEN_MARKS = re.compile(r"^\s*###\s*(BEGIN|END) HIDDEN TESTS\s*$", re.MULTILINE)
_AUTOTEST = re.compile(r"^\s*#.*\bAUTOTEST\b", re.MULTILINE)  # nbgrader makes a test of it
_SCHEMAS = (0, 1, 2, 3)
_COMMENT_LINES = re.compile(r"^#.*$", re.MULTILINE)


def import_assignment(notebook: Notebook, name: str) -> Imported:
    """The instructor's version of the notebook: with solutions and tests."""
    notes = list[str]()
    shape, items = "nbgrader", list(_nbgrader(notebook, notes))
    if not items:
        shape, items = "otter", list(_otter(notebook, notes))
    if not items:
        raise ImportRefused(f"{name}: {_why_nothing(notebook)}")
    language: Any = notebook.language if notebook.language != "other" else "any"
    tested = any(isinstance(item.check, CodeTests) for item in items)
    rubric = Rubric(assignment=name, items=tuple(items), language=language, rerun=tested, point_step=step_for(items))
    return Imported(rubric=rubric, shape=shape, notes=tuple(notes))


def _why_nothing(notebook: Notebook) -> str:
    marked = [data for cell in notebook.cells if isinstance(data := cell.metadata.get("nbgrader"), dict)]
    graded = [data for data in marked if data.get("grade") or data.get("task")]
    if not marked:
        return "the notebook has neither nbgrader's metadata nor otter's raw cells."
    if not graded:
        return "the notebook has nbgrader's metadata, but no cell that is graded."
    told = ", ".join(f"`{data.get('grade_id') or ''}`: {data.get('points', 'none')}" for data in graded)
    return f"no graded cell of the notebook has points ({told})."


def _nbgrader(notebook: Notebook, notes: list[str]) -> Iterator[Item]:
    taken = list[str]()
    for cell in notebook.cells:
        data = cell.metadata.get("nbgrader")
        if not isinstance(data, dict) or not (data.get("grade") or data.get("task")):
            continue
        if not _has_points(data):
            notes.append(f"Cell {cell.index + 1} (`{cell.grade_id}`) has no points: it was left out.")
            continue
        if not cell.grade_id:
            notes.append(
                f"Cell {cell.index + 1} has no grade_id: its test runs at the end, a human looks for its work."
            )
        if data.get("schema_version", 1) not in _SCHEMAS:
            notes.append(
                f"Cell {cell.index + 1} has nbgrader's schema {data.get('schema_version')}; known: {_SCHEMAS}."
            )
        title = cell.grade_id or f"cell {cell.index + 1}"
        chosen = item_id(title, taken)
        taken.append(chosen)
        points = points_of(data["points"], title)
        manual = bool(data.get("solution") or data.get("task"))
        missing = "" if manual else _missing_test(cell)
        if missing:
            notes.append(f"The test `{title}` {missing}")
        yield Item(id=chosen, title=title, points=points, check=_manual(cell) if manual or missing else _test(cell))


def _has_points(data: dict[str, Any]) -> bool:
    """Old schemas have texts."""
    try:
        return float(data.get("points") or 0) > 0
    except (TypeError, ValueError):
        return False


def _missing_test(cell: Cell) -> str:
    """What any work would pass is no test."""
    if _AUTOTEST.search(cell.source):
        return "has AUTOTEST lines, which nbgrader fills in: import the notebook that it generated. A human grades it."
    return "" if _COMMENT_LINES.sub("", cell.source).strip() else "has no code: a human grades it."


def _manual(cell: Cell) -> Manual:
    return Manual(where=Where(grade_id=cell.grade_id))


def _test(cell: Cell) -> CodeTests:
    hidden = bool(_HIDDEN_MARKS.search(cell.source))
    return CodeTests(code=_HIDDEN_MARKS.sub("", cell.source), hidden=hidden, after_cell=cell.grade_id)


class _Question(msgspec.Struct):
    name: str
    points: Decimal
    manual: bool = False
    tests: list[tuple[str, bool]] = []
    guideline: str = ""


def _otter(notebook: Notebook, notes: list[str]) -> Iterator[Item]:
    taken = list[str]()
    for question in _questions(notebook, notes):
        for item in _question_items(question, taken, notes):
            taken.append(item.id)
            yield item


def _questions(notebook: Notebook, notes: list[str]) -> Iterator[_Question]:
    question, in_tests, in_solution = None, False, False
    for cell in notebook.cells:
        mark = _mark(cell)
        if mark == "BEGIN QUESTION":
            question = _question(cell, notes)
        elif mark == "END QUESTION" and question is not None:
            yield question
            question = None
        elif mark in ("BEGIN TESTS", "END TESTS"):
            in_tests = mark == "BEGIN TESTS"
        elif mark in ("BEGIN SOLUTION", "END SOLUTION"):
            in_solution = mark == "BEGIN SOLUTION"
        elif question is not None and in_tests and cell.kind == "code":
            question.tests.append(_otter_test(notebook, cell, notes))
        elif question is not None and in_solution and cell.kind == "markdown":
            question.guideline += cell.source
    if question is not None:
        yield question


def _mark(cell: Cell) -> str:
    """`BEGIN QUESTION` of a raw cell whose first line is `# BEGIN QUESTION`."""
    first = cell.source.strip().splitlines()[0] if cell.source.strip() else ""
    found = re.fullmatch(r"#\s*(BEGIN|END)\s+(QUESTION|TESTS|SOLUTION|PROMPT)\s*", first, re.IGNORECASE)
    return f"{found[1]} {found[2]}".upper() if found and cell.kind == "raw" else ""


def _question(cell: Cell, notes: list[str]) -> _Question:
    try:
        config = yaml.safe_load(_COMMENT_LINES.sub("", cell.source))
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        notes.append(f"Cell {cell.index + 1}: the question's configuration is not YAML.")
        config = {}
    name = str(config.get("name") or f"question {cell.index + 1}")
    points = config.get("points", 1)
    points = sum(points) if isinstance(points, list) else points.get("each", 1) if isinstance(points, dict) else points
    return _Question(name, points_of(points, name), bool(config.get("manual")), [])


def _otter_test(notebook: Notebook, cell: Cell, notes: list[str]) -> tuple[str, bool]:
    """Code that fails unless the cell's last value is the one that the instructor's notebook shows."""
    hidden = bool(re.match(r"\s*#\s*HIDDEN", cell.source)) or "hidden: true" in cell.source
    shown = "".join(output.text for output in cell.outputs if output.kind in ("result", "stream")).strip()
    if notebook.language != "python" or not shown:
        return cell.source, hidden
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        notes.append(f"Cell {cell.index + 1}: the test does not parse, it is kept as it is.")
        return cell.source, hidden
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or any(output.kind == "stream" for output in cell.outputs):
        notes.append(f"Cell {cell.index + 1}: the test prints; only errors make it fail.")
        return cell.source, hidden
    before = "\n".join(ast.unparse(node) for node in tree.body[:-1])
    return f"{before}\nassert repr({ast.unparse(last.value)}) == {shown!r}".strip(), hidden


def _question_items(question: _Question, taken: list[str], notes: list[str]) -> Iterator[Item]:
    """The question's points in equal parts over its tests."""
    if question.manual or not question.tests:
        if not question.manual:
            notes.append(f"{question.name} has no tests: a human grades it.")
        chosen = item_id(question.name, taken)
        yield Item(id=chosen, title=question.name, points=question.points, check=Manual(), guideline=question.guideline)
        return
    used, count = list(taken), len(question.tests)
    parts = apportioned([Decimal(1)] * count, question.points)
    for number, ((code, hidden), points) in enumerate(zip(question.tests, parts, strict=True), 1):
        title = question.name if count == 1 else f"{question.name} test {number}"
        chosen = item_id(title, used)
        used.append(chosen)
        yield Item(
            id=chosen, title=title, points=points, group=question.name, check=CodeTests(code=code, hidden=hidden)
        )
