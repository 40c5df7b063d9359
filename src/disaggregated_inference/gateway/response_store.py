"""Responses that a later request may continue from: limited in number, size and age, and private to each API key.

The store is in memory: a restarted gateway, or another one, does not have them.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from disaggregated_inference.errors import BadRequest


class ResponseNotFound(BadRequest):
    status = 404


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt`: all items that the model read, those of earlier responses included."""

    prompt: tuple[Any, ...]
    response: Any
    size_bytes: int
    stored_at: float


class ResponseStore:
    def __init__(
        self,
        max_count: int = 1000,
        max_bytes: int = 256 << 20,
        max_age_s: float = 24 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_count, self._max_bytes, self._max_age_s, self._clock = max_count, max_bytes, max_age_s, clock
        self._responses: dict[tuple[str, str], StoredResponse] = {}  # oldest first
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, owner: str, id: str, prompt: tuple[Any, ...], response: Any) -> None:
        # Responses of one conversation share the earlier items. Each is counted with all of them, because any of them
        # may be the last one in the store.
        size_bytes = len(msgspec.json.encode((prompt, response)))
        self._drop((owner, id))
        self._responses[owner, id] = StoredResponse(
            prompt=prompt, response=response, size_bytes=size_bytes, stored_at=self._clock()
        )
        self.size_bytes += size_bytes
        self._evict()

    def get(self, owner: str, id: str) -> StoredResponse:
        self._evict()
        if found := self._responses.get((owner, id)):
            return found
        raise ResponseNotFound(f"no response {id!r} is stored: it was never stored, was deleted, or is too old")

    def delete(self, owner: str, id: str) -> None:
        self.get(owner, id)
        self._drop((owner, id))

    def owned(self, owner: str) -> list[StoredResponse]:
        """Newest first."""
        self._evict()
        return [stored for (name, _), stored in reversed(self._responses.items()) if name == owner]

    def _evict(self) -> None:
        while self._responses and self._over_limit(next(iter(self._responses.values()))):
            self._drop(next(iter(self._responses)))

    def _over_limit(self, oldest: StoredResponse) -> bool:
        too_old = self._clock() - oldest.stored_at > self._max_age_s
        return too_old or len(self._responses) > self._max_count or self.size_bytes > self._max_bytes

    def _drop(self, key: tuple[str, str]) -> None:
        if dropped := self._responses.pop(key, None):
            self.size_bytes -= dropped.size_bytes
