"""What the layers look at."""

from fractions import Fraction

import msgspec

from grader.notebook import Notebook
from grader.sandbox import Rerun
from grader.verdicts import Evidence, Flag


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A student's notebook beside the solution. Re-runs are there when the rubric asks for them."""

    notebook: Notebook
    solution: Notebook | None = None
    template: Notebook | None = None
    rerun: Rerun | None = None
    solution_rerun: Rerun | None = None

    @property
    def executed(self) -> Notebook:
        """The notebook with the outputs that count: fresh ones where the sandbox ran it."""
        return self.rerun.notebook if self.rerun else self.notebook

    @property
    def executed_solution(self) -> Notebook | None:
        return self.solution_rerun.notebook if self.solution_rerun else self.solution


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a check found: the share of the points, or that a human must look."""

    share: Fraction
    reason: str
    evidence: tuple[Evidence, ...] = ()
    flags: tuple[Flag, ...] = ()
    review: bool = False
