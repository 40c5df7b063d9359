"""msgspec builds what it knows of a struct when it first decodes one. A second thread that decodes the same struct
meanwhile sees half of it, and the process dies of SIGSEGV (0.22). So a process that decodes on several threads builds
all structs before it starts them."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import msgspec

_lock = threading.Lock()
_built: set[type] = set()


def build_struct_types() -> None:
    """Of all modules that are imported by now. Calls after the first cost little."""
    with _lock:
        for kind in set(_below(msgspec.Struct)) - _built:
            with suppress(TypeError, NameError):  # nothing decodes a struct that cannot be decoded
                msgspec.json.Decoder(kind)
            _built.add(kind)


def _below(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _below(each)
