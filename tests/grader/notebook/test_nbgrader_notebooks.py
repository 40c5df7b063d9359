"""The notebooks inside the nbgrader package: all end in right points or a flag. The package itself is not used."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from grader.errors import ImportRefused
from grader.layers import Submission, check_items, submission_flags
from grader.notebook import Cell, Notebook, read_notebook
from grader.rubric import Manual, Rubric, RunLimits, dump_rubric, import_assignment, load_rubric
from grader.sandbox import rerun, rerun_for, why_unavailable
from grader.scoring import score

_SPEC = importlib.util.find_spec("nbgrader")
ROOT = Path(_SPEC.origin).parent if _SPEC and _SPEC.origin else Path("/nowhere")
FILES = sorted(ROOT.rglob("*.ipynb"))
APPS, GUIDE = ROOT / "tests/apps/files", ROOT / "docs/source/user_guide"
pytestmark = pytest.mark.skipif(not FILES, reason="nbgrader's files are not installed")
needs_sandbox = pytest.mark.skipif(bool(why_unavailable()), reason=f"no sandbox: {why_unavailable()}")
LIMITS = RunLimits(cell_timeout_s=4, notebook_timeout_s=120, memory_mib=400, processes=40)


def _read(path: Path) -> Notebook:
    return read_notebook(path.read_bytes(), path.name)


def _rubric(path: Path) -> Rubric:
    return msgspec.structs.replace(import_assignment(_read(path), "ps1").rubric, limits=LIMITS)


def test_the_package_has_its_notebooks() -> None:
    assert len(FILES) == 87


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)).replace(".ipynb", ""))
def test_every_notebook_is_graded_or_flagged(path: Path) -> None:
    """Without a re-run: items wait for the sandbox or a human; nothing crashes, and no point is given."""
    notebook = _read(path)
    assert notebook.readable
    try:
        imported = import_assignment(notebook, "a")
    except ImportRefused:
        return
    assert load_rubric(dump_rubric(imported.rubric)) == imported.rubric
    verdicts = check_items(imported.rubric, Submission(notebook=notebook, solution=notebook))
    assert {verdict.status for verdict in verdicts} == {"needs_review"}
    whole = score(imported.rubric, verdicts)
    assert whole.total == 0
    assert whole.pending == whole.maximum


def test_only_notebooks_without_anything_to_grade_are_refused() -> None:
    """Each for a reason that is told."""
    refused: dict[str, set[str]] = {}
    for path in FILES:
        try:
            import_assignment(_read(path), "a")
        except ImportRefused as error:
            refused.setdefault(str(error).removeprefix("a: "), set()).add(path.stem)
    plain = refused.pop("the notebook has neither nbgrader's metadata nor otter's raw cells.")
    assert plain == {
        "blank", "creating_and_grading_assignments", "empty", "header", "infinite-loop", "infinite-loop-with-output",
        "infinite-recursion", "long-output", "managing_assignment_files", "managing_assignment_files_manually",
        "managing_the_database", "side-effects", "task", "test-no-metadata", "test-no-metadata-autotest",
        "warning-pattern",
    }  # fmt: skip
    assert refused == {
        "the notebook has nbgrader's metadata, but no cell that is graded.": {
            "bad-markdown-cell-2", "cell-type-changed", "no-cell-type", "old-schema",
        },
        "no graded cell of the notebook has points (`correct_squares`: 0).": {"validation-zero-points"},
        "no graded cell of the notebook has points (`id1`: none).": {"blank-points"},
    }  # fmt: skip
    assert not any(cell.metadata.get("nbgrader") for path in FILES if path.stem in plain for cell in _read(path).cells)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("submitted-cheat-attempt", "tampering"),
        ("submitted-cheat-attempt-alternative", "tampering"),
        ("submitted-grade-cell-changed", "given_cell_changed"),
        ("submitted-locked-cell-changed", "given_cell_changed"),
        ("submitted-unchanged", None),
        ("submitted-changed", None),
    ],
)
def test_changed_cells_and_cheats_are_flagged(name: str, code: str | None) -> None:
    given = _read(APPS / "submitted-unchanged.ipynb")
    flags = submission_flags(Submission(notebook=_read(APPS / f"{name}.ipynb"), template=given))
    assert {flag.code for flag in flags} == ({code} if code else set())


def test_new_schema_is_noted() -> None:
    assert "schema" in import_assignment(_read(APPS / "too-new.ipynb"), "a").notes[0]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """Submissions of one answer, which share a sandbox run, each with its points by item (`open`: a human decides)."""

    works: dict[Path, dict[str, str]]
    given: Path | None = None  # without it: each work itself
    flags: frozenset[str] = frozenset()


def _graded(known: Known) -> tuple[dict[Path, dict[str, Decimal | str]], set[str]]:
    given = {path: known.given or path for path in known.works}
    rubrics = {path: _rubric(given[path]) for path in known.works}
    notebooks = {path: _read(path) for path in known.works}
    together = msgspec.structs.replace(
        rubrics[next(iter(rubrics))], items=tuple(item for rubric in rubrics.values() for item in rubric.items)
    )
    done = rerun_for(together, _joined([*notebooks.values()]))
    found, codes = dict[Path, dict[str, Decimal | str]](), set[str]()
    for path, notebook in notebooks.items():
        submission = Submission(notebook=notebook, template=_read(given[path]), rerun=done)
        verdicts = check_items(rubrics[path], submission)
        found[path] = {each.item_id: "open" if each.status == "needs_review" else each.points for each in verdicts}
        codes |= {flag.code for flag in submission_flags(submission)}
    return found, codes


def _joined(notebooks: list[Notebook]) -> Notebook:
    """The first, then the test cells of the others."""
    first, *others = notebooks
    cells = list(first.cells)
    for other in others:
        answers = [[cell.source for cell in one.code_cells if not _tests(cell)] for one in (first, other)]
        assert answers[0] == answers[1]
        cells += filter(_tests, other.cells)
    numbered = [msgspec.structs.replace(cell, index=index) for index, cell in enumerate(cells)]
    return msgspec.structs.replace(first, cells=tuple(numbered))


def _tests(cell: Cell) -> bool:
    data = cell.metadata.get("nbgrader")
    return isinstance(data, dict) and bool(data.get("grade"))


UNCHANGED, PS1 = APPS / "submitted-unchanged.ipynb", GUIDE / "source/ps1/problem1.ipynb"
OPEN = {"baz": "open", "quux": "open"}


def _app(name: str, points: dict[str, str], *flags: str, given: Path | None = None) -> Known:
    return Known(works={APPS / f"{name}.ipynb": points}, given=given, flags=frozenset(flags))


def _autotests(names: list[str], points: str) -> Known:
    """Each has one graded cell, named after its kind."""
    return Known(works={APPS / f"autotest-{name}.ipynb": {f"test-{name.split('-')[0]}": points} for name in names})


def _submitted(student: str, problem: int, points: dict[str, str], *flags: str) -> Known:
    path = GUIDE / f"submitted/{student}/ps1/problem{problem}.ipynb"
    return Known(given=PS1.with_stem(f"problem{problem}"), works={path: points}, flags=frozenset(flags))


KNOWN = [
    _app("submitted-changed", {"foo": "1", "bar": "1", **OPEN}, given=UNCHANGED),
    _app("submitted-cheat-attempt", {"foo": "1", "bar": "0"}, "tampering", given=UNCHANGED),
    _app("submitted-cheat-attempt-alternative", {"bar": "0"}, "tampering", given=UNCHANGED),
    _app("submitted-grade-cell-changed", {"foo": "1", "bar": "0"}, "given_cell_changed", given=UNCHANGED),
    _app("submitted-locked-cell-changed", {"foo": "1", "bar": "0", **OPEN}, "given_cell_changed", given=UNCHANGED),
    _submitted(
        "hacker",
        1,
        {
            "correct-squares": "1",
            "squares-invalid-input": "1",
            "correct-sum-of-squares": "0.5",
            "sum-of-squares-uses-squares": "0.5",
        },
    ),
    _submitted(
        "bitdiddle",
        1,
        {
            "correct-squares": "0",
            "squares-invalid-input": "1",
            "correct-sum-of-squares": "0",
            "sum-of-squares-uses-squares": "0.5",
        },
        "given_cell_changed",
    ),
    _submitted("hacker", 2, {"part-a": "open", "part-b": "open"}),
    _submitted("bitdiddle", 2, {"part-a": "open", "part-b": "open"}),
    _app("timeout", {"correct-squares": "0"}, "resource_limit"),
    _app(
        "test-hidden-tests",
        {
            "correct-squares": "0",
            "squares-invalid-input": "1",
            "correct-sum-of-squares": "0",
            "sum-of-squares-uses-squares": "0.5",
        },
    ),
    _autotests(["simple-changed", "hashed-changed", "hidden-changed-right"], "1"),
    _autotests(["simple-unchanged", "hashed-unchanged", "hidden-unchanged"], "0"),
    _autotests(["hidden-changed-wrong"], "1"),  # the hidden tests are not in it; those that are pass
    _app(  # the third checks the types and values of `d`, `e` and `f`, which are wrong
        "autotest-multi-changed",
        {"test-multi": "1", "cell-f2803ba7c42d03ab": "1", "cell-693350420ec62f1b": "0", "cell-13479eb0e5fff152": "1"},
    ),
    _app(
        "autotest-multi-unchanged",
        {"test-multi": "0", "cell-f2803ba7c42d03ab": "0", "cell-693350420ec62f1b": "0", "cell-13479eb0e5fff152": "0"},
    ),
]


@needs_sandbox
@pytest.mark.slow
def test_submissions_get_the_right_points() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(_graded, KNOWN))
    for known, (found, codes) in zip(KNOWN, results, strict=True):
        for path, points in known.works.items():
            right = {name: value if value == "open" else Decimal(value) for name, value in points.items()}
            assert {name: found[path][name] for name in right} == right, path.name
        assert known.flags <= codes, known.works
        assert known.flags or not codes, known.works


def test_autotests_that_nbgrader_did_not_fill_in_are_open() -> None:
    """In the instructor's source they are comments, which any work would pass."""
    for name in ("simple", "hashed", "hidden", "multi"):
        imported = import_assignment(_read(APPS / f"autotest-{name}.ipynb"), "a")
        assert all(isinstance(item.check, Manual) for item in imported.rubric.items), name
        assert all("AUTOTEST" in note for note in imported.notes)
        assert len(imported.notes) == len(imported.rubric.items)


@needs_sandbox
@pytest.mark.slow
def test_loops_and_side_effects_stay_inside(tmp_path: Path) -> None:
    paths = [APPS / f"{name}.ipynb" for name in ("infinite-loop", "infinite-loop-with-output", "side-effects")]
    paths.append(ROOT / "tests/preprocessors/files/infinite-recursion.ipynb")
    with ThreadPoolExecutor(2) as pool:
        loop, growing, effects, deep = pool.map(lambda path: rerun(_read(path), LIMITS), paths)
    assert [flag.code for flag in loop.flags] == ["resource_limit"]
    assert "resource_limit" in {flag.code for flag in growing.flags}
    assert effects.notebook.cells[0].error is None
    assert not list(Path.cwd().glob("side-effect.txt"))
    assert [cell.error.error_name for cell in deep.notebook.cells if cell.error] == ["RecursionError"]
    assert deep.status == "finished"
