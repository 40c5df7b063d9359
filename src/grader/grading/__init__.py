"""From stored results to a grade, and what people do with it."""

from grader.grading.cards import AnswerRecord, CombinedCard, ModelCard, answer_records, combined_card, model_card
from grader.grading.checks import check_notebook, rerun_behind, rerun_of
from grader.grading.class_similarity import resemblances
from grader.grading.compare import GradeChange, ItemChange, changes_since
from grader.grading.decisions import Approved, DecisionRefused, approve_all, approve_grade, for_graders, override
from grader.grading.final import Grade, grade_in_class, grade_of, grades, overridden, parse_rubric
from grader.grading.merge import merged
from grader.grading.model_costs import ModelFigures, figures_line, model_figures
from grader.grading.results import ChecksResult, GradeRecord, GradeSettings, grading_key, record_of

__all__ = [
    "AnswerRecord",
    "Approved",
    "ChecksResult",
    "CombinedCard",
    "DecisionRefused",
    "Grade",
    "GradeChange",
    "GradeRecord",
    "GradeSettings",
    "ItemChange",
    "ModelCard",
    "ModelFigures",
    "answer_records",
    "approve_all",
    "approve_grade",
    "changes_since",
    "check_notebook",
    "combined_card",
    "figures_line",
    "for_graders",
    "grade_in_class",
    "grade_of",
    "grades",
    "grading_key",
    "merged",
    "model_card",
    "model_figures",
    "overridden",
    "override",
    "parse_rubric",
    "record_of",
    "rerun_behind",
    "rerun_of",
    "resemblances",
]
