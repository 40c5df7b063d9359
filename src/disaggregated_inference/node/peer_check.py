"""Which prefill nodes this decode node has proven, and how: see canary.py."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import msgspec
import numpy as np

from disaggregated_inference.engines import Sequence
from disaggregated_inference.errors import KVMemoryFull, PeerRefused
from disaggregated_inference.kv.dtype import Array
from disaggregated_inference.kv_transfer import Hello, KVFetch, Paths, Sink
from disaggregated_inference.node.canary import Reading, canary_tokens, require_same
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.kv_memory import KVMemory

log = logging.getLogger(__name__)

_MOST_PEERS = 256
_PATIENCE_S = 0.2
_RETRY_S = 0.05


class PeerCheck(msgspec.Struct, frozen=True):
    """A peer's standing; `refused` says why, where it is not trusted."""

    epoch: str
    distance: float | None = None
    refused: str | None = None


class PeerChecks:
    """One canary per epoch of a peer, for whoever asks first; others wait for it. Verdicts are kept."""

    def __init__(self, kv_memory: KVMemory, paths: Paths) -> None:
        self._kv_memory, self._scheduler, self._engine, self._paths = (
            kv_memory,
            kv_memory.scheduler,
            kv_memory.engine,
            paths,
        )
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[PeerCheck]] = OrderedDict()
        self.tokens_computed = 0

    def require(self, context: PrefillContext, hello: Hello, answer: Generation) -> float:
        """Seconds it took, 0 for a peer that is known. Raises `PeerRefused`, or why the canary did not arrive: that is
        this request's own trouble, and the next one tries for itself."""
        started = time.perf_counter()
        while True:
            mine: Future[PeerCheck] = Future()
            with self._lock:
                future = self._known.setdefault(context.epoch, mine)
                if len(self._known) > _MOST_PEERS:
                    self._known.popitem(last=False)
            if future is mine:
                self._prove(context, hello, mine, answer)
            while not wait([future], _PATIENCE_S).done:
                answer.require_wanted()
            if future is mine or not future.exception():
                break
        if refused := future.result().refused:
            raise PeerRefused(refused)
        return time.perf_counter() - started if future is mine else 0.0

    def seen(self) -> list[PeerCheck]:
        with self._lock:
            done = [future for future in self._known.values() if future.done() and not future.exception()]
        return [future.result() for future in done]

    def _prove(self, context: PrefillContext, hello: Hello, future: "Future[PeerCheck]", answer: Generation) -> None:
        about = {"peer": context.epoch, "request_id": hello.request_id}
        try:
            distance = self._compare(context, hello, answer)
        except PeerRefused as error:
            log.error("prefill node %s is refused: %s", context.epoch, error, extra=about)
            future.set_result(PeerCheck(context.epoch, refused=str(error)))
        except BaseException as error:
            with self._lock:
                self._known.pop(context.epoch, None)
            future.set_exception(error)
        else:
            log.info("prefill node %s is proven", context.epoch, extra=about | {"distance": distance})
            future.set_result(PeerCheck(context.epoch, distance))

    def _compare(self, context: PrefillContext, hello: Hello, answer: Generation) -> float:
        """One after the other: there may be room for no more than one of them."""
        tokens = canary_tokens(self._engine.spec.vocabulary)
        with self._opened(len(tokens) + 1, answer) as theirs:
            logits, rounding = self._receive(context, hello, theirs, len(tokens), answer)
            received = self._scheduler.call(lambda: self._stepped(theirs, logits, tokens))
        with self._opened(len(tokens) + 1, answer) as ours:
            computed = self._scheduler.call(lambda: self._stepped(ours, self._read(ours, tokens), tokens))
        return require_same(computed, received, max(rounding, self._engine.fingerprint.weights.rounding))

    @contextmanager
    def _opened(self, capacity: int, answer: Generation) -> Iterator[Sequence]:
        """Admission has promised nobody this memory. Where it is not there, it will be when another request ends."""
        while True:
            try:
                sequence = self._scheduler.call(lambda: self._kv_memory.open(capacity, counted=False))
                break
            except KVMemoryFull:
                answer.require_wanted()
                if not self._engine.live:
                    raise
                time.sleep(_RETRY_S)
        try:
            yield sequence
        finally:
            self._scheduler.post(lambda: self._kv_memory.close(sequence))

    def _receive(
        self, context: PrefillContext, hello: Hello, target: Sequence, count: int, answer: Generation
    ) -> tuple[Array, float]:
        """The canary's cache, into its place; its logits, and how coarse the weights are that made them."""
        logits: list[Array] = []
        sink = Sink(
            place=lambda piece: self._scheduler.call(lambda: self._engine.place(target, piece)),
            commit=lambda length: self._scheduler.call(lambda: self._engine.commit(target, length)),
            logits=logits.append,
        )
        spec, asked = self._engine.spec, msgspec.structs.replace(hello, canary=True)
        gather = KVFetch(asked, spec.layout, spec.vocabulary, count, self._paths.ordered(context.addresses), sink)
        answer.on_cancel(gather.stop)  # the client may leave; whoever waits for the same proof tries for itself
        gathered = gather.run()
        return logits[0], gathered.rounding

    def _read(self, sequence: Sequence, tokens: list[int]) -> Array:
        """On the engine's thread."""
        self.tokens_computed += len(tokens)
        logits: Array = self._engine.prefill(sequence, tokens).numpy()[0]
        return logits

    def _stepped(self, sequence: Sequence, logits: Array, tokens: list[int]) -> Reading:
        """On the engine's thread: one step on, and all that there is, in memory of its own."""
        later = self._engine.step([sequence], [tokens[0]]).numpy()[0]
        return Reading([piece.copy() for piece in self._engine.export(sequence)], np.stack([logits, later]))
