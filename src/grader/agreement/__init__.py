"""Pilot mode: how well the machine's points agree with a human's."""

from grader.agreement.measures import Agreement, Pair, agreement, icc_3_1, quadratic_kappa
from grader.agreement.pilot import (
    FEWEST,
    HandGrades,
    HandGradesInvalid,
    PilotReport,
    given_by_hand,
    pilot_report,
    read_hand_grades,
)

__all__ = [
    "FEWEST",
    "Agreement",
    "HandGrades",
    "HandGradesInvalid",
    "Pair",
    "PilotReport",
    "agreement",
    "given_by_hand",
    "icc_3_1",
    "pilot_report",
    "quadratic_kappa",
    "read_hand_grades",
]
