"""`export` and `report`: files on disk."""

from pathlib import Path

from grader.cli.options import me, open_book
from grader.cli.show import console
from grader.errors import GraderError
from grader.export import Identities, fill_gradebook, released, write_reports, write_tables, write_zip
from grader.grading import Grade, grade_of, grades
from grader.store import find_submission, reveal
from grader.texts import read_text


def run_export(
    book: Path,
    name: str,
    output: Path,
    names: bool,
    everything: bool,
    reports: bool,
    pdf: bool,
    zip_all: bool,
    who: str,
    gradebook: Path | None = None,
    column: str = "",
) -> None:
    database, assignment = open_book(book, name)
    found = grades(database, assignment)
    chosen = released(found, everything)
    if not chosen:
        raise GraderError(
            f"none of {len(found)} grades is approved: disagg-grade review --approve-all, or export --all for drafts"
        )
    ids = [one.submission.id for one in chosen]
    named = names or gradebook is not None
    identities = reveal(database, ids, me(who), f"export of {assignment.name}") if named else {}
    title = _title(chosen[0], assignment.name)
    files = write_tables(output, chosen, identities, assignment.name)
    if gradebook:
        files.append(_fill(gradebook, output, chosen, identities, column or assignment.name))
    if reports:
        files += write_reports(output / "reports", chosen, identities, title, pdf)
    out = console()
    out.print(f"{len(chosen)} of {len(found)} grades, {len(files)} files in {output}")
    if named and (left_open := sum(one.score.needs_review for one in chosen)):
        out.print(f"without a grade in the tables for Canvas and Moodle, since they have open items: {left_open}")
    if older := _left_from_before(output, files):
        out.print(f"also in {output}, from an earlier export: {', '.join(older[:5])}{' ...' if older[5:] else ''}")
    if zip_all:
        out.print(str(write_zip(output.with_suffix(".zip"), output, files)))
    if left := len(found) - len(chosen):
        out.print(f"{left} are not approved and stay out: --all takes them too")


def _left_from_before(output: Path, files: list[Path]) -> list[str]:
    """They may have names, or grades that are not approved any more."""
    written = set(files)
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file() and path not in written)


def _fill(gradebook: Path, output: Path, chosen: list[Grade], identities: Identities, column: str) -> Path:
    filled = fill_gradebook(read_text(gradebook), chosen, identities, column)
    path = output / f"{gradebook.stem}-filled.csv"
    path.write_text("\ufeff" + filled.text, encoding="utf-8", newline="")
    out = console()
    out.print(f"{path}: {filled.filled} grades in the table of {filled.platform.capitalize()}")
    if filled.missing:
        out.print(f"not in the table, and so not filled in: {', '.join(filled.missing)}")
    return path


def run_report(book: Path, name: str, student: str, output: Path, pdf: bool) -> None:
    database, assignment = open_book(book, name)
    if student:
        one = grade_of(database, find_submission(database, assignment.id, student))
        found = [one] if one else []
    else:
        found = grades(database, assignment)
    if not found:
        raise GraderError(f"nothing is graded yet: disagg-grade grade --book {book}")
    files = write_reports(output, found, {}, _title(found[0], assignment.name), pdf)
    out = console()
    for path in files[:10]:
        out.print(str(path))
    if len(files) > 10:
        out.print(f"and {len(files) - 10} more in {output}")


def _title(grade: Grade, name: str) -> str:
    return grade.rubric.title or name
