"""Layers 1 and 2: verdicts that need no model. The same notebook always gives the same points."""

from grader.layers.check import check_item, check_items, verdict_of
from grader.layers.compare import Shown, shown_by_cell
from grader.layers.flags import submission_flags
from grader.layers.submission import CheckResult, Submission

__all__ = [
    "CheckResult",
    "Shown",
    "Submission",
    "check_item",
    "check_items",
    "shown_by_cell",
    "submission_flags",
    "verdict_of",
]
