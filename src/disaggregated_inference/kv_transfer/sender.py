"""The sending half: an outbox that an engine fills while it computes, and the loop that empties it onto a socket."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
import numpy as np

from disaggregated_inference.errors import Cancelled, DisaggError, PeerGone, ProtocolError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv_transfer import codecs
from disaggregated_inference.kv_transfer.frames import Connection, Frame, Kind, bytes_of
from disaggregated_inference.kv_transfer.messages import End, ErrorMessage, Hello, Welcome, failure_of, parse

_MOST_STREAMS = 64
_HELLO_S = 3.0
_PULSE_S = 0.2  # how often a sender that waits for its engine says that it is there
_LAST_WORDS_S = 0.2
_LOOK_S = 0.0002  # how often it looks whether a slice's bytes have come from a device


class Outbox:
    """What one prefill has produced so far. Kept, not consumed: a connection that resumes reads it again.

    The engine's thread puts, any number of sender threads read. Logits overtake: every reader gets them next.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self._changed = threading.Condition()
        self._slices: list[KVSlice] = []
        self._logits: Array | None = None
        self._end: End | None = None
        self._error: DisaggError | None = None
        self.readers = 0  # senders in the middle of a slice
        self.unread: Callable[[], None] = lambda: None  # called when the last of them is done with a failed outbox

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the use of a slice's memory: it must not be given to anyone else meanwhile."""
        with self._changed:
            if self._error:
                raise self._error
            self.readers += 1
        try:
            yield
        finally:
            with self._changed:
                self.readers -= 1
                last = self._error is not None and not self.readers
            if last:
                self.unread()

    def put(self, piece: KVSlice) -> None:
        with self._changed:
            self._slices.append(piece)
            self._changed.notify_all()

    def put_logits(self, logits: Array) -> None:
        with self._changed:
            self._logits = logits
            self._changed.notify_all()

    def finish(self, end: End) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def fail(self, error: DisaggError) -> None:
        """Readers stop here, even when everything was computed: the memory behind the slices is going away."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def slices(self) -> list[KVSlice]:
        """All so far."""
        with self._changed:
            return list(self._slices)

    def copy(self) -> "Outbox":
        """In memory of its own."""
        with self._changed:
            other, other._slices = Outbox(self.tokens), [piece.copy() for piece in self._slices]
            other._logits, other._end, other._error = self._logits, self._end, self._error
        return other

    @property
    def whole(self) -> bool:
        return self._end is not None and not self._error

    def forget(self) -> None:
        """Let go of everything now: pinned memory that waits for the garbage collector is missed by the next prompt."""
        with self._changed:
            self._slices, self._logits, self.unread = [], None, lambda: None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def poke(self) -> None:
        """Make readers look up: something outside has changed."""
        with self._changed:
            self._changed.notify_all()

    def next(self, at: int, want_logits: bool, stopped: Callable[[], object]) -> "KVSlice | Array | End | None":
        """Logits when wanted and there, else the slice at `at`, else the end. None when nothing came for a moment, or
        once `stopped`, which is asked again whenever something is put or the outbox is poked."""
        with self._changed:
            if not self._changed.wait_for(lambda: stopped() or self._ready(at, want_logits), _PULSE_S) or stopped():
                return None
            if self._error:
                raise self._error
            if want_logits and self._logits is not None:
                return self._logits
            if at < len(self._slices):
                return self._slices[at]
            return self._end

    def _ready(self, at: int, want_logits: bool) -> bool:
        has_logits = want_logits and self._logits is not None
        return bool(has_logits or at < len(self._slices) or self._end or self._error)


Admit = Callable[[Hello], tuple[Welcome, Outbox]]


def serve(connection: Connection, admit: Admit, renew: Callable[[], None] = lambda: None) -> End | None:
    """One connection, from HELLO to the receiver's DONE. Returns what END said; None where the cache was not asked for.

    `admit` checks ticket, secret and fingerprint, and raises what it refuses; `renew` is called for every RENEW. Raises
    `Cancelled` when the receiver no longer wants the cache, `PeerGone` when it vanished (it may come back and resume).
    """
    peer: _Peer | None = None
    try:
        hello = _receive_hello(connection)
        if not 0 <= hello.stream < hello.streams <= _MOST_STREAMS:
            raise ProtocolError(f"stream {hello.stream} of {hello.streams}; at most {_MOST_STREAMS}")
        welcome, outbox = admit(hello)
        connection.send_message(Kind.WELCOME, msgspec.json.encode(welcome))
        peer = _Peer(connection, outbox, renew)
        end = None
        if hello.tokens_only:
            send_tokens(connection, outbox.tokens)
        elif not hello.renew_only:
            end = _send_all(connection, hello, welcome, outbox, peer)
        peer.wait_until_done()
        return end
    except DisaggError as error:
        reason = (peer and peer.why_it_left(wait=isinstance(error, PeerGone))) or error
        _tell(connection, reason)
        raise reason from None
    finally:
        connection.part()


def _receive_hello(connection: Connection) -> Hello:
    """Whoever drips it byte by byte is a stranger who wants to hold the place."""
    patience = connection.sock.gettimeout()
    connection.sock.settimeout(min(_HELLO_S, patience or _HELLO_S))
    connection.deadline = time.monotonic() + _HELLO_S
    frame = connection.receive_header()
    if frame.kind is not Kind.HELLO:
        raise ProtocolError(f"a connection begins with HELLO, not {frame.kind.name}")
    hello = parse(connection.receive_message(frame), Hello)
    connection.sock.settimeout(patience)
    connection.deadline = None
    return hello


def _send_all(connection: Connection, hello: Hello, welcome: Welcome, outbox: Outbox, peer: "_Peer") -> End:
    """Slices of this stream's layers from the receiver's held tokens on; the logits go with stream 0. Slices that it
    does not want are no sign of life: it hears nothing of them."""
    at, want_logits, said_at = 0, hello.stream == 0, time.monotonic()
    while True:
        item = outbox.next(at, want_logits, lambda: peer.error)
        if peer.error:
            raise peer.error
        if isinstance(item, End):
            connection.send_message(Kind.END, msgspec.json.encode(item))
            return item
        if isinstance(item, KVSlice):
            at += 1
            if item.layer % hello.streams == hello.stream and item.stop > hello.held_tokens:
                with outbox.reading():
                    _await(connection, item, peer, said_at)
                    send_slice(connection, _beyond(item, hello.held_tokens), welcome.codec)
            elif time.monotonic() - said_at < _PULSE_S:
                continue
            else:
                connection.send_message(Kind.ALIVE)
        elif item is None:
            connection.send_message(Kind.ALIVE)
        else:
            want_logits = False
            data = bytes_of(item)
            connection.send(Frame(Kind.LOGITS, len(data)), data)
        said_at = time.monotonic()


def _await(connection: Connection, piece: KVSlice, peer: "_Peer", said_at: float) -> None:
    """A device that is busy with other prompts may take seconds to come to this one's rows."""
    while not piece.ready():
        if peer.error:
            raise peer.error
        if time.monotonic() - said_at >= _PULSE_S:
            connection.send_message(Kind.ALIVE)
            said_at = time.monotonic()
        time.sleep(_LOOK_S)


def send_tokens(connection: Connection, tokens: Sequence[int]) -> None:
    data = bytes_of(np.array(tokens, "<u4"))
    connection.send(Frame(Kind.TOKENS, len(data)), data)


def _beyond(piece: KVSlice, held: int) -> KVSlice:
    """What a receiver lacks of a slice: it may hold a part of the chunk, from an answer that began the same way."""
    lacking = piece.stop - held
    if piece.tokens <= lacking:
        return piece
    piece.wait()
    return replace(piece, start=held, keys=piece.keys[-lacking:], values=piece.values[-lacking:])


def send_slice(connection: Connection, piece: KVSlice, codec: str) -> None:
    piece.wait()
    arrays = [bytes_of(array) for array in codecs.encode(codec, piece)]
    size = sum(map(len, arrays))
    frame = Frame(Kind.SLICE, size, codecs.CODECS[codec], piece.layer, piece.tokens, piece.start)
    connection.send(frame, *arrays)


def _tell(connection: Connection, error: DisaggError) -> None:
    """The reason, if the other side still listens."""
    with suppress(DisaggError):
        connection.send_message(Kind.ERROR, failure_of(error))


class _Peer:
    """Listens to the receiver on a thread of its own while we send: it may renew, cancel, finish, or be gone."""

    def __init__(self, connection: Connection, outbox: Outbox, renew: Callable[[], None]) -> None:
        self._connection, self._outbox, self._renew = connection, outbox, renew
        self.error: DisaggError | None = None
        self._done = threading.Event()
        threading.Thread(target=self._listen, name="kv-peer", daemon=True).start()

    def why_it_left(self, wait: bool) -> DisaggError | None:
        """Where sending broke because it left, its last words came before that, and may not have been read yet."""
        self._done.wait(_LAST_WORDS_S if wait else 0)
        return self.error

    def wait_until_done(self) -> None:
        self._done.wait()
        if self.error:
            raise self.error

    def _listen(self) -> None:
        try:
            while self._next() is not Kind.DONE:
                pass
        except DisaggError as error:
            self.error = error
        self._done.set()
        self._outbox.poke()

    def _next(self) -> Kind:
        frame = self._connection.receive_header()
        if frame.kind is Kind.ERROR:
            failure = parse(self._connection.receive_message(frame), ErrorMessage)
            raise Cancelled(f"the receiver gave up: {failure.message} ({failure.code})")
        self._connection.receive_message(frame, limit=0)
        if frame.kind is Kind.CANCEL:
            raise Cancelled("the receiver no longer wants this cache")
        if frame.kind is Kind.RENEW:
            self._renew()
        elif frame.kind is not Kind.DONE:
            raise ProtocolError(f"{frame.kind.name} from a receiver")
        return frame.kind
