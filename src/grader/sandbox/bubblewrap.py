"""Commands of bubblewrap. The driver runs in an outer sandbox, the kernel in an inner one.

Outer: no network, own processes, the interpreter and the inputs read-only. Inner: the same, with limits, without the
right to make namespaces, and with processes of its own, so that student code cannot see or signal the driver. As root,
one more layer in front gives up root: the kernel's limits do not hold for root."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from grader.errors import SandboxUnavailable
from grader.rubric import RunLimits
from grader.timeouts import SandboxTimeouts

WORK = "/tmp/notebook"
CONNECTION = "/tmp/notebook-kernel.json"
_DRIVER = "/driver"
_DRIVER_FILES = ("driver.py", "job.py", "processes.py")
_INPUTS = "/inputs"
_UID = "65534"  # the user without rights
_DRIVER_THREADS = 32  # most; outside the inner sandbox they count as well
_CPU_SLACK_S = 5  # the driver, which counts all processes together, comes first and says why
_SYSTEM = ("/usr", "/opt/R")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "R", "fonts", "jupyter")
_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "JUPYTER_CONFIG_DIR": "/tmp/jupyter",
    "JUPYTER_DATA_DIR": "/tmp/jupyter",
    "JUPYTER_RUNTIME_DIR": "/tmp/jupyter",
    "IPYTHONDIR": "/tmp/ipython",
    "JUPYTER_PLATFORM_DIRS": "1",
    "MPLCONFIGDIR": "/tmp/matplotlib",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


def outer_command(inputs: Path | None, command: Sequence[str]) -> list[str]:
    """Starts the command (the driver) in the outer sandbox."""
    sources = _driver_sources(inputs)
    outer = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", *_environment()]
    outer += [*_view(_seen(sources), _disk("/tmp", 64)), "--proc", "/proc"]
    outer += ["--remount-ro", "/", "--chdir", "/tmp", "--", *command]
    return _without_root(sources, outer) if os.geteuid() == 0 else outer


def _without_root(sources: dict[str, str], command: list[str]) -> list[str]:
    """Root's view of the same files, then another user. Files under root's home are reachable in this view only."""
    rights = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    front = ["bwrap", "--die-with-parent", *rights, *_view(sources, _disk("/tmp", 1)), "--bind", "/proc", "/proc"]
    drop = ["setpriv", "--reuid", _UID, "--regid", _UID, "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
    return [*front, *drop, "--inh-caps=-all", "--", *command]


def inner_command(limits: RunLimits, inputs: Path | None, command: Sequence[str]) -> list[str]:
    """Starts the kernel inside the outer sandbox. `{connection_file}` is for Jupyter to fill in."""
    separate = [f"--unshare-{name}" for name in ("user", "pid", "ipc", "uts", "cgroup-try")]
    box = [
        *_limited(limits, _DRIVER_THREADS),
        "bwrap",
        *separate,
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        *_environment(),
    ]
    box += [*_view(_seen(_interpreter()), _disk("/tmp", limits.disk_mib)), "--proc", "/proc"]
    box += [*_disk("/dev/shm", 16), "--dir", WORK]
    for name in _input_names(inputs):
        box += ["--ro-bind", f"{_INPUTS}/{name}", f"{WORK}/{name}"]
    box += ["--ro-bind", "{connection_file}", CONNECTION, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]
    return [*box, "--", *_limited(limits, 0), *command]


def _limited(limits: RunLimits, more_processes: int) -> list[str]:
    """Limits of each process. The driver watches the memory and the processor time of all together. bubblewrap's own
    process, the first in the inner sandbox, has limits, too: student code can write into its memory."""
    return [
        "prlimit",
        f"--nproc={limits.processes + more_processes}",
        f"--as={(limits.memory_mib + 2048) * 2**20}",
        f"--cpu={limits.cpu_s + _CPU_SLACK_S}",
        f"--fsize={limits.disk_mib * 2**20}",
        "--nofile=1024",
        "--core=0",
        "--",
    ]


def driver_script() -> str:
    return f"{_DRIVER}/driver.py"


def _driver_sources(inputs: Path | None) -> dict[str, str]:
    here = Path(__file__).parent
    sources = {**_interpreter(), **{f"{_DRIVER}/{name}": str(here / name) for name in _DRIVER_FILES}}
    return {**sources, **({_INPUTS: str(inputs.resolve())} if inputs is not None else {})}


def _interpreter() -> dict[str, str]:
    """What the interpreter and R need, at the places where they are."""
    named = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    prefixes = {*named, *(str(Path(prefix).resolve()) for prefix in named)}
    found = [path for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC)) if os.path.exists(path)]
    return {path: path for path in [*found, *sorted(prefixes)] if path != "/usr/local"}


def _seen(sources: dict[str, str]) -> dict[str, str]:
    """Inside, files are where the layer in front has put them."""
    return {place: place for place in sources} if os.geteuid() == 0 else sources


def _view(sources: dict[str, str], temporary: list[str]) -> list[str]:
    """Read-only files at their places; folders above them can be entered, and hold nothing else. The temporary disk
    comes first: an interpreter may be under /tmp."""
    arguments = list(temporary)
    for folder in _parents(sources):
        arguments += ["--perms", "0755", "--dir", folder]
    for place, source in sources.items():
        arguments += ["--ro-bind", source, place]
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            arguments += ["--ro-bind", f"/{name}", f"/{name}"]
    return [*arguments, "--dev", "/dev"]


def _parents(places: Iterable[str]) -> list[str]:
    found = {str(folder) for place in places for folder in Path(place).parents if str(folder) != "/"}
    return sorted(found - set(places))


def _environment() -> list[str]:
    settings = [word for name, value in _ENV.items() for word in ("--setenv", name, value)]
    return ["--clearenv", *settings]


def _input_names(inputs: Path | None) -> list[str]:
    """Files and folders; links are left out."""
    return sorted(path.name for path in inputs.iterdir() if not path.is_symlink()) if inputs is not None else []


def _disk(place: str, size_mib: int) -> list[str]:
    """An empty folder in memory that holds so much and no more."""
    return ["--perms", "1777", "--size", str(size_mib * 2**20), "--tmpfs", place]


@functools.cache
def why_unavailable(try_s: float = SandboxTimeouts().try_s) -> str:
    """Empty when the sandbox works: it was tried."""
    if not sys.platform.startswith("linux"):
        return "the sandbox needs Linux."
    missing = [name for name in ("bwrap", "setpriv", "prlimit") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: install the packages bubblewrap and util-linux."
    if {"/", os.path.expanduser("~")} & _interpreter().keys():
        return "the interpreter is installed in the home folder itself, which the sandbox must not show."
    inner = [word.replace("{connection_file}", "/dev/null") for word in inner_command(RunLimits(), None, ["true"])]
    tried = subprocess.run(outer_command(None, inner), capture_output=True, text=True, timeout=try_s, check=False)
    return "" if tried.returncode == 0 else f"bubblewrap does not work here: {tried.stderr.strip()[:300]}"


def require_sandbox() -> None:
    why = why_unavailable()
    if why:
        raise SandboxUnavailable(f"The grader runs no student code on this machine: {why}")
