"""What this process uses of its memory, as its two allocators count it. Resident memory also has what they keep."""

import ctypes
import sys

import msgspec

_NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MemoryInUse(msgspec.Struct, frozen=True, kw_only=True):
    python_blocks: int  # of up to 512 bytes: Python's own allocator does not count bytes
    malloc_bytes: int | None  # None: only glibc counts


class _Mallinfo(ctypes.Structure):
    """Of <malloc.h>: `uordblks` are the bytes in use, `hblkhd` those of large blocks, which are mapped one by one."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


def memory_in_use() -> MemoryInUse:
    return MemoryInUse(python_blocks=sys.getallocatedblocks(), malloc_bytes=_malloc_bytes())


def _malloc_bytes() -> int | None:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)
