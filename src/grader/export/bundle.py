"""Everything at once: tables, a report for each student, as files or as one ZIP."""

import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from grader.export.pdf import write_pdf
from grader.export.report import report_html
from grader.export.tables import Identities, as_csv, canvas_table, item_table, moodle_table
from grader.grading import Grade

_UNSAFE = re.compile(r"[^\w.-]+")


def released(grades: Sequence[Grade], everything: bool) -> list[Grade]:
    """Only approved ones, unless all are wanted."""
    return [grade for grade in grades if everything or grade.approved]


def tables(grades: Sequence[Grade], identities: Identities, title: str) -> Iterator[tuple[str, str]]:
    """File name and content. The tables for learning platforms need names."""
    yield "grades.csv", as_csv(item_table(grades, identities))
    if identities:
        yield "canvas.csv", as_csv(canvas_table(grades, identities, title))
        yield "moodle.csv", as_csv(moodle_table(grades, identities))


def file_stem(grade: Grade, identities: Identities) -> str:
    """For one student's report: no path, no hidden file, and never two of the same name."""
    who = identities.get(grade.submission.id)
    named = _UNSAFE.sub("_", f"{who.name or who.key}").strip("._") if who else ""
    return f"{named}_{grade.submission.pseudonym}" if named else grade.submission.pseudonym


def write_reports(
    folder: Path, grades: Sequence[Grade], identities: Identities, title: str, pdf: bool = False
) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for grade in grades:
        who = identities.get(grade.submission.id)
        html = report_html(grade, title, who.name or who.key if who else grade.submission.pseudonym)
        path = folder / f"{file_stem(grade, identities)}.html"
        path.write_text(html, encoding="utf-8")
        written.append(path)
        if pdf:
            write_pdf(html, path.with_suffix(".pdf"))
            written.append(path.with_suffix(".pdf"))
    return written


def write_tables(folder: Path, grades: Sequence[Grade], identities: Identities, title: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in tables(grades, identities, title):
        path = folder / name
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())  # with the mark that Excel needs for UTF-8
        written.append(path)
    return written


def write_zip(path: Path, folder: Path, files: Sequence[Path]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.relative_to(folder))
    return path
