"""What a re-run in the sandbox gives back."""

from typing import Literal

import msgspec

from grader.notebook import Notebook, Output
from grader.verdicts import Flag

# finished: every cell was tried. timed_out: the notebook's time ended. died: the kernel or its runner ended early.
RerunStatus = Literal["finished", "timed_out", "died"]


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    """`passed`: the code ran to its last line, which the runner checks with a random mark."""

    __test__ = False  # not one of pytest's

    passed: bool
    message: str = ""


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """`notebook` has the fresh outputs. `probes`: the values of variables at the end, as the kernel displays them."""

    notebook: Notebook
    status: RerunStatus
    backend: str
    tests: dict[str, TestResult] = {}
    probes: dict[str, tuple[Output, ...]] = {}
    flags: tuple[Flag, ...] = ()
    run_s: float = 0
