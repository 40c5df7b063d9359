"""The notebooks inside the nbgrader package: all end in right points or a flag. The package itself is not used."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest

from grader.errors import ImportRefused
from grader.layers import Submission, check_items, submission_flags
from grader.notebook import Notebook, read_notebook
from grader.rubric import Rubric, RunLimits, dump_rubric, import_assignment, load_rubric
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
    import msgspec

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


def _graded(given: Path, path: Path) -> tuple[dict[str, Decimal], set[str]]:
    rubric, notebook = _rubric(given), _read(path)
    submission = Submission(notebook=notebook, template=_read(given), rerun=rerun_for(rubric, notebook))
    verdicts = check_items(rubric, submission)
    return {each.item_id: each.points for each in verdicts}, {flag.code for flag in submission_flags(submission)}


UNCHANGED, PS1 = APPS / "submitted-unchanged.ipynb", GUIDE / "source/ps1/problem1.ipynb"
KNOWN: list[tuple[Path, Path, dict[str, str], set[str]]] = [
    (UNCHANGED, APPS / "submitted-changed.ipynb", {"foo": "1", "bar": "1"}, set()),
    (UNCHANGED, APPS / "submitted-cheat-attempt.ipynb", {"foo": "1", "bar": "0"}, {"tampering"}),
    (UNCHANGED, APPS / "submitted-cheat-attempt-alternative.ipynb", {"bar": "0"}, {"tampering"}),
    (UNCHANGED, APPS / "submitted-grade-cell-changed.ipynb", {"foo": "1", "bar": "0"}, {"given_cell_changed"}),
    (
        PS1,
        GUIDE / "submitted/hacker/ps1/problem1.ipynb",
        {
            "correct_squares": "1",
            "squares_invalid_input": "1",
            "correct_sum_of_squares": "0.5",
            "sum_of_squares_uses_squares": "0.5",
        },
        set(),
    ),
    (
        PS1,
        GUIDE / "submitted/bitdiddle/ps1/problem1.ipynb",
        {
            "correct_squares": "0",
            "squares_invalid_input": "1",
            "correct_sum_of_squares": "0",
            "sum_of_squares_uses_squares": "0.5",
        },
        {"given_cell_changed"},
    ),
    (APPS / "timeout.ipynb", APPS / "timeout.ipynb", {"correct_squares": "0"}, {"resource_limit"}),
]


@needs_sandbox
@pytest.mark.slow
def test_submissions_get_the_right_points() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda known: _graded(known[0], known[1]), KNOWN))
    for (_, path, points, flags), (found, codes) in zip(KNOWN, results, strict=True):
        right = {name.replace("_", "-"): Decimal(value) for name, value in points.items()}
        assert {name: found[name] for name in right} == right, path.name
        assert flags <= codes, path.name


@needs_sandbox
@pytest.mark.slow
def test_loops_and_side_effects_stay_inside(tmp_path: Path) -> None:
    paths = [APPS / f"{name}.ipynb" for name in ("infinite-loop", "infinite-loop-with-output", "side-effects")]
    with ThreadPoolExecutor(2) as pool:
        loop, growing, effects = pool.map(lambda path: rerun(_read(path), LIMITS), paths)
    assert [flag.code for flag in loop.flags] == ["resource_limit"]
    assert "resource_limit" in {flag.code for flag in growing.flags}
    assert effects.notebook.cells[0].error is None
    assert not list(Path.cwd().glob("side-effect.txt"))
