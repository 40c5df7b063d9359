"""systemd: units of the system, whose log is the journal, or of the user with lingering."""

import shlex

from disaggregated_inference.cluster.services.service import (
    FileLogged,
    Place,
    Service,
    ServiceFile,
    ServiceManager,
    words,
)
from disaggregated_inference.timeouts import DeployTimeouts

_UNIT = """\
[Unit]
Description=disagg: {title}
{after}StartLimitIntervalSec=0

[Service]
Type=exec
{user}WorkingDirectory={folder}
{environment}{environment_file}ExecStart={command}
Restart=always
RestartSec=2
TimeoutStopSec={stop_s}
KillMode=mixed
UMask=0077
LimitNOFILE=65536
NoNewPrivileges=yes

[Install]
WantedBy={target}
"""
_NETWORK = "After=network-online.target\nWants=network-online.target\n"


class Systemd(ServiceManager):
    """The system's manager. `sudo -n` is used where the login is not root's."""

    kind = "systemd"
    _systemctl: tuple[str, ...] = ("systemctl",)
    _units = "/etc/systemd/system"
    _target, _after = "multi-user.target", _NETWORK

    def __init__(self, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        super().__init__(place, timeouts)
        self._sudo: tuple[str, ...] = () if place.uid == 0 else ("sudo", "-n")

    def file(self, service: Service) -> ServiceFile:
        text = _UNIT.format(
            title=_escape(service.title),
            after=self._after,
            user=self._user(),
            folder=_escape(self.place.folder),
            environment="".join(
                f"Environment={_quote(f'{name}={value}', dollars=False)}\n"
                for name, value in service.environment.items()
            ),
            environment_file=f"EnvironmentFile={_escape(path)}\n" if (path := service.environment_file) else "",
            command=" ".join(_quote(word) for word in self._command(service)),
            stop_s=self.timeouts.stop_s,
            target=self._target,
        )
        name = f"{service.name}.service"
        return ServiceFile(name, text, f"{self._units}/{name}")

    def _command(self, service: Service) -> tuple[str, ...]:
        return self.place.command(service)

    def _user(self) -> str:
        return f"User={self.place.user}\n"

    def install(self, service: Service, release: str) -> str:
        file = self.file(service)
        copy = words(*self._sudo, "install", "-D", "-m", "644", f"{release}/services/{file.name}", file.installed)
        return f"{copy} && {words(*self._sudo, *self._systemctl, 'daemon-reload')}"

    def start(self, service: Service) -> str:
        return words(*self._sudo, *self._systemctl, "enable", "--now", "--quiet", f"{service.name}.service")

    def stop(self, service: Service) -> str:
        """A unit whose file is gone cannot be disabled, and need not."""
        unit = f"{service.name}.service"
        disable = words(*self._sudo, *self._systemctl, "disable", "--now", "--quiet", unit)
        return f"{{ {disable} || ! {words(*self._systemctl, 'is-active', '--quiet', unit)}; }}"

    def remove(self, service: Service) -> str:
        reload = words(*self._sudo, *self._systemctl, "daemon-reload")
        path = f"{self._units}/{service.name}.service"
        return f"{self.stop(service)}; {words(*self._sudo, 'rm', '-f', path)} && {reload}"

    def state(self, service: Service) -> str:
        show = words(*self._systemctl, "show", "-p", "ActiveState,MainPID,NRestarts", f"{service.name}.service")
        return (
            f'{show} | awk -F= \'{{v[$1]=$2}} END {{print (v["ActiveState"]=="active" ? "running" : "stopped"),'
            ' v["MainPID"], v["NRestarts"]}\''
        )

    def logs(self, service: Service, count: int, follow: bool) -> str:
        return self._journal(service, "-n", str(count), *(["-f"] if follow else []))

    def _journal(self, service: Service, *options: str) -> str:
        lines = ("-o", "short-iso-precise", "--utc", "--no-pager")
        return words(*self._sudo, "journalctl", "-u", f"{service.name}.service", *lines, *options)

    def find_in_logs(self, service: Service, text: str) -> str:
        return f"{self._journal(service)} | {words('grep', '-F', '--', text)} || true"

    def log_end(self, service: Service) -> str:
        return f"{self._journal(service, '-n', '1', '--show-cursor')} 2>/dev/null | sed -n 's/^-- cursor: //p'"

    def logs_after(self, service: Service, end: str) -> str:
        return self._journal(service, *([f"--after-cursor={end}"] if end else []))


class SystemdUser(FileLogged, Systemd):
    """The user's own manager; lingering makes it start at boot, without a login."""

    kind = "systemd-user"
    _systemctl = ("systemctl", "--user")
    _target, _after = "default.target", ""

    def __init__(self, place: Place, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        super().__init__(place, timeouts)
        self._sudo = ()
        self._units = f"{place.home}/.config/systemd/user"

    def _user(self) -> str:
        return ""

    def _command(self, service: Service) -> tuple[str, ...]:
        """With a log of its own: a user cannot read the journal everywhere."""
        return self.place.supervised(service, "--once")

    def start(self, service: Service) -> str:
        user = shlex.quote(self.place.user)
        remedy = f"error: run once as an administrator: sudo loginctl enable-linger {user}"
        refused = f"{{ echo {shlex.quote(remedy)} >&2; exit 1; }}"
        linger = f"{{ test -e /var/lib/systemd/linger/{user} || loginctl enable-linger || {refused}; }}"
        return f"{linger} && {super().start(service)}"


def _escape(text: str) -> str:
    return text.replace("%", "%%").replace("\n", " ")


def _quote(word: str, dollars: bool = True) -> str:
    """A word of a unit: specifiers and variables are not expanded."""
    text = _escape(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text.replace("$", "$$") if dollars else text}"'
