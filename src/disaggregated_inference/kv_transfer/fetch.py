"""Fetch one ticket's KV over several connections and several network paths, and resume when one of them breaks.

Each stream is one connection at a time. Small slices travel whole, large ones in parts, one on each stream. When a
connection breaks, its stream dials again, the next path first, and continues at the last committed chunk. Where the
rows go, and in which order, is in `placement.py`.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import msgspec

from disaggregated_inference.errors import ChecksumMismatch, DisaggError, PeerFailed, PeerGone
from disaggregated_inference.kv import KVLayout, KVSlice
from disaggregated_inference.kv_transfer.messages import End, Hello
from disaggregated_inference.kv_transfer.paths import NetworkPath, format_address
from disaggregated_inference.kv_transfer.placement import Placement, Sink
from disaggregated_inference.kv_transfer.receiver import ConnectionResult, fetch_stream, renew
from disaggregated_inference.kv_transfer.stall_limit import SilenceLimit
from disaggregated_inference.kv_transfer.stoppable import StoppableWork, require_path_error
from disaggregated_inference.kv_transfer.wire_time import Arrivals


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


class KVFetch(StoppableWork):
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
        self._hello, self._layout, self._vocabulary, self._tokens = hello, layout, vocabulary, tokens
        self._paths = paths
        self._used: dict[str, None] = {}  # addresses, in order of first use
        count = min(streams, len(layout.layers))
        self._streams = [_Stream(n, SilenceLimit(paths[0].timeouts)) for n in range(count)]
        self._placement = Placement(hello, layout, tokens, count, sink)
        self._current_path: dict[int, NetworkPath] = {}
        self._arrivals = Arrivals()

    @property
    def committed(self) -> int:
        """Tokens of the prompt that are complete on all layers."""
        return self._placement.committed

    def stop(self, error: BaseException) -> None:
        self._placement.stop(error)
        super().stop(error)

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
        self._placement.require_complete()
        return FetchResult(
            end=end,
            codec=welcome.codec,
            rounding=welcome.rounding,
            computed_at=max(result.computed_at for result in results),  # each is a little too early
            payload_bytes=sum(stream.received_bytes for stream in self._streams),
            resumed=sum(stream.resumed for stream in self._streams),
            paths=tuple(self._used),
            arrivals=self._arrivals,
        )

    def _run_stream(self, stream: _Stream) -> None:
        try:
            self._fetch_with_retries(stream)
            self._placement.stream_ended()
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
                if self.error:
                    raise
                require_path_error(error)
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
        with self.changed:
            others = [self.connections[number] for number, used in self._current_path.items() if used is path]
        for connection in others:
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RD)

    def _fetch_over(self, path: NetworkPath, stream: _Stream) -> None:
        connection = path.dial(path.probe_timeout_s() if stream.unresponsive else None)

        def probe(limit_s: float) -> bool:
            return self._probe(stream, path, min(limit_s, path.probe_timeout_s(connection.handshake_s)))

        stream.silence.watch(connection, None if stream.unresponsive else probe)
        stream.unresponsive = False
        with self.changed:
            self.use(connection, stream.number)
            self._current_path[stream.number] = path
            self._used.setdefault(format_address(path.address))
        hello = msgspec.structs.replace(
            self._hello, held_tokens=self.committed, stream=stream.number, streams=len(self._streams)
        )
        if hello.prompt_logprobs is not msgspec.UNSET:
            hello = msgspec.structs.replace(hello, scored_tokens=self._placement.scored)

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
            self._placement.take_logits,
            measure=measure,
            on_logprobs=self._placement.take_logprobs,
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
        with self.changed:
            same = {number: self.connections[number] for number, used in self._current_path.items() if used is path}
        return same.pop(stream.number).has_bytes() or any(each.received_at > started for each in same.values())

    def _take_slice(self, stream: _Stream, piece: KVSlice) -> None:
        stream.placed += self._placement.take_slice(stream.number, piece)
