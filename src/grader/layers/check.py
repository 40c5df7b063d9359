"""One verdict per rubric item, from layers 1 and 2. Items for a model or a human wait for review."""

from fractions import Fraction

from grader.layers.credit import credit_by_rule
from grader.layers.outputs import check_output, check_tests
from grader.layers.structure import check_structure
from grader.layers.submission import CheckResult, Submission
from grader.points import share_of
from grader.rubric import CodeTests, Item, Manual, ModelJudged, OutputMatch, Rubric, item_hash, layer_of
from grader.verdicts import Status, Verdict


def check_items(rubric: Rubric, submission: Submission) -> tuple[Verdict, ...]:
    """In the rubric's order."""
    return tuple(check_item(rubric, item, submission) for item in rubric.items)


def check_item(rubric: Rubric, item: Item, submission: Submission) -> Verdict:
    if not submission.notebook.readable:
        why = submission.notebook.flags[0].message if submission.notebook.flags else "The file is no notebook."
        return verdict_of(rubric, item, CheckResult(share=Fraction(0), reason=why))
    finding = _found(item, submission)
    if finding.share < 1 and not finding.review and not item.deduction:
        finding = credit_by_rule(item, submission, finding)
    return verdict_of(rubric, item, finding)


def _found(item: Item, submission: Submission) -> CheckResult:
    check = item.check
    if isinstance(check, OutputMatch):
        return check_output(check, submission)
    if isinstance(check, CodeTests):
        return check_tests(item, check, submission)
    if isinstance(check, ModelJudged):
        return CheckResult(share=Fraction(0), reason="The code model has not judged this item.", review=True)
    if isinstance(check, Manual):
        return CheckResult(share=Fraction(0), reason="A human grades this item.", review=True)
    return check_structure(check, submission)


def verdict_of(rubric: Rubric, item: Item, finding: CheckResult) -> Verdict:
    """A deduction takes its points away by the share to which the check holds."""
    share = min(max(finding.share, Fraction(0)), Fraction(1))
    points = share_of(item.points, share, rubric.point_step)
    good = 1 - share if item.deduction else share
    status: Status = "earned" if good == 1 else "partial" if good else "not_earned"
    return Verdict(
        item_id=item.id,
        status="needs_review" if finding.review else status,
        points=-points if item.deduction else points,
        max_points=-item.points if item.deduction else item.points,
        pending=item.points - points if finding.review and not item.deduction else item.points * 0,
        reason=finding.reason,
        layer=layer_of(item.check),
        evidence=finding.evidence,
        flags=finding.flags,
        item_hash=item_hash(rubric, item),
    )
