"""What the grader sends to the driver in the sandbox, and what the driver sends back: JSON over pipes."""

from collections.abc import Sequence
from typing import Any

import msgspec

MAX_RESTARTS = 3


class CodeCell(msgspec.Struct, frozen=True):
    index: int
    source: str
    grade_id: str = ""


class TestCode(msgspec.Struct, frozen=True):
    """Code of one rubric item, run after the cell with this grade_id, or at the end."""

    __test__ = False  # not one of pytest's

    id: str
    code: str
    after_cell: str = ""


class Job(msgspec.Struct, frozen=True):
    """`kernel`: the command that starts the kernel inside a sandbox of its own."""

    kernel: Sequence[str]
    language: str
    cells: Sequence[CodeCell]
    tests: Sequence[TestCode] = ()
    probes: Sequence[str] = ()
    cell_timeout_s: float = 60
    notebook_timeout_s: float = 600
    startup_timeout_s: float = 60
    memory_mib: int = 2048
    cpu_s: float = 600
    output_kib: int = 1024


class CellRun(msgspec.Struct, frozen=True):
    """One cell's fresh outputs. `execution_count` is None when it was not tried."""

    index: int
    outputs: list[dict[str, Any]]
    execution_count: int | None = None
    cut: bool = False


class TestRun(msgspec.Struct, frozen=True):
    __test__ = False  # not one of pytest's

    passed: bool
    message: str = ""


class Restart(msgspec.Struct, frozen=True):
    """The kernel was lost in a cell, and earlier cells ran again in a new one. `different`: cells that failed in one of
    the two runs alone."""

    cell: int
    why: str
    different: list[int] = []


class JobResult(msgspec.Struct, frozen=True):
    status: str
    cells: list[CellRun]
    tests: dict[str, TestRun] = {}
    probes: dict[str, list[dict[str, Any]]] = {}
    notes: list[str] = []
    restarts: list[Restart] = []
