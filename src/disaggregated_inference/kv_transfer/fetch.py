"""Fetch one ticket's KV over several connections and several network paths, and resume when one of them breaks.

Each stream is one connection at a time. Small slices travel whole, large ones in parts, one on each stream. When a
connection breaks, its stream dials again, the next path first, and continues at the last committed chunk; rows that
arrive twice are dropped. Chunks are placed one after the other, and the rows of one layer too. A chunk is committed
when all its layers are placed, so the receiving sequence always holds a number of complete chunks, plus a part of one
that can be rolled back.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import msgspec

from disaggregated_inference.errors import (
    ChecksumMismatch,
    DisaggError,
    NodeRestarted,
    PeerFailed,
    PeerGone,
    ProtocolError,
)
from disaggregated_inference.kv import Array, KVLayout, KVSlice, LogprobRows
from disaggregated_inference.kv_transfer.frames import Connection, Kind
from disaggregated_inference.kv_transfer.messages import End, Hello
from disaggregated_inference.kv_transfer.paths import NetworkPath, format_address
from disaggregated_inference.kv_transfer.receiver import (
    ConnectionResult,
    fetch_stream,
    fetch_tokens,
    handshake,
    renew,
    send_hello,
)
from disaggregated_inference.kv_transfer.stall_limit import SilenceLimit
from disaggregated_inference.kv_transfer.wire_time import Arrivals


@dataclass(frozen=True, slots=True)
class Sink:
    """Where received KV goes. Several threads call `place` at once; it may not keep the arrays after it returns."""

    place: Callable[[KVSlice], None]
    commit: Callable[[int], None]
    logits: Callable[[Array], None]
    logprobs: Callable[[LogprobRows], None] = lambda rows: None  # of the prompt, in order, without a gap


@dataclass(frozen=True, slots=True)
class FetchResult:
    end: End
    codec: str
    rounding: float  # of the sender's weights
    computed_at: float  # when the sender's computing ended, by this side's time.perf_counter
    payload_bytes: int
    resumed: int  # connections that continued a broken one
    paths: tuple[str, ...]  # used, in order of first use
    arrivals: Arrivals  # of slices, over all connections


@dataclass(slots=True)
class _Stream:
    """What one connection at a time carries."""

    number: int
    silence: SilenceLimit
    placed: int = 0  # slices and parts of slices
    result: ConnectionResult | None = None
    received_bytes: int = 0
    resumed: int = 0
    unresponsive: bool = False  # the connection was silent, and its node did not answer a probe
    used: list[str] = field(default_factory=list)


class _Stoppable:
    """Work over connections, one at a time for each stream. Another thread may `stop` it at any time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._connections: dict[int, Connection] = {}  # by stream number

    def stop(self, error: BaseException) -> None:
        """End now with this error, unless the work has failed already. The sender is told."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
            connections = list(self._connections.values())
        for connection in connections:
            connection.cancel(error)

    def use(self, connection: Connection, stream: int = 0) -> Connection:
        with self._changed:
            if self._error:
                connection.sock.close()
                raise self._error
            self._connections[stream] = connection
        return connection

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error, seconds)
        self.raise_if_stopped()

    def raise_if_stopped(self) -> None:
        if self._error:
            raise self._error


def fetch_prompt(
    hello: Hello,
    count: int,
    vocabulary: int,
    paths: Sequence[NetworkPath],
    on_cancel: Callable[[Callable[[DisaggError], None]], None] = lambda stop: None,
) -> list[int]:
    """The prompt's token ids, over the first path that works. Fails when every path has failed for `redial_s`.
    `on_cancel` receives a function that ends the fetch with an error, from another thread."""
    attempts, started = _Stoppable(), time.monotonic()
    on_cancel(attempts.stop)
    for path in cycle(paths):
        attempts.raise_if_stopped()
        try:
            return fetch_tokens(attempts.use(path.dial()), hello, count, vocabulary)
        except (PeerGone, ChecksumMismatch, PeerFailed) as error:
            attempts.raise_if_stopped()  # cancelled, so the path is not to blame
            _require_path_error(error)
            path.record_failure(error)
            redial_s, last = path.timeouts.redial_s, path is paths[-1]
            if last and time.monotonic() - started > redial_s:
                raise
            attempts.pause(redial_s / 5 if last else 0)
    raise AssertionError("a fetch has at least one path")


def renew_lease(hello: Hello, paths: Sequence[NetworkPath]) -> float:
    """Renew the lease of KV that will be fetched later, over the first path that works. Returns the lease in seconds;
    raises why the ticket has none any more, or that the prefill node does not answer."""
    for path in paths:
        try:
            return renew(path.dial(), hello)
        except (PeerGone, PeerFailed) as error:
            _require_path_error(error)
            path.record_failure(error)
    raise PeerGone("the prefill node does not answer")


def cancel_ticket(hello: Hello, paths: Sequence[NetworkPath]) -> None:
    """Tell the sender that this KV will not be fetched. Uses the first path on which the sender answers."""
    for path in paths:
        with suppress(DisaggError):
            connection = path.dial()
            try:
                tokens_only = msgspec.structs.replace(hello, tokens_only=True)
                if hello.keyed is True:  # the key of CANCEL comes with WELCOME
                    handshake(connection, tokens_only)
                else:
                    send_hello(connection, tokens_only)
                connection.send_message(Kind.CANCEL)
                connection.receive_header()
            finally:
                connection.close()
            return


def _require_path_error(error: DisaggError) -> None:
    """Raise errors that another path would not cure. A restarted node is one that it may: another path may lead to
    another node."""
    if isinstance(error, PeerFailed) and error.peer_code != NodeRestarted("").code:
        raise error


class KVFetch(_Stoppable):
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
        super().__init__()
        self._hello, self._layout, self._vocabulary, self._paths, self._sink = hello, layout, vocabulary, paths, sink
        self._tokens = tokens
        count = min(streams, len(layout.layers))
        self._streams = [_Stream(n, SilenceLimit(paths[0].timeouts)) for n in range(count)]
        self._waiting: dict[int, KVSlice] = {}  # by stream number: rows whose turn it is not yet
        self._placing: set[int] = set()  # layers of which a stream places rows now
        self._ended = 0  # streams that have brought all that they carry
        self._placed = [hello.held_tokens] * len(layout.layers)
        self._chunk_stop: int | None = None  # end of the chunk that is being placed
        self._has_logits = False
        self._scored = max(1, hello.scored_tokens or 0)  # the first token of a prompt has no logprob
        self._current_path: dict[int, NetworkPath] = {}
        self._arrivals = Arrivals()
        self.committed = hello.held_tokens

    def run(self) -> FetchResult:
        threads = [
            threading.Thread(target=self._run_stream, args=(stream,), name=f"kv-fetch-{stream.number}", daemon=True)
            for stream in self._streams[1:]
        ]
        for thread in threads:
            thread.start()
        self._run_stream(self._streams[0])
        for thread in threads:
            thread.join()
        self.raise_if_stopped()
        return self._result()

    def _result(self) -> FetchResult:
        results = [stream.result for stream in self._streams if stream.result]
        welcome, end = results[0].welcome, results[0].end
        if self.committed != self._tokens or not self._has_logits:
            raise ProtocolError(f"the transfer ended with {self.committed} of {self._tokens} tokens complete")
        return FetchResult(
            end=end,
            codec=welcome.codec,
            rounding=welcome.rounding,
            computed_at=max(result.computed_at for result in results),  # each is a little too early
            payload_bytes=sum(stream.received_bytes for stream in self._streams),
            resumed=sum(stream.resumed for stream in self._streams),
            paths=tuple(dict.fromkeys(name for stream in self._streams for name in stream.used)),
            arrivals=self._arrivals,
        )

    def _run_stream(self, stream: _Stream) -> None:
        try:
            self._fetch_with_retries(stream)
            with self._changed:
                self._ended += 1
                self._changed.notify_all()
        except BaseException as error:
            self.stop(error)

    def _fetch_with_retries(self, stream: _Stream) -> None:
        """Connection after connection, until the stream's END. Fails when every path has failed since the last slice,
        and either `redial_s` has passed since the first failure or the sender refuses connections; or when silent
        connections took too long."""
        failures, since = 0, time.monotonic()
        for path in cycle(self._paths):
            before = stream.placed
            try:
                return self._fetch_over(path, stream)
            except (PeerGone, ChecksumMismatch, PeerFailed) as error:
                if self._error:
                    raise
                _require_path_error(error)
                path.record_failure(error)
                self._abandon_path(path)
                advanced = stream.placed > before
                stream.resumed += advanced
                if not stream.unresponsive:
                    failures = 0 if advanced else failures
                    since = since if failures else time.monotonic()
                failures += 1
                if stream.silence.reached:
                    raise
                if failures >= len(self._paths):
                    refused = isinstance(error.__cause__, ConnectionRefusedError)
                    if refused or time.monotonic() - since > path.timeouts.redial_s:
                        raise
                    time.sleep(path.timeouts.redial_s / 5)

    def _abandon_path(self, path: NetworkPath) -> None:
        """All streams leave a path that failed one of them, if there is another: else each would wait for it."""
        if len(self._paths) == 1:
            return
        with self._changed:
            others = [self._connections[number] for number, used in self._current_path.items() if used is path]
        for connection in others:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RD)

    def _fetch_over(self, path: NetworkPath, stream: _Stream) -> None:
        connection = path.dial(path.probe_timeout_s() if stream.unresponsive else None)

        def probe(limit_s: float) -> bool:
            return self._probe(stream, path, min(limit_s, path.probe_timeout_s(connection.handshake_s)))

        stream.silence.watch(connection, None if stream.unresponsive else probe)
        stream.unresponsive = False
        with self._changed:
            self.use(connection, stream.number)
            self._current_path[stream.number] = path
        stream.used.append(format_address(path.address))
        hello = msgspec.structs.replace(
            self._hello, held_tokens=self.committed, stream=stream.number, streams=len(self._streams)
        )
        if hello.prompt_logprobs is not msgspec.UNSET:
            hello = msgspec.structs.replace(hello, scored_tokens=self._scored)

        @contextmanager
        def measure(size: int) -> Iterator[None]:
            with self._arrivals.one(), path.measure(size):
                yield
            stream.received_bytes += size

        stream.result = fetch_stream(
            connection,
            hello,
            self._layout,
            self._vocabulary,
            self._tokens,
            partial(self._take_slice, stream),
            self._take_logits,
            measure=measure,
            on_logprobs=self._take_logprobs,
        )

    def _probe(self, stream: _Stream, path: NetworkPath, timeout_s: float) -> bool:
        """Whether the node behind a silent connection is alive. A node that is too busy to answer the probe in time
        may send something else meanwhile; a frozen one does not."""
        started = time.monotonic()
        try:
            renew(path.dial(timeout_s), self._hello)
        except PeerGone:
            stream.unresponsive = not self._received_since(started, stream, path)
        except DisaggError:
            pass  # the node refuses, so it is alive; the silent connection will get the reason too
        return not stream.unresponsive

    def _received_since(self, started: float, stream: _Stream, path: NetworkPath) -> bool:
        """On this connection, or on another one over the same path. Unread bytes of the others may be old."""
        with self._changed:
            same = {number: self._connections[number] for number, used in self._current_path.items() if used is path}
        return same.pop(stream.number).has_bytes() or any(each.received_at > started for each in same.values())

    def _take_logprobs(self, rows: LogprobRows) -> None:
        if rows.start > self._scored:
            raise ProtocolError(f"the prompt's logprobs continue at token {rows.start}, {self._scored} have arrived")
        if rows.stop > self._scored:
            rows, self._scored = rows.after(self._scored), rows.stop
            self._sink.logprobs(rows)

    def _take_logits(self, logits: Array) -> None:
        if self._hello.prompt_logprobs is not msgspec.UNSET and self._scored < self._tokens:
            raise ProtocolError(
                f"the logits came after logprobs of {self._scored} of the prompt's {self._tokens} tokens"
            )
        if not self._has_logits:  # a resumed connection brings them again
            self._has_logits = True
            self._sink.logits(logits)

    def _take_slice(self, stream: _Stream, piece: KVSlice) -> None:
        if self._wait_for_turn(stream.number, piece):
            self._sink.place(piece)
            stream.placed += 1
            self._commit_if_complete(piece)

    def _wait_for_turn(self, stream: int, piece: KVSlice) -> bool:
        """Until earlier chunks are committed and earlier rows of the layer placed. False for rows that came before."""
        with self._changed:
            self._waiting[stream] = piece
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or self._may_go_on(piece) or self._is_stuck())
            self.raise_if_stopped()
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
        over = len(self._waiting) + self._ended == len(self._streams)
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
