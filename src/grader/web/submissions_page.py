"""Submissions: files in, one or all to the worker process, and a look at the batch."""

import time

import msgspec
import streamlit as st

from grader.grading import GradeSettings, parse_rubric
from grader.intake import read_roster, read_uploads, take_in
from grader.models import ModelSettings, require_models
from grader.sandbox import require_sandbox
from grader.store import Assignment, Database, last_settings, live_workers, progress, queued_at, submissions
from grader.texts import decoded
from grader.web.session import book, chosen_assignment, note, refusals, show_note
from grader.web.settings import settings
from grader.worker import Watched, WorkerOptions, ensure_worker, queue_some, watched

_ALL = "all submissions"


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
        files = st.file_uploader("Notebooks and ZIPs", type=["ipynb", "zip"], accept_multiple_files=True)
        roster = st.file_uploader(
            "Roster, if there is one (CSV of Canvas or Moodle, or: key, name, email, lms_id, late_days)",
            type="csv",
            max_upload_size=5,
        )
        replace = st.checkbox("These files count, also where a newer one of the student is there (--replace)")
        if not st.form_submit_button("Take in", type="primary"):
            return
    if not files:
        st.warning("Choose files first.")
        return
    with refusals():
        known = read_roster(decoded(roster.getvalue(), roster.name)) if roster else {}
        taken = take_in(database, chosen, read_uploads(((one.name, one) for one in files), known), replace)
        note(f"{taken.told()}.")
        st.rerun()


def _grading(database: Database, chosen: Assignment) -> None:
    st.subheader("Grade")
    everyone = submissions(database, chosen.id)
    before = _last(database, chosen)
    which = st.selectbox("Grade", [_ALL, *(one.pseudonym for one in everyone)], label_visibility="collapsed")
    rerun = st.checkbox("Run the notebooks again in the sandbox", before.rerun)
    models = _models(before.models) if st.checkbox("Ask the models (layers 3 and 4)", bool(before.models)) else None
    st.text(f"{len(everyone)} submissions. What is graded already is not graded again.")
    if not st.button("Grade", type="primary", disabled=not everyone):
        return
    with refusals():
        if rerun or parse_rubric(chosen.rubric.content).rerun:
            require_sandbox()
        if models:
            require_models(models)
        ids = [one.id for one in everyone if which in (_ALL, one.pseudonym)]
        count = queue_some(database, chosen, GradeSettings(models=models, rerun=rerun), ids)
        ensure_worker(database, WorkerOptions())
        note(f"{count} new in the queue." if count else "All of this is graded already.")
        st.rerun()


def _last(database: Database, chosen: Assignment) -> GradeSettings:
    text = last_settings(database, chosen.id)
    return msgspec.json.decode(text, type=GradeSettings) if text else GradeSettings()


def _models(before: ModelSettings | None) -> ModelSettings:
    start = before or ModelSettings(config=settings().config)
    with st.expander("Which models"):
        return msgspec.structs.replace(
            start,
            code_model=st.text_input("Code model", start.code_model),
            feedback_model=st.text_input("Feedback model", start.feedback_model),
            endpoint=st.text_input("OpenAI-compatible endpoint that ends in /v1 (empty: the cluster)", start.endpoint),
            config=st.text_input("Cluster file (empty: as the client finds it)", start.config),
            readings=int(st.number_input("Readings of the code model", 1, 9, start.readings)),
            code_tokens=int(st.number_input("Longest answer of the code model, tokens", 16, 32_000, start.code_tokens)),
            feedback_tokens=int(st.number_input("Longest feedback, tokens", 16, 32_000, start.feedback_tokens)),
        )


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
        if st.button("Go on"):
            ensure_worker(database, WorkerOptions())
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
