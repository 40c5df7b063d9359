"""Memory, threads and open files of a process, where the system lists them."""

import os
import re
from pathlib import Path

import msgspec

from disaggregated_inference.observe import memory_in_use


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """None: unknown on this system, or the process is gone."""

    resident_bytes: int | None = None
    threads: int | None = None
    descriptors: int | None = None
    python_blocks: int | None = None
    malloc_bytes: int | None = None
    requests: int | None = None  # that a node has ended


def footprint_of(pid: int, metrics: str = "") -> Footprint:
    """From /proc, which Linux has; of a server also from its metrics, of this process from its allocators."""
    in_use = msgspec.structs.asdict(memory_in_use()) if pid == os.getpid() else _told(metrics)
    return msgspec.structs.replace(_footprint_of(pid), **in_use)


def _told(metrics: str) -> dict[str, int]:
    found = re.findall(r"^disagg_(?:gateway_)?(python_blocks|malloc_bytes) (\S+)$", metrics, re.MULTILINE)
    ended = re.findall(r"^disagg_requests_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    told = {name: int(float(value)) for name, value in found}
    return told | ({"requests": int(sum(map(float, ended)))} if "disagg_requests" in metrics else {})


def _footprint_of(pid: int) -> Footprint:
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        threads, descriptors = (len(os.listdir(folder / name)) for name in ("task", "fd"))
    except OSError:
        return Footprint()
    return Footprint(resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"), threads=threads, descriptors=descriptors)
