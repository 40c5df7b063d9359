"""Student code runs here only: no network, read-only inputs, limits on everything."""

from grader.sandbox.bubblewrap import require_sandbox, why_unavailable
from grader.sandbox.job import TestCode
from grader.sandbox.report import Rerun, RerunStatus, TestResult
from grader.sandbox.run import code_tests_of, kernel_command, longest_run_s, probes_of, rerun, rerun_for

__all__ = [
    "Rerun",
    "RerunStatus",
    "TestCode",
    "TestResult",
    "code_tests_of",
    "kernel_command",
    "longest_run_s",
    "probes_of",
    "require_sandbox",
    "rerun",
    "rerun_for",
    "why_unavailable",
]
