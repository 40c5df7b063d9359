"""The driver: runs inside the outer sandbox, starts the kernel in an inner one, and sends it the cells.

Student code is in the inner sandbox only: it sees neither this process nor its pipes. The grader starts this file as a
script with the file job.py beside it; the grader's package is not in the sandbox."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import nbformat.v4
import zmq
import zmq.asyncio
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

sys.path.insert(0, str(Path(__file__).parent))
from job import MAX_RESTARTS, CellRun, CodeCell, Job, JobResult, Restart, TestCode, TestRun  # type: ignore[import-not-found]
from processes import CellClock, CpuMeter, proportional_bytes, resident_bytes  # type: ignore[import-not-found]

_TICK_S = 0.1
_INTERRUPT_S = 5.0  # of a cell's time, for the end of a cell that was interrupted and for its last outputs
_OUTPUTS_S = 60  # for outputs that are still on their way when the kernel says that a cell has ended
_LIMITS_POLL_S = 0.1
_FLOOD_BYTES = 64 * 2**20  # a cell that writes more is ended: what is not kept must still be read
_LARGEST_MESSAGE_BYTES = 128 * 2**20


class BoundedClient(NotebookClient):
    """Keeps a limited amount of each cell's outputs; remembers the kernel's reply."""

    limit_bytes = 0
    used_bytes = 0
    cut = False
    reply: dict[str, Any] = {}  # noqa: RUF012

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] in ("stream", "display_data", "execute_result", "update_display_data"):
            left = max(0, self.limit_bytes - self.used_bytes)
            self.used_bytes += _size(msg["content"])
            if self.used_bytes > self.limit_bytes:
                self.cut = True
                if msg["msg_type"] != "stream" or not left:
                    return None
                msg["content"]["text"] = msg["content"]["text"][:left]
        return super().process_message(msg, cell, cell_index)

    def begin(self, limit_bytes: int) -> None:
        self.limit_bytes, self.used_bytes, self.cut, self.reply = limit_bytes, 0, False, {}


def _size(content: dict[str, Any]) -> int:
    return (
        len(content["text"]) if "text" in content else sum(len(str(part)) for part in content.get("data", {}).values())
    )


class Executed(msgspec.Struct):
    """One piece of code that was run. `problem`: a limit ended it."""

    outputs: list[dict[str, Any]]
    count: int | None
    cut: bool
    problem: str

    @property
    def failed(self) -> bool:
        return any(output.get("output_type") == "error" for output in self.outputs)


class Driver:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.left_s = job.notebook_timeout_s
        self.done: list[tuple[CodeCell, bool]] = []  # to run again after a restart; whether it failed
        self.notes: list[str] = []
        self.restarts: list[Restart] = []
        self.cell = -1
        self.over_memory = self.over_cpu = False
        self.cpu = CpuMeter()
        self.client: BoundedClient | None = None

    async def run(self) -> JobResult:
        watch = asyncio.create_task(self._watch_limits())
        cells, tests, probes, status = [], dict[str, TestRun](), dict[str, Any](), "finished"
        try:
            await self._start()
            for cell in self.job.cells:
                cells.append(await self._run_cell(cell))
                await self._run_tests(
                    [test for test in self.job.tests if test.after_cell == cell.grade_id != ""], tests
                )
            await self._run_tests(self.job.tests, tests)
            for name in self.job.probes:
                probes[name] = await self._probe(name)
        except _TimeOver:
            status = "timed_out"
        except _KernelLost as error:
            self.notes.append(str(error))
            status = "died"
        watch.cancel()
        await self._stop()
        cells += [CellRun(cell.index, []) for cell in self.job.cells[len(cells) :]]
        return JobResult(status, cells, tests, probes, self.notes, self.restarts)

    async def _start(self) -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE_BYTES)
        manager = AsyncKernelManager(connection_file="/tmp/driver/kernel.json", context=context)
        manager._kernel_spec = KernelSpec(
            argv=list(self.job.kernel), language=self.job.language, display_name="", interrupt_mode="message"
        )
        self.client = BoundedClient(
            cast(Any, nbformat.v4).new_notebook(),
            km=manager,
            allow_errors=True,
            record_timing=False,
            startup_timeout=int(self.job.startup_timeout_s),
            timeout=None,  # `_within` counts the cell's own time
            iopub_timeout=_OUTPUTS_S,
            raise_on_iopub_timeout=True,
            store_widget_state=False,
        )
        self.client.on_cell_executed = self._remember
        self.over_memory = False
        try:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            await self.client.async_start_new_kernel(**quiet)
            await self.client.async_start_new_kernel_client()
        except (RuntimeError, DeadKernelError, OSError) as error:
            raise _KernelLost(f"The kernel does not answer: {error}") from None

    def _remember(self, cell: Any, cell_index: int, execute_reply: dict[str, Any]) -> None:
        assert self.client is not None
        self.client.reply = execute_reply["content"]

    async def _run_cell(self, cell: CodeCell) -> CellRun:
        if not cell.source.strip():
            return CellRun(cell.index, [])
        self.cell = cell.index
        ran = await self._execute(cell.source)
        if not ran.problem:
            self.done.append((cell, ran.failed))
        return CellRun(cell.index, ran.outputs, ran.count, ran.cut)

    async def _execute(self, source: str) -> Executed:
        """Errors stay in the cell. A kernel that is lost is started again."""
        ran, lost = await self._execute_once(source)
        if lost:
            await self._restart(ran.problem)
        return ran

    async def _execute_once(self, source: str) -> tuple[Executed, bool]:
        """The second: the kernel is lost."""
        client, cell = self._next_cell(source)
        problem, lost = await self._limited(client, asyncio.ensure_future(client.async_execute_cell(cell, 0)))
        outputs = [dict(output) for output in cell.outputs]
        if problem:  # the error of the interrupt says less
            outputs = [output for output in outputs if output["output_type"] != "error"] + _error(problem)
        else:
            outputs += _unseen_error(client.reply, outputs)
        return Executed(outputs, cell.execution_count or 1, client.cut, problem[1] if problem else ""), lost

    def _next_cell(self, source: str) -> tuple[BoundedClient, Any]:
        if self.left_s <= 0:
            raise _TimeOver
        assert self.client is not None
        self.client.begin(self.job.output_kib * 1024)
        cell = cast(Any, nbformat.v4).new_code_cell(source)
        self.client.nb.cells = [cell]
        return self.client, cell

    async def _limited(
        self, client: BoundedClient, running: "asyncio.Future[Any]"
    ) -> tuple[tuple[str, str] | None, bool]:
        """The limit that ended the cell, and whether the kernel is lost. An interrupted cell ends by itself, with its
        last outputs: none of them is left for the next cell."""
        limit_s = min(self.job.cell_timeout_s, self.left_s)
        try:
            if await self._within(running, limit_s, client):
                await running
                return None, False
            flood = client.used_bytes > _FLOOD_BYTES
            problem = _flood() if flood else ("CellTimeout", f"The cell ran longer than {round(limit_s, 1):g} s.")
            await self._interrupt()
            if await self._within(running, _INTERRUPT_S):
                await running
                return problem, False
            running.cancel()
            return problem, True
        except CellTimeoutError:
            return (
                "OutputLimit",
                "Outputs did not arrive; those of this cell or of the one before may be too large.",
            ), True
        except DeadKernelError:
            return self._why_it_died(), True

    def _why_it_died(self) -> tuple[str, str]:
        if self.over_cpu:
            return "CpuLimit", f"The notebook used more than {self.job.cpu_s:g} s of processor time."
        if self.over_memory:
            return "MemoryLimit", f"The notebook used more than {self.job.memory_mib} MiB."
        return "KernelDied", "The kernel died."

    async def _within(
        self, running: "asyncio.Future[Any]", limit_s: float, client: BoundedClient | None = None
    ) -> bool:
        """Whether the cell ended in its time, and without a flood of outputs."""
        clock = CellClock()
        while not running.done() and clock.own_s < limit_s and not (client and client.used_bytes > _FLOOD_BYTES):
            await asyncio.wait({running}, timeout=_TICK_S)
            clock.tick()
        self.left_s -= clock.own_s
        return running.done()

    async def _interrupt(self) -> None:
        assert self.client is not None
        with contextlib.suppress(Exception):
            await cast(Any, self.client.km).interrupt_kernel()

    async def _restart(self, why: str) -> None:
        """A new kernel, with the cells that worked run again, so that later cells get their chance."""
        await self._stop()
        if self.over_cpu:
            self.left_s = 0.0  # nothing more runs
            self.notes.append(why)
            return None
        if len(self.restarts) == MAX_RESTARTS:
            raise _KernelLost(f"The kernel was lost {MAX_RESTARTS + 1} times.")
        await self._start()
        restart = Restart(self.cell, why, [])
        self.restarts.append(restart)
        for cell, failed in list(self.done):
            ran, lost = await self._execute_once(cell.source)
            if lost:  # it worked before; later cells must do without it
                self.done.remove((cell, failed))
                return await self._restart(f"Cell {cell.index + 1}, when it was run again: {ran.problem}")
            if ran.failed != failed:
                restart.different.append(cell.index)

    async def _run_tests(self, due: Sequence[TestCode], tests: dict[str, TestRun]) -> None:
        for test in due:
            if test.id not in tests:
                tests[test.id] = await self._run_test(test)

    async def _run_test(self, test: TestCode) -> TestRun:
        """Passed: no error, and the random mark after the last line was printed."""
        mark = secrets.token_hex(16)
        last = f'cat("{mark}")' if self.job.language == "r" else f'__import__("sys").stdout.write("{mark}")'
        ran = await self._execute(f"{test.code}\n{last}\n")
        errors = [output for output in ran.outputs if output.get("output_type") == "error"]
        seen = any(mark in str(output.get("text", "")) for output in ran.outputs)
        if errors:
            return TestRun(False, f"{errors[0].get('ename')}: {errors[0].get('evalue')}"[:500])
        return TestRun(seen, "" if seen else "The test did not reach its last line, and showed no error.")

    async def _probe(self, name: str) -> list[dict[str, Any]]:
        ran = await self._execute(name)
        return [] if ran.failed else ran.outputs

    async def _watch_limits(self) -> None:
        """Kills the kernel's sandbox when all its processes together hold too much memory, or have had too much of the
        processors."""
        while True:
            await asyncio.sleep(_LIMITS_POLL_S)
            if not self.over_cpu and self.cpu.read_s() > self.job.cpu_s:
                self.over_cpu = True
                self._kill()
            limit = self.job.memory_mib * 2**20
            if not self.over_memory and resident_bytes() > limit and proportional_bytes() > limit:
                self.over_memory = True
                self._kill()

    def _kill(self) -> None:
        provisioner = self.client.km.provisioner if self.client is not None and self.client.km is not None else None
        if provisioner is not None and getattr(provisioner, "pid", None):
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(Any, provisioner).pid, signal.SIGKILL)

    async def _stop(self) -> None:
        if self.client is None:
            return
        self.cpu.start_again()
        self._kill()
        with contextlib.suppress(Exception):
            await self.client._async_cleanup_kernel()
        with contextlib.suppress(FileNotFoundError):
            os.unlink("/tmp/driver/kernel.json")


class _TimeOver(Exception):
    """The notebook's time has ended."""


class _KernelLost(Exception):
    """No kernel, and no more tries."""


def _flood() -> tuple[str, str]:
    return "OutputLimit", f"The cell wrote more than {_FLOOD_BYTES >> 20} MiB of output."


def _error(problem: tuple[str, str]) -> list[dict[str, Any]]:
    name, value = problem
    return [{"output_type": "error", "ename": name, "evalue": value, "traceback": [f"{name}: {value}"]}]


def _unseen_error(reply: dict[str, Any], outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The kernel's reply says error, but no output does: student code may have hidden the traceback."""
    shown = any(output.get("output_type") == "error" for output in outputs)
    if reply.get("status") != "error" or shown:
        return []
    return _error((str(reply.get("ename", "HiddenError")), str(reply.get("evalue", ""))[:500]))


def main() -> None:
    os.makedirs("/tmp/driver", exist_ok=True)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    answer = sys.stdout.buffer
    sys.stdout = sys.stderr
    answer.write(msgspec.json.encode(asyncio.run(Driver(job).run())))
    answer.flush()
    os._exit(0)  # zmq's threads have nothing left to say


if __name__ == "__main__":
    main()
