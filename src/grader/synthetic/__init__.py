"""Synthetic classes: everything is made up, and the right points are known."""

from grader.synthetic.cells import code, failed, notebook_bytes, printed, result, text
from grader.synthetic.classroom import SyntheticClass, SyntheticSubmission, make_class

__all__ = [
    "SyntheticClass",
    "SyntheticSubmission",
    "code",
    "failed",
    "make_class",
    "notebook_bytes",
    "printed",
    "result",
    "text",
]
