"""Checksums on the HTTP line between orchestrator and node: of request bodies, and of event streams.

TCP's own checksum misses what a bad cable driver, a proxy or a memory error changes. A changed digit in JSON is a wrong
answer without any sign. KV frames have their own checksums.

The client sends `x-checksum`: the CRC-32 of the body. The node refuses a body that differs. It then sends the same
header in the head of an event stream, and a comment `: sum CRC-32` after each part: of all parts so far. Of any other
response the header is the CRC-32 of its body: an answer, a status or a refusal without it is not believed.
"""

import zlib
from collections.abc import Mapping

CHECKSUM_HEADER = "x-checksum"

_MARK, _LINE_BYTES = b"\n\n: sum ", 18  # the mark, eight digits, two line ends
_SUM_BYTES = _LINE_BYTES - 2
_LIMIT_BYTES = 16 << 20


def checksum(data: bytes | bytearray, so_far: int = 0) -> int:
    return zlib.crc32(data, so_far)


def checksum_text(data: bytes | bytearray) -> str:
    return f"{checksum(data):08x}"


def body_is_proven(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether the body is the one that was sent with these headers."""
    return headers.get(CHECKSUM_HEADER) == checksum_text(body)


class StreamDamaged(Exception):
    """What arrived is not what was sent."""


class ChecksumReader:
    """Passes on what is proven by a sum."""

    def __init__(self) -> None:
        self._rest, self._so_far = b"", 0

    def feed(self, data: bytes) -> bytes:
        """Nearly always one part arrives, with its sum and nothing else: then a single comparison proves it."""
        if not self._rest:
            part = data[:-_SUM_BYTES]
            so_far = zlib.crc32(part, self._so_far)
            if data[-_LINE_BYTES:] == b"\n\n: sum %08x\n\n" % so_far:
                self._so_far = so_far
                return part
        return self._feed_parts(data)

    def _feed_parts(self, data: bytes) -> bytes:
        self._rest += data
        proven = b""
        while (at := self._rest.find(_MARK)) >= 0 and len(self._rest) >= at + _LINE_BYTES:
            part = self._rest[: at + 2]
            self._so_far = checksum(part, self._so_far)
            if self._rest[at + 2 : at + _LINE_BYTES] != b": sum %08x\n\n" % self._so_far:
                raise StreamDamaged("its stream was damaged on the way: the checksum differs")
            proven += part
            self._rest = self._rest[at + _LINE_BYTES :]
        if len(self._rest) > _LIMIT_BYTES:
            raise StreamDamaged(f"its stream has no checksum within {_LIMIT_BYTES} bytes")
        return proven
