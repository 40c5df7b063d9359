"""Statistics of the class."""

import statistics
from collections import Counter
from decimal import Decimal
from typing import Any

import streamlit as st

from grader.grading import Grade
from grader.points import plain, rounded
from grader.web.session import all_grades, book, chosen_assignment

_BAND_PERCENT = 10
_SHARES = {  # as a bar chart, but always from 0 to 100 percent
    "mark": "bar",
    "height": {"step": 24},
    "encoding": {
        "x": {"field": "percent", "type": "quantitative", "scale": {"domain": [0, 100]}},
        "y": {"field": "item", "type": "nominal", "sort": None},
    },
}


def statistics_page() -> None:
    database = book()
    if (chosen := chosen_assignment(database)) is None or not (found := all_grades(database, chosen)):
        return
    _figures(found)
    if waiting := sum(one.score.needs_review for one in found):
        st.info(f"{waiting} of {len(found)} have open items: their totals may still grow.")
    left, right = st.columns(2)
    with left:
        st.subheader("Totals")
        st.bar_chart(bands(found), x="percent", y="students", sort=False)
    with right:
        st.subheader("Mean share of each item's points")
        st.vega_lite_chart(item_shares(found), _SHARES)
    if flags := Counter(code for one in found for code in {flag.code for flag in one.flags}):
        st.subheader("Flags")
        st.bar_chart(
            [{"flag": code, "students": count} for code, count in flags.items()],
            x="flag",
            y="students",
            horizontal=True,
        )


def _figures(found: list[Grade]) -> None:
    totals = [one.score.total for one in found]
    middle, mean = statistics.median(totals), statistics.fmean(totals)
    spread = statistics.stdev(totals) if len(totals) > 1 else 0.0
    figures = [
        ("Students", str(len(found))),
        (f"Mean of {plain(found[0].score.maximum)}", f"{mean:.1f}"),
        ("Median", plain(rounded(Decimal(middle)))),
        ("Deviation", f"{float(spread):.1f}"),
        ("Lowest, highest", f"{plain(min(totals))}, {plain(max(totals))}"),
    ]
    for column, (label, value) in zip(st.columns(len(figures)), figures, strict=True):
        column.metric(label, value)


def bands(found: list[Grade]) -> list[dict[str, Any]]:
    last = 100 // _BAND_PERCENT - 1
    counts = Counter(min(last, max(0, int(one.score.percent) // _BAND_PERCENT)) for one in found)
    return [{"percent": _band(number), "students": counts[number]} for number in range(last + 1)]


def _band(number: int) -> str:
    low = number * _BAND_PERCENT
    return f"{low}-{low + _BAND_PERCENT}"


def item_shares(found: list[Grade]) -> list[dict[str, Any]]:
    """Open items are in no figure."""
    rows = []
    for item in found[0].rubric.items:
        verdicts = [one for grade in found for one in grade.verdicts if one.item_id == item.id]
        known = [
            float(one.points / one.max_points) for one in verdicts if one.status != "needs_review" and one.max_points
        ]
        if known:
            rows.append({"item": item.id, "percent": round(100 * statistics.fmean(known), 1)})
    return rows
