"""Files that are valid JSON and nonsense: each ends in points or a flag, and none harms the rest of its class."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grader.code import code_facts
from grader.grading import grades
from grader.intake import read_files
from grader.layers.values import cleaned
from grader.notebook import passages, read_notebook, words_of
from grader.store import StudentIdentity, add_submission, progress
from grader.web.notebook_view import notebook_html
from tests.support.grade_books import grade_here, make_book, work


def _cell(**fields: Any) -> dict[str, Any]:
    cell = {"cell_type": "code", "metadata": {}, "source": "sales = [1, 2]\nsales", "id": "a", "execution_count": 1}
    return cell | {"outputs": []} | fields


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def _file(*cells: Any, version: Any = 4) -> bytes:
    content = {"nbformat": version, "nbformat_minor": 5, "metadata": {}, "cells": list(cells)}
    return json.dumps(content).encode()


_ERROR = {"output_type": "error", "ename": "\ud800", "evalue": "\udfff", "traceback": ["\ud800"]}
_LONG = "".join(f"value_{n} = compute(value_{n}, '\ud800', {n}) + other[{n}]\n" for n in range(60))
ODD = {
    "half a character in code": _file(_cell(source="sales = ['\ud800']")),
    "half a character in long code": _file(_cell(source=_LONG)),
    "half a character in text": _file(_cell(cell_type="markdown", source="# Sales\n\ud800 " + "word " * 60)),
    "half a character in an error": _file(_cell(outputs=[_ERROR])),
    "half a character in metadata": _file(_cell(metadata={"\ud800": "\ud801", "tags": ["\ud802"]}, id="\ud803")),
    "deep outputs": _file(_cell(outputs=_nested(900))),
    "deep metadata": _file(_cell(metadata={"deep": _nested(900)})),
    "a version that is no whole number": _file(_cell(), version=4.0),
    "numbers that are none": _file(_cell(execution_count=float("nan"), metadata={"a": float("inf")})),
    "a count of thousands of digits": _file(_cell(execution_count=10**4000)),
    "one id for all cells": _file(_cell(), _cell(source="mean_sales = 20"), _cell()),
    "no cells in the list": _file(None, 1, "x", [], {}, _cell(source=[1, None, ["x"]], outputs={"a": 1}, metadata=[1])),
}


@pytest.mark.parametrize("name", ODD)
def test_reading_never_fails(name: str) -> None:
    read = read_notebook(ODD[name], "student-1")
    notebook_html(read, ()).encode()
    assert read.readable


def test_a_class_of_odd_files_is_graded_beside_a_good_one(tmp_path: Path) -> None:
    """Each file twice: what two have in common is stored as evidence too."""
    book, assignment = make_book(tmp_path)
    for name, content in (ODD | {"good": work()}).items():
        for key in (name, f"{name} again"):
            add_submission(book, assignment.id, StudentIdentity(key=key), "x.ipynb", content)
    grade_here(book, assignment)
    state = progress(book, assignment.id)
    assert (state.checks.done, state.failures) == (2 * len(ODD) + 2, ())
    found = grades(book, assignment)
    assert sorted(one.score.total for one in found)[-2:] == [6, 6]
    assert all("identical" in {flag.code for flag in one.flags} for one in found)


def test_a_file_name_that_is_no_text_names_a_student(tmp_path: Path) -> None:
    path = tmp_path / b"stud\xffent.ipynb".decode(errors="surrogateescape")
    path.write_bytes(work())
    assert [one.owner.identity.key for one in read_files([tmp_path], {})] == ["stud?ent"]


def _cost_s(run: Callable[[str], object], text: str) -> float:
    """Of this process alone: other work on the machine does not count."""
    began_s = time.process_time()
    run(text)
    return time.process_time() - began_s


@pytest.mark.parametrize(
    ("run", "piece", "end"),
    [
        (lambda text: list(passages([(0, f"# a{text}")])), "#", "b"),
        (lambda text: list(passages([(0, f"# a{text}")])), "\t", "b"),
        (words_of, "<", ""),
        (words_of, "<a", ""),
        (cleaned, " \n", "x"),
        (lambda text: code_facts(text, "python"), " ", "x"),
    ],
)
def test_time_grows_with_a_text_and_no_faster(run: Callable[[str], object], piece: str, end: str) -> None:
    """A pattern that tries every split of a long line keeps a worker busy for days. Quadratic: 16 times."""
    short, long = (f"{piece * (count // len(piece))}{end}" for count in (10_000, 40_000))
    assert _cost_s(run, long) < 10 * _cost_s(run, short) + 0.5
