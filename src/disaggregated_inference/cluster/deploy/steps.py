"""The steps of a deploy. A step says what it does, whether it is done, and does it: a second deploy changes nothing,
and one that was broken off is repaired."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from disaggregated_inference.cluster.shell import Shell, path_word
from disaggregated_inference.errors import CommandFailed

_FULL = "No space left on device"


class RemoteFile(NamedTuple):
    path: str  # absolute
    content: bytes
    mode: int = 0o600
    is_secret: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def describe(self) -> str:
        kind = "secret, not shown" if self.is_secret else f"sha256 {self.digest[:12]}"
        return f"write {self.path} ({len(self.content):,} bytes, mode {self.mode:o}, {kind})"


class Step(ABC):
    def __init__(self, title: str) -> None:
        self.title = title

    @abstractmethod
    def describe(self) -> list[str]:
        """Every command and every file, without secrets."""

    @abstractmethod
    async def is_done(self, shell: Shell) -> bool: ...

    @abstractmethod
    async def do(self, shell: Shell) -> None: ...


class FilesStep(Step):
    def __init__(self, title: str, files: Sequence[RemoteFile]) -> None:
        super().__init__(title)
        self.files = files

    def describe(self) -> list[str]:
        return [file.describe() for file in self.files]

    async def is_done(self, shell: Shell) -> bool:
        return not await self._different(shell)

    async def _different(self, shell: Shell) -> list[RemoteFile]:
        if not self.files:
            return []
        output = (await shell.run("\n".join(map(_fingerprint, self.files)))).stdout
        found = output.split("\n")
        expected = [f"{file.digest} {file.mode:o}" for file in self.files]
        return [file for file, want, got in zip(self.files, expected, found, strict=False) if want != got.strip()]

    async def do(self, shell: Shell) -> None:
        for file in await self._different(shell):
            try:
                await shell.put(file.content, file.path, file.mode)
            except CommandFailed as error:
                raise explained(error) from None


def _fingerprint(file: RemoteFile) -> str:
    """A line: the digest and the mode of a file, by the programs of Linux or of macOS."""
    path = path_word(file.path)
    digest = f"{{ sha256sum {path} || shasum -a 256 {path}; }} 2>/dev/null | cut -d' ' -f1"
    mode = f"{{ stat -c %a {path} || stat -f %Lp {path}; }} 2>/dev/null"
    return f'echo "$({digest}) $({mode})"'


class CommandStep(Step):
    """`check` succeeds when nothing is left to do."""

    def __init__(
        self,
        title: str,
        script: str,
        check: str,
        timeout_s: float | None = None,
        remedy: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__(title)
        self.script, self.check, self.timeout_s, self._remedy = script, check, timeout_s, remedy

    def describe(self) -> list[str]:
        return [line.strip() for line in self.script.strip().splitlines()]

    async def is_done(self, shell: Shell) -> bool:
        return (await shell.run(self.check)).ok

    async def do(self, shell: Shell) -> None:
        done = await shell.run(self.script, timeout_s=self.timeout_s)
        if not done.ok:
            error = CommandFailed(shell.name, f"{self.title} failed (exit code {done.exit_code}): {done.last_words}")
            hint = self._remedy(done.stderr) if self._remedy else ""
            raise CommandFailed(shell.name, f"{error.reason}; {hint}") if hint else explained(error)


def explained(error: CommandFailed) -> CommandFailed:
    """With the remedy, where the message has a known cause."""
    if _FULL in str(error):
        return CommandFailed(
            error.machine, f"{error.reason}; the disk is full: free some space there, then deploy again"
        )
    return error
