"""What is kept with a grade: feedback, the history of decisions, raw prompts and answers."""

import json
from datetime import datetime

import msgspec
import streamlit as st

from grader.grading import Grade
from grader.models import Figures
from grader.store import Database, answers, history


def show_feedback(grade: Grade) -> None:
    if grade.feedback is None:
        return
    lines = [f"+ {one.text}" for one in grade.feedback.strengths]
    lines += [f"- {one.what}: {one.why} {one.how} {one.example}" for one in grade.feedback.improvements]
    lines += [f"reflection: {grade.feedback.reflection.quality}. {grade.feedback.reflection.comment}"]
    lines += [f"for you: {grade.feedback.instructor_comment}"]
    with st.expander("Feedback (a draft until you approve)"):
        st.code("\n".join(lines), language=None, wrap_lines=True)


def show_history(database: Database, grade: Grade) -> None:
    rows = [
        {
            "when": datetime.fromtimestamp(one.at).strftime("%Y-%m-%d %H:%M"),
            "who": one.who,
            "what": f"{one.action} {one.item}".strip(),
            "before": _shown(one.before),
            "after": _shown(one.after),
            "why": one.why + (" (taken back)" if one.undone else ""),
        }
        for one in reversed(history(database, grade.submission.id))
    ]
    with st.expander(f"History ({len(rows)})"):
        if rows:
            st.dataframe(rows, hide_index=True)
        else:
            st.text("No decision of a person yet.")


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def show_prompts(database: Database, grade: Grade) -> None:
    found = answers(database, grade.submission.id, grade.submission.current_key or "")
    if not found:
        return
    with st.expander("Raw prompts and answers"):
        for one in found:
            weights = ", ".join(msgspec.json.decode(one.figures, type=Figures).weights) or "not told"
            st.text(f"{one.layer} model {one.model}, reading {one.reading + 1}, weights: {weights}")
            messages = json.loads(one.prompt)["messages"]
            said = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
            st.code(f"{said}\n\n[answer]\n{one.answer or one.error}", language=None, wrap_lines=True, height=300)
