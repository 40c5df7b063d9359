"""What became of the requests."""

from collections import Counter
from typing import Any

import msgspec

_KEPT = 10  # failing cases of a kind, with all details


class FailingCase(msgspec.Struct, frozen=True, kw_only=True):
    """A request that failed or had a wrong answer."""

    request_id: str
    request: str  # its name in the catalogue
    at_s: float
    seconds: float
    what: str
    failovers: list[dict[str, Any]] = []
    gateway_log: str = ""  # its last lines, when the request had ended


class RequestOutcomes:
    def __init__(self) -> None:
        self.right = self.over_failure = self.cancelled = self.wrong = self.failed = 0
        self.codes: Counter[str] = Counter()
        self.failovers: Counter[str] = Counter()
        self.slowest_s, self.slowest = 0.0, ""
        self.cases: list[FailingCase] = []

    @property
    def total(self) -> int:
        return self.right + self.cancelled + self.wrong + self.failed

    def took(self, seconds: float, request_id: str) -> None:
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, request_id

    def was_right(self, failovers: list[dict[str, Any]]) -> None:
        self.right += 1
        self.over_failure += bool(failovers)
        self.failovers.update(f"{each['node']} {each['code']}" for each in failovers)

    def was_wrong(self, case: FailingCase) -> None:
        self.wrong += 1
        self._keep(self.wrong, case)

    def has_failed(self, code: str, case: FailingCase) -> None:
        self.failed += 1
        self.codes[code] += 1
        self._keep(self.codes[code], case)

    def _keep(self, number: int, case: FailingCase) -> None:
        if number <= _KEPT:
            self.cases.append(case)
