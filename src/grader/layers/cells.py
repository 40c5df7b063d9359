"""Cells by tag, section, variable or grade_id: never by position."""

from grader.code import CodeFacts, Use, code_facts
from grader.notebook import Cell, Notebook, in_section
from grader.rubric import Where
from grader.verdicts import Evidence


def facts_of(notebook: Notebook, cell: Cell) -> CodeFacts:
    return code_facts(cell.source, notebook.language)


def cells_at(notebook: Notebook, where: Where) -> tuple[Cell, ...]:
    return tuple(cell for cell in notebook.cells if _is_at(notebook, cell, where))


def code_at(notebook: Notebook, where: Where) -> tuple[Cell, ...]:
    return tuple(cell for cell in cells_at(notebook, where) if cell.kind == "code")


def _is_at(notebook: Notebook, cell: Cell, where: Where) -> bool:
    return (
        (not where.tag or where.tag in cell.tags)
        and (not where.section or in_section(cell.section, where.section))
        and (not where.grade_id or where.grade_id == cell.grade_id)
        and (not where.variable or (cell.kind == "code" and _has_variable(notebook, cell, where.variable)))
    )


def _has_variable(notebook: Notebook, cell: Cell, name: str) -> bool:
    facts = facts_of(notebook, cell)
    return bool(facts.find("assign", name) or facts.find("show", name))


def described(where: Where) -> str:
    """For reasons: ` in section "Load data"`, or nothing."""
    parts = [
        f'tagged "{where.tag}"' if where.tag else "",
        f'in section "{where.section}"' if where.section else "",
        f'with grade_id "{where.grade_id}"' if where.grade_id else "",
        f"of variable {where.variable}" if where.variable else "",
    ]
    return "".join(f" {part}" for part in parts if part)


def at_use(cell: Cell, use: Use) -> Evidence:
    return Evidence(cell=cell.index, line=use.line, quote=use.quote)


def at_line(cell: Cell, line: int) -> Evidence:
    lines = cell.source.splitlines()
    return Evidence(cell=cell.index, line=line, quote=lines[line - 1].strip() if 0 < line <= len(lines) else "")
