"""Partial credit by the rubric's rules, matched against code without comments and strings."""

import re
from fractions import Fraction

from grader.code import plain_code
from grader.layers.cells import at_line, code_at
from grader.layers.submission import CheckResult, Submission
from grader.rubric import CreditRule, Item
from grader.verdicts import Evidence


def credit_by_rule(item: Item, submission: Submission, finding: CheckResult) -> CheckResult:
    """The finding, or the share of the highest rule that holds, where that is more."""
    for rule in sorted(item.credit_rules, key=lambda rule: -rule.priority):
        evidence = _holds(rule, item, submission)
        if evidence is not None:
            share = Fraction(rule.multiplier)
            if share <= finding.share:
                return finding
            reason = f"{finding.reason} Partial credit: {rule.explanation or ', '.join(rule.patterns)}"
            return CheckResult(share=share, reason=reason, evidence=(*finding.evidence, *evidence), flags=finding.flags)
    return finding


def _holds(rule: CreditRule, item: Item, submission: Submission) -> tuple[Evidence, ...] | None:
    places = [_place(pattern, item, submission) for pattern in rule.patterns]
    found = [place for place in places if place is not None]
    if rule.when == "not_regex":
        has_code = any(cell.source.strip() for cell in code_at(submission.notebook, item.check.where))
        return () if not found and has_code else None
    if rule.when in ("all_of", "regex"):
        return tuple(found) if len(found) == len(places) else None
    return tuple(found) if found else None


def _place(pattern: str, item: Item, submission: Submission) -> Evidence | None:
    for cell in code_at(submission.notebook, item.check.where):
        for number, line in enumerate(plain_code(cell.source, submission.notebook.language).splitlines(), 1):
            if re.search(pattern, line) or re.search(pattern, line.replace(" ", "")):
                return at_line(cell, number)
    return None
