"""A POSIX shell on one machine of the cluster: by ssh (`ssh.py`), or on this machine itself.

Every script runs in /bin/sh, whatever the user's own shell is. Secrets go in by standard input, never by a command.
"""

import asyncio
import os
import re
import shlex
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import NamedTuple

from disaggregated_inference.errors import CommandFailed
from disaggregated_inference.timeouts import DeployTimeouts

# A command by ssh has a short PATH: on a Mac without Homebrew, everywhere without ~/.local/bin, where uv is.
_PATH = 'PATH="$HOME/.local/bin:$PATH:/opt/homebrew/bin:/usr/local/bin:/usr/sbin:/sbin"; export PATH; '
_LAST_LINES = 6
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|\x1b\[[0-9;]*[A-Za-z]")


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
        lines = [_CONTROLS.sub("", line).strip() for line in (self.stderr or self.stdout).splitlines()]
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        return " | ".join((errors or [line for line in lines if line])[-_LAST_LINES:])[-800:]


def as_command(script: str) -> str:
    """One command for any login shell."""
    return f"/bin/sh -c {shlex.quote(_PATH + script)}"


def path_word(path: str) -> str:
    """A path as a word of a script. `~/` becomes the home folder of the machine."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


class Shell(ABC):
    """One machine. `name` is for messages."""

    def __init__(self, name: str, timeouts: DeployTimeouts = DeployTimeouts()) -> None:
        self.name, self.timeouts = name, timeouts

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
            raise CommandFailed(f"{self.name}: {what or script} failed (exit code {done.exit_code}): {done.last_words}")
        return done.stdout

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
        self, name: str, timeouts: DeployTimeouts = DeployTimeouts(), environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name, timeouts)
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
        )

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float | None = None) -> CommandOutput:
        process = await self._start(script)
        try:
            async with asyncio.timeout(timeout_s or self.timeouts.command_s):
                stdout, stderr = await process.communicate(stdin)
        except TimeoutError:
            raise too_slow(self.name, script, timeout_s or self.timeouts.command_s) from None
        finally:
            await _end(process)
        return CommandOutput(process.returncode or 0, stdout.decode(errors="replace"), stderr.decode(errors="replace"))

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
            yield (await process.stdout.readline()).decode(errors="replace").strip()
        finally:
            process.stdin.close()
            await process.wait()

    async def close(self) -> None:
        """Nothing is open between two scripts."""


async def _end(process: asyncio.subprocess.Process) -> None:
    """With everything that the script started."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def too_slow(name: str, script: str, timeout_s: float) -> CommandFailed:
    shown = script if len(script) <= 80 else script[:77] + "..."
    return CommandFailed(f"{name}: no end after {timeout_s:.0f} s: {shown}")
