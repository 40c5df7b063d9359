"""Review: the notebook beside the verdicts, and the instructor's decisions."""

import streamlit as st

from grader.errors import GraderError
from grader.grading import Grade, approve_grade, grade_of, rerun_behind
from grader.notebook import read_notebook
from grader.points import plain
from grader.sandbox import Rerun
from grader.store import (
    Assignment,
    Database,
    blob,
    find_submission,
    last_decision,
    reopen,
    reveal,
    submissions,
    undo,
)
from grader.web.by_question import by_question
from grader.web.decisions import comments, show_items
from grader.web.notebook_view import notebook_html
from grader.web.records import show_feedback, show_history, show_prompts
from grader.web.session import book, chosen_assignment, decide, field, one_grade, show_note, who

_HEIGHT_PX = 760
_REVEALED = "revealed"  # in the session: the submission whose student was looked up, and who it is


def review_page() -> None:
    show_note()
    database = book()
    if (chosen := chosen_assignment(database)) is None:
        return
    way = st.segmented_control(
        "Review", ["by student", "by question"], default="by student", label_visibility="collapsed"
    )
    if way == "by question":
        by_question(database, chosen)
    elif (pseudonym := _student(database, chosen)) and (grade := one_grade(database, chosen, pseudonym)):
        _one(database, chosen, grade)
    elif pseudonym:
        st.info("This submission is not graded yet: see the page Submissions.")


def _student(database: Database, chosen: Assignment) -> str | None:
    names = [one.pseudonym for one in submissions(database, chosen.id)]
    if not names:
        st.info("There are no submissions yet: see the page Submissions.")
        return None
    before = st.session_state.get("student") or st.query_params.get("student", "")
    place = names.index(before) if before in names else 0
    back, select, forward = st.columns([1, 4, 1], vertical_alignment="bottom")
    last = len(names) - 1
    back.button("Previous", disabled=not place, width="stretch", on_click=_go_to, args=(names[max(0, place - 1)],))
    forward.button(
        "Next", disabled=place == last, width="stretch", on_click=_go_to, args=(names[min(last, place + 1)],)
    )
    name = select.selectbox("Student", names, index=place)
    st.session_state["student"] = st.query_params["student"] = name
    return name


def _go_to(name: str) -> None:
    """A second click on the same button goes to the same student: none is passed over unseen."""
    st.session_state["student"] = name


def _one(database: Database, chosen: Assignment, grade: Grade) -> None:
    _head(grade)
    rerun = rerun_behind(database, chosen, grade.rubric, grade.record)
    st.caption(_which_outputs(grade, rerun))
    left, right = st.columns(2)
    with left, st.container(height=_HEIGHT_PX):
        saved = read_notebook(blob(database, grade.submission.blob_sha), "submission")
        evidence = [one for verdict in grade.verdicts for one in verdict.evidence]
        evidence += [one for flag in grade.flags for one in flag.evidence]
        st.html(notebook_html(rerun.notebook if rerun else saved, evidence))
    with right, st.container(height=_HEIGHT_PX):
        _actions(database, grade)
        if told := list(dict.fromkeys(f"{flag.code}: {flag.message}" for flag in grade.flags)):
            st.warning("Flags:")
            st.code("\n".join(told), language=None, wrap_lines=True)
        show_items(database, grade, rerun)
        comments(database, chosen, grade)
        show_feedback(grade)
        show_history(database, grade)
        show_prompts(database, grade)
        _reveal(database, grade)


def _which_outputs(grade: Grade, rerun: Rerun | None) -> str:
    if rerun is not None:
        return "Outputs of the re-run in the sandbox: the points rest on these, not on those saved in the file."
    if any(flag.code == "not_rerun" for flag in grade.flags):
        return "Outputs as the student saved them: the re-run was not possible, see the flags."
    return "Outputs as the student saved them: the notebook was not run again."


def _head(grade: Grade) -> None:
    score = grade.score
    open_part = f", {plain(score.pending)} open" if score.pending else ""
    machine = f"; the machine gave {plain(grade.machine.total)}" if score.total != grade.machine.total else ""
    st.subheader(f"{plain(score.total)} of {plain(score.maximum)} points{open_part}: {grade.state}{machine}")


def _actions(database: Database, grade: Grade) -> None:
    first, second, third = st.columns(3)
    submission = grade.submission.id
    first.button(
        "Approve",
        key=f"approve-{submission}",
        type="primary",
        disabled=grade.approved,
        width="stretch",
        on_click=decide,
        args=(_approve, database, grade),
    )
    second.button(
        "Reopen",
        key=f"reopen-{submission}",
        disabled=grade.review.approval is None,
        width="stretch",
        on_click=decide,
        args=(_reopen, database, submission),
    )
    last = last_decision(database, submission)
    third.button(
        "Undo",
        key=f"undo-{submission}",
        disabled=last is None,
        width="stretch",
        on_click=decide,
        args=(_undo, database, submission, last.id if last else None),
    )


def _approve(database: Database, shown: Grade) -> str:
    """What the page showed, and nothing else: a worker, or a click before, may have changed the grade."""
    now = grade_of(database, find_submission(database, shown.submission.assignment_id, shown.submission.pseudonym))
    if now is None or now.content != shown.content:
        raise GraderError("the grade changed after the page showed it: look at it again, then approve")
    approve_grade(database, now, who())
    return "Approved."


def _reopen(database: Database, submission: int) -> str:
    reopen(database, submission, who(), "")
    return "Open again."


def _undo(database: Database, submission: int, decision: int | None) -> str:
    taken = undo(database, submission, who(), decision)
    return f"Taken back: {taken.action} {taken.item}".rstrip()


def _reveal(database: Database, grade: Grade) -> None:
    submission = grade.submission.id
    with st.expander("Who is it?"):
        with st.form("reveal"):
            st.text_input("Why you look (it is logged)", key=f"why-{submission}")
            st.form_submit_button("Reveal", on_click=decide, args=(_look, database, submission))
        if (seen := st.session_state.get(_REVEALED)) and seen[0] == submission:
            st.text(seen[1])


def _look(database: Database, submission: int) -> str:
    if st.session_state.get(_REVEALED, (None,))[0] != submission:
        found = reveal(database, [submission], who(), field(f"why-{submission}", ""))[submission]
        told = ", ".join(part for part in (found.name, found.key, found.email) if part)
        st.session_state[_REVEALED] = submission, told
    return "The name is under Who is it?; the look is logged."
