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
from disaggregated_inference.errors import PeerGone
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.nodes.context import Context
from disaggregated_inference.nodes.worker import EngineThread, Work
from disaggregated_inference.wire import Hello, Receipt, fetch
from disaggregated_inference.wire.frames import Connection

_SILENCE_S = 15.0
_DIAL_S = 3.0


class DecodeMetrics(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    decode_time: float = 0.0
    decode_speed: float = 0.0
    first_token_time: float = 0.0
    prompt_tokens_recomputed: int = 0
    kv_bytes: int = 0
    fetch_time: float = 0.0
    prefill_time: float = 0.0
    exposed_transfer_time: float = 0.0
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
        started = time.perf_counter()
        done: Future[Any] = Future()
        try:
            logits, receipt = self._fetch(context, sequence)
            self.worker.call(lambda: self.engine.commit(sequence, context.tokens))
            metrics = answer.metrics
            metrics.fetch_time = time.perf_counter() - started
            metrics.kv_bytes, metrics.prefill_time = receipt.payload_bytes, receipt.end.prefill_s
            metrics.exposed_transfer_time = max(0.0, metrics.fetch_time - receipt.end.prefill_s)
            first = int(logits.argmax())
            metrics.first_token_time = time.perf_counter() - started
            self.worker.start(self._write(sequence, first, answer, max_tokens)).result()
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)
        self._finish(sequence, answer, done)

    def _fetch(self, context: Context, sequence: Sequence) -> tuple[Array, Receipt]:
        hello = Hello(
            ticket=context.ticket,
            secret=context.secret,
            fetch=secrets.token_hex(8),
            fingerprint=self.engine.fingerprint,
        )
        logits: list[Array] = []
        receipt = fetch(
            Connection(_dial(context.addresses)),
            hello,
            self.engine.spec.layout,
            self.engine.spec.vocabulary,
            lambda piece: self.worker.call(lambda: self.engine.place(sequence, piece)),
            logits.append,
        )
        if not logits:
            raise PeerGone("the cache arrived without logits")
        return logits[0], receipt

    def _read_then_write(self, tokens: list[int], sequence: Sequence, answer: Answer, max_tokens: int) -> Work[None]:
        started = time.perf_counter()
        for part in chunks(tokens, self.chunk_tokens):
            logits = self.engine.prefill(sequence, part)
            answer.metrics.prompt_tokens_recomputed += len(part)
            yield
        first = int(np.argmax(logits.numpy()[0]))
        answer.metrics.prefill_time = answer.metrics.first_token_time = time.perf_counter() - started
        yield from self._write(sequence, first, answer, max_tokens)

    def _write(self, sequence: Sequence, token: int, answer: Answer, max_tokens: int) -> Work[None]:
        started, metrics, engine = time.perf_counter(), answer.metrics, self.engine
        while not answer.cancelled:
            answer.put(token)
            metrics.completion_tokens += 1
            metrics.decode_time = time.perf_counter() - started
            if token in engine.spec.eos_tokens:
                metrics.finish_reason = "stop"
                break
            if metrics.completion_tokens == max_tokens:
                break
            token = engine.step([sequence], [token]).greedy().tolist()[0]
            yield
        if metrics.completion_tokens > 1:
            metrics.decode_speed = (metrics.completion_tokens - 1) / metrics.decode_time

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
