"""What the doctor says: findings, each with what, why it matters and the command that mends it."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from disaggregated_inference.doctor.checks import CHECKS

Severity = Literal["ok", "note", "warning", "error", "unknown"]

# The worst first. `unknown`: the doctor could not check.
ORDER: tuple[Severity, ...] = ("error", "warning", "unknown", "note", "ok")
WARNINGS_EXIT_CODE, ERRORS_EXIT_CODE = 3, 4  # 1 and 2 are failures of the command itself


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about one thing. `check` is its name in docs/TROUBLESHOOTING.md."""

    check: str
    severity: Severity
    what: str
    why: str = ""
    mend: str = ""
    machine: str = ""


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """All findings; `facts` is what a machine tells the machine that compares it with others."""

    findings: tuple[Finding, ...] = ()
    facts: dict[str, Any] = {}

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def exit_code(self) -> int:
        if self.count("error"):
            return ERRORS_EXIT_CODE
        return WARNINGS_EXIT_CODE if self.count("warning") else 0


class CannotRead(Exception):
    """A reading is not possible here; the text is the reason."""


def ok(check: str, what: str) -> Finding:
    assert check in CHECKS
    return Finding(check=check, severity="ok", what=what)


def unknown(check: str, reason: str) -> Finding:
    """The doctor could not check; what would make it possible stands in the reason."""
    assert check in CHECKS
    return Finding(check=check, severity="unknown", what=reason)


def note(check: str, what: str) -> Finding:
    """Worth knowing; there is nothing to mend."""
    assert check in CHECKS
    return Finding(check=check, severity="note", what=what)


def found(severity: Severity, check: str, what: str, mend: str = "") -> Finding:
    """Something to know or to mend. Without `mend`, the catalogue's."""
    kind = CHECKS[check]
    return Finding(check=check, severity=severity, what=what, why=kind.why, mend=mend or kind.mend)


def sort_findings(findings: Iterable[Finding], machines: Sequence[str] = ()) -> tuple[Finding, ...]:
    """By machine, in this order and then that of their appearance; of each the worst first."""
    listed = list(findings)
    order = list(dict.fromkeys([*machines, *(finding.machine for finding in listed)]))
    return tuple(sorted(listed, key=lambda each: (order.index(each.machine), ORDER.index(each.severity))))
