"""Export: the files of `disagg-grade export`, as downloads."""

import tempfile
from pathlib import Path
from typing import Any

import streamlit as st

from grader.errors import GraderError
from grader.export import Filled, fill_gradebook, find_browser, released, write_reports, write_tables, write_zip
from grader.grading import Grade
from grader.store import Assignment, Database, reveal, reveals
from grader.texts import decoded
from grader.web.session import all_grades, book, chosen_assignment, note, refusals, show_note, who

_FILES = "export-files"  # in the session; a name of its own, apart from the form
_KINDS = {".csv": "text/csv", ".zip": "application/zip"}


def export_page() -> None:
    database = book()
    if (chosen := chosen_assignment(database)) is None or not (found := all_grades(database, chosen)):
        return
    approved = sum(one.approved for one in found)
    st.text(f"{approved} of {len(found)} grades are approved.")
    with st.form("export"):
        drafts = st.checkbox("Also grades that are not approved")
        names = st.checkbox("With names, and tables for Canvas and Moodle (it is logged)")
        pdf = st.checkbox("Reports also as PDF", disabled=find_browser() is None)
        table = st.file_uploader(
            "Fill in a gradebook of Canvas or a grading worksheet of Moodle (it is logged)",
            type="csv",
            max_upload_size=20,
        )
        asked = st.form_submit_button("Make the files", type="primary")
    if asked:
        st.session_state.pop(_FILES, None)
        with refusals(), st.spinner("Making the files"):
            st.session_state[_FILES] = (
                chosen.id,
                make_files(database, chosen, released(found, drafts), names, pdf, table),
            )
    show_note()
    made = st.session_state.get(_FILES)
    if made and made[0] == chosen.id:
        for name, content in made[1].items():
            st.download_button(name, content, name, _KINDS[Path(name).suffix], on_click="ignore")
    _show_reveals(database)


def make_files(
    database: Database, chosen: Assignment, grades: list[Grade], names: bool, pdf: bool, table: Any = None
) -> dict[str, bytes]:
    """Tables, the platform's own table filled in, and a ZIP of tables and reports."""
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
    _say_what_is_empty(grades if identities else [], filled)
    if filled is None:
        return made
    return made | {f"{filled.platform}-filled.csv": b"\xef\xbb\xbf" + filled.text.encode()}


def _say_what_is_empty(grades: list[Grade], filled: Filled | None) -> None:
    said = []
    if left_open := sum(one.score.needs_review for one in grades):
        said.append(f"{left_open} have open items, and so no grade in the tables for Canvas and Moodle.")
    if filled and filled.missing:
        said.append(f"{len(filled.missing)} of {len(grades)} are not in the table, and so not filled in.")
    if said:
        note(" ".join(said))


def _show_reveals(database: Database) -> None:
    if found := reveals(database):
        with st.expander(f"Names were shown {len(found)} times"):
            rows = [{"who": one.who, "submissions": len(one.what), "why": one.why} for one in found]
            st.dataframe(rows, hide_index=True)
