"""Export: the files of `disagg-grade export`, as downloads."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import streamlit as st

from grader.errors import GraderError
from grader.export import Filled, fill_gradebook, find_browser, released, write_reports, write_tables, write_zip
from grader.grading import Grade
from grader.store import Assignment, Database, reveal, reveals
from grader.texts import decoded
from grader.web.session import REFUSALS, all_grades, book, chosen_assignment, field, show_refusal, who

_EXPORT = "export-files"  # in the session; a name of its own, apart from the form
_KINDS = {".csv": "text/csv", ".zip": "application/zip"}


class _Asked(msgspec.Struct, frozen=True):
    drafts: bool
    names: bool
    pdf: bool
    table: Any


class _Export(msgspec.Struct):
    """Of a session. What is asked stays asked until it is made: the next click may end the page's run before that.
    `made`: how often files were made, so that of two clicks on one form one counts."""

    assignment: int
    asked: _Asked | None = None
    files: dict[str, bytes] = {}
    said: str = ""
    refused: str = ""
    made: int = 0


def export_page() -> None:
    database = book()
    if (chosen := chosen_assignment(database)) is None or not (found := all_grades(database, chosen)):
        return
    approved = sum(one.approved for one in found)
    st.text(f"{approved} of {len(found)} grades are approved.")
    export = _export_of(chosen)
    _form(export)
    if export.asked:
        with st.spinner("Making the files"):
            _make(database, chosen, found, export, export.asked)
        st.rerun()  # the form is for the next files now
    if export.refused:
        show_refusal(export.refused)
    if export.said:
        st.info(export.said)
    for name, content in export.files.items():
        st.download_button(name, content, name, _KINDS[Path(name).suffix], on_click="ignore")
    _show_reveals(database)


def _export_of(chosen: Assignment) -> _Export:
    if (export := st.session_state.get(_EXPORT)) is None or export.assignment != chosen.id:
        export = st.session_state[_EXPORT] = _Export(chosen.id)
    return export


def _form(export: _Export) -> None:
    with st.form("export"):
        st.checkbox("Also grades that are not approved", key="export-drafts")
        st.checkbox("With names, and tables for Canvas and Moodle (it is logged)", key="export-names")
        st.checkbox("Reports also as PDF", disabled=find_browser() is None, key="export-pdf")
        st.file_uploader(
            "Fill in a gradebook of Canvas or a grading worksheet of Moodle (it is logged)",
            type="csv",
            max_upload_size=20,
            key="export-table",
        )
        st.form_submit_button("Make the files", type="primary", on_click=_ask, args=(export, export.made))


def _ask(export: _Export, made: int) -> None:
    if made == export.made:
        drafts, names, pdf = (bool(field(f"export-{name}")) for name in ("drafts", "names", "pdf"))
        export.asked = _Asked(drafts, names, pdf, field("export-table"))


def _make(database: Database, chosen: Assignment, found: list[Grade], export: _Export, asked: _Asked) -> None:
    """Nothing in it can be ended by a click: what is logged is made."""
    export.files, export.said, export.refused, export.asked, export.made = {}, "", "", None, export.made + 1
    try:
        given = released(found, asked.drafts)
        export.files, export.said = make_files(database, chosen, given, asked.names, asked.pdf, asked.table)
    except REFUSALS as error:
        export.refused = str(error)


def make_files(
    database: Database, chosen: Assignment, grades: list[Grade], names: bool, pdf: bool, table: Any = None
) -> tuple[dict[str, bytes], str]:
    """Tables, the platform's own table filled in, and a ZIP of tables and reports; and what is empty in them."""
    if not grades:
        raise GraderError("no grade is approved: approve on the pages Results or Review, or take drafts too")
    ids = [one.submission.id for one in grades]
    identities = reveal(database, ids, who(), f"export of {chosen.name}") if names or table else {}
    given = decoded(table.getvalue(), table.name) if table else ""
    filled = fill_gradebook(given, grades, identities, chosen.name) if table else None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "export"
        tables = write_tables(output, grades, identities, chosen.name)
        title = grades[0].rubric.title or chosen.name
        reports = write_reports(output / "reports", grades, identities, title, pdf)
        packed = write_zip(Path(folder) / "all.zip", output, tables + reports)
        made = {path.name: path.read_bytes() for path in (*tables, packed)}
    said = _what_is_empty(grades if identities else [], filled)
    if filled is None:
        return made, said
    return made | {f"{filled.platform}-filled.csv": b"\xef\xbb\xbf" + filled.text.encode()}, said


def _what_is_empty(grades: list[Grade], filled: Filled | None) -> str:
    said = []
    if left_open := sum(one.score.needs_review for one in grades):
        said.append(f"{left_open} have open items, and so no grade in the tables for Canvas and Moodle.")
    if filled and filled.missing:
        said.append(f"{len(filled.missing)} of {len(grades)} are not in the table, and so not filled in.")
    return " ".join(said)


def _show_reveals(database: Database) -> None:
    if found := reveals(database):
        with st.expander(f"Names were shown {len(found)} times"):
            rows = [{"who": one.who, "submissions": len(one.what), "why": one.why} for one in found]
            st.dataframe(rows, hide_index=True)
