"""Submissions: files in, one or all to the worker process, and a look at the batch."""

import time

import msgspec
import streamlit as st

from grader.errors import GraderError
from grader.grading import GradeSettings, parse_rubric
from grader.intake import read_roster, read_uploads, take_in
from grader.models import ModelSettings, require_models
from grader.sandbox import require_sandbox
from grader.store import Assignment, Database, last_settings, live_workers, progress, queued_at, submissions
from grader.texts import decoded
from grader.web.session import book, chosen_assignment, decide, field, show_note
from grader.web.settings import settings
from grader.worker import Watched, WorkerOptions, ensure_worker, queue_some, watched

_ALL = "all submissions"
_FILES, _ROSTER, _REPLACE = "intake-files", "intake-roster", "intake-replace"
_WORDS = ("code_model", "feedback_model", "endpoint", "config")
_COUNTS = ("readings", "code_tokens", "feedback_tokens")


def submissions_page() -> None:
    show_note()
    database = book()
    if (chosen := chosen_assignment(database)) is None:
        return
    left, right = st.columns(2)
    with left:
        _intake(database, chosen)
    with right:
        _grading(database, chosen)
    st.subheader("Progress")
    _watch(chosen.id)


def _intake(database: Database, chosen: Assignment) -> None:
    st.subheader("Take in")
    with st.form("intake", clear_on_submit=True):
        st.file_uploader("Notebooks and ZIPs", type=["ipynb", "zip"], accept_multiple_files=True, key=_FILES)
        st.file_uploader(
            "Roster, if there is one (CSV of Canvas or Moodle, or: key, name, email, lms_id, late_days)",
            type="csv",
            max_upload_size=5,
            key=_ROSTER,
        )
        st.checkbox("These files count, also where a newer one of the student is there (--replace)", key=_REPLACE)
        st.form_submit_button("Take in", type="primary", on_click=decide, args=(_take_in, database, chosen))


def _take_in(database: Database, chosen: Assignment) -> str:
    files, roster = field(_FILES), field(_ROSTER)
    if not files:
        raise GraderError("choose files first")
    known = read_roster(decoded(roster.getvalue(), roster.name)) if roster else {}
    taken = take_in(database, chosen, read_uploads(((one.name, one) for one in files), known), bool(field(_REPLACE)))
    return f"{taken.told()}."


def _grading(database: Database, chosen: Assignment) -> None:
    st.subheader("Grade")
    everyone, key = submissions(database, chosen.id), f"grade-{chosen.id}"
    before = _last(database, chosen)
    st.selectbox(
        "Grade",
        [_ALL, *(one.pseudonym for one in everyone)],
        label_visibility="collapsed",
        key=f"{key}-which",
    )
    st.checkbox("Run the notebooks again in the sandbox", before.rerun, key=f"{key}-rerun")
    start = before.models or ModelSettings(config=settings().config)
    if st.checkbox("Ask the models (layers 3 and 4)", bool(before.models), key=f"{key}-ask"):
        _models(start, key)
    st.text(f"{len(everyone)} submissions. What is graded already is not graded again.")
    given = _start, database, chosen, start, key
    st.button("Grade", type="primary", disabled=not everyone, on_click=decide, args=given)


def _start(database: Database, chosen: Assignment, start: ModelSettings, key: str) -> str:
    which, rerun = field(f"{key}-which", _ALL), bool(field(f"{key}-rerun"))
    models = _models_given(start, key) if field(f"{key}-ask") else None
    if rerun or parse_rubric(chosen.rubric.content).rerun:
        require_sandbox()
    if models:
        require_models(models)
    ids = [one.id for one in submissions(database, chosen.id) if which in (_ALL, one.pseudonym)]
    count = queue_some(database, chosen, GradeSettings(models=models, rerun=rerun), ids)
    ensure_worker(database, WorkerOptions())
    return f"{count} new in the queue." if count else "All of this is graded already."


def _last(database: Database, chosen: Assignment) -> GradeSettings:
    text = last_settings(database, chosen.id)
    return msgspec.json.decode(text, type=GradeSettings) if text else GradeSettings()


def _models(start: ModelSettings, key: str) -> None:
    with st.expander("Which models"):
        st.text_input("Code model", start.code_model, key=f"{key}-code_model")
        st.text_input("Feedback model", start.feedback_model, key=f"{key}-feedback_model")
        where = "OpenAI-compatible endpoint that ends in /v1 (empty: the cluster)"
        st.text_input(where, start.endpoint, key=f"{key}-endpoint")
        st.text_input("Cluster file (empty: as the client finds it)", start.config, key=f"{key}-config")
        st.number_input("Readings of the code model", 1, 9, start.readings, key=f"{key}-readings")
        longest = "Longest answer of the code model, tokens"
        st.number_input(longest, 16, 32_000, start.code_tokens, key=f"{key}-code_tokens")
        st.number_input("Longest feedback, tokens", 16, 32_000, start.feedback_tokens, key=f"{key}-feedback_tokens")


def _models_given(start: ModelSettings, key: str) -> ModelSettings:
    words = {name: str(field(f"{key}-{name}", getattr(start, name))).strip() for name in _WORDS}
    counts = {name: int(field(f"{key}-{name}", getattr(start, name))) for name in _COUNTS}
    return msgspec.structs.replace(start, **words, **counts)


@st.fragment(run_every=1.0)
def _watch(assignment_id: int) -> None:
    """Looks at the grade book alone: a refresh or a closed page ends nothing."""
    database = book()
    state = progress(database, assignment_id)
    if not state.checks.total:
        st.text("Nothing was graded yet.")
        return
    began_at = queued_at(database, assignment_id) or time.time()
    _bars(watched(database, state, began_at, max(time.time() - began_at, 0.1)))
    if not state.is_over and not live_workers(database):
        st.warning("No worker process runs.")
        st.button("Go on", on_click=ensure_worker, args=(database, WorkerOptions()))
    for pseudonym, error in state.failures:
        st.code(f"{pseudonym} failed: {error}", language=None, wrap_lines=True)


def _bars(seen: Watched) -> None:
    state = seen.progress
    _bar("checked", state.checks.done + state.checks.failed, state.checks.total)
    if state.models.total:
        _bar("read by the models", state.models.done + state.models.failed, state.models.total + state.checks.left)
    if state.is_over:
        st.success("The batch is over. See Results.")
    elif seen.eta_s is not None:
        st.text(f"about {_duration(seen.eta_s)} left")
    if state.waiting_reason:
        st.code(f"waiting for the models: {state.waiting_reason}", language=None, wrap_lines=True)


def _bar(what: str, done: int, total: int) -> None:
    st.progress(done / total if total else 0.0, f"{what}: {done} of {total}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
