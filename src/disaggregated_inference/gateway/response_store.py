"""Answers that a later request may go on from: so many, so large, so old at most, and each caller's alone.

In memory: a gateway that starts again has forgotten them, and another gateway never knew them.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest


class ResponseNotFound(BadRequest):
    status = 404


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`read` is what the answer answers, with everything that was said before it."""

    read: tuple[Any, ...]
    response: Any
    size_bytes: int
    kept_at: float


class ResponseStore:
    def __init__(
        self,
        most: int = 1000,
        most_bytes: int = 256 << 20,
        age_s: float = 24 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._most_bytes, self._age_s, self._clock = most, most_bytes, age_s, clock
        self._kept: dict[tuple[str, str], StoredResponse] = {}  # oldest first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, name: str, read: tuple[Any, ...], response: Any) -> None:
        # A conversation's answers share what was said before them, and each is counted with all of it: any of them may
        # be the last to hold it.
        size_bytes = len(msgspec.json.encode((read, response)))
        self._drop((owner, name))
        self._kept[owner, name] = StoredResponse(
            read=read, response=response, size_bytes=size_bytes, kept_at=self._clock()
        )
        self.size_bytes += size_bytes
        self._make_room()

    def get(self, owner: str, name: str) -> StoredResponse:
        """Somebody else's is not there."""
        self._make_room()
        if found := self._kept.get((owner, name)):
            return found
        raise ResponseNotFound(f"no response {name!r} is kept here: it was never stored, was deleted, or is too old")

    def delete(self, owner: str, name: str) -> None:
        self.get(owner, name)
        self._drop((owner, name))

    def owned(self, owner: str) -> list[StoredResponse]:
        """Newest first."""
        self._make_room()
        return [kept for (name, _), kept in reversed(self._kept.items()) if name == owner]

    def _make_room(self) -> None:
        while self._kept and self._too_much(next(iter(self._kept.values()))):
            self._drop(next(iter(self._kept)))

    def _too_much(self, oldest: StoredResponse) -> bool:
        too_old = self._clock() - oldest.kept_at > self._age_s
        return too_old or len(self._kept) > self._most or self.size_bytes > self._most_bytes

    def _drop(self, key: tuple[str, str]) -> None:
        if dropped := self._kept.pop(key, None):
            self.size_bytes -= dropped.size_bytes
