"""What all pages share: the grade book, the chosen assignment, and how texts are shown.

Streamlit reads most texts as markdown. Texts of students and of models go through `st.text`, `st.code`, tables or
escaped HTML alone.

Buttons act by `decide` or `note` in their callbacks, and read their fields there: what a page's run does after a click
may be ended by the next click.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import streamlit as st

from disaggregated_inference.errors import DisaggError
from grader.errors import GraderError
from grader.grading import Grade, grade_in_class, grades
from grader.store import Assignment, Database, assignment, assignment_names, find_submission
from grader.web.settings import settings

_NOTES, _REFUSED = "notes", "refused"  # of decisions, until a page has shown them
REFUSALS = (GraderError, DisaggError, OSError, sqlite3.Error)


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
    return grade_in_class(database, chosen, find_submission(database, chosen.id, pseudonym))


@contextmanager
def refusals(what: str = "This was refused:") -> Iterator[None]:
    """Errors that say what to do are shown, as plain text."""
    try:
        yield
    except REFUSALS as error:
        show_refusal(str(error), what)


def show_refusal(why: str, what: str = "This was refused:") -> None:
    st.error(what)
    st.code(why, language=None, wrap_lines=True)


def decide(what: Callable[..., str], *args: Any) -> None:
    """The callback of a button: acts, and keeps what the page then says: what was done, or why not."""
    try:
        note(what(*args))
    except REFUSALS as error:
        _keep(_REFUSED, str(error))


def field(key: str, default: Any = None) -> Any:
    """What stands in a field when a button acts."""
    return st.session_state.get(key, default)


def note(text: str) -> None:
    """Shown once, after the page has run again."""
    _keep(_NOTES, text)


def _keep(where: str, text: str) -> None:
    st.session_state[where] = [*st.session_state.get(where, ()), text]


def show_note() -> None:
    for text in st.session_state.get(_NOTES, ()):
        st.toast(text)
        st.success(text)
    for why in st.session_state.get(_REFUSED, ()):
        show_refusal(why)
    for name in (_NOTES, _REFUSED):
        st.session_state.pop(name, None)
