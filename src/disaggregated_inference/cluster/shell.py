"""A POSIX shell on one machine of the cluster: by ssh (`ssh.py`), or on this machine itself.

Every script runs in /bin/sh, whatever the user's own shell is. Secrets go in by standard input, never by a command.
"""

import asyncio
import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import NamedTuple, Protocol, TypeVar

from disaggregated_inference.errors import CommandFailed
from disaggregated_inference.timeouts import DeployTimeouts

Result = TypeVar("Result")

# A command by ssh has a short PATH: on a Mac without Homebrew, everywhere without ~/.local/bin, where uv is.
_PATH = 'PATH="$HOME/.local/bin:$PATH:/opt/homebrew/bin:/usr/local/bin:/usr/sbin:/sbin"; export PATH; '
BEGIN = "disagg-begins-here"
_LAST_LINES, _MOST_WORDS = 6, 1 << 20
MOST_BYTES, _PART_BYTES = 64 << 20, 1 << 16  # of what a script prints
_LONGEST_LINE = 4 << 20
# Sequences that colour text, move the cursor or rename the window; then single control characters.
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class CommandOutput(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def last_words(self) -> str:
        """The end of what it said, for a message: one line, without control characters."""
        lines = [printable(line).strip() for line in (self.stderr or self.stdout)[-_MOST_WORDS:].splitlines()]
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        return " | ".join((errors or [line for line in lines if line])[-_LAST_LINES:])[-800:]


def printable(text: str) -> str:
    """What a machine says, without what would act on the terminal."""
    return _CONTROLS.sub("", text)


def as_command(script: str) -> str:
    """One command for any login shell. What comes before the line `BEGIN` is a greeting of that shell."""
    return f"/bin/sh -c {shlex.quote(f'echo {BEGIN}; {_PATH}{script}')}"


def path_word(path: str) -> str:
    """A path as a word of a script. `~/` becomes the home folder of the machine."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


class Shell(ABC):
    """One machine. `name` is for messages. A script that prints more than `most_bytes` is ended."""

    def __init__(self, name: str, timeouts: DeployTimeouts = DeployTimeouts(), most_bytes: int = MOST_BYTES) -> None:
        self.name, self.timeouts, self.most_bytes = name, timeouts, most_bytes

    @abstractmethod
    async def run(self, script: str, stdin: bytes = b"", timeout_s: float | None = None) -> CommandOutput:
        """Run a script to its end. A script that fails is no error here."""

    @abstractmethod
    def lines(self, script: str) -> AsyncIterator[str]:
        """The output of a script, line by line, while it runs."""

    @abstractmethod
    def hold(self, script: str) -> AbstractAsyncContextManager[str]:
        """Run a script for the length of the block; gives its first line. Its standard input ends with the block, or
        with this process."""

    @abstractmethod
    async def close(self) -> None: ...

    async def check(self, script: str, stdin: bytes = b"", timeout_s: float | None = None, what: str = "") -> str:
        """Run a script that must succeed; returns its output. `what` is the start of the message if it fails."""
        done = await self.run(script, stdin, timeout_s)
        if not done.ok:
            raise CommandFailed(self.name, f"{what or script} failed (exit code {done.exit_code}): {done.last_words}")
        return done.stdout

    async def in_time(self, work: Awaitable[Result], script: str) -> Result:
        """Within the time of a small command."""
        try:
            async with asyncio.timeout(self.timeouts.command_s):
                return await work
        except TimeoutError:
            raise too_slow(self.name, script, self.timeouts.command_s) from None

    async def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        """Write a file, all at once, with its mode from the start. Folders are made."""
        word, temporary = path_word(path), path_word(f"{path}.{os.getpid()}.new")
        folder = path_word(os.path.dirname(path) or ".")
        await self.check(
            f"umask 077; mkdir -p {folder} && cat > {temporary} && chmod {mode:o} {temporary}"
            f" && mv -f {temporary} {word} || {{ rm -f {temporary}; exit 1; }}",
            content,
            what=f"writing {path}",
        )


class LocalShell(Shell):
    """This machine, without ssh. `environ`: other variables for scripts, such as HOME."""

    def __init__(
        self,
        name: str,
        timeouts: DeployTimeouts = DeployTimeouts(),
        environ: Mapping[str, str] | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        super().__init__(name, timeouts, most_bytes)
        self._environ = {**os.environ, **(environ or {})}

    async def _start(self, script: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            _PATH + script,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=self._environ,
            start_new_session=True,
            limit=_LONGEST_LINE,
        )

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float | None = None) -> CommandOutput:
        process = await self._start(script)
        try:
            async with asyncio.timeout(timeout_s or self.timeouts.command_s):
                stdout, stderr = await self._communicate(process, stdin)
                await process.wait()
        except TimeoutError:
            raise too_slow(self.name, script, timeout_s or self.timeouts.command_s) from None
        except OutputTooLong:
            raise too_long(self.name, script, self.most_bytes) from None
        finally:
            await _end(process)
        return CommandOutput(process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

    async def _communicate(self, process: asyncio.subprocess.Process, stdin: bytes) -> tuple[bytes, bytes]:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        feeding = _feed(process.stdin, stdin)
        reading = (read_all(process.stdout, self.most_bytes), read_all(process.stderr, self.most_bytes))
        _, stdout, stderr = await asyncio.gather(feeding, *reading)
        return stdout, stderr

    async def lines(self, script: str) -> AsyncIterator[str]:
        process = await self._start(script)
        assert process.stdout
        try:
            async for line in process.stdout:
                yield line.decode(errors="replace").rstrip("\n")
        finally:
            await _end(process)

    @asynccontextmanager
    async def hold(self, script: str) -> AsyncIterator[str]:
        process = await self._start(script)
        assert process.stdin
        assert process.stdout
        try:
            yield (await self.in_time(process.stdout.readline(), script)).decode(errors="replace").strip()
        finally:
            process.stdin.close()
            with suppress(CommandFailed):
                await self.in_time(process.wait(), script)
            await _end(process)

    async def close(self) -> None:
        """Nothing is open between two scripts."""


async def _feed(stream: asyncio.StreamWriter, content: bytes) -> None:
    """A script may end before it has read its input."""
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(content)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


class OutputTooLong(Exception):
    """A script prints without an end, or a machine sends something else than it was asked for."""


class ByteStream(Protocol):
    async def read(self, size: int, /) -> bytes: ...


async def read_all(stream: ByteStream, most_bytes: int) -> bytes:
    parts, left = [], most_bytes
    while part := await stream.read(_PART_BYTES):
        left -= len(part)
        if left < 0:
            raise OutputTooLong
        parts.append(part)
    return b"".join(parts)


async def _end(process: asyncio.subprocess.Process) -> None:
    """With everything that the script started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def too_slow(name: str, script: str, timeout_s: float) -> CommandFailed:
    return CommandFailed(name, f"no end after {timeout_s:.0f} s: {_shown(script)}")


def too_long(name: str, script: str, most_bytes: int) -> CommandFailed:
    limit = f"more than {most_bytes >> 20} MiB"
    return CommandFailed(name, f"it printed {limit}, check its login shell; the command was: {_shown(script)}")


def _shown(script: str) -> str:
    line = " ".join(script.split())
    return line if len(line) <= 80 else line[:77] + "..."
