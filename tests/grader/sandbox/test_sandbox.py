"""The sandbox: escapes that student code may try, each tried and failed."""

import ast
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grader.errors import KernelUnavailable, SandboxUnavailable
from grader.rubric import RunLimits, load_rubric
from grader.sandbox import Rerun, TestCode, kernel_command, rerun, rerun_for, why_unavailable
from grader.sandbox import bubblewrap as backend
from grader.sandbox.processes import MAX_STRETCH, own_time_s
from tests.support.notebooks import code, notebook, printed, text

needs_sandbox = pytest.mark.skipif(bool(why_unavailable()), reason=f"no sandbox: {why_unavailable()}")
LIMITS = RunLimits(cell_timeout_s=30, notebook_timeout_s=300, memory_mib=400, disk_mib=32, processes=64)


def run(*sources: str, limits: RunLimits = LIMITS, inputs: Path | None = None, **more: object) -> Rerun:
    return rerun(notebook(*(code(source) for source in sources)), limits, inputs, **more)  # type: ignore[arg-type]


def said(done: Rerun, index: int = 0) -> str:
    return "".join(output.text for output in done.notebook.cells[index].outputs)


def failure(done: Rerun, index: int = 0) -> str:
    error = done.notebook.cells[index].error
    return error.error_name if error else ""


@pytest.fixture
def listener() -> Iterator[tuple[str, int]]:
    """A server on this machine that anything outside the sandbox reaches."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close(), daemon=True)
        thread.start()
        yield server.getsockname()


_PREFIXES = [Path(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
PLACES = {*_PREFIXES, *(path.resolve() for path in _PREFIXES)}


def _files_of(home: str) -> Iterator[str]:
    """Outside the interpreter, which the sandbox shows."""
    for folder, folders, names in os.walk(home):
        folders[:] = [name for name in folders if PLACES.isdisjoint({Path(folder, name), Path(folder, name).resolve()})]
        yield from (f"{folder}/{name}" for name in names if Path(folder, name).is_file())


def _program(*command: str) -> str:
    assert shutil.which(command[0])
    return f"subprocess.run({list(command)!r}, check=True, capture_output=True)"


ATTEMPT = """
def attempt(what):
    try:
        print("DONE", what())
    except BaseException as error:
        print("FAILED", type(error).__name__, getattr(error, "errno", ""))
import os, socket, subprocess
"""


def _attempts(listener: tuple[str, int], secret: str, home: str) -> dict[str, tuple[str, set[str]]]:
    """By name: code, and the errors that mean that it failed for the right reason."""
    treasure = next(_files_of(home), "")
    assert treasure, "the home folder has something to steal"
    missing, denied = {"FileNotFoundError"}, {"PermissionError", "FileNotFoundError"}
    return {
        "network": (f"socket.create_connection({listener!r}, timeout=5)", {"ConnectionRefusedError"}),
        "any network": ('socket.create_connection(("203.0.113.1", 80), timeout=5)', {"OSError"}),  # unreachable
        "names": ('socket.getaddrinfo("example.org", 80)', {"gaierror"}),
        "the database": (f"open({secret!r}).read()", missing),
        "its link among the inputs": ('open("link.csv").read()', missing),
        "a link of one's own": (f"(os.symlink({secret!r}, 'mine'), open('mine').read())", missing),
        "the database by /proc": (f"open('/proc/1/root' + {secret!r}).read()", denied),
        "settings of the machine": ("open('/proc/sys/kernel/hostname', 'w').write('x')", {"OSError", *denied}),
        "accounts": ("open('/etc/passwd').read()", missing),
        "a file of the home folder": (f"open({treasure!r}).read()", missing),
        "ssh keys": (f"os.listdir({home!r} + '/.ssh')", missing),
        "writing to the home folder": (f"open({home!r} + '/x', 'w')", {"OSError", *denied}),
        "writing to the system": ("open('/usr/x', 'w')", {"OSError", *denied}),
        "writing to the interpreter": ("open(os.path.dirname(os.__file__) + '/os.py', 'a')", {"OSError", *denied}),
        "writing to the root": ("open('/x', 'w')", {"OSError", *denied}),
        "writing to devices": ("open('/dev/x', 'w')", {"OSError", *denied}),
        "changing an input": ("open('sales.csv', 'w')", {"OSError", *denied}),
        "replacing an input": ("(os.rename('sales.csv', 'old.csv'), 'renamed')", {"OSError", *denied}),
        "mounting": (_program("mount", "-t", "tmpfs", "x", "/mnt"), {"CalledProcessError"}),
        "a namespace of one's own": (_program("unshare", "-Ur", "true"), {"CalledProcessError"}),
        "killing the driver": ("[os.kill(pid, 9) for pid in others()][0]", {"IndexError"}),  # it sees no process
    }


@needs_sandbox
@pytest.mark.slow
def test_escapes_fail(tmp_path: Path, listener: tuple[str, int]) -> None:
    secret = tmp_path / "grades.sqlite"
    secret.write_text("all the grades")
    data = tmp_path / "inputs"
    data.mkdir()
    (data / "sales.csv").write_text("a,b\n1,2\n")
    (data / "sales.csv").chmod(0o600)  # as root, the sandbox's user is another one
    (data / "link.csv").symlink_to(secret)
    home = os.path.expanduser("~")
    attempts = _attempts(listener, str(secret), home)
    others = "def others(): return {int(name) for name in os.listdir('/proc') if name.isdigit()} - {1, os.getpid()}"
    cells = [f"attempt(lambda: {what})" for what, _ in attempts.values()]
    listed = f"print([name for name in os.listdir({home!r})] if os.path.exists({home!r}) else [])"
    first = "for name in ('1', 'self'): print(open(f'/proc/{name}/limits').read().replace('unlimited', '0'), end='$')"
    good = "print(open('sales.csv').read(), os.environ['HOME'], os.getcwd())\nopen('own.txt', 'w').write('mine')"
    done = run(
        ATTEMPT + others,
        *cells,
        good,
        "os.kill(1, 9); os.kill(-1, 0)",
        "print('still here')",
        listed,
        first,
        inputs=data,
    )
    assert done.status == "finished", done.flags
    for index, (name, (_, right)) in enumerate(attempts.items(), 1):
        failed, kind = said(done, index).split()[:2]
        assert (failed, kind in right) == ("FAILED", True), f"{name}: {said(done, index)}"
    assert "1,2" in said(done, len(attempts) + 1)
    assert failure(done, len(attempts) + 1) == ""
    assert "still here" in said(done, len(attempts) + 3)
    shown = [Path(home) / name for name in ast.literal_eval(said(done, len(attempts) + 4))]
    assert all(any(path in (place, *place.parents) for place in PLACES) for path in shown), "the way to Python alone"
    limits = [
        {line[:25].strip(): line[25:].split()[1] for line in one.splitlines()[1:]}
        for one in said(done, len(attempts) + 5).split("$")[:2]
    ]
    assert int(limits[1].pop("Max processes")) == LIMITS.processes
    assert LIMITS.processes <= int(limits[0].pop("Max processes")) < 2 * LIMITS.processes
    assert limits[0] == limits[1], "student code can write into the memory of the first process"
    assert secret.read_text() == "all the grades"
    assert os.environ["PATH"] not in said(done, len(attempts) + 1)


@needs_sandbox
@pytest.mark.slow
def test_processes_disk_and_memory_are_limited() -> None:
    bomb = """
import os, time
made = []
try:
    for i in range(2000):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
            os._exit(0)
        made.append(pid)
except OSError as error:
    print("FAILED after", len(made), error)
for pid in made:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""
    disk = """
written = 0
try:
    for name in ("a", "b", "/dev/shm/c", "/tmp/d"):
        with open(name, "wb") as file:
            for i in range(64):
                file.write(bytes(2**20))
                file.flush()
                written += 1
except OSError as error:
    print("FAILED after", written, "MiB", error.errno)
import os
os.unlink("a")
"""
    huge = "x = bytearray(2**40)"
    slow = "keep = []\nwhile True:\n    keep.append(bytearray(2**22))"
    done = run("y = 7", bomb, disk, huge, slow, "print('after', y)")
    assert done.status == "finished", done.flags
    made = int(said(done, 1).split("after ")[1].split()[0])
    assert 0 < made < LIMITS.processes
    assert int(said(done, 2).split("after ")[1].split()[0]) <= LIMITS.disk_mib
    assert failure(done, 3) == "MemoryError"
    assert failure(done, 4) == "MemoryLimit"
    assert said(done, 5) == "after 7\n", "earlier cells run again after the kernel was killed"
    assert [flag.code for flag in done.flags if flag.code == "resource_limit"]


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    ["os.waitpid(pid, 0)", "time.sleep(1.2)"],
    ids=["children that are waited for", "children that are not waited for"],
)
def test_processor_time_is_limited_for_all_processes_together(wait: str) -> None:
    """Each child has little of it, and none comes near the limit."""
    many = f"""
import os, signal, time
{"signal.signal(signal.SIGCHLD, signal.SIG_IGN)" if "sleep" in wait else ""}
for number in range(600):
    pid = os.fork()
    if pid == 0:
        until = time.process_time() + 1
        while time.process_time() < until: pass
        os._exit(0)
    print("number", number, flush=True)
    {wait}
"""
    limits = RunLimits(cell_timeout_s=500, notebook_timeout_s=500, cpu_s=5)
    done = run("x = 1", many, "print('after')", limits=limits)
    assert (failure(done, 1), done.status) == ("CpuLimit", "timed_out"), done.flags
    assert not done.notebook.cells[2].ran
    assert "more than 5 s of processor time" in done.flags[0].message
    assert "number 1\n" in said(done, 1), "it had gone on after the first ones"


@needs_sandbox
@pytest.mark.slow
def test_endless_cells_fail_alone() -> None:
    limits = RunLimits(cell_timeout_s=3, notebook_timeout_s=300, output_kib=16)
    stubborn = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    silent = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    flood = "b = 2\nwhile True: print('x' * 1000)"
    done = run("a = 1", stubborn, silent, flood, "print(a, b)", limits=limits)
    assert done.status == "finished", done.flags
    assert [failure(done, index) for index in range(1, 3)] == ["CellTimeout"] * 2
    assert failure(done, 3) in ("CellTimeout", "OutputLimit")
    assert 1000 < len(said(done, 3)) < 40_000
    assert said(done, 4) == "1 2\n", "the flood was interrupted, and nothing of it is left"
    codes = [flag.code for flag in done.flags]
    assert "huge_output" in codes
    assert [flag.evidence[0].cell for flag in done.flags if flag.code == "kernel_restarted"] == [1, 2]


@needs_sandbox
@pytest.mark.slow
def test_outputs_that_are_too_large_are_not_read() -> None:
    """One print of 256 MiB. On a very busy machine ipykernel says that the cell has ended before it sends the text:
    then the next cell shows it."""
    limits = RunLimits(cell_timeout_s=10, memory_mib=4096, notebook_timeout_s=300)
    done = run("a = 1", "print('x' * 2**28)", "print(a)", limits=limits)
    assert len(said(done, 1)) < 2**21
    assert {flag.code for flag in done.flags} & {"resource_limit", "rerun_died"}


@contextmanager
def busy_core(spinners: int = 4) -> Iterator[None]:
    """This process and what it starts share one core with programs that never rest."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    spin = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(spin, start_new_session=True) for _ in range(spinners)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
        os.sched_setaffinity(0, before)


@needs_sandbox
@pytest.mark.slow
def test_a_busy_machine_takes_no_time_from_a_cell() -> None:
    """The cell needs 1 s of a processor and may have 1.8 s. It waits for the processor much longer than that."""
    work = (
        "import time\nstart, wall = time.process_time(), time.monotonic()\nwhile time.process_time() - start < 1: pass"
    )
    with busy_core():
        done = run(work, "print(time.monotonic() - wall)", limits=RunLimits(cell_timeout_s=1.8))
    assert float(said(done, 1)) > 1.8, "the fault happened"
    assert failure(done) == ""
    assert not done.flags


def test_a_cell_s_own_time() -> None:
    assert own_time_s(1, {"1": (0, 0)}, {"1": (0, 0)}) == 1, "it sleeps"
    assert own_time_s(1, {"1": (5, 5)}, {"1": (6, 5)}) == 1, "it computes"
    assert own_time_s(1, {"1": (5, 5)}, {"1": (5.25, 5.75)}) == 0.25, "it waits for a processor"
    assert own_time_s(1, {}, {"1": (0, 1)}) == 1 / MAX_STRETCH, "it never waits for ever"
    crowd = {str(name): (0.02, 0.98) for name in range(100)}
    assert own_time_s(1, {}, crowd) == 1, "its processes wait for each other"


@needs_sandbox
@pytest.mark.slow
def test_notebook_has_a_time_limit_and_dead_kernels_are_told() -> None:
    limits = RunLimits(cell_timeout_s=30, notebook_timeout_s=5)
    done = run("print(1)", *["import time\ntime.sleep(60)"] * 4, "print(2)", limits=limits)
    assert done.status == "timed_out"
    assert said(done, 0) == "1\n"
    assert failure(done, 1) == "CellTimeout"
    assert not done.notebook.cells[5].ran
    assert done.flags[0].code == "rerun_timed_out"
    died = run(*["import os; os._exit(1)"] * 4)
    assert died.status == "died"
    assert failure(died, 0) == "KernelDied"
    assert "The kernel was lost" in died.flags[0].message


@needs_sandbox
@pytest.mark.slow
def test_a_kernel_that_never_answers(tmp_path: Path) -> None:
    """It starts, and hangs in its first import."""
    (tmp_path / "ipykernel_launcher.py").write_text("import signal\nsignal.pause()")
    hung = run("print(1)", inputs=tmp_path, startup_timeout_s=1.0)
    assert hung.status == "died"
    assert not hung.notebook.cells[0].ran
    assert [flag.code for flag in hung.flags] == ["rerun_died"]
    assert "The kernel does not answer" in hung.flags[0].message
    assert "1 seconds" in hung.flags[0].message


@needs_sandbox
@pytest.mark.slow
def test_tests_cannot_be_hidden() -> None:
    """A student's code may hide tracebacks; the kernel's reply and the random mark cannot be hidden that way."""
    cheat = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.showtraceback = lambda *args, **kwargs: None
def add(a, b): return 0
print = None
"""
    tests = [
        TestCode("wrong", "assert add(1, 2) == 3"),
        TestCode("right", "assert add(0, 0) == 0"),
        TestCode("no", "nothing"),
    ]
    done = run(cheat, "1 / 0", tests=tests, probes=["add"])
    assert failure(done, 1) == "ZeroDivisionError"
    assert {name: result.passed for name, result in done.tests.items()} == {"wrong": False, "right": True, "no": False}
    assert done.tests["wrong"].message.startswith("AssertionError")


@needs_sandbox
@pytest.mark.slow
def test_rubric_says_what_is_run() -> None:
    rubric = load_rubric("""
assignment: a
rerun: true
items:
  - {id: t, title: T, points: 1, check: {kind: tests, code: "assert avg == 2.5"}}
  - {id: v, title: V, points: 1, check: {kind: output, where: {variable: avg}}}
""")
    done = rerun_for(rubric, notebook(text("# A"), code("avg = 2.5", printed("forged")), code("1/0", printed("fine"))))
    assert done.tests["t"].passed
    assert done.probes["avg"][0].text == "2.5"
    assert done.notebook.cells[1].outputs == ()
    assert "fails_when_run" in {flag.code for flag in done.flags}


def test_refuses_to_run_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    backend.why_unavailable.cache_clear()
    try:
        with pytest.raises(
            SandboxUnavailable, match="runs no student code on this machine: bwrap, setpriv, prlimit is missing"
        ):
            rerun(notebook(code("print(1)")), LIMITS)
    finally:
        monkeypatch.undo()
        backend.why_unavailable.cache_clear()


def test_language_chooses_the_kernel() -> None:
    assert "ipykernel_launcher" in kernel_command(notebook(code("1")))
    import msgspec

    other = msgspec.structs.replace(notebook(code("1")), language="other", kernel="evil")
    with pytest.raises(KernelUnavailable, match="this notebook's kernel is `evil`"):
        kernel_command(other)
