"""What all pages share: the grade book, the chosen assignment, and how texts are shown.

Streamlit reads most texts as markdown. Texts of students and of models go through `st.text`, `st.code`, tables or
escaped HTML alone.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import streamlit as st

from disaggregated_inference.errors import DisaggError
from grader.errors import GraderError
from grader.grading import Grade, grade_of, grades
from grader.store import Assignment, Database, assignment, assignment_names, find_submission
from grader.web.settings import settings

_NOTE = "note"


def book() -> Database:
    return Database.open(settings().book)


def who() -> str:
    return settings().who


def chosen_assignment(database: Database) -> Assignment | None:
    """The choice is in the address, so that a refresh keeps it. None: the book has none."""
    names = assignment_names(database)
    if not names:
        st.info("The grade book has no assignment yet: make one on the page Assignments.")
        return None
    asked = st.session_state.get("assignment") or st.query_params.get("assignment", "")
    name = st.sidebar.selectbox("Assignment", names, index=names.index(asked) if asked in names else 0)
    st.session_state["assignment"] = st.query_params["assignment"] = name
    return assignment(database, name)


def all_grades(database: Database, chosen: Assignment) -> list[Grade]:
    found = grades(database, chosen)
    if not found:
        st.info("Nothing is graded yet: see the page Submissions.")
    return found


def one_grade(database: Database, chosen: Assignment, pseudonym: str) -> Grade | None:
    return grade_of(database, find_submission(database, chosen.id, pseudonym))


@contextmanager
def refusals(what: str = "This was refused:") -> Iterator[None]:
    """Errors that say what to do are shown, as plain text."""
    try:
        yield
    except (GraderError, DisaggError, OSError, sqlite3.Error) as error:
        st.error(what)
        st.code(str(error), language=None, wrap_lines=True)


def note(text: str) -> None:
    """Shown once, after the page has run again."""
    st.session_state[_NOTE] = text


def show_note() -> None:
    if text := st.session_state.pop(_NOTE, ""):
        st.toast(text)
        st.success(text)
