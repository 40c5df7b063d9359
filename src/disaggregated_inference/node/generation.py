"""A running generation: its parameters, its metrics, and its tokens as they are generated."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from disaggregated_inference.api import (
    DEFAULT_NODE_TOKENS,
    DecodeMetrics,
    GenerationParams,
    Progress,
    PromptLogprobs,
    TokenEvent,
)
from disaggregated_inference.errors import Cancelled, DisaggError


class Admitted:
    """The first item of every generation: its memory is reserved."""


Item = TokenEvent | Admitted | Progress | PromptLogprobs | BaseException | None


class RequestInfo(NamedTuple):
    """`arrived_at`, on the clock of time.perf_counter, is earlier than now if a grammar was compiled first."""

    id: str = ""
    arrived_at: float | None = None


class Generation:
    """Iterate for tokens; then `metrics` is complete."""

    def __init__(
        self,
        params: GenerationParams,
        metrics: DecodeMetrics,
        info: RequestInfo = RequestInfo(),
        progress_s: float = 0.1,
    ) -> None:
        self.params, self.metrics, self.request_id, self._progress_s = params, metrics, info.id, progress_s
        self.created_at = time.perf_counter()
        self.arrived_at = self.created_at if info.arrived_at is None else info.arrived_at
        self.deadline = time.monotonic() + params.timeout_s - (self.created_at - self.arrived_at)
        self.ended = False
        self.cancel_error: DisaggError | None = None
        self._stop: Callable[[DisaggError], None] = lambda error: None
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._deliver: Callable[[Item], None] = self._items.put
        self._lock = threading.Lock()
        self._reported_tokens, self._reported_at = -1, 0.0

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens or DEFAULT_NODE_TOKENS

    def put(self, item: Item) -> None:
        """The next token, or the end: None, or an error."""
        with self._lock:
            self.ended = item is None or isinstance(item, BaseException)
            self._deliver(item)

    def report_progress(self, tokens: int) -> None:
        """This many prompt tokens are in place. The first and the last report always reach the stream."""
        if not self.params.progress:
            return
        now, metrics, total = time.perf_counter(), self.metrics, self.metrics.prompt_tokens or 0
        with self._lock:
            early = now - self._reported_at < self._progress_s and tokens < total
            if self.ended or early or tokens <= self._reported_tokens:
                return
            self._reported_tokens, self._reported_at = tokens, now
            passed_ms = round(1000 * (now - self.created_at - metrics.admission_time))
            self._deliver(Progress(total, metrics.cached_tokens, tokens, passed_ms))

    def put_prompt_logprobs(self, piece: PromptLogprobs) -> None:
        """Before the first token; dropped if the request ended meanwhile."""
        with self._lock:
            if not self.ended:
                self._deliver(piece)

    def listen(self, deliver: Callable[[Item], None]) -> None:
        """From now on every item goes to `deliver`, on the thread that produced it; waiting items go first."""
        with self._lock:
            while not self._items.empty():
                deliver(self._items.get())
            self._deliver = deliver

    def cancel(self, error: DisaggError | None = None) -> None:
        """A transfer stops at once, decoding at the next token."""
        if not self.ended and not self.cancel_error:
            self.cancel_error = error or Cancelled("the client disconnected")
            self._stop(self.cancel_error)

    def on_cancel(self, stop: Callable[[DisaggError], None]) -> None:
        """Call `stop` with the error of a cancellation, now if there was one."""
        self._stop = stop
        if self.cancel_error:
            stop(self.cancel_error)

    def raise_if_cancelled(self) -> None:
        if self.cancel_error:
            raise self.cancel_error

    def events(self) -> Iterator[TokenEvent]:
        while (item := self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, TokenEvent):
                yield item

    def __iter__(self) -> Iterator[int]:
        return (event.token for event in self.events())
