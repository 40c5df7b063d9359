"""Numbers and words in output text, compared with tolerances."""

import math
import re
from collections.abc import Sequence

from grader.rubric import OutputMatch

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
    r"|nan|NaN|inf|Inf)(?!\w)"
)
_TOKEN = re.compile(_NUMBER.pattern + r"|[^\W\d_]+|\w+")
_R_INDEX = re.compile(r"^[ \t]*\[\d+\]", re.MULTILINE)  # R writes `[1]` before a vector
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def cleaned(text: str) -> str:
    return _R_INDEX.sub(" ", _ANSI.sub("", text))


def as_number(text: str) -> float | None:
    text = text.strip().strip("%$€£").strip()
    if not _NUMBER.fullmatch(text):
        return None
    return float(text.replace(",", "").replace("\u2212", "-"))


def numbers_in(text: str) -> list[float]:
    found = (as_number(match.group()) for match in _NUMBER.finditer(cleaned(text)))
    return [number for number in found if number is not None]


def tokens_in(text: str) -> list[str]:
    return _TOKEN.findall(cleaned(text))


def is_close(have: float, want: float, check: OutputMatch) -> bool:
    """What is no number is one answer too, as good as another: a mean of nothing."""
    both_none = math.isnan(have) and math.isnan(want)
    return both_none or math.isclose(have, want, rel_tol=check.rel_tol, abs_tol=check.abs_tol)


def same_value(have: str, want: str, check: OutputMatch) -> bool:
    """Two texts: equal as numbers within the tolerance, or equal as words."""
    numbers = as_number(have), as_number(want)
    if numbers[0] is not None and numbers[1] is not None:
        return is_close(numbers[0], numbers[1], check)
    a, b = " ".join(have.split()), " ".join(want.split())
    return a.casefold() == b.casefold() if check.ignore_case else a == b


def found_in_order(have: Sequence[float], want: Sequence[float], check: OutputMatch) -> int:
    """How many of the wanted numbers stand in `have`, in their order (longest common subsequence)."""
    row = [0] * (len(want) + 1)
    for number in have:
        before = 0
        for j, wanted in enumerate(want):
            above = row[j + 1]
            row[j + 1] = before + 1 if is_close(number, wanted, check) else max(above, row[j])
            before = above
    return row[-1]
