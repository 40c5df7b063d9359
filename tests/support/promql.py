"""A parser of PromQL as far as deploy/ uses it: it says what Prometheus would refuse.

kind("sum(rate(a_total[5m])) / 2 > 1")  ->  "vector"
"""

import re
from collections.abc import Sequence

RANGE, VECTOR, SCALAR = "range", "vector", "scalar"
_FUNCTIONS: dict[str, tuple[Sequence[str], str]] = {
    **dict.fromkeys(("rate", "irate", "increase", "delta", "changes", "resets"), ((RANGE,), VECTOR)),
    **dict.fromkeys(("avg_over_time", "max_over_time", "min_over_time", "sum_over_time"), ((RANGE,), VECTOR)),
    **dict.fromkeys(("abs", "absent", "ceil", "floor", "round"), ((VECTOR,), VECTOR)),
    **dict.fromkeys(("clamp_min", "clamp_max"), ((VECTOR, SCALAR), VECTOR)),
    "histogram_quantile": ((SCALAR, VECTOR), VECTOR),
    "scalar": ((VECTOR,), SCALAR),
    "vector": ((SCALAR,), VECTOR),
    "time": ((), SCALAR),
}
_AGGREGATIONS = {"sum", "avg", "min", "max", "count", "stddev", "stdvar", "group"}
_COMPARISONS, _SETS = {"==", "!=", "<", ">", "<=", ">="}, {"and", "or", "unless"}
_LEVELS = ({"or"}, {"and", "unless"}, _COMPARISONS, {"+", "-"}, {"*", "/", "%"}, {"^"})  # loosest first
_DURATION = r"(?:\$__range|\$__rate_interval|\$__interval|(?:\d+(?:ms|[smhdwy]))+)"
_TOKEN = re.compile(
    rf'\s*(?:(?P<range>\[{_DURATION}\])|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w:]))|(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>=~|!~|==|!=|<=|>=|[-+*/%^<>=(){},]))"
)


class PromqlError(ValueError):
    """Prometheus would refuse the expression."""


def kind(expression: str) -> str:
    """Of its result: a vector or a scalar, or a range, which is none that can be shown."""
    parser = _Parser(_tokens(expression))
    found = parser.binary(0)
    if parser.now:
        raise PromqlError(f"{parser.now!r} is left over in {expression}")
    return found


def _tokens(expression: str) -> list[str]:
    found, at, text = list[str](), 0, expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise PromqlError(f"{text[at : at + 20]!r} is no PromQL")
        found.append(match[0].strip())
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    @property
    def now(self) -> str:
        """Empty at the end."""
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.now
        if not token or (expected and token not in expected):
            raise PromqlError(f"{token!r} stands where {' or '.join(expected) or 'an expression'} is expected")
        self._at += 1
        return token

    def binary(self, level: int) -> str:
        if level == len(_LEVELS):
            return self._operand()
        left = self.binary(level + 1)
        while self.now in _LEVELS[level]:
            left = self._joined(left, self.take(), level)
        return left

    def _joined(self, left: str, sign: str, level: int) -> str:
        is_bool = sign in _COMPARISONS and self.now == "bool" and bool(self.take())
        if self.now in ("on", "ignoring"):
            self.take()
            self._labels()
            if self.now in ("group_left", "group_right"):
                self.take()
                if self.now == "(":
                    self._labels()
        right = self.binary(level + 1)
        if RANGE in (left, right) or (sign in _SETS and SCALAR in (left, right)):
            raise PromqlError(f"{sign} joins no {left} and {right}")
        if sign in _COMPARISONS and {left, right} == {SCALAR} and not is_bool:
            raise PromqlError(f"{sign} between numbers needs bool")
        return VECTOR if VECTOR in (left, right) else SCALAR

    def _operand(self) -> str:
        if self.now in ("+", "-"):
            self.take()
            return self._operand()
        if self.now == "(":
            self.take()
            found = self.binary(0)
            self.take(")")
            return found
        token = self.take()
        if token[0].isdigit():
            return SCALAR
        if not re.match(r"[a-zA-Z_:]", token) or token in _SETS:
            raise PromqlError(f"{token!r} stands where an expression is expected")
        if token in _AGGREGATIONS and self.now in ("(", "by", "without"):
            return self._aggregation(token)
        return self._call(token) if self.now == "(" else self._selector()

    def _aggregation(self, name: str) -> str:
        grouped = self._grouping()
        self._arguments(name, (VECTOR,))
        if not grouped:
            self._grouping()
        return VECTOR

    def _grouping(self) -> bool:
        if self.now not in ("by", "without"):
            return False
        self.take()
        self._labels()
        return True

    def _call(self, name: str) -> str:
        if name not in _FUNCTIONS:
            raise PromqlError(f"{name} is no known function")
        arguments, result = _FUNCTIONS[name]
        self._arguments(name, arguments)
        return result

    def _arguments(self, name: str, expected: Sequence[str]) -> None:
        self.take("(")
        for place, wanted in enumerate(expected):
            if place:
                self.take(",")
            if (found := self.binary(0)) != wanted:
                raise PromqlError(f"{name} takes a {wanted}, not a {found}")
        self.take(")")

    def _selector(self) -> str:
        if self.now == "{":
            self.take()
            while self.now != "}":
                self._label()
                self.take("=", "!=", "=~", "!~")
                if not self.now.startswith('"'):
                    raise PromqlError(f"{self.now!r} is no string")
                self.take()
                if self.now != "}":
                    self.take(",")
            self.take()
        if self.now.startswith("["):
            self.take()
            return RANGE
        return VECTOR

    def _labels(self) -> None:
        self.take("(")
        while self.now != ")":
            self._label()
            if self.now != ")":
                self.take(",")
        self.take()

    def _label(self) -> None:
        if not re.fullmatch(r"[a-zA-Z_]\w*", self.take()):
            raise PromqlError("a label is expected")
