"""Where received rows go, in their order, whichever connection brings them.

Chunks are placed one after the other, and the rows of one layer too; rows that arrive twice are dropped. A chunk is
committed when all its layers are placed, so the receiving sequence always holds a number of complete chunks, plus a
part of one that can be rolled back.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from disaggregated_inference.errors import ProtocolError
from disaggregated_inference.kv import Array, KVLayout, KVSlice, LogprobRows
from disaggregated_inference.kv_transfer.messages import Hello


@dataclass(frozen=True, slots=True)
class Sink:
    """Where received KV goes. Several threads call `place` at once; it may not keep the arrays after it returns."""

    place: Callable[[KVSlice], None]
    commit: Callable[[int], None]
    logits: Callable[[Array], None]
    logprobs: Callable[[LogprobRows], None] = lambda rows: None  # of the prompt, in order, without a gap


class Placement:
    """What of one prompt has arrived. Each of `streams` threads brings rows, and waits here for their turn."""

    def __init__(self, hello: Hello, layout: KVLayout, tokens: int, streams: int, sink: Sink) -> None:
        self._hello, self._layout, self._tokens, self._streams, self._sink = hello, layout, tokens, streams, sink
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._waiting: dict[int, KVSlice] = {}  # by stream number: rows whose turn it is not yet
        self._placing: set[int] = set()  # layers of which a stream places rows now
        self._ended = 0  # streams that have brought all that they carry
        self._placed = [hello.held_tokens] * len(layout.layers)
        self._chunk_stop: int | None = None  # end of the chunk that is being placed
        self._has_logits = False
        self.scored = max(1, hello.scored_tokens or 0)  # the first token of a prompt has no logprob
        self.committed = hello.held_tokens

    def stop(self, error: BaseException) -> None:
        """Streams that wait for their turn end with this error, unless there is an earlier one."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def stream_ended(self) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def require_complete(self) -> None:
        if self.committed != self._tokens or not self._has_logits:
            raise ProtocolError(f"the transfer ended with {self.committed} of {self._tokens} tokens complete")

    def take_logprobs(self, rows: LogprobRows) -> None:
        if rows.start > self.scored:
            raise ProtocolError(f"the prompt's logprobs continue at token {rows.start}, {self.scored} have arrived")
        if rows.stop > self.scored:
            rows, self.scored = rows.after(self.scored), rows.stop
            self._sink.logprobs(rows)

    def take_logits(self, logits: Array) -> None:
        if self._hello.prompt_logprobs is not msgspec.UNSET and self.scored < self._tokens:
            raise ProtocolError(
                f"the logits came after logprobs of {self.scored} of the prompt's {self._tokens} tokens"
            )
        if not self._has_logits:  # a resumed connection brings them again
            self._has_logits = True
            self._sink.logits(logits)

    def take_slice(self, stream: int, piece: KVSlice) -> bool:
        """Places the rows when it is their turn. False for rows that came before."""
        if not self._wait_for_turn(stream, piece):
            return False
        self._sink.place(piece)
        self._commit_if_complete(piece)
        return True

    def _wait_for_turn(self, stream: int, piece: KVSlice) -> bool:
        """Until earlier chunks are committed and earlier rows of the layer placed. False for rows that came before."""
        with self._changed:
            self._waiting[stream] = piece
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._may_go_on(piece) or self._is_stuck())
            if self._error:
                raise self._error
            if not self._may_go_on(piece):
                raise ProtocolError(f"the rows of layer {piece.layer} before token {piece.start} did not come")
            del self._waiting[stream]
            if piece.stop <= self._placed[piece.layer]:
                return False
            self._chunk_stop = piece.chunk_stop
            self._placing.add(piece.layer)
            return True

    def _may_go_on(self, piece: KVSlice) -> bool:
        placed, plan = self._placed[piece.layer], self._layout.layers[piece.layer]
        if piece.stop <= placed or piece.layer in self._placing:  # a sender may bring rows twice at once
            return piece.layer not in self._placing
        first = max(placed, plan.first_row(self.committed, piece.chunk_stop))
        return self._chunk_stop in (None, piece.chunk_stop) and piece.start <= first

    def _is_stuck(self) -> bool:
        """Every stream has ended or waits for rows that no stream will bring."""
        over = len(self._waiting) + self._ended == self._streams
        return over and not any(self._may_go_on(piece) for piece in self._waiting.values())

    def _commit_if_complete(self, piece: KVSlice) -> None:
        with self._changed:
            self._placed[piece.layer] = piece.stop
            self._placing.discard(piece.layer)
            self._changed.notify_all()
            if any(stop != piece.chunk_stop for stop in self._placed):
                return
        self._sink.commit(piece.stop)
        with self._changed:
            self.committed, self._chunk_stop = piece.stop, None
            self._changed.notify_all()
