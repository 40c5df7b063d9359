"""Layer 1: what the notebook contains, found by parsing. A name in a comment or a string earns nothing."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import singledispatch

from grader.code import Fact
from grader.layers.cells import at_line, at_use, cells_at, code_at, described, facts_of
from grader.layers.reflection import reflection
from grader.layers.submission import CheckResult, Submission
from grader.notebook import Cell, Notebook, markdown_lines, names_section, tables_in
from grader.rubric import Check, Columns, Functions, Ran, Sections, Variables, Where, Words
from grader.verdicts import Evidence

_Found = Callable[[str], Evidence | None]
_SHOWN_CELLS = 5  # of those that ran well


@singledispatch
def check_structure(check: Check, submission: Submission) -> CheckResult:
    raise TypeError(f"layer 1 has no check {type(check).__name__}")


@check_structure.register
def _variables(check: Variables, submission: Submission) -> CheckResult:
    cells = code_at(submission.notebook, check.where)
    return _each("variable", check.names, lambda name: _use(submission.notebook, cells, "assign", [name]), check)


@check_structure.register
def _functions(check: Functions, submission: Submission) -> CheckResult:
    cells = code_at(submission.notebook, check.where)
    fact: Fact = "call" if check.use == "call" else "define"
    word = "call of function" if check.use == "call" else "function"

    def found(name: str) -> Evidence | None:
        return _use(submission.notebook, cells, fact, [name, *check.equivalents.get(name, ())])

    return _each(word, check.names, found, check)


@check_structure.register
def _columns(check: Columns, submission: Submission) -> CheckResult:
    cells = code_at(submission.executed, check.where)
    return _each("column", check.names, lambda name: _column(submission.executed, cells, name), check)


@check_structure.register
def _sections(check: Sections, submission: Submission) -> CheckResult:
    def found(name: str) -> Evidence | None:
        return _section(submission.executed, name, check.need_code)

    return _each("section", check.names, found, check)


@check_structure.register
def _words(check: Words, submission: Submission) -> CheckResult:
    return reflection(check, submission)


@check_structure.register
def _ran(check: Ran, submission: Submission) -> CheckResult:
    """Cells that ran without an error output, in order. A notebook without code earns nothing."""
    cells = _with_code(submission.executed, check)
    if not cells:
        return CheckResult(share=Fraction(0), reason=f"There is no code cell{described(check.where)}.")
    problems = _run_problems(cells, check.in_order)
    if not problems:
        shown = tuple(at_line(cell, _first_line(cell)) for cell in cells[:_SHOWN_CELLS])
        return CheckResult(
            share=Fraction(1), reason=f"All {len(cells)} code cells ran without an error.", evidence=shown
        )
    counted = _counted(check, submission, len(cells))
    share = Fraction(0) if check.all_or_nothing else max(Fraction(0), 1 - Fraction(len(problems), counted))
    told = "; ".join(f"cell {cell.index + 1} {problem}" for cell, problem in problems[:5])
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    reason = f"{len(problems)} of {len(cells)} code cells did not run well: {told}{more}."
    return CheckResult(share=share, reason=reason, evidence=tuple(_problem_evidence(cell) for cell, _ in problems))


def _first_line(cell: Cell) -> int:
    return next(number for number, line in enumerate(cell.source.splitlines(), 1) if line.strip())


def _with_code(notebook: Notebook, check: Ran) -> list[Cell]:
    return [cell for cell in code_at(notebook, check.where) if cell.source.strip()]


def _counted(check: Ran, submission: Submission, count: int) -> int:
    """Cells that share the points: no more than the solution has, so that cells without work buy nothing back."""
    solution = submission.executed_solution
    most = len(_with_code(solution, check)) if solution else 0
    return min(count, most) if most else count


def _run_problems(cells: Sequence[Cell], in_order: bool) -> list[tuple[Cell, str]]:
    problems, highest = [], 0
    for cell in cells:
        problem = _run_problem(cell, highest if in_order else 0)
        highest = max(highest, cell.execution_count or 0)
        if problem:
            problems.append((cell, problem))
    return problems


def _run_problem(cell: Cell, highest: int) -> str:
    if cell.error is not None:
        return f"ended with {cell.error.error_name or 'an error'}"
    if not cell.ran:
        return "did not run"
    if cell.execution_count is not None and cell.execution_count < highest:
        return "ran before a cell above it"
    return ""


def _problem_evidence(cell: Cell) -> Evidence:
    if cell.error is None:
        return at_line(cell, 1)
    quote = f"{cell.error.error_name}: {cell.error.error_value}".strip(": ")[:300]
    return Evidence(cell=cell.index, quote=quote, part="output")


def _use(notebook: Notebook, cells: Sequence[Cell], fact: Fact, names: Sequence[str]) -> Evidence | None:
    for cell in cells:
        for name in names:
            use = facts_of(notebook, cell).find(fact, name)
            if use is not None:
                return at_use(cell, use)
    return None


def _column(notebook: Notebook, cells: Sequence[Cell], name: str) -> Evidence | None:
    used = _use(notebook, cells, "column", [name])
    if used is not None:
        return used
    for cell in cells:
        for output in cell.outputs:
            if any(name in table.header for table in tables_in(output.html)):
                return Evidence(cell=cell.index, quote=name, part="output")
    return None


def _section(notebook: Notebook, name: str, need_code: bool) -> Evidence | None:
    for cell in notebook.markdown_cells:
        for line in markdown_lines(cell.source):
            if line.level and names_section(line.text, name):
                return at_line(cell, line.number) if not need_code or _has_good_code(notebook, name) else None
    return None


def _has_good_code(notebook: Notebook, section: str) -> bool:
    cells = [cell for cell in cells_at(notebook, Where(section=section)) if cell.kind == "code" and cell.source.strip()]
    return any(cell.ran and cell.error is None for cell in cells)


def _found_all(word: str, plural: str, count: int) -> str:
    return f"The {word} was found" if count == 1 else f"All {count} {plural} found"


def _each(word: str, names: Sequence[str], found: _Found, check: Check) -> CheckResult:
    """Credit in equal parts for each name."""
    evidence = {name: found(name) for name in names}
    missing = [name for name in names if evidence[name] is None]
    have = len(names) - len(missing)
    where = described(check.where)
    plural = word.replace("call of function", "calls of functions") if "call" in word else f"{word}s"
    reason = (
        f"{_found_all(word, plural, len(names))}{where}: {', '.join(names)}."
        if not missing
        else f"{have} of {len(names)} {plural} found{where}. Missing: {', '.join(missing)}."
    )
    share = Fraction(have, len(names)) if names else Fraction(1)
    return CheckResult(share=share, reason=reason, evidence=tuple(each for each in evidence.values() if each))
