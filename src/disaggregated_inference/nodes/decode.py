"""The decode node: takes a cache from a prefill node, or reads the prompt itself, and writes the answer."""

import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from disaggregated_inference.engines import Sequence, chunks
from disaggregated_inference.errors import Cancelled, PeerGone
from disaggregated_inference.kv import KVSlice
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.worker import EngineThread, Work
from disaggregated_inference.wire import Hello, fetch
from disaggregated_inference.wire.frames import Connection

_SILENCE_S = 15.0
_DIAL_S = 3.0


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
    queue_time: float = 0.0
    prefill_time: float = 0.0
    fetch_time: float = 0.0
    exposed_transfer_time: float = 0.0
    inject_time: float = 0.0
    finish_reason: str = "length"


class Answer:
    """One request's answer while it is being written: iterate for tokens, then `metrics` is complete."""

    def __init__(self, metrics: DecodeMetrics) -> None:
        self.metrics = metrics
        self.cancelled = False
        self._tokens: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()

    def put(self, token: int) -> None:
        self._tokens.put(token)

    def end(self, error: BaseException | None) -> None:
        self._tokens.put(error)

    def __iter__(self) -> Iterator[int]:
        while (item := self._tokens.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


class DecodeNode:
    def __init__(self, worker: EngineThread, chunk_tokens: int = 512) -> None:
        self.worker, self.engine = worker, worker.engine
        self.chunk_tokens = chunk_tokens
        self.epoch = secrets.token_hex(8)

    def fetch_and_write(self, context: Context, max_tokens: int) -> Answer:
        """Memory first, then the transfer, then the answer: each token is in the answer the moment it is known."""
        answer = Answer(DecodeMetrics(prompt_tokens=context.tokens))
        sequence = self.worker.call(lambda: self.engine.open(context.tokens + max_tokens))
        threading.Thread(
            target=self._fetch_then_write, args=(context, sequence, answer, max_tokens), name="decode", daemon=True
        ).start()
        return answer

    def read_and_write(self, tokens: list[int], max_tokens: int) -> Answer:
        """No cache from elsewhere: this node reads the prompt too, in chunks, between other works."""
        answer = Answer(DecodeMetrics(prompt_tokens=len(tokens)))
        sequence = self.worker.call(lambda: self.engine.open(len(tokens) + max_tokens))
        future = self.worker.start(self._read_then_write(tokens, sequence, answer, max_tokens))
        future.add_done_callback(lambda done: self._finish(sequence, answer, done))
        return answer

    def _fetch_then_write(self, context: Context, sequence: Sequence, answer: Answer, max_tokens: int) -> None:
        done: Future[Any] = Future()
        try:
            first = self._fetch(context, sequence, answer)
            self.worker.start(self._write(sequence, first, answer, max_tokens)).result()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        self._finish(sequence, answer, done)

    def _fetch(self, context: Context, sequence: Sequence, answer: Answer) -> int:
        """The cache into the sequence. The first token is out as soon as the logits are here, whatever still comes."""
        metrics, started = answer.metrics, time.perf_counter()
        first: list[int] = []

        def take(piece: KVSlice) -> None:
            if answer.cancelled:
                raise Cancelled("the client is gone")
            begun = time.perf_counter()
            self.worker.call(lambda: self.engine.place(sequence, piece))
            metrics.inject_time += time.perf_counter() - begun

        def choose(logits: Array) -> None:
            first.append(int(logits.argmax()))
            metrics.first_token_time = time.perf_counter() - started
            self._put(first[0], answer)

        hello = Hello(
            ticket=context.ticket,
            secret=context.secret,
            fetch=secrets.token_hex(8),
            fingerprint=self.engine.fingerprint,
        )
        spec = self.engine.spec
        receipt = fetch(Connection(_dial(context.addresses)), hello, spec.layout, spec.vocabulary, take, choose)
        if not first:
            raise PeerGone("the cache arrived without logits")
        self.worker.call(lambda: self.engine.commit(sequence, context.tokens))
        metrics.fetch_time = time.perf_counter() - started
        metrics.exposed_transfer_time = metrics.fetch_time - metrics.first_token_time
        metrics.kv_bytes = receipt.payload_bytes
        metrics.queue_time, metrics.prefill_time = receipt.end.queue_s, receipt.end.prefill_s
        return first[0]

    def _read_then_write(self, tokens: list[int], sequence: Sequence, answer: Answer, max_tokens: int) -> Work[None]:
        started = time.perf_counter()
        for part in chunks(tokens, self.chunk_tokens):
            logits = self.engine.prefill(sequence, part)
            answer.metrics.prompt_tokens_recomputed += len(part)
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
        while metrics.completion_tokens < max_tokens and metrics.finish_reason != "stop" and not answer.cancelled:
            token = self.engine.step([sequence], [token]).greedy().tolist()[0]
            self._put(token, answer)
            metrics.decode_time = time.perf_counter() - started
            metrics.decode_speed = (metrics.completion_tokens - 1) / metrics.decode_time
            yield

    def _finish(self, sequence: Sequence, answer: Answer, done: "Future[Any]") -> None:
        """Always: give the memory back, then end the answer, with the error if there was one."""
        threading.Thread(target=self._end, args=(sequence, answer, done), daemon=True).start()

    def _end(self, sequence: Sequence, answer: Answer, done: "Future[Any]") -> None:
        self.worker.call(lambda: self.engine.close(sequence))
        answer.end(done.exception())


def _dial(addresses: tuple[tuple[str, int], ...]) -> socket.socket:
    """The first address that answers."""
    last: OSError | None = None
    for host, port in addresses:
        try:
            sock = socket.create_connection((host, port), timeout=_DIAL_S)
        except OSError as error:
            last = error
            continue
        sock.settimeout(_SILENCE_S)
        return sock
    raise PeerGone(f"no KV address of the prefill node answers: {last}")
