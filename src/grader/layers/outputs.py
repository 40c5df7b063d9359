"""Layer 2: outputs against the solution's, matched by tag, section, variable or grade_id, never by position."""

from collections.abc import Iterator
from fractions import Fraction

from grader.code import code_names
from grader.layers.cells import at_line, at_use, code_at, described, facts_of
from grader.layers.compare import Shown, is_flood, kind_of, lacks, share_matching, shown_by, shown_by_cell
from grader.layers.submission import CheckResult, Submission
from grader.notebook import Cell, Notebook, Output
from grader.rubric import CodeTests, Item, OutputMatch, Where
from grader.sandbox import Rerun
from grader.verdicts import Evidence, Flag

_QUOTE_CHARS = 300
_PLACES = 3  # most lines that are shown for one item of tests
_NONE = Fraction(0)


def check_output(check: OutputMatch, submission: Submission) -> CheckResult:
    expected = _expected(check, submission)
    if not expected:
        reason = f"The solution has no output{described(check.where)}: the grader has nothing to compare with."
        return CheckResult(share=_NONE, reason=reason, review=True)
    if any(lacks(want, check) for want in expected):
        reason = f"The solution's output{described(check.where)} has no {check.compare} to compare with."
        return CheckResult(share=_NONE, reason=reason, review=True)
    candidates = _candidates(check, submission)
    best = [_best(candidates, want, check) for want in expected]
    flooded = [
        have for have, want, share in best if share == 1 and kind_of(want, check) == "number" and is_flood(have, want)
    ]
    if flooded:
        return _flood(flooded)
    assigned = tuple(_assigned(check, submission.executed))
    return _finding(check, best, assigned, tuple(_lost_place(check, submission.executed)))


def _lost_place(check: OutputMatch, notebook: Notebook) -> Iterator[Flag]:
    """Some editors drop tags: a human should see that the place is gone, not only its points."""
    if not code_at(notebook, check.where) and any(cell.source.strip() for cell in notebook.code_cells):
        yield Flag(code="place_missing", message=f"The notebook has code, but no code cell{described(check.where)}.")


def _assigned(check: OutputMatch, notebook: Notebook) -> Iterator[Evidence]:
    """Where the variable got its value at last: the evidence for a value that no cell shows."""
    uses = [(cell, facts_of(notebook, cell).find("assign", check.where.variable)) for cell in notebook.code_cells]
    places = [at_use(cell, use) for cell, use in uses if use]
    yield from places[-1:]


def _finding(
    check: OutputMatch,
    best: list[tuple[Shown, Shown, Fraction]],
    assigned: tuple[Evidence, ...],
    flags: tuple[Flag, ...],
) -> CheckResult:
    shares = [share if check.partial or share == 1 else _NONE for _, _, share in best]
    share = sum(shares, _NONE) / len(shares)
    share = share if check.partial or share == 1 or len(shares) > 1 else _NONE
    shown = [have for have, _, _ in best if not have.empty]
    evidence = tuple(_quote(have) for have in shown)
    evidence += assigned if any(have.cell is None for have in shown) else ()
    where = described(check.where)
    if share == 1:
        return CheckResult(share=share, reason=f"The output{where} equals the solution's.", evidence=evidence)
    if all(have.empty for have, _, _ in best):
        return CheckResult(share=_NONE, reason=f"There is no output{where}.", evidence=evidence, flags=flags)
    kinds = ", ".join(sorted({kind_of(want, check) for _, want, _ in best}))
    matched = sum(share == 1 for share in shares)
    reason = f"The output{where} differs from the solution's ({kinds}; {matched} of {len(shares)} outputs match)."
    return CheckResult(share=share, reason=reason, evidence=evidence)


def _flood(flooded: list[Shown]) -> CheckResult:
    evidence = tuple(_quote(have) for have in flooded)
    flag = Flag(code="many_numbers", message="The output has far more numbers than the solution's.", evidence=evidence)
    reason = "The expected numbers are among many others in the output: a human decides."
    return CheckResult(share=_NONE, reason=reason, evidence=evidence, flags=(flag,), review=True)


def _best(candidates: list[Shown], want: Shown, check: OutputMatch) -> tuple[Shown, Shown, Fraction]:
    have, share = Shown(), _NONE
    for candidate in candidates:
        matching = share_matching(candidate, want, check)
        if matching > share or have.empty:
            have, share = candidate, matching
    return have, want, share


def _expected(check: OutputMatch, submission: Submission) -> list[Shown]:
    if check.expected is not None:
        return [Shown(check.expected)]
    solution = submission.executed_solution
    return _answers(solution, submission.solution_rerun, check.where) if solution else []


def _answers(notebook: Notebook, rerun: Rerun | None, where: Where) -> list[Shown]:
    """One per cell that shows something; of a variable, its value at the end, or the last cell that shows it."""
    if where.variable:
        probed = _probe(rerun, where.variable)
        showing = [shown for shown in map(shown_by_cell, _showing(notebook, where)) if not shown.empty]
        return [probed] if probed else showing[-1:]
    return [shown for shown in map(shown_by_cell, code_at(notebook, where)) if not shown.empty]


def _candidates(check: OutputMatch, submission: Submission) -> list[Shown]:
    """Each cell of the student at that place, then all together: an answer may be split over cells."""
    notebook, where = submission.executed, check.where
    cells = _showing(notebook, where) if where.variable else code_at(notebook, where)
    probed = _probe(submission.rerun, where.variable) if where.variable else None
    shown = [each for each in map(shown_by_cell, reversed(cells)) if not each.empty]
    good = [output for cell in cells if cell.error is None for output in cell.outputs]
    together = [shown_by(good, shown[-1].cell)] if len(shown) > 1 else []
    return ([probed] if probed else []) + shown + together


def _showing(notebook: Notebook, where: Where) -> tuple[Cell, ...]:
    """Cells that show the variable; without any, cells that assign it and show something."""
    cells = code_at(notebook, where)
    showing = tuple(cell for cell in cells if facts_of(notebook, cell).find("show", where.variable))
    return showing or tuple(cell for cell in cells if facts_of(notebook, cell).find("assign", where.variable))


def _probe(rerun: Rerun | None, variable: str) -> Shown | None:
    outputs: tuple[Output, ...] = rerun.probes.get(variable, ()) if rerun else ()
    shown = shown_by(outputs)
    return None if shown.empty else shown


def _quote(have: Shown) -> Evidence:
    text = have.text.strip() or ("table" if have.tables else "image" if have.images else "")
    return Evidence(cell=have.cell, quote=text[:_QUOTE_CHARS], part="output")


def check_tests(item: Item, check: CodeTests, submission: Submission) -> CheckResult:
    """The result of the item's tests in the sandbox."""
    if submission.rerun is None:
        return CheckResult(share=_NONE, reason="The tests need a re-run in the sandbox.", review=True)
    result = submission.rerun.tests.get(item.id)
    if result is None:
        reason = f"The tests did not run: the notebook {submission.rerun.status.replace('_', ' ')}."
        return CheckResult(share=_NONE, reason=reason, review=submission.rerun.status == "finished")
    message = "The tests pass." if result.passed else f"The tests fail: {result.message or 'no message'}"
    if check.hidden and not result.passed:
        message = "Hidden tests fail."
    return CheckResult(
        share=Fraction(int(result.passed)), reason=message, evidence=tuple(_tested(check, submission, result.message))
    )


def _tested(check: CodeTests, submission: Submission, message: str) -> Iterator[Evidence]:
    """What the tests said, unless they are hidden: reports show evidence. Then where the work defines what they use."""
    if message and not check.hidden:
        yield Evidence(quote=message[:_QUOTE_CHARS], part="output")
    notebook = submission.notebook
    names, places = code_names(check.code, notebook.language), dict[tuple[int, int], Evidence]()
    for cell in notebook.code_cells:
        for use in facts_of(notebook, cell).uses:
            if use.name in names and use.fact in ("define", "assign"):
                places.setdefault((cell.index, use.line), at_use(cell, use))
    own = [cell for cell in code_at(notebook, Where(grade_id=check.after_cell)) if check.after_cell]
    yield from [*places.values()][:_PLACES] or [at_line(cell, 1) for cell in own if not check.hidden]
