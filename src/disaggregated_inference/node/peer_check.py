"""The peer check: before a decode node uses the KV of a prefill node, both compute a canary prompt and compare.

Fingerprints show that both nodes hold the same model; the canary shows that both compute the same KV with it. Rows are
compared by their relative distance, by its median over the prompt's tokens. Quantized weights move rows by a few
hundredths (four-bit weights of small models by up to 0.7, and logits by up to 0.24), and an MoE router may choose other
experts for a token. A wrong rotation, a swapped head or other weights move all rows by about one.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from disaggregated_inference.api import PeerStatus
from disaggregated_inference.engines import Sequence
from disaggregated_inference.errors import KVMemoryFull, PeerRefused
from disaggregated_inference.kv import Array, KVDType, KVSlice, as_dtype
from disaggregated_inference.kv_transfer import Hello, KVFetch, NetworkPath, Sink
from disaggregated_inference.node.context import PrefillContext
from disaggregated_inference.node.generation import Generation
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.timeouts import NodeTimeouts

log = logging.getLogger(__name__)

CANARY_TOKENS = 48
LIMIT = 0.3
_COARSE_LIMIT = 0.8  # for the keys and values of coarse weights
_COARSE = 0.1  # rounding of five-bit and smaller weights, and of unknown formats
_MAX_PEERS = 256


def canary_prompt(vocabulary: int) -> list[int]:
    """The same on every node with the same vocabulary."""
    return [(7919 * (at + 1)) % vocabulary for at in range(CANARY_TOKENS)]


class CanaryResult(NamedTuple):
    """What one node computes for the canary prompt."""

    slices: list[KVSlice]
    logits: NDArray[np.float32]  # after the prompt, and one token later


class PeerChecks:
    """One check for each peer and epoch, run by the first request; others wait for it. Results are kept: by the peer's
    identity where the connection proves it, else by its addresses."""

    def __init__(
        self,
        kv_memory: KVMemory,
        paths_to: Callable[[PrefillContext], list[NetworkPath]],
        timeouts: NodeTimeouts,
        limit: float = LIMIT,
        trust: Trust = Trust(),
    ) -> None:
        self._kv_memory, self._scheduler, self._paths_to = kv_memory, kv_memory.scheduler, paths_to
        self._trust = trust
        self._timeouts, self.limit = timeouts, limit
        self._lock = threading.Lock()
        self._checks: OrderedDict[tuple[object, str], Future[PeerStatus]] = OrderedDict()
        self.tokens_computed = 0

    def require(self, context: PrefillContext, hello: Hello, generation: Generation) -> float:
        """Seconds that the check took; 0 for a known peer. Raises `PeerRefused`, or the error of a check that could
        not run: then the next request tries again."""
        started, key = time.perf_counter(), self._trust.peer_key(context)
        while True:
            mine: Future[PeerStatus] = Future()
            with self._lock:
                future = self._checks.setdefault(key, mine)
                if len(self._checks) > _MAX_PEERS:
                    self._checks.popitem(last=False)
            if future is mine:
                self._check(context, hello, mine, generation)
            while not wait([future], self._timeouts.peer_check_poll_s).done:
                generation.raise_if_cancelled()
            if future is mine or not future.exception():
                break
        if refused := future.result().refused:
            raise PeerRefused(refused)
        return time.perf_counter() - started if future is mine else 0.0

    def stats(self) -> list[PeerStatus]:
        with self._lock:
            done = [future for future in self._checks.values() if future.done() and not future.exception()]
        return [future.result() for future in done]

    def _check(
        self, context: PrefillContext, hello: Hello, future: "Future[PeerStatus]", generation: Generation
    ) -> None:
        extra = {"peer": context.epoch, "request_id": hello.request_id}
        identity = context.signer if self._trust.is_authentic(context) else ""
        try:
            distance = self._compare(context, hello, generation)
        except PeerRefused as error:
            log.error("prefill node %s is refused: %s", context.epoch, error, extra=extra)
            future.set_result(PeerStatus(context.epoch, refused=str(error), identity=identity))
        except BaseException as error:
            with self._lock:
                self._checks.pop(self._trust.peer_key(context), None)
            future.set_exception(error)
        else:
            log.info("prefill node %s passed the peer check", context.epoch, extra=extra | {"distance": distance})
            future.set_result(PeerStatus(context.epoch, distance=distance, identity=identity))

    def _compare(self, context: PrefillContext, hello: Hello, generation: Generation) -> float:
        """One sequence after the other: there may be memory for one only."""
        tokens = canary_prompt(self._kv_memory.engine.spec.vocabulary)
        with self._open(len(tokens) + 1, generation) as sequence:
            logits, rounding = self._receive(context, hello, sequence, len(tokens), generation)
            received = self._scheduler.call(lambda: self._step(sequence, logits, tokens))
        with self._open(len(tokens) + 1, generation) as own:
            computed = self._scheduler.call(lambda: self._step(own, self._prefill(own, tokens), tokens))
        rounding = max(rounding, self._kv_memory.engine.fingerprint.weights.rounding)
        return require_same(computed, received, rounding, self.limit)

    @contextmanager
    def _open(self, capacity: int, generation: Generation) -> Iterator[Sequence]:
        """Admission has not reserved this memory: where it is missing, try again until another request ends."""
        while True:
            try:
                sequence = self._scheduler.call(lambda: self._kv_memory.open(capacity, reserved=False))
                break
            except KVMemoryFull:
                generation.raise_if_cancelled()
                if not self._kv_memory.engine.live:
                    raise
                time.sleep(self._timeouts.peer_check_retry_s)
        try:
            yield sequence
        finally:
            self._scheduler.post(lambda: self._kv_memory.close(sequence))

    def _receive(
        self, context: PrefillContext, hello: Hello, target: Sequence, count: int, generation: Generation
    ) -> tuple[Array, float]:
        """Fetch the peer's canary KV into `target`; returns its logits and the rounding of its weights."""
        logits: list[Array] = []
        sink = Sink(
            place=lambda piece: self._scheduler.call(lambda: self._kv_memory.engine.place(target, piece)),
            commit=lambda length: self._scheduler.call(lambda: self._kv_memory.engine.commit(target, length)),
            logits=logits.append,
        )
        spec, hello = self._kv_memory.engine.spec, msgspec.structs.replace(hello, canary=True)
        fetch = KVFetch(hello, spec.layout, spec.vocabulary, count, self._paths_to(context), sink)
        generation.on_cancel(fetch.stop)  # other requests that wait for this check then run their own
        result = fetch.run()
        return logits[0], result.rounding

    def _prefill(self, sequence: Sequence, tokens: list[int]) -> Array:
        """On the scheduler's thread."""
        self.tokens_computed += len(tokens)
        logits: Array = self._kv_memory.engine.prefill(sequence, tokens).numpy()[0]
        return logits

    def _step(self, sequence: Sequence, logits: Array, tokens: list[int]) -> CanaryResult:
        """On the scheduler's thread: decode one more token and copy everything."""
        later = self._kv_memory.engine.step([sequence], [tokens[0]]).numpy()[0]
        return CanaryResult(
            [piece.copy() for piece in self._kv_memory.engine.export(sequence)], np.stack([logits, later])
        )


def require_same(computed: CanaryResult, received: CanaryResult, rounding: float = 0.0, limit: float = LIMIT) -> float:
    """The largest distance; `PeerRefused` at the first place where it is too large. `rounding` is `Weights.rounding`
    of the node with the coarser weights."""
    coarse = max(limit, _COARSE_LIMIT) if rounding >= _COARSE else limit
    rows = _largest(_row_distances(computed, received), coarse)
    return max(rows, _largest(_logit_distances(computed, received), limit))


def _largest(distances: Iterator[tuple[str, float]], limit: float) -> float:
    largest = 0.0
    for place, value in distances:
        if not value <= limit:  # also for NaN
            raise PeerRefused(
                f"the prefill node computes other values than this node: on the canary prompt, {place} differ by"
                f" {value:.3g} of their size (limit {limit}). Check that both nodes hold the same model files."
            )
        largest = max(largest, value)
    return largest


def _row_distances(computed: CanaryResult, received: CanaryResult) -> Iterator[tuple[str, float]]:
    for mine, other in zip(computed.slices, received.slices, strict=True):
        for name in ("keys", "values"):
            pair = (_rows(getattr(piece, name), piece.dtype) for piece in (mine, other))
            yield f"the {name} of layer {mine.layer}", distance(*pair)


def _logit_distances(computed: CanaryResult, received: CanaryResult) -> Iterator[tuple[str, float]]:
    for row, place in enumerate(("after the prompt", "one token later")):
        yield f"the logits {place}", distance(computed.logits[row : row + 1], received.logits[row : row + 1])


def distance(computed: NDArray[np.float32], received: NDArray[np.float32]) -> float:
    """The median over the tokens of |computed - received| / |computed|."""
    size = np.linalg.norm(computed, axis=-1)
    return float(np.median(np.linalg.norm(computed - received, axis=-1) / np.where(size == 0, 1, size)))


def _rows(array: Array, dtype: KVDType) -> NDArray[np.float32]:
    rows: NDArray[np.float32] = as_dtype(array, dtype, "float32").reshape(len(array), -1)
    return rows
