"""One ticket's cache over several connections and several paths, resumed when one of them breaks.

Stream n of m carries the layers with layer mod m = n, on a connection of its own. When a connection breaks, its stream
dials again, the next path first, and goes on at the chunk where its layers stand; what comes twice is dropped. Chunks
are placed one after the other, and each is committed when all its layers are there: so whatever happens, the receiving
sequence is a whole number of chunks, plus a part of one that can be rolled back.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle

import msgspec

from disaggregated_inference.errors import (
    Cancelled,
    ChecksumMismatch,
    DisaggError,
    NodeRestarted,
    PeerFailed,
    PeerGone,
    ProtocolError,
)
from disaggregated_inference.kv import KVLayout, KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv_transfer import paths as ways
from disaggregated_inference.kv_transfer.frames import Connection, Kind
from disaggregated_inference.kv_transfer.messages import End, Hello, failure_of
from disaggregated_inference.kv_transfer.paths import NetworkPath, spoken
from disaggregated_inference.kv_transfer.receiver import Receipt, fetch, fetch_tokens, renew

_PATIENCE_S = 0.3


@dataclass(frozen=True, slots=True)
class Sink:
    """Where a cache goes. `place` is called by several threads at once and is done with the arrays when it returns."""

    place: Callable[[KVSlice], None]
    commit: Callable[[int], None]
    logits: Callable[[Array], None]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What it took."""

    end: End
    epoch: str
    codec: str
    rounding: float  # of the sender's weights
    payload_bytes: int
    seconds: float
    resumed: int  # connections that took over from broken ones
    paths: tuple[str, ...]  # used, in order of first use


@dataclass(slots=True)
class _FetchConnection:
    number: int
    layers: range
    receipt: Receipt | None = None
    received_bytes: int = 0
    resumed: int = 0
    mute: bool = False  # its connection said nothing, and its node no more when it was asked
    used: list[str] = field(default_factory=list)


class _PendingQuestion:
    """Asked on one connection after the other. `stop` ends it from another thread, whatever it waits for."""

    def __init__(self) -> None:
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._error: BaseException | None = None
        self._connection: Connection | None = None

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self._error, connection = self._error or error, self._connection
        self._stopped.set()
        if connection:
            connection.cancel(b"" if isinstance(error, Cancelled) else failure_of(error))

    def on(self, connection: Connection) -> Connection:
        with self._lock:
            self._connection = connection
        if self._error:
            connection.sock.close()
        self.require_wanted()
        return connection

    def pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)
        self.require_wanted()

    def require_wanted(self) -> None:
        if self._error:
            raise self._error


def gather_tokens(
    hello: Hello,
    count: int,
    vocabulary: int,
    paths: Sequence[NetworkPath],
    on_cancel: Callable[[Callable[[DisaggError], None]], None] = lambda stop: None,
) -> list[int]:
    """The prompt's ids over the first path that works; given up when every path has failed, and a moment has passed.
    `on_cancel` is given what ends it early, with an error, from another thread."""
    question, since = _PendingQuestion(), time.monotonic()
    on_cancel(question.stop)
    for path in cycle(paths):
        question.require_wanted()
        try:
            return fetch_tokens(question.on(path.dial()), hello, count, vocabulary)
        except (PeerGone, ChecksumMismatch, PeerFailed) as error:
            question.require_wanted()  # it broke because nobody wants it: the path is as good as before
            _require_of_path(error)
            path.failed(error)
            if path is paths[-1] and time.monotonic() - since > _PATIENCE_S:
                raise
            question.pause(_PATIENCE_S / 5 if path is paths[-1] else 0)
    raise AssertionError("there is always a path")


def keep_waiting(hello: Hello, paths: Sequence[NetworkPath]) -> float:
    """Renew the lease of a cache that someone will come for later, over the first path that works. Returns the lease in
    seconds; raises why there is none any more, or that nobody answers."""
    for path in paths:
        try:
            return renew(path.dial(), hello)
        except (PeerGone, PeerFailed) as error:
            _require_of_path(error)
            path.failed(error)
    raise PeerGone("the prefill node does not answer")


def withdraw(hello: Hello, paths: Sequence[NetworkPath]) -> None:
    """Tell the sender that nobody will come for this cache, before anyone did. Over a path on which someone answers:
    what a silent one takes is heard by nobody."""
    for path in paths:
        with suppress(DisaggError):
            connection = path.dial()
            try:
                asked = msgspec.structs.replace(hello, tokens_only=True)
                connection.send_message(Kind.HELLO, msgspec.json.encode(asked))
                connection.send_message(Kind.CANCEL)
                connection.receive_header()
            finally:
                connection.part()
            return


def _require_of_path(error: DisaggError) -> None:
    """Raise what another path would not mend. At the end of this one there may be another node."""
    if isinstance(error, PeerFailed) and error.peer_code != NodeRestarted("").code:
        raise error


class KVFetch:
    """One fetch. `run` blocks until everything is committed; `stop` ends it from another thread."""

    def __init__(
        self,
        hello: Hello,
        layout: KVLayout,
        vocabulary: int,
        tokens: int,
        paths: Sequence[NetworkPath],
        sink: Sink,
        streams: int = 1,
    ) -> None:
        self._hello, self._layout, self._vocabulary, self._paths, self._sink = hello, layout, vocabulary, paths, sink
        self._tokens = tokens
        count = min(streams, len(layout.layers))
        self._streams = [_FetchConnection(n, range(n, len(layout.layers), count)) for n in range(count)]
        self._changed = threading.Condition()
        self._placed = [hello.held_tokens] * len(layout.layers)
        self._chunk_stop: int | None = None  # of the chunk that is being placed
        self._got_logits = False
        self._error: BaseException | None = None
        self._connections: dict[int, Connection] = {}
        self._via: dict[int, NetworkPath] = {}
        self.committed = hello.held_tokens

    def run(self) -> FetchResult:
        started = time.perf_counter()
        threads = [
            threading.Thread(target=self._guarded, args=(stream,), name=f"kv-fetch-{stream.number}", daemon=True)
            for stream in self._streams[1:]
        ]
        for thread in threads:
            thread.start()
        self._guarded(self._streams[0])
        for thread in threads:
            thread.join()
        if self._error:
            raise self._error
        return self._gathered(time.perf_counter() - started)

    def stop(self, error: BaseException) -> None:
        """End now, with this error, unless another came first. The sender is told."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            connections = list(self._connections.values())
        reason = b"" if isinstance(error, Cancelled) else failure_of(error)
        for connection in connections:
            connection.cancel(reason)

    def _gathered(self, seconds: float) -> FetchResult:
        receipts = [stream.receipt for stream in self._streams if stream.receipt]
        welcome, end = receipts[0].welcome, receipts[0].end
        if self.committed != self._tokens or not self._got_logits:
            raise ProtocolError(f"the transfer ended with {self.committed} of {self._tokens} tokens whole")
        return FetchResult(
            end=end,
            epoch=welcome.epoch,
            codec=welcome.codec,
            rounding=welcome.rounding,
            payload_bytes=sum(stream.received_bytes for stream in self._streams),
            seconds=seconds,
            resumed=sum(stream.resumed for stream in self._streams),
            paths=tuple(dict.fromkeys(name for stream in self._streams for name in stream.used)),
        )

    def _guarded(self, stream: _FetchConnection) -> None:
        try:
            self._persist(stream)
        except BaseException as error:
            self.stop(error)

    def _persist(self, stream: _FetchConnection) -> None:
        """Connection after connection, until the stream's END. Given up when every path has failed since something last
        came, and a moment has passed since the first did, or nobody listens any more."""
        failures, since = 0, time.monotonic()
        for path in cycle(self._paths):
            before = self._held(stream)
            try:
                return self._connect(stream, path)
            except (PeerGone, ChecksumMismatch, PeerFailed) as error:
                if self._error:
                    raise
                _require_of_path(error)
                path.failed(error)
                self._leave_path(path)
                stream.resumed += self._held(stream) > before
                if self._held(stream) > before and not stream.mute:
                    failures = 0
                if not failures and not stream.mute:
                    since = time.monotonic()
                failures += 1
                if failures >= len(self._paths):
                    nobody = isinstance(error.__cause__, ConnectionRefusedError)
                    if nobody or time.monotonic() - since > _PATIENCE_S:
                        raise
                    time.sleep(_PATIENCE_S / 5)

    def _leave_path(self, path: NetworkPath) -> None:
        """Where there is another way, a path that failed one stream is left by all: each would wait for it in turn."""
        if len(self._paths) == 1:
            return
        with self._changed:
            others = [self._connections[number] for number, via in self._via.items() if via is path]
        for connection in others:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RD)

    def _connect(self, stream: _FetchConnection, path: NetworkPath) -> None:
        connection = path.dial(ways.answer_s() if stream.mute else None)
        connection.sock.settimeout(ways.SILENCE_S)
        if not stream.mute:
            connection.still_there = lambda: self._answers(stream, path, ways.answer_s(connection.greeted_s))
        stream.mute = False
        with self._changed:
            if self._error:
                connection.sock.close()
                raise self._error
            self._connections[stream.number], self._via[stream.number] = connection, path
        stream.used.append(spoken(path.address))
        hello = msgspec.structs.replace(
            self._hello, held_tokens=self._held(stream), stream=stream.number, streams=len(self._streams)
        )

        @contextmanager
        def receiving(size: int) -> Iterator[None]:
            with path.receiving(size):
                yield
            stream.received_bytes += size

        stream.receipt = fetch(
            connection,
            hello,
            self._layout,
            self._vocabulary,
            self._tokens,
            self._take,
            self._choose,
            receiving=receiving,
        )

    def _answers(self, stream: _FetchConnection, path: NetworkPath, patience_s: float) -> bool:
        """The node behind a silent connection, asked on another. One that is too busy to answer in time may say
        something else meanwhile; one that is frozen does not."""
        asked_at = time.monotonic()
        try:
            renew(path.dial(patience_s), self._hello)
        except PeerGone:
            stream.mute = not self._heard(stream, path, asked_at)
        except DisaggError:
            pass  # it says no; on the connection that waits it will say so too
        return not stream.mute

    def _heard(self, stream: _FetchConnection, path: NetworkPath, since: float) -> bool:
        """On this connection, or on one of the others to the same place. What waits there unread may be old."""
        with self._changed:
            there = {number: self._connections[number] for number, via in self._via.items() if via is path}
        return there.pop(stream.number).has_bytes() or any(each.heard_at > since for each in there.values())

    def _held(self, stream: _FetchConnection) -> int:
        with self._changed:
            return min(self._placed[layer] for layer in stream.layers)

    def _choose(self, logits: Array) -> None:
        if not self._got_logits:  # a resumed connection brings them again
            self._got_logits = True
            self._sink.logits(logits)

    def _take(self, piece: KVSlice) -> None:
        if self._await_turn(piece):
            self._sink.place(piece)
            self._note_placed(piece)

    def _await_turn(self, piece: KVSlice) -> bool:
        """Wait for the chunk before this slice's. False for a slice that is here already."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._chunk_stop in (None, piece.stop))
            if self._error:
                raise self._error
            if piece.stop <= self._placed[piece.layer]:
                return False
            self._chunk_stop = piece.stop
            return True

    def _note_placed(self, piece: KVSlice) -> None:
        with self._changed:
            self._placed[piece.layer] = piece.stop
            if any(stop != piece.stop for stop in self._placed):
                return
        self._sink.commit(piece.stop)
        with self._changed:
            self.committed, self._chunk_stop = piece.stop, None
            self._changed.notify_all()
