"""Every error that the grader raises on purpose. Each message says what to do."""

from collections.abc import Sequence

from grader.problems import Problem


class GraderError(Exception):
    """Base class of the grader's errors."""


class RubricInvalid(GraderError):
    """The rubric file has mistakes. `problems` has all of them, with their lines."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.located(source) for problem in self.problems))


class SandboxUnavailable(GraderError):
    """This machine has no working sandbox: the grader runs no student code."""


class KernelUnavailable(SandboxUnavailable):
    """The notebook's language has no kernel on this machine."""


class ImportRefused(GraderError):
    """The file has none of the rubric shapes that the importer knows."""
