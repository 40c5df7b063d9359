"""A submission's grade as it stands: the machine's verdicts, a human's points over them, the score, what is open."""

import hashlib
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache

import msgspec

from grader.grading.class_similarity import resemblances
from grader.grading.merge import merged
from grader.grading.results import ChecksResult, GradeRecord
from grader.models import FEEDBACK_CONTRADICTS, Feedback, ModelsResult, contradictions
from grader.points import plain
from grader.rubric import Rubric, load_rubric
from grader.scoring import Lateness, Score, score
from grader.similarity import similarity_flags
from grader.store import (
    Assignment,
    Database,
    Grading,
    HumanPoints,
    Review,
    StoredSubmission,
    grading,
    review_of,
    rubric_version,
    submissions,
)
from grader.verdicts import Flag, Status, Verdict

_MINUTES_PER_DAY = 24 * 60


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """`machine`: the score without any human's points. `models`: None while the models' stage is not done."""

    submission: StoredSubmission
    rubric: Rubric
    verdicts: tuple[Verdict, ...]
    score: Score
    machine: Score
    machine_verdicts: tuple[Verdict, ...]
    flags: tuple[Flag, ...]
    review: Review
    record: GradeRecord
    checks: ChecksResult
    models: ModelsResult | None

    @property
    def feedback(self) -> Feedback | None:
        return self.models.feedback if self.models else None

    @property
    def content(self) -> str:
        """A hash of what an approval is of: the rubric, every line of the score with its reason and evidence, the
        feedback. Comments are the instructor's own, and flags are not for the student."""
        told = self.record.rubric_hash, self.score, self.feedback
        return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:16]

    @property
    def approved(self) -> bool:
        """As it is now: a regrade that moves points between items needs another approval, whatever the total."""
        return self.review.approval is not None and self.review.approval.content == self.content

    @property
    def is_changed(self) -> bool:
        """Approved, and not as it is now."""
        return self.review.approval is not None and not self.approved

    @property
    def state(self) -> str:
        if self.approved:
            return "approved"
        if self.is_changed:
            return "changed since approval"
        return "needs review" if self.score.needs_review else "graded"


@lru_cache(maxsize=64)
def parse_rubric(content: str) -> Rubric:
    return load_rubric(content, "the stored rubric")


def grades(database: Database, assignment: Assignment) -> list[Grade]:
    """Of all submissions whose checks are done."""
    everyone = submissions(database, assignment.id)
    found = [grade for one in everyone if (grade := grade_of(database, one)) is not None]
    pairs = resemblances(database, assignment, everyone) if found else ()
    return [_flagged(one, similarity_flags(one.submission.pseudonym, pairs)) for one in found]


def grade_in_class(database: Database, assignment: Assignment, submission: StoredSubmission) -> Grade | None:
    """With the flags of works that are alike. None: not graded yet."""
    grade = grade_of(database, submission)
    if grade is None:
        return None
    pairs = resemblances(database, assignment, submissions(database, assignment.id))
    return _flagged(grade, similarity_flags(submission.pseudonym, pairs))


def _flagged(grade: Grade, flags: tuple[Flag, ...]) -> Grade:
    return msgspec.structs.replace(grade, flags=(*grade.flags, *flags)) if flags else grade


def grade_of(database: Database, submission: StoredSubmission) -> Grade | None:
    """None: not graded yet."""
    stored = grading(database, submission.id, submission.current_key)
    return _grade(database, submission, stored) if stored and stored.checks else None


def grade_with(database: Database, submission: StoredSubmission, stored: Grading) -> Grade:
    """By an earlier grading: for comparisons."""
    return _grade(database, submission, stored)


def _grade(database: Database, submission: StoredSubmission, stored: Grading) -> Grade:
    assert stored.checks
    rubric = parse_rubric(rubric_version(database, stored.rubric_version_id).content)
    checks = msgspec.json.decode(stored.checks, type=ChecksResult)
    models = msgspec.json.decode(stored.models, type=ModelsResult) if stored.models else None
    review = review_of(database, submission.id)
    machine = merged(rubric, checks, models)
    verdicts = overridden(rubric, machine, review.points)
    late = Lateness(minutes=round(submission.late_days * _MINUTES_PER_DAY)) if submission.late_days else None
    total = score(rubric, verdicts, late)
    spoken = _spoken(models, rubric, verdicts, total) if models else ()
    return Grade(
        submission=submission,
        rubric=rubric,
        verdicts=verdicts,
        score=total,
        machine=score(rubric, machine, late),
        machine_verdicts=machine,
        flags=(*checks.flags, *(flag for one in verdicts for flag in one.flags), *spoken),
        review=review,
        record=msgspec.json.decode(stored.record, type=GradeRecord),
        checks=checks,
        models=models,
    )


def _spoken(models: ModelsResult, rubric: Rubric, verdicts: tuple[Verdict, ...], total: Score) -> tuple[Flag, ...]:
    return contradictions(models.feedback, rubric, verdicts, total, models.unfounded) if models.feedback else ()


def overridden(rubric: Rubric, verdicts: tuple[Verdict, ...], points: Mapping[str, HumanPoints]) -> tuple[Verdict, ...]:
    return tuple(_by_human(one, points[one.item_id]) if one.item_id in points else one for one in verdicts)


def _by_human(verdict: Verdict, given: HumanPoints) -> Verdict:
    """A human's points stay as they are, also where a later rubric gives the item less."""
    low, high = min(verdict.max_points, given.points, Decimal(0)), max(verdict.max_points, given.points, Decimal(0))
    return Verdict(
        item_id=verdict.item_id,
        status=_status(verdict, given.points),
        points=given.points,
        max_points=high if verdict.max_points >= 0 else low,
        reason=f"set by {given.who}: {given.why} (the machine gave {plain(verdict.points)})",
        layer="human",
        evidence=verdict.evidence,
        flags=tuple(flag for flag in verdict.flags if flag.code != FEEDBACK_CONTRADICTS),  # the human has decided
        item_hash=verdict.item_hash,
    )


def _status(verdict: Verdict, points: Decimal) -> Status:
    if verdict.max_points < 0:
        return "earned" if not points else "not_earned"
    if points >= verdict.max_points:
        return "earned"
    return "partial" if points else "not_earned"
