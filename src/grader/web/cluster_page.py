"""The models: their health as the endpoint says it now, the dashboard's cards, and what the answers cost."""

from contextlib import closing
from datetime import datetime
from typing import Any

import msgspec
import streamlit as st

from grader.grading import (
    AnswerRecord,
    Grade,
    GradeSettings,
    ModelFigures,
    answer_records,
    combined_card,
    grades,
    model_card,
    model_figures,
)
from grader.models import ALL_UP, LayerRun, ModelSettings, connect
from grader.store import Assignment, Database, settings_of_batches
from grader.web.cards import cards_html, combined_card_html, model_card_html, rate, seconds
from grader.web.session import book, chosen_assignment, refusals
from grader.web.settings import settings

_LAST = 10
_UNUSABLE = (
    "Unusable: the model's answer could not be read, or none came. It decides nothing: what it was asked stays open for"
    " you, or has no feedback. The column *problem* under *Every answer* says why."
)


def cluster_page() -> None:
    database = book()
    if (chosen := chosen_assignment(database)) is None:
        return
    models, records = _models(database, chosen), answer_records(database, chosen)
    names, health = list(dict.fromkeys((models.code_model, models.feedback_model))), dict[str, Any]()
    with refusals("The models cannot be reached:"), closing(connect(models)) as endpoint:
        health = endpoint.health(*names)
    _show_cards(names, records, health.get("verdicts", {}))
    _show_health(health)
    _show_last(records)
    read = [one for one in grades(database, chosen) if one.models]
    _show_costs(model_figures(one.models for one in read if one.models))
    _show_runs(read)
    st.button("Look again")


def _models(database: Database, chosen: Assignment) -> ModelSettings:
    """Of the last batch that asked models, else the defaults."""
    batches = (msgspec.json.decode(text, type=GradeSettings) for text in settings_of_batches(database, chosen.id))
    asked = (batch.models for batch in batches if batch.models)
    return next(asked, None) or ModelSettings(config=settings().config)


def _show_cards(names: list[str], records: list[AnswerRecord], verdicts: dict[str, str]) -> None:
    found = {name: verdicts.get(name, "not reached") for name in names}
    cards = [model_card_html(model_card(name, records), found[name], found[name] == ALL_UP) for name in names]
    st.html(cards_html([*cards, combined_card_html(combined_card(records))]))


def _show_health(health: dict[str, Any]) -> None:
    st.subheader("Server health")
    if not health:
        st.text("No server was reached.")
    elif "nodes" not in health:
        st.dataframe([{"Model": name} for name in health["models"]], hide_index=True)
    else:
        st.dataframe([_node_row(name, node) for name, node in health["nodes"].items()], hide_index=True)
        for warning in health["warnings"]:
            st.code(str(warning), language=None, wrap_lines=True)


def _node_row(name: str, node: dict[str, Any]) -> dict[str, str]:
    state = f"{node['state']}: {node['why']}" if node.get("why") else str(node["state"])
    return {"Name": name, "Role": str(node["role"]), "State": state, "Address": str(node["url"])}


def _show_last(records: list[AnswerRecord]) -> None:
    st.subheader("Last ten requests")
    if not records:
        st.text("No model was asked yet.")
        return
    numbers = range(len(records), 0, -1)
    rows = [_request_row(number, one) for number, one in zip(numbers, records[:_LAST], strict=False)]
    st.dataframe(rows, hide_index=True)


def _request_row(number: int, one: AnswerRecord) -> dict[str, Any]:
    read = "cached" if one.is_cached else rate(one.figures.prefill_speed)
    return {
        "#": number,
        "Model": one.model.removeprefix("disaggregated:"),
        "For": one.layer,
        "Time": seconds(one.figures.total_s),
        "Outcome": "ok" if one.ok else "no answer",
        "Prefill → decode": f"{read} → {rate(one.figures.decode_speed)} tok/s",
        "Ended": datetime.fromtimestamp(one.at).strftime("%H:%M:%S"),
    }


def _show_costs(figures: ModelFigures) -> None:
    if not figures.notebooks:
        return
    st.subheader("Answers about these notebooks")
    shown = [
        ("Notebooks", str(figures.notebooks)),
        ("Answers", str(figures.answers)),
        ("Unusable", str(figures.unusable_answers)),
        ("Prefix cache", "-" if figures.hit_rate is None else f"{figures.hit_rate:.0%}"),
        ("KV per notebook", f"{(figures.kv_bytes_per_notebook or 0) / 1e6:.1f} MB"),
        ("Both models at once", "-" if figures.speedup is None else f"{figures.speedup:.2f}x"),
    ]
    for column, (label, value) in zip(st.columns(len(shown)), shown, strict=True):
        column.metric(label, value)
    if figures.unusable_answers:
        st.caption(_UNUSABLE)


def _show_runs(read: list[Grade]) -> None:
    if not read:
        return
    rows = [_run_row(one, run) for one in read if one.models for run in one.models.runs]
    with st.expander(f"Every answer ({len(rows)})"):
        st.dataframe(rows, hide_index=True)


def _run_row(grade: Grade, run: LayerRun) -> dict[str, Any]:
    row = {"student": grade.submission.pseudonym, "layer": run.layer, "model": run.model, "problem": run.problem}
    kept = ("prompt_tokens", "cached_tokens", "completion_tokens", "prefill_s", "transfer_s", "decode_s", "total_s")
    return row | {name: getattr(run.figures, name, None) for name in (*kept, "kv_bytes", "method")}
