"""A service of a machine, and what a service manager must be able to do with it.

Managers only make text: files and scripts. The deploy code writes and runs them over ssh, and `--dry-run` prints them.
"""

import shlex
from abc import ABC, abstractmethod
from typing import NamedTuple

import msgspec

from disaggregated_inference.timeouts import DeployTimeouts

SUPERVISOR = "supervise.py"


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A node or the gateway. Nothing here is secret."""

    name: str  # of the service: letters, digits, dashes
    title: str  # for people
    arguments: tuple[str, ...]  # of `disagg`
    environment: dict[str, str] = {}
    environment_file: str = ""  # with secret variables; empty: there are none
    url: str = ""  # where it answers /health
    listens: tuple[tuple[str, int], ...] = ()  # addresses and ports: HTTP, then KV
    node: str = ""  # the server's name in the cluster file; empty: the gateway
    role: str = ""
    model: str = ""


class Place(NamedTuple):
    """Where a machine keeps things. All paths are absolute there."""

    home: str
    folder: str
    user: str
    uid: int

    @property
    def current(self) -> str:
        return f"{self.folder}/current"

    @property
    def python(self) -> str:
        return f"{self.current}/venv/bin/python"

    @property
    def supervisor(self) -> tuple[str, ...]:
        """Our supervisor is a file of the release that needs nothing else of it."""
        return self.python, "-I", f"{self.current}/{SUPERVISOR}"

    @property
    def secrets(self) -> str:
        return f"{self.folder}/secrets"

    @property
    def secret_environment(self) -> str:
        """Variables of services and of commands that fetch models, one `NAME='VALUE'` in a line."""
        return f"{self.secrets}/environment"

    @property
    def lock(self) -> str:
        return f"{self.folder}/lock"

    @property
    def audit(self) -> str:
        return f"{self.folder}/audit.jsonl"

    def log(self, service: str) -> str:
        return f"{self.folder}/logs/{service}.log"

    def state(self, service: str) -> str:
        return f"{self.folder}/run/{service}.json"

    def stamp(self, service: str) -> str:
        """What a service was last started with."""
        return f"{self.folder}/run/{service}.started"

    def command(self, service: Service) -> tuple[str, ...]:
        return (self.python, "-m", "disaggregated_inference", *service.arguments)

    def supervised(self, service: Service, *options: str) -> tuple[str, ...]:
        """The command under our own supervisor, which rotates its log."""
        files = ["--log", self.log(service.name), "--state", self.state(service.name)]
        files += ["--environment", service.environment_file] if service.environment_file else []
        return (*self.supervisor, *options, *files, "--", *self.command(service))


class ServiceFile(NamedTuple):
    """A file of a service in its release, and the place where the service manager reads it; empty: only there."""

    name: str
    content: str
    installed: str = ""


class ServiceState(NamedTuple):
    """What a manager says of a service. `restarts`: since it was started by us."""

    is_running: bool
    pid: int = 0
    restarts: int = 0

    @classmethod
    def parse(cls, text: str) -> "ServiceState":
        """The output of a manager's `state` script: `running PID RESTARTS`, or anything else."""
        words = text.split()
        if not words or words[0] != "running":
            restarts = int(words[2]) if len(words) > 2 and words[2].isdigit() else 0
            return cls(False, 0, restarts)
        numbers = [int(word) if word.isdigit() else 0 for word in words[1:3]] + [0, 0]
        return cls(True, numbers[0], numbers[1])


class ServiceManager(ABC):
    """Each method gives a POSIX shell script."""

    kind: str
    note = ""  # what users of this kind must know

    def __init__(self, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        self.place, self.timeouts = place, timeouts

    @abstractmethod
    def file(self, service: Service) -> ServiceFile: ...

    def install(self, service: Service, release: str) -> str:
        """Put the file of a release where the manager reads it."""
        return "true"

    @abstractmethod
    def start(self, service: Service) -> str:
        """Now, and after every boot. No change where it runs already."""

    @abstractmethod
    def stop(self, service: Service) -> str:
        """Now, and for the next boot."""

    @abstractmethod
    def remove(self, service: Service) -> str:
        """Stop it and take its file away."""

    @abstractmethod
    def state(self, service: Service) -> str:
        """Prints `running PID RESTARTS`, or `stopped`."""

    @abstractmethod
    def logs(self, service: Service, count: int, follow: bool) -> str: ...

    @abstractmethod
    def find_in_logs(self, service: Service, text: str) -> str:
        """Prints the lines with this text of everything that is kept, the oldest first."""

    @abstractmethod
    def log_end(self, service: Service) -> str:
        """Prints where the log ends now, for `logs_after`."""

    @abstractmethod
    def logs_after(self, service: Service, end: str) -> str:
        """Prints what was written since; an empty `end`: everything."""

    def is_installed(self, service: Service, release: str) -> str:
        """Succeeds if the manager reads the file of this release."""
        file = self.file(service)
        return words("cmp", "-s", f"{release}/services/{file.name}", file.installed) if file.installed else "true"


def words(*parts: str) -> str:
    return shlex.join(parts)


class FileLogged(ServiceManager):
    """Services under our own supervisor, which writes their log and rotates it."""

    def logs(self, service: Service, count: int, follow: bool) -> str:
        """`-F` goes on with the new file after a rotation."""
        more = ("-F",) if follow else ()
        return f"{words('tail', '-n', str(count), *more, self._log(service))} 2>/dev/null"

    def find_in_logs(self, service: Service, text: str) -> str:
        older = [f"{self._log(service)}.{number}" for number in range(9, 0, -1)]
        return f"cat {words(*older, self._log(service))} 2>/dev/null | {words('grep', '-F', '--', text)} || true"

    def log_end(self, service: Service) -> str:
        return f"cat {words(self._log(service))} 2>/dev/null | wc -c"

    def logs_after(self, service: Service, end: str) -> str:
        """A file that is shorter now was rotated: all of it is new."""
        begin = int(end) if end.strip().isdigit() else 0
        first = f"n=$({self.log_end(service)}); [ $n -ge {begin} ] && n={begin + 1} || n=1"
        return f"{first}; tail -c +$n {words(self._log(service))} 2>/dev/null"

    def _log(self, service: Service) -> str:
        return self.place.log(service.name)
