"""Assignments: a rubric with its mistakes by line, solution, template and data files."""

from pathlib import Path
from typing import Any

import msgspec
import streamlit as st

from grader.errors import GraderError, RubricInvalid
from grader.grading import parse_rubric
from grader.intake import IntakeLimits
from grader.notebook import read_notebook
from grader.points import plain
from grader.rubric import EXAMPLE, LARGEST_RUBRIC_BYTES, Rubric, dump_rubric, import_text, layer_of, load_rubric
from grader.store import Assignment, Database, assignment, assignment_names, rubric_versions, save_assignment
from grader.web.session import book, decide, field, refusals, show_note

_NEW = "A new assignment"
_DECIDED_BY = {"structure": "program (structure)", "outputs": "program (outputs)", "code": "code model", "human": "you"}


def assignments_page() -> None:
    show_note()
    st.html("<style>textarea{font-family:ui-monospace,Menlo,Consolas,monospace!important}</style>")
    database = book()
    names = assignment_names(database)
    asked = st.session_state.get("saved") or st.query_params.get("assignment", "")
    choices = [*names, _NEW]
    name = st.selectbox("Assignment", choices, index=choices.index(asked) if asked in names else 0)
    chosen = assignment(database, name) if name != _NEW else None
    if chosen:
        _show_state(database, chosen)
    left, right = st.columns([3, 2])
    with left:
        rubric, editor = _editor(chosen)
    with right:
        _files_and_save(database, chosen, rubric, editor)


def _show_state(database: Database, chosen: Assignment) -> None:
    versions = len(rubric_versions(database, chosen.id))
    has = [word for word, sha in (("solution", chosen.solution_sha), ("template", chosen.template_sha)) if sha]
    files = ", ".join([*has, *chosen.inputs]) or "no solution, no template, no data files"
    st.text(f"Rubric version {chosen.rubric.number} of {versions}. Files: {files}.")


def _editor(chosen: Assignment | None) -> tuple[Rubric | None, str]:
    """The rubric, if it has no mistakes, and the key of the editor. Each text to start from has an editor of its own:
    it is the field's default, which reaches the browser in every run."""
    text = dump_rubric(parse_rubric(chosen.rubric.content)) if chosen else EXAMPLE
    key = f"rubric-{chosen.id}-{chosen.rubric.id}" if chosen else "rubric-new"
    if (given := _from_file(key)) is not None:
        text, key = given.text, f"{key}-{given.id}"
    written = st.text_area("Rubric (YAML or JSON)", text, height=460, key=key)
    try:
        rubric = load_rubric(written)
    except RubricInvalid as error:
        _show_mistakes(written, error)
        return None, key
    st.dataframe(_items(rubric), hide_index=True)
    shared = sum((item.points * item.ai_share for item in rubric.items), rubric.maximum * 0)
    st.text(f"{plain(rubric.maximum)} points. Models may decide {plain(shared)} of them.")
    return rubric, key


class _Given(msgspec.Struct, frozen=True):
    id: str
    text: str


def _from_file(key: str) -> _Given | None:
    """A chosen file goes into the editor; then the text in the editor counts."""
    given = st.file_uploader(
        "Start from a file: a rubric of any known shape, or the instructor's notebook of nbgrader or otter",
        type=["yaml", "yml", "json", "ipynb"],
        max_upload_size=LARGEST_RUBRIC_BYTES >> 20,
        key=f"file-{key}",
    )
    if given is None:
        return None
    found: list[_Given] = []
    with refusals():
        imported = import_text(given.name, given.getvalue())
        found = [_Given(given.file_id, imported.text)]
        if imported.notes:
            st.info("Look at this before you save:")
            st.code("\n".join(imported.notes), language=None, wrap_lines=True)
    return found[0] if found else None


def _show_mistakes(written: str, error: RubricInvalid) -> None:
    st.error(f"{len(error.problems)} mistake{'s' if len(error.problems) > 1 else ''} in the rubric:")
    lines = written.splitlines()
    for one in error.problems:
        here = lines[one.line - 1].strip() if 0 < one.line <= len(lines) else ""
        place = f"line {one.line}, column {one.column}" if one.line else "rubric"
        st.code(f"{place}: {one.message}\n    {here}".rstrip(), language=None, wrap_lines=True)


def _items(rubric: Rubric) -> list[dict[str, Any]]:
    return [
        {
            "item": item.id,
            "points": float(-item.points if item.deduction else item.points),
            "decided by": _decided_by(layer_of(item.check), bool(item.ai_share)),
            "title": item.title,
        }
        for item in rubric.items
    ]


def _decided_by(layer: str, by_model: bool) -> str:
    return "you, advised by the code model" if layer == "code" and not by_model else _DECIDED_BY[layer]


def _files_and_save(database: Database, chosen: Assignment | None, rubric: Rubric | None, editor: str) -> None:
    largest, key = IntakeLimits().file_bytes >> 20, f"files-{chosen.id if chosen else 'new'}"
    st.file_uploader(
        "Solution (a notebook with its outputs)", type="ipynb", max_upload_size=largest, key=f"{key}-solution"
    )
    st.file_uploader(
        "Template (what students started from)", type="ipynb", max_upload_size=largest, key=f"{key}-template"
    )
    st.file_uploader("Data files that notebooks read", accept_multiple_files=True, key=f"{key}-data")
    st.caption("Files that you do not choose stay as they are.")
    given = _save, database, chosen, editor, key
    st.button("Save the assignment", type="primary", disabled=rubric is None, on_click=decide, args=given)


def _save(database: Database, chosen: Assignment | None, editor: str, key: str) -> str:
    rubric, data = load_rubric(field(editor, "")), field(f"{key}-data")
    saved = save_assignment(
        database,
        chosen.name if chosen else _new_name(database, rubric.assignment),
        dump_rubric(rubric),
        solution=_notebook(field(f"{key}-solution")),
        template=_notebook(field(f"{key}-template")),
        inputs={Path(one.name).name: one.getvalue() for one in data} if data else None,
    )
    st.session_state["saved"] = st.session_state["assignment"] = saved.name
    return f"Saved: rubric version {saved.rubric.number}, {plain(rubric.maximum)} points."


def _new_name(database: Database, name: str) -> str:
    if name in assignment_names(database):
        raise GraderError(
            f"the grade book has an assignment {name}: change `assignment:` in the rubric, or choose it above"
        )
    return name


def _notebook(upload: Any) -> bytes | None:
    if upload is None:
        return None
    content: bytes = upload.getvalue()
    if len(content) > (limit := IntakeLimits().file_bytes):
        raise GraderError(f"{upload.name} has more than {limit >> 20} MiB")
    found = read_notebook(content, upload.name)
    if not found.readable:
        raise GraderError(f"{upload.name}: {found.flags[0].message if found.flags else 'it is no notebook'}")
    return content
