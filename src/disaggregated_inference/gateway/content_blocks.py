"""Content while it is generated, for APIs whose messages consist of blocks or items, and whose events have names."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import msgspec

from disaggregated_inference.gateway.tool_parsers.base import ContentDelta, ToolCallArguments, ToolCallStart

Event = dict[str, Any]


def encode_event(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class OpenContent(ABC):
    """The block or item that is being generated. `first`: its first delta. `index`: its place in the message."""

    def __init__(self, index: int, first: ContentDelta) -> None:
        self.index, self.first, self._pieces = index, first, [""]

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def continues_with(self, piece: ContentDelta) -> bool:
        kind = ToolCallArguments if isinstance(self.first, ToolCallStart) else type(self.first)
        return type(piece) is kind

    def add(self, text: str) -> Event:
        self._pieces.append(text)
        return self.delta(text)

    @abstractmethod
    def start(self) -> Iterator[Event]: ...

    @abstractmethod
    def delta(self, text: str) -> Event: ...

    @abstractmethod
    def finish(self, complete: bool) -> Iterator[Event]: ...

    @abstractmethod
    def content(self, complete: bool) -> Any:
        """The block or item itself."""


class ContentList:
    """The content of one message, and the events about it."""

    def __init__(self, kind: type[OpenContent], single_call: bool) -> None:
        self._kind, self._single_call = kind, single_call
        self.finished: list[Any] = []
        self._open: OpenContent | None = None

    def add(self, piece: ContentDelta) -> Iterator[Event]:
        if self._single_call and isinstance(piece, ToolCallStart | ToolCallArguments) and piece.index:
            return  # some models begin a second call although one is allowed
        if not (self._open and self._open.continues_with(piece)):
            yield from self.close()
            self._open = self._kind(len(self.finished), piece)
            yield from self._open.start()
        if not isinstance(piece, ToolCallStart):
            yield self._open.add(piece.text)

    def close(self, complete: bool = True) -> Iterator[Event]:
        if self._open:
            yield from self._open.finish(complete)
            self.finished.append(self._open.content(complete))
            self._open = None
