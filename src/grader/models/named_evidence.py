"""What the feedback says is in the work, and is not: cells beyond the last one, and names or code between backticks.

Only praise and the words about the reflection speak of what is there. An improvement may name what is missing, or code
that the student could write instead."""

import re
from collections.abc import Iterator

from grader.models.consistency import texts
from grader.models.feedback import Feedback
from grader.models.prompts import shown, without_names
from grader.notebook import Notebook
from grader.rubric import Rubric

_CELL = re.compile(r"\bcell\s+(?:no\.?\s*|number\s+|#\s*)?(\d{1,6})\b", re.IGNORECASE)
_CELLS = re.compile(r"\bcells\s+(\d{1,6}(?:\s*(?:-|\u2013|to|and|or|&|,)\s*\d{1,6})*)\b", re.IGNORECASE)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_WORDS = re.compile(r"[^\W\d]\w*|\d+(?:\.\d+)?")


def unfounded(feedback: Feedback, rubric: Rubric, notebook: Notebook, names: tuple[str, ...]) -> tuple[str, ...]:
    """`names`: of the student, which the model has not seen."""
    everything = [*texts(feedback), feedback.instructor_comment]
    claims = [*(one.text for one in feedback.strengths), feedback.reflection.comment]
    work = without_names(shown(notebook), names)
    return (*_cells(everything, len(notebook.cells)), *_code(claims, work, {item.id for item in rubric.items}))


def _cells(said: list[str], count: int) -> Iterator[str]:
    found = (number for text in said for number in _numbers(text))
    for number in sorted({number for number in found if not 1 <= number <= count}):
        yield f"the feedback speaks of cell {number}; the work has {count}"


def _numbers(text: str) -> Iterator[int]:
    yield from map(int, _CELL.findall(text))
    for several in _CELLS.findall(text):
        yield from map(int, re.findall(r"\d+", several))


def _code(claims: list[str], work: str, items: set[str]) -> Iterator[str]:
    """Word by word: `total()` and `total(x)` are the work's `total( x )`. Items of the rubric may be named, too."""
    known = {word.casefold() for word in _WORDS.findall(work)}
    quoted = dict.fromkeys(code.strip() for text in claims for _, code in _CODE.findall(text))
    for code in quoted:
        if code not in items and not known.issuperset(word.casefold() for word in _WORDS.findall(code)):
            yield f"the feedback names `{code[:80]}`, which the work does not have"
