"""The re-run of a notebook in the sandbox, seen from outside."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from grader.errors import KernelUnavailable
from grader.notebook import Cell, Notebook, Output, read_outputs
from grader.rubric import CodeTests, OutputMatch, Rubric, RunLimits
from grader.sandbox.bubblewrap import CONNECTION, driver_script, inner_command, outer_command, require_sandbox
from grader.sandbox.inputs import readable
from grader.sandbox.job import MAX_RESTARTS, CellRun, CodeCell, Job, JobResult, Restart, TestCode
from grader.sandbox.processes import MAX_STRETCH
from grader.sandbox.report import Rerun, RerunStatus, TestResult
from grader.timeouts import SandboxTimeouts
from grader.verdicts import Evidence, Flag

BACKEND = "bubblewrap"
_MAX_RESULT_BYTES = 256 * 2**20
_LIMITS = ("CellTimeout", "MemoryLimit", "CpuLimit", "OutputLimit", "KernelDied")
_STATUSES = ("finished", "timed_out", "died")


def rerun_for(rubric: Rubric, notebook: Notebook, inputs: Path | None = None) -> Rerun:
    """Re-runs with the rubric's limits, its tests, and the variables that its output checks name."""
    return rerun(notebook, rubric.limits, inputs, code_tests_of(rubric), probes_of(rubric))


def code_tests_of(rubric: Rubric) -> list[TestCode]:
    checks = [(item.id, item.check) for item in rubric.items if isinstance(item.check, CodeTests)]
    return [TestCode(name, check.code, check.after_cell) for name, check in checks]


def probes_of(rubric: Rubric) -> list[str]:
    """Variables whose values the rubric's output checks compare."""
    names = {item.check.where.variable for item in rubric.items if isinstance(item.check, OutputMatch)}
    return sorted(name for name in names if name.isidentifier())


def rerun(
    notebook: Notebook,
    limits: RunLimits,
    inputs: Path | None = None,
    tests: Sequence[TestCode] = (),
    probes: Sequence[str] = (),
    startup_timeout_s: float = SandboxTimeouts().startup_s,
) -> Rerun:
    """Runs every code cell in the sandbox. Raises SandboxUnavailable rather than run without one."""
    require_sandbox()
    job = Job(
        kernel=inner_command(limits, inputs, kernel_command(notebook)),
        language=notebook.language,
        cells=[CodeCell(cell.index, cell.source, cell.grade_id) for cell in notebook.code_cells],
        tests=list(tests),
        probes=list(probes),
        cell_timeout_s=limits.cell_timeout_s,
        notebook_timeout_s=limits.notebook_timeout_s,
        startup_timeout_s=startup_timeout_s,
        memory_mib=limits.memory_mib,
        cpu_s=limits.cpu_s,
        output_kib=limits.output_kib,
    )
    begin = time.monotonic()
    with readable(inputs) as shown:
        result = _run(job, shown)
    return _report(notebook, result, time.monotonic() - begin)


def kernel_command(notebook: Notebook) -> list[str]:
    """By language: a notebook cannot choose its kernel."""
    if notebook.language == "python":
        return [sys.executable, "-m", "ipykernel_launcher", "-f", CONNECTION]
    if notebook.language == "r":
        try:
            argv = KernelSpecManager().get_kernel_spec("ir").argv
        except NoSuchKernel:
            raise KernelUnavailable("There is no R kernel on this machine: install IRkernel.") from None
        return [CONNECTION if word == "{connection_file}" else word for word in argv]
    raise KernelUnavailable(f"The grader runs Python and R; this notebook's kernel is `{notebook.kernel}`.")


def _run(job: Job, inputs: Path | None) -> JobResult:
    command = outer_command(inputs, [sys.executable, driver_script()])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            limit_s = longest_run_s(job.notebook_timeout_s, job.startup_timeout_s)
            answer, said = process.communicate(msgspec.json.encode(job), timeout=limit_s)
        except subprocess.TimeoutExpired:
            answer, said = b"", b"The driver did not end in time."
        finally:
            _kill(process)
    if process.returncode != 0 or len(answer) > _MAX_RESULT_BYTES:
        return JobResult("died", [], notes=[said.decode(errors="replace")[-500:]])
    return msgspec.json.decode(answer, type=JobResult)


def longest_run_s(
    notebook_timeout_s: float,
    startup_timeout_s: float = SandboxTimeouts().startup_s,
    slack_s: float = SandboxTimeouts().slack_s,
) -> float:
    """On the wall, on the busiest machine."""
    return MAX_STRETCH * notebook_timeout_s + (1 + MAX_RESTARTS) * (startup_timeout_s + slack_s)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """bubblewrap's processes die with their parent: the first is enough."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _report(notebook: Notebook, result: JobResult, run_s: float) -> Rerun:
    runs = {run.index: run for run in result.cells}
    cells = tuple(_cell(cell, runs.get(cell.index)) for cell in notebook.cells)
    return Rerun(
        notebook=msgspec.structs.replace(notebook, cells=cells),
        status=cast(RerunStatus, result.status if result.status in _STATUSES else "died"),
        backend=BACKEND,
        tests={name: TestResult(passed=run.passed, message=run.message) for name, run in result.tests.items()},
        probes={name: read_outputs(outputs) for name, outputs in result.probes.items()},
        flags=tuple(_flags(notebook, cells, result)),
        run_s=run_s,
    )


def _cell(cell: Cell, run: CellRun | None) -> Cell:
    if cell.kind != "code":
        return cell
    outputs = read_outputs(run.outputs) if run is not None else ()
    if run is not None and run.cut:
        outputs = (*outputs, Output(kind="stream", stream="stderr", text="(more output was left out)", cut=True))
    return msgspec.structs.replace(cell, outputs=outputs, execution_count=run.execution_count if run else None)


def _flags(notebook: Notebook, cells: Sequence[Cell], result: JobResult) -> list[Flag]:
    flags = []
    if result.status != "finished":
        message = "The notebook ran out of time." if result.status == "timed_out" else "The notebook could not be run."
        flags.append(Flag(code=f"rerun_{result.status}", message=" ".join([message, *result.notes])))
    for cell in cells:
        if cell.error is not None and cell.error.error_name in _LIMITS:
            where = (Evidence(cell=cell.index, quote=cell.error.error_value, part="output"),)
            flags.append(Flag(code="resource_limit", message=cell.error.error_value, evidence=where))
        if any(output.cut for output in cell.outputs):
            where = (Evidence(cell=cell.index, part="output"),)
            flags.append(Flag(code="huge_output", message="The cell writes more than the limit.", evidence=where))
    flags += [_restart_flag(restart) for restart in result.restarts]
    hidden = [
        cell.index for cell, old in zip(cells, notebook.cells, strict=True) if cell.error and old.ran and not old.error
    ]
    if hidden:
        places = tuple(Evidence(cell=index, part="output") for index in hidden)
        flags.append(
            Flag(
                code="fails_when_run",
                message="Cells fail in the re-run that show no error in the file.",
                evidence=places,
            )
        )
    return flags


def _restart_flag(restart: Restart) -> Flag:
    """What the cell had done before it was ended is lost to the cells after it."""
    message = "The kernel was started again after this cell, and the cells before it were run again."
    if restart.different:
        cells = ", ".join(str(index + 1) for index in restart.different)
        message += f" This time it went otherwise in cell {cells}: look at what follows."
    where = (Evidence(cell=restart.cell, quote=restart.why, part="output"),)
    return Flag(code="kernel_restarted", message=message, evidence=where)
