"""The synthetic class: the points of layers 1 and 2 equal the known ones exactly."""

import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from shutil import which

import pytest

from grader.injection import find_attempts
from grader.layers import Submission, check_items
from grader.notebook import read_notebook
from grader.rubric import load_rubric
from grader.sandbox import rerun_for, why_unavailable
from grader.scoring import score
from grader.similarity import compare, similarity_flags
from grader.synthetic import SyntheticSubmission, code, make_class, printed, text

CLASSES = {language: make_class(language) for language in ("python", "r")}
ALL = [(language, each) for language, made in CLASSES.items() for each in made.submissions]


def _names(case: object) -> str:
    return case.variant if isinstance(case, SyntheticSubmission) else str(case)


@pytest.mark.parametrize(("language", "submitted"), ALL, ids=_names)
def test_points_are_the_known_ones(language: str, submitted: SyntheticSubmission) -> None:
    made = CLASSES[language]
    rubric = load_rubric(made.rubric)
    submission = Submission(
        notebook=read_notebook(submitted.data, submitted.file_name),
        solution=read_notebook(made.solution, "solution"),
        template=read_notebook(made.template, "template"),
    )
    verdicts = check_items(rubric, submission)
    assert {verdict.item_id: verdict.points for verdict in verdicts if verdict.item_id != "clarity"} == submitted.points
    assert score(rubric, verdicts).total == sum(submitted.points.values(), Decimal(0))
    assert all(verdict.reason for verdict in verdicts)
    assert all(verdict.evidence for verdict in verdicts if verdict.points > 0 and verdict.item_id != "runs")


@pytest.mark.parametrize("language", CLASSES)
def test_flags_are_the_known_ones(language: str) -> None:
    made = CLASSES[language]
    notebooks = {each.file_name: read_notebook(each.data, each.file_name) for each in made.submissions}
    pairs = compare(notebooks, read_notebook(made.template, "template"))
    copies = {name for pair in pairs if pair.identical for name in (pair.first, pair.second)}
    assert {each.variant for each in made.submissions if each.file_name in copies} == {"perfect", "copied"}
    for each in made.submissions:
        notebook = notebooks[each.file_name]
        flags = {*notebook.flags, *find_attempts(notebook), *similarity_flags(each.file_name, pairs)}
        assert each.flags <= {flag.code for flag in flags}


def test_same_seed_same_class_and_others_differ() -> None:
    assert make_class("python") == CLASSES["python"]
    assert make_class("python", seed=1).solution != CLASSES["python"].solution


def test_large_class_has_as_many_files(tmp_path: Path) -> None:
    made = make_class("python", students=50)
    made.write(tmp_path)
    assert len(list((tmp_path / "submissions").iterdir())) == 50
    assert len({each.student for each in made.submissions}) >= 40
    assert load_rubric((tmp_path / "rubric.yaml").read_text()).maximum == 40


@pytest.mark.parametrize("language", CLASSES)
@pytest.mark.parametrize("variant", ["perfect", "crash", "wrong_numbers"])
def test_one_inserted_cell_changes_nothing(language: str, variant: str) -> None:
    made = CLASSES[language]
    rubric, solution = load_rubric(made.rubric), read_notebook(made.solution, "solution")
    submitted = next(each for each in made.submissions if each.variant == variant)
    content = json.loads(submitted.data)
    helper = {"python": ("helper = 0\nprint(helper)", "0\n"), "r": ("helper <- 0\nprint(helper)", "[1] 0\n")}
    source, shown = helper[language]
    extra = [text("A remark."), code(source, printed(shown), count=None), code("", count=None)]
    for position in range(len(content["cells"]) + 1):
        for cell in extra:
            cells = [*content["cells"][:position], cell, *content["cells"][position:]]
            notebook = read_notebook(json.dumps({**content, "cells": cells}).encode(), "x")
            verdicts = check_items(rubric, Submission(notebook=notebook, solution=solution))
            assert {each.item_id: each.points for each in verdicts if each.item_id != "clarity"} == submitted.points


_LIMITS = "limits: {cell_timeout_s: 6, memory_mib: 700, processes: 40}\nrerun: true\n"


_R_TESTS = """\
  - {id: passes, title: P, points: 1, check: {kind: tests, code: "stopifnot(nrow(rows) > 1, is.function(revenue))"}}
  - {id: fails, title: F, points: 1, check: {kind: tests, code: "stopifnot(nrow(rows) == 1)"}}
"""


def _rerun_points(language: str, variant: str, folder: Path, tests: str = "") -> dict[str, Decimal]:
    made = CLASSES[language]
    rubric = load_rubric(made.rubric.replace("total: 40\n", "") + tests + _LIMITS)
    submitted = next(each for each in made.submissions if each.variant == variant)
    notebook = read_notebook(submitted.data if language == "python" else _endless_first(submitted.data), "x")
    submission = Submission(
        notebook=notebook,
        solution=read_notebook(made.solution, "solution"),
        template=read_notebook(made.template, "template"),
        rerun=rerun_for(rubric, notebook, folder / "inputs"),
    )
    return {each.item_id: each.points for each in check_items(rubric, submission) if each.item_id != "clarity"}


def _endless_first(data: bytes) -> bytes:
    """The loop or the bomb comes before the others: they must earn their points after it."""
    content = json.loads(data)
    content["cells"].sort(key=lambda cell: "while" not in cell["source"])
    return json.dumps(content).encode()


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no sandbox: {why_unavailable()}")
def test_rerun_gives_the_same_points(tmp_path: Path) -> None:
    """What the sandbox finds is what the file says."""
    made = CLASSES["python"]
    made.write(tmp_path)
    variants = ("fork_bomb", "wrong_numbers", "infinite_loop", "crash", "huge_output")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda variant: _rerun_points("python", variant, tmp_path), variants))
    known = {each.variant: each.points for each in made.submissions}
    assert dict(zip(variants, found, strict=True)) == {variant: known[variant] for variant in variants}


@pytest.mark.slow
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no sandbox: {why_unavailable()}")
@pytest.mark.skipif(which("R") is None, reason="R and IRkernel are not installed")
def test_r_notebooks_run_in_the_sandbox(tmp_path: Path) -> None:
    made = CLASSES["r"]
    made.write(tmp_path)
    known = {each.variant: each.points for each in made.submissions}
    tested = {"passes": Decimal(1), "fails": Decimal(0)}
    with ThreadPoolExecutor(2) as pool:
        variants = ("infinite_loop", "fork_bomb", "wrong_numbers", "crash")
        found = list(pool.map(lambda variant: _rerun_points("r", variant, tmp_path, _R_TESTS), variants))
    assert dict(zip(variants, found, strict=True)) == {variant: known[variant] | tested for variant in variants}
