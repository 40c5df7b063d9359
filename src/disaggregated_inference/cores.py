"""The cores of this machine: how many this process may use, and how nodes on one machine divide them.

Two engines with a thread per core each wait for each other's threads, spinning: on two cores a request was sixty times
slower than with one thread each.
"""

import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_THREADS = 1024


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Cores that this process may use: its CPU affinity, and the CPU quota of its container or service. The file `own`
    says where in the folder `cgroups` that is."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        path = own.read_text().partition("::")[2].strip()
    except OSError:
        path = ""
    return max(1, min([affinity, *_quotas(cgroups / path.lstrip("/"))]))


def _quotas(folder: Path) -> Iterator[int]:
    """Whole cores that a cgroup and those around it allow."""
    for each in (folder, *folder.parents):
        try:
            quota, period = (each / "cpu.max").read_text().split()
            yield int(quota) // int(period)
        except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
            continue


def configured_threads() -> int:
    """What the user's OMP_NUM_THREADS says; 0: nothing."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(int(first), _MAX_THREADS) if first.isascii() and first.isdigit() else 0


def wait_without_spinning() -> None:
    """OpenMP's threads sleep while they wait for each other, unless the user has set it. They read this when torch,
    MLX's BLAS or llama.cpp is loaded: it must run before."""
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("KMP_BLOCKTIME", "0")):
        os.environ[name] = os.environ.get(name) or value


def nodes_folder() -> Path:
    """Of this machine and user."""
    return Path(tempfile.gettempdir()) / f"disagg-nodes-{os.getuid()}"


class CoreShare:
    """A node's part of the cores. Every node on a machine has a locked file in one folder; a lock ends with its
    process, however that ends. The file holds the node's number of threads if the user has set it, else 0: such nodes
    divide the cores that the others leave."""

    def __init__(self, fixed: int = 0, folder: Path | None = None, cores: int | None = None) -> None:
        self._fixed, self._folder = fixed, folder or nodes_folder()
        self._cores = cores or available_cores()
        self._file: int | None = None
        self._path: Path | None = None

    def join(self) -> None:
        """Without the folder the node counts as the only one."""
        try:
            self._require_private_folder()
            name = f"{os.getpid()}-{secrets.token_hex(4)}"
            hidden, self._path = self._folder / f".{name}", self._folder / name
            self._file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._file, b"%d" % self._fixed)
            hidden.rename(self._path)  # only now: an unlocked file counts as that of a dead node
        except OSError as error:
            self.leave()
            log.warning("cannot share the cores with other nodes on this machine: %s; set --threads on each", error)

    def _require_private_folder(self) -> None:
        """Another user could have made it, in a folder that everyone may write to."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise OSError(f"{self._folder} is not a folder of this user")

    def leave(self) -> None:
        """Its engine needs no cores, or the node ends."""
        if self._path:
            self._path.unlink(missing_ok=True)
        if self._file is not None:
            os.close(self._file)
        self._file = self._path = None

    @property
    def threads(self) -> int:
        """For this node's engine, at this moment."""
        if self._fixed:
            return self._fixed
        others = list(self._others()) if self._path else []
        return max(1, (self._cores - sum(others)) // (1 + others.count(0)))

    def _others(self) -> Iterator[int]:
        """The files' numbers. Files of dead nodes are removed."""
        try:
            paths = [path for path in self._folder.iterdir() if path != self._path and path.name[0] != "."]
        except OSError:
            return
        for path in paths:
            try:
                if (threads := _read_if_locked(path)) is None:
                    path.unlink(missing_ok=True)
                else:
                    yield threads
            except OSError:
                continue


def _read_if_locked(path: Path) -> int | None:
    """None: no process holds the lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read(8)
            return min(int(text), _MAX_THREADS) if text.isdigit() else 0
    return None
