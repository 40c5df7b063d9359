"""Machines by ssh, with the user's own settings: ~/.ssh/config, agent, jump hosts, known hosts.

Host keys are always checked, no password is asked for or stored, and nothing is written to the user's ssh files.
asyncssh is imported when a connection is made: it is the extra `deploy`.
"""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from disaggregated_inference.cluster.shell import (
    BEGIN,
    MOST_BYTES,
    CommandOutput,
    LocalShell,
    OutputTooLong,
    Shell,
    as_command,
    read_all,
    too_long,
    too_slow,
)
from disaggregated_inference.errors import (
    CommandFailed,
    ConfigError,
    HostKeyChanged,
    HostKeyUnknown,
    LoginRefused,
    MachineError,
    MachineUnreachable,
)
from disaggregated_inference.timeouts import DeployTimeouts

if TYPE_CHECKING:
    import asyncssh

LOCAL = "local"  # in place of an address: this machine, without ssh
# Neither part may begin as an option of ssh does.
_TARGET = re.compile(r"(?:([^@\s-][^@\s]*)@)?(\[[^\]\s]+\]|[^:@\s-][^:@\s]*)(?::([0-9]{1,5}))?")
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


class SshTarget(NamedTuple):
    """What the user typed. Empty and 0: as ~/.ssh/config says."""

    host: str
    user: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> "SshTarget":
        match = _TARGET.fullmatch(text.strip())
        if not match:
            raise ConfigError(f"{text!r} is no ssh address: write HOST, USER@HOST or USER@HOST:PORT")
        if (port := int(match[3] or 0)) > 65535:
            raise ConfigError(f"{text!r} is no ssh address: ports end at 65535")
        return cls(match[2].strip("[]"), match[1] or "", port)

    def __str__(self) -> str:
        return (f"{self.user}@" if self.user else "") + self.host + (f":{self.port}" if self.port else "")

    @property
    def keyscan(self) -> str:
        return f"ssh {f'-p {self.port} ' if self.port else ''}{self.user + '@' if self.user else ''}{self.host}"


async def open_shell(
    name: str, target: str, timeouts: DeployTimeouts = DeployTimeouts(), most_bytes: int = MOST_BYTES
) -> Shell:
    """A shell on a machine: `target` is HOST, USER@HOST, USER@HOST:PORT, a Host of ~/.ssh/config, or "local"."""
    if target == LOCAL:
        return LocalShell(name, timeouts, most_bytes=most_bytes)
    return await SshShell.connect(name, SshTarget.parse(target), timeouts, most_bytes)


class SshShell(Shell):
    """One connection; scripts run in channels of it, several at once."""

    def __init__(
        self, name: str, connection: "asyncssh.SSHClientConnection", timeouts: DeployTimeouts, most_bytes: int
    ) -> None:
        super().__init__(name, timeouts, most_bytes)
        self._connection = connection

    @classmethod
    async def connect(
        cls, name: str, target: SshTarget, timeouts: DeployTimeouts = DeployTimeouts(), most_bytes: int = MOST_BYTES
    ) -> "SshShell":
        ssh = _library()
        options: dict[str, Any] = {"username": target.user} if target.user else {}
        options |= {"port": target.port} if target.port else {}
        try:
            async with asyncio.timeout(timeouts.connect_s):
                settings = await ssh.SSHClientConnectionOptions.construct(
                    host=target.host, config=_user_config(), keepalive_interval=timeouts.keepalive_s, **options
                )
                known_hosts = _known_hosts(settings, name)
                connection = await ssh.connect(target.host, options=settings, known_hosts=known_hosts)
        except ssh.HostKeyNotVerifiable as error:
            raise _host_key_error(ssh, name, target, settings, known_hosts, error) from None
        except (ssh.Error, OSError, TimeoutError, ssh.KeyImportError, ssh.ConfigParseError) as error:
            raise _connect_error(ssh, name, target, error, timeouts) from None
        return cls(name, connection, timeouts, most_bytes)

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float | None = None) -> CommandOutput:
        limit_s = timeout_s or self.timeouts.command_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._completed(script, stdin)
        except TimeoutError:
            raise too_slow(self.name, script, limit_s) from None
        except OutputTooLong:
            raise too_long(self.name, script, self.most_bytes) from None
        except (OSError, _library().Error) as error:
            raise self._lost(error) from None

    async def _completed(self, script: str, stdin: bytes) -> CommandOutput:
        """A script may end before it has read its input: that is no fault of the connection."""
        given = {} if stdin else {"stdin": _library().DEVNULL}  # an empty input would never end
        process = await self._connection.create_process(as_command(script), encoding=None, **given)
        try:
            with suppress(BrokenPipeError):
                if stdin:
                    process.stdin.write(stdin)
                    process.stdin.write_eof()
            reading = (read_all(process.stdout, self.most_bytes), read_all(process.stderr, self.most_bytes))
            stdout, stderr = await asyncio.gather(*reading)
            await process.wait_closed()
            code = 255 if process.exit_status is None else process.exit_status
            greeting, begin, output = stdout.partition(f"{BEGIN}\n".encode())
            said = output if begin else greeting
            return CommandOutput(code, said.decode(errors="replace"), stderr.decode(errors="replace"))
        except BaseException:
            process.close()
            raise

    async def lines(self, script: str) -> AsyncIterator[str]:
        async with await self._process(script) as process:
            try:
                await _skip_greeting(process)
                while line := await process.stdout.readline():
                    yield line.rstrip("\n")
            except (OSError, _library().Error) as error:
                raise self._lost(error) from None
            finally:
                with suppress(OSError, _library().Error):
                    process.terminate()

    @asynccontextmanager
    async def hold(self, script: str) -> AsyncIterator[str]:
        process = await self._process(script)
        try:
            await self.in_time(_skip_greeting(process), script)
            yield (await self.in_time(process.stdout.readline(), script)).strip()
        finally:
            with suppress(OSError, CommandFailed, _library().Error):  # a lost connection ends the script, too
                process.stdin.write_eof()
                await self.in_time(process.wait(), script)
            process.close()  # a script that goes on is not waited for

    async def _process(self, script: str) -> "asyncssh.SSHClientProcess[str]":
        try:
            return await self.in_time(self._connection.create_process(as_command(script), errors="replace"), script)
        except (OSError, _library().Error) as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> MachineUnreachable:
        return MachineUnreachable(self.name, f"the ssh connection broke: {error}; run the command again")

    async def close(self) -> None:
        self._connection.close()
        await self._connection.wait_closed()


async def _skip_greeting(process: "asyncssh.SSHClientProcess[str]") -> None:
    while (line := await process.stdout.readline()) and not line.endswith(f"{BEGIN}\n"):
        pass


def _library() -> Any:
    try:
        import asyncssh
    except ImportError:
        remedy = "pip install 'disaggregated-inference[deploy]'"
        raise ConfigError(f"commands over ssh need the package asyncssh: {remedy}") from None
    return asyncssh


def _user_config() -> list[str]:
    path = Path("~/.ssh/config").expanduser()
    return [str(path)] if path.is_file() else []


def _known_hosts(settings: Any, name: str) -> bytes:
    """The content of the user's and the system's files. asyncssh alone would stop at a file that is missing, and check
    nothing where the ssh config says `UserKnownHostsFile none`."""
    if settings.known_hosts is None:
        raise MachineError(
            name,
            f"your ssh config has `UserKnownHostsFile none` for {settings.orig_host}, which leaves no host key"
            " to compare with; take that line out",
        )
    files = settings.known_hosts or ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
    contents = [_read(Path(file).expanduser()) for file in (*files, _SYSTEM_KNOWN_HOSTS)]
    return b"\n".join([*contents, b"\n"])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _host_key_error(
    ssh: Any, name: str, target: SshTarget, settings: Any, known: bytes, error: Exception
) -> MachineError:
    host, port = settings.host_key_alias or settings.host, settings.port
    found = ssh.match_known_hosts(known, host, "", None if port == 22 else port)
    place = host if port == 22 else f"[{host}]:{port}"
    if any(found[0]) or "revoked" in str(error).lower():
        return HostKeyChanged(
            name,
            f"the host key of {place} is not the one in your known_hosts: another machine answers there, or it"
            f" was installed again. If you know why, remove the old key with `ssh-keygen -R '{place}'` and connect once"
            f" with `{target.keyscan}`",
        )
    return HostKeyUnknown(
        name,
        f"the host key of {place} is not in your known_hosts: connect once with `{target.keyscan}`, compare the"
        " fingerprint and accept it",
    )


def _connect_error(ssh: Any, name: str, target: SshTarget, error: Exception, timeouts: DeployTimeouts) -> MachineError:
    if isinstance(error, ssh.PermissionDenied):
        who = f"as {target.user}" if target.user else "with your user name"
        return LoginRefused(
            name,
            f"{target.host} refuses the login {who}: put your public key there with"
            f" `ssh-copy-id {target.user + '@' if target.user else ''}{target.host}`, and load a key with a passphrase"
            " into the agent with `ssh-add`",
        )
    if isinstance(error, ssh.KeyImportError | ssh.ConfigParseError):
        return LoginRefused(name, f"your ssh files cannot be used: {error}; check ~/.ssh/config and its keys")
    reason = f"no answer within {timeouts.connect_s:.0f} s" if isinstance(error, TimeoutError) else _reason(error)
    return MachineUnreachable(
        name, f"{target} cannot be reached by ssh: {reason}; check that it is on and that `{target.keyscan}` works"
    )


def _reason(error: Exception) -> str:
    """In the system's words: asyncio says `Connect call failed ('10.0.0.1', 22)`, for several addresses in a list."""
    number = re.search(r"\[Errno (\d+)\]", str(error)) if isinstance(error, OSError) else None
    if number and not isinstance(error, socket.gaierror):
        return os.strerror(int(number[1]))
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
