"""Memory, threads and open files of a process, where the system lists them."""

import os
from pathlib import Path

import msgspec


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """None: unknown on this system, or the process is gone."""

    resident_bytes: int | None = None
    threads: int | None = None
    descriptors: int | None = None


def footprint_of(pid: int) -> Footprint:
    """From /proc, which Linux has."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        threads, descriptors = (len(os.listdir(folder / name)) for name in ("task", "fd"))
    except OSError:
        return Footprint()
    return Footprint(resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"), threads=threads, descriptors=descriptors)
