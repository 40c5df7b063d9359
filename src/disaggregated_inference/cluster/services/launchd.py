"""launchd on macOS: a daemon of the system, which starts at boot, or an agent of a user who is logged in."""

import plistlib
import shlex

from disaggregated_inference.cluster.services.service import (
    FileLogged,
    Place,
    Service,
    ServiceFile,
    words,
)
from disaggregated_inference.timeouts import DeployTimeouts

_TRIES = 20  # launchd answers "Input/output error" until the earlier job is gone


class Launchd(FileLogged):
    """The system's domain. It needs root: `sudo -n`, where the login is not root's."""

    kind = "launchd"
    _folder, _domain = "/Library/LaunchDaemons", "system"
    _remedy = "error: launchd refuses the service: look at its .launchd.log in the folder of logs"

    def __init__(self, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        super().__init__(place, timeouts)
        self._sudo: tuple[str, ...] = () if place.uid == 0 else ("sudo", "-n")

    def file(self, service: Service) -> ServiceFile:
        name = f"{service.name}.plist"
        text = plistlib.dumps(self._properties(service), sort_keys=False).decode()
        return ServiceFile(name, text, f"{self._folder}/{name}")

    def _properties(self, service: Service) -> dict[str, object]:
        start_log = self.place.log(f"{service.name}.launchd")  # what is said before our own log begins
        return {
            "Label": service.name,
            **self._owner(),
            "ProgramArguments": list(self.place.supervised(service, "--once")),
            "EnvironmentVariables": dict(service.environment),
            "WorkingDirectory": self.place.folder,
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": 5,
            "ExitTimeOut": self.timeouts.stop_s,
            "ProcessType": "Interactive",  # else macOS slows a background job down
            "Umask": 0o077,
            "SoftResourceLimits": {"NumberOfFiles": 65536},
            "HardResourceLimits": {"NumberOfFiles": 65536},
            "StandardOutPath": start_log,
            "StandardErrorPath": start_log,
        }

    def _owner(self) -> dict[str, object]:
        return {"UserName": self.place.user}

    def _install_command(self, source: str, target: str) -> str:
        return words(*self._sudo, "install", "-m", "644", "-o", "root", "-g", "wheel", source, target)

    def install(self, service: Service, release: str) -> str:
        """With the folder of logs: launchd opens them before our program runs, and makes no folders."""
        file, logs = self.file(service), f"{self.place.folder}/logs"
        folder = words("mkdir", "-p", "-m", "700", logs)
        return f"{folder} && {self._install_command(f'{release}/services/{file.name}', file.installed)}"

    def start(self, service: Service) -> str:
        target = f"{self._domain}/{service.name}"
        enable = self._launchctl("enable", target)
        bootstrap = self._launchctl("bootstrap", self._domain, f"{self._folder}/{service.name}.plist")
        loaded = f"{self._launchctl('print', target)} >/dev/null 2>&1"
        give_up = f"[ $i -lt {_TRIES} ] || {{ echo {shlex.quote(self._remedy)} >&2; exit 1; }}"
        again = f"i=0; until {bootstrap}; do i=$((i+1)); {give_up}; sleep 0.5; done"
        return f"{enable} && if {loaded}; then {self._launchctl('kickstart', target)}; else {again}; fi"

    def stop(self, service: Service) -> str:
        target = f"{self._domain}/{service.name}"
        gone = f"while {self._launchctl('print', target)} >/dev/null 2>&1; do sleep 0.5; done"
        return f"{self._launchctl('disable', target)}; {self._launchctl('bootout', target)} 2>/dev/null; {gone}"

    def remove(self, service: Service) -> str:
        return f"{self.stop(service)}; {words(*self._sudo, 'rm', '-f', f'{self._folder}/{service.name}.plist')}"

    def state(self, service: Service) -> str:
        return (
            f"{self._launchctl('print', f'{self._domain}/{service.name}')} 2>/dev/null | awk '"
            '$1=="state" && !s {s=$3} $1=="pid" && !p {p=$3} $1=="runs" && !r {r=$3} '
            'END {print (s=="running" ? "running" : "stopped"), p+0, (r>0 ? r-1 : 0)}\''
        )

    def _launchctl(self, *arguments: str) -> str:
        return words(*self._sudo, "launchctl", *arguments)


class LaunchdUser(Launchd):
    kind = "launchd-user"
    _remedy = "error: launchd has no session of this user: log in at the Mac, or allow sudo without a password"
    note = (
        "launchd starts it when the user logs in, not at boot, and macOS asks there for access to the local network;"
        " allow sudo without a password, or set automatic login"
    )

    def __init__(self, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        super().__init__(place, timeouts)
        self._sudo = ()
        self._folder, self._domain = f"{place.home}/Library/LaunchAgents", f"gui/{place.uid}"

    def _owner(self) -> dict[str, object]:
        return {}

    def _install_command(self, source: str, target: str) -> str:
        return f"{words('mkdir', '-p', self._folder)} && {words('install', '-m', '644', source, target)}"
