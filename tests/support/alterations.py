"""Recorded bytes, altered at random, the same in every run. `make fuzz` asks for more cases (DISAGG_FUZZ_EXAMPLES)."""

import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice

TIMES = max(1, int(os.environ.get("DISAGG_FUZZ_EXAMPLES", "150")) // 150)

Alteration = Callable[[bytes, int, random.Random], bytes]


def _flipped(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _replaced(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + bytes([(data[at] + 1 + chance.randrange(255)) % 256]) + data[at + 1 :]


def _removed(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + data[at + 1 + chance.randrange(8) :]


def _inserted(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at] + chance.randbytes(1 + chance.randrange(8)) + data[at:]


def _doubled(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[: at + 1 + chance.randrange(64)] + data[at:]


def _swapped(data: bytes, at: int, chance: random.Random) -> bytes:
    first, second = data[at : at + 16], data[at + 16 : at + 32]
    return data[:at] + second + first + data[at + 32 :]


def _cut(data: bytes, at: int, chance: random.Random) -> bytes:
    return data[:at]


ALTERATIONS: tuple[Alteration, ...] = (
    _flipped,
    _flipped,
    _flipped,
    _replaced,
    _removed,
    _inserted,
    _doubled,
    _swapped,
    _cut,
)


def altered(data: bytes, cases: int, seed: int, parts: Sequence[tuple[int, int]] = ()) -> Iterator[bytes]:
    """`cases` altered copies. `parts`: the classes of positions, each of which gets as many cases as any other."""
    chance, places = random.Random(seed), parts or [(0, len(data))]
    for number in range(cases * TIMES):
        start, stop = places[number % len(places)]
        changed = data
        while changed == data:
            changed = chance.choice(ALTERATIONS)(data, chance.randrange(start, stop), chance)
        yield changed


_CLASSES = {
    "key": rb'"(\w+)":',
    "value": rb'":("(?:[^"\\]|\\.)*"|[-\w.+]+)',
    "checksum": rb"(?:\n: sum |\nx-checksum: )(\w{8})",
    "length": rb"(?i:\ncontent-length: )(\d+)|\r\n([0-9a-f]+)\r\n",  # of a body, or of a chunk of it
    "line": rb"(\ndata: |\n\n)",
}


def http_parts(message: bytes, *classes: str) -> list[tuple[int, int]]:
    """`parts` of an HTTP message with JSON or events: its head, and each of these classes of position, as often as any
    other."""
    head = message.index(b"\r\n\r\n") + 2
    found = [[(0, head)]]
    for name in classes:
        matches = re.finditer(_CLASSES[name], message)
        found.append([match.span(match.lastindex or 0) for match in matches])
        assert found[-1], f"no {name} in {message[:2000]!r}"
    rounds = (cycle(spans) for spans in found)
    return [span for row in islice(zip(*rounds, strict=True), max(map(len, found))) for span in row]
