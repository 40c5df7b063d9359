"""The decode node: takes a cache from a prefill node, or reads the prompt itself, and writes the answer."""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from disaggregated_inference.engines import Sequence, chunks
from disaggregated_inference.errors import BadRequest, Cancelled, NodeBusy, ProtocolError, SliceRefused, WireError
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.proofs import Proofs
from disaggregated_inference.nodes.worker import EngineThread, Work
from disaggregated_inference.wire import Gather, Hello, Paths, Sink
from disaggregated_inference.wire.tape import Playback

log = logging.getLogger(__name__)

_SLOW_TRANSFER_S = 1.0


class DecodeMetrics(msgspec.Struct):
    """Seconds and counts of one request. Transfer is *hidden* while the prompt is still being read; what remains after
    the logits are here (they overtake waiting slices) is *exposed*."""

    prompt_tokens: int
    completion_tokens: int = 0
    decode_time: float = 0.0
    decode_speed: float = 0.0
    first_token_time: float = 0.0
    prompt_tokens_recomputed: int = 0
    kv_bytes: int = 0
    kv_codec: str = ""
    kv_paths: tuple[str, ...] = ()
    resumed: int = 0
    canary_time: float = 0.0
    queue_time: float = 0.0
    prefill_time: float = 0.0
    fetch_time: float = 0.0
    exposed_transfer_time: float = 0.0
    inject_time: float = 0.0
    finish_reason: str = "length"


Item = int | BaseException | None


class Answer:
    """One request's answer while it is being written: iterate for tokens, then `metrics` is complete."""

    def __init__(self, metrics: DecodeMetrics, request_id: str = "") -> None:
        self.metrics, self.request_id = metrics, request_id
        self.cancelled = False
        self._stop: Callable[[], None] = lambda: None
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._deliver: Callable[[Item], None] = self._items.put
        self._lock = threading.Lock()

    def put(self, item: Item) -> None:
        """The next token, or the end: None, or the error there was."""
        with self._lock:
            self._deliver(item)

    def listen(self, deliver: Callable[[Item], None]) -> None:
        """From now on every item goes to `deliver`, on whatever thread it comes from; those that wait go first."""
        with self._lock:
            while not self._items.empty():
                deliver(self._items.get())
            self._deliver = deliver

    def cancel(self) -> None:
        """Nobody wants it any more: a transfer stops at once, writing at the next token."""
        self.cancelled = True
        self._stop()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self.cancelled:
            stop()

    def __iter__(self) -> Iterator[int]:
        while (item := self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class DecodeNode:
    def __init__(
        self, worker: EngineThread, chunk_tokens: int = 0, streams: int = 2, codecs: tuple[str, ...] = ("raw",)
    ) -> None:
        self.worker, self.engine = worker, worker.engine
        self.chunk_tokens, self.streams, self.codecs = chunk_tokens or self.engine.chunk_tokens, streams, codecs
        self.epoch = secrets.token_hex(8)
        self.paths = Paths()
        self.proofs = Proofs(worker, self.paths)
        self._answers: set[Answer] = set()

    @property
    def healthy(self) -> bool:
        return self.worker.alive

    def close(self) -> None:
        """Answers that are still being written are cancelled."""
        for answer in list(self._answers):
            answer.cancel()

    def _begun(self, prompt_tokens: int, request_id: str) -> Answer:
        answer = Answer(DecodeMetrics(prompt_tokens=prompt_tokens), request_id)
        self._answers.add(answer)
        return answer

    def fetch_and_write(self, context: Context, max_tokens: int, request_id: str = "") -> Answer:
        """Memory first, then the transfer, then the answer: each token is in the answer the moment it is known."""
        sequence = self.worker.call(lambda: self.engine.open(context.tokens + max_tokens))
        answer = self._begun(context.tokens, request_id)
        self._in_thread(lambda: self._fetch(context, sequence, answer), sequence, answer, max_tokens)
        return answer

    def play_and_write(self, content: bytes, max_tokens: int, request_id: str = "") -> Answer:
        """From a cache that came whole, in the request itself."""
        spec = self.engine.spec
        with _said_of_the_request():
            tape = Playback(content, self.engine.fingerprint, spec.layout, spec.vocabulary, spec.context_window)
        sequence = self.worker.call(lambda: self.engine.open(tape.welcome.prompt_tokens + max_tokens))
        answer = self._begun(tape.welcome.prompt_tokens, request_id)
        answer.metrics.kv_bytes = len(content)
        self._in_thread(lambda: self._play(tape, sequence, answer), sequence, answer, max_tokens)
        return answer

    def read_and_write(self, tokens: list[int], max_tokens: int, request_id: str = "") -> Answer:
        """No cache from elsewhere: this node reads the prompt too, in chunks, between other works."""
        sequence = self.worker.call(lambda: self.engine.open(len(tokens) + max_tokens))
        answer = self._begun(len(tokens), request_id)
        try:
            future = self.worker.start(self._read_then_write(tokens, sequence, answer, max_tokens))
        except BaseException:
            self._answers.discard(answer)
            self.worker.post(lambda: self.engine.close(sequence))
            raise
        future.add_done_callback(lambda done: self._finish(sequence, answer, done))
        return answer

    def _in_thread(self, take: Callable[[], int], sequence: Sequence, answer: Answer, max_tokens: int) -> None:
        """`take` fills the sequence and returns the first token; the rest is the same for all."""

        def run() -> None:
            done: Future[Any] = Future()
            try:
                first = take()
                self.worker.start(self._write(sequence, first, answer, max_tokens)).result()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            self._finish(sequence, answer, done)

        threading.Thread(target=run, name="decode", daemon=True).start()

    def _fetch(self, context: Context, sequence: Sequence, answer: Answer) -> int:
        """The cache into the sequence. The first token is out as soon as the logits are here, whatever still comes."""
        metrics, started = answer.metrics, time.perf_counter()
        hello = Hello(
            ticket=context.ticket,
            secret=context.secret,
            fetch=secrets.token_hex(8),
            fingerprint=self.engine.fingerprint,
            epoch=context.epoch,
            request_id=answer.request_id,
            codecs=self.codecs,
        )
        metrics.canary_time = self.proofs.require(context, hello)
        if answer.cancelled:
            raise Cancelled("the client is gone")
        first: list[int] = []
        spec, paths = self.engine.spec, self.paths.ordered(context.addresses)
        sink = self._sink(sequence, answer, first, started)
        gather = Gather(hello, spec.layout, spec.vocabulary, context.tokens, paths, sink, self.streams)
        answer.on_cancel(lambda: gather.stop(Cancelled("the client is gone")))
        gathered = gather.run()
        metrics.fetch_time = time.perf_counter() - started
        metrics.exposed_transfer_time = metrics.fetch_time - metrics.first_token_time
        metrics.kv_bytes, metrics.kv_codec = gathered.payload_bytes, gathered.codec
        metrics.kv_paths, metrics.resumed = gathered.paths, gathered.resumed
        metrics.queue_time, metrics.prefill_time = gathered.end.queue_s, gathered.end.prefill_s
        self._warn_if_slow(answer)
        return first[0]

    def _play(self, tape: Playback, sequence: Sequence, answer: Answer) -> int:
        first: list[int] = []
        with _said_of_the_request():
            tape.play(self._sink(sequence, answer, first, time.perf_counter()))
            if sequence.length != tape.welcome.prompt_tokens or not first:
                raise ProtocolError("it ends before its prompt does")
        return first[0]

    def _sink(self, sequence: Sequence, answer: Answer, first: list[int], started: float) -> Sink:
        """Into this sequence, on the engine's thread; the first token goes to the answer and into `first`."""
        metrics = answer.metrics

        def place(piece: KVSlice) -> None:
            begun = time.perf_counter()
            try:
                self.worker.call(lambda: self.engine.place(sequence, piece))
            except SliceRefused as error:
                raise ProtocolError(f"a slice that does not belong here: {error}") from error
            metrics.inject_time += time.perf_counter() - begun

        def logits(row: Array) -> None:
            first.append(int(row.argmax()))
            metrics.first_token_time = time.perf_counter() - started
            self._put(first[0], answer)

        return Sink(place, lambda length: self.worker.call(lambda: self.engine.commit(sequence, length)), logits)

    def _warn_if_slow(self, answer: Answer) -> None:
        exposed = answer.metrics.exposed_transfer_time
        if exposed > _SLOW_TRANSFER_S:
            about = {"request_id": answer.request_id, "paths": answer.metrics.kv_paths}
            log.warning("the KV transfer went on for %.1f s after the prefill", exposed, extra=about)

    def _read_then_write(self, tokens: list[int], sequence: Sequence, answer: Answer, max_tokens: int) -> Work[None]:
        started = time.perf_counter()
        for part in chunks(tokens, self.chunk_tokens):
            if answer.cancelled:
                raise Cancelled("the client is gone")
            logits = self.engine.prefill(sequence, part)
            yield
        first = int(np.argmax(logits.numpy()[0]))
        answer.metrics.prefill_time = answer.metrics.first_token_time = time.perf_counter() - started
        self._put(first, answer)
        yield from self._write(sequence, first, answer, max_tokens)

    def _put(self, token: int, answer: Answer) -> None:
        answer.metrics.completion_tokens += 1
        if token in self.engine.spec.eos_tokens:
            answer.metrics.finish_reason = "stop"
        answer.put(token)

    def _write(self, sequence: Sequence, token: int, answer: Answer, max_tokens: int) -> Work[None]:
        """From the first token, which is out already, to the last."""
        started, metrics = time.perf_counter(), answer.metrics
        while metrics.completion_tokens < max_tokens and metrics.finish_reason != "stop":
            if answer.cancelled:
                raise Cancelled("the client is gone")
            token = self.engine.step([sequence], [token]).greedy().tolist()[0]
            self._put(token, answer)
            metrics.decode_time = time.perf_counter() - started
            metrics.decode_speed = (metrics.completion_tokens - 1) / metrics.decode_time
            yield

    def _finish(self, sequence: Sequence, answer: Answer, done: "Future[Any]") -> None:
        """Always: give the memory back, then end the answer, with the error if there was one."""
        self._answers.discard(answer)

        def end() -> None:
            answer.metrics.prompt_tokens_recomputed = sequence.computed
            self.engine.close(sequence)
            answer.put(done.exception())

        try:
            self.worker.post(end)
        except NodeBusy as error:  # the engine has stopped: nothing to give back, but someone may be waiting
            answer.put(error)


@contextmanager
def _said_of_the_request() -> Iterator[None]:
    """What would be another node's fault on the wire is the caller's in a request."""
    try:
        yield
    except WireError as error:
        raise BadRequest(f"kv_cache: {error}") from error
