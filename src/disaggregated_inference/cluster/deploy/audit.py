"""Who did what to a machine, when: lines of JSON in its folder, and one view over all machines."""

import time
import uuid
from collections.abc import Iterable, Mapping

import msgspec

from disaggregated_inference.cluster.deploy.lock import who_am_i
from disaggregated_inference.cluster.shell import Shell, path_word

_MOST_LINES = 1000


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """`id` is the same on all machines of one command."""

    id: str
    time: float
    who: str
    command: str
    release: str = ""
    result: str = "ok"
    releases: dict[str, str] = {}  # of each machine, in the merged view


class AuditedRun(msgspec.Struct, frozen=True):
    """One run of a command."""

    command: str
    id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex[:12])

    def entry(self, release: str, result: str = "ok") -> AuditEntry:
        return AuditEntry(
            id=self.id, time=time.time(), who=who_am_i(), command=self.command, release=release, result=result[:300]
        )


async def write_audit(shell: Shell, path: str, entry: AuditEntry) -> None:
    line = msgspec.json.encode(entry) + b"\n"
    await shell.check(f"umask 077; cat >> {path_word(path)}", line, what=f"writing {path}")


async def read_audit(shell: Shell, path: str) -> list[AuditEntry]:
    """A line that was cut off is left out."""
    output = (await shell.run(f"tail -n {_MOST_LINES} {path_word(path)} 2>/dev/null")).stdout
    found = []
    for line in output.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=AuditEntry))
        except msgspec.DecodeError:
            continue
    return found


def merge_audits(entries: Mapping[str, Iterable[AuditEntry]]) -> list[AuditEntry]:
    """One entry for each operation and result, with its machines; the newest last. `release` is what the releases of
    the machines have in common: version and wheel."""
    merged: dict[tuple[str, str], AuditEntry] = {}
    for machine, own in entries.items():
        for entry in own:
            known = merged.get((entry.id, entry.result), entry)
            merged[entry.id, entry.result] = msgspec.structs.replace(
                known,
                release=entry.release.rpartition("-")[0],
                releases=known.releases | {machine: entry.release},
                time=min(known.time, entry.time),
            )
    return sorted(merged.values(), key=lambda entry: entry.time)
