"""What a request gets: its rules, its metrics, and the answer while it is being written."""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from disaggregated_inference.errors import BadRequest, Cancelled, DisaggError
from disaggregated_inference.node.sampling import SamplingParams
from disaggregated_inference.node.structured_output import OutputFormat

_MOST_CHOICES = 16
_PROGRESS_S = 0.1  # at most so often is anyone told how far the reading is; a prompt may come in pieces of 16 tokens


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is to be written. The defaults: one answer, the likeliest tokens."""

    max_tokens: int = 256
    n: int = 1
    sampling: SamplingParams = SamplingParams()
    format: OutputFormat | None = None
    written: tuple[int, ...] = ()  # tokens of the answer that the prompt already ends with: another node wrote them
    choice: int = 0  # which of several this is, where one of them goes on by itself: it has its own random numbers
    timeout_s: float = 180.0
    queue_s: float = 30.0  # how long it may wait for memory
    arrived_at: float | None = None  # on the clock of time.perf_counter, where it waited before: for its grammar
    progress: bool = False  # whether someone wants to know how much of the prompt is here

    def seeded(self) -> "GenerationParams":
        """With a seed to report and to go on with, where the answer will be sampled and none was given."""
        if not self.sampling.temperature or self.sampling.seed is not None:
            return self
        seed = secrets.randbits(53)  # what every JSON reader keeps whole
        return msgspec.structs.replace(self, sampling=msgspec.structs.replace(self.sampling, seed=seed))

    def require_valid(self, vocabulary: int) -> None:
        self.sampling.require_valid(vocabulary)
        if self.max_tokens < 1:
            raise BadRequest("max_new_tokens must be at least 1")
        if not 1 <= self.n <= _MOST_CHOICES:
            raise BadRequest(f"n must be between 1 and {_MOST_CHOICES}, not {self.n}")
        if (self.written or self.choice) and self.n > 1:
            raise BadRequest("an answer that goes on has one choice: give written and choice with n = 1")
        if not 0 <= self.choice < _MOST_CHOICES:
            raise BadRequest(f"choice must be between 0 and {_MOST_CHOICES - 1}, not {self.choice}")
        if not 0 < self.timeout_s <= 86400 or not 0 <= self.queue_s <= 86400:
            raise BadRequest("timeout_s and queue_s are seconds, up to a day")


class DecodeMetrics(msgspec.Struct):
    """Seconds and counts of one request. Transfer is *hidden* while the prompt is still being read; what remains after
    the logits are here (they overtake waiting slices) is *exposed*."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, that this node held already
    prefill_cached_tokens: int = 0  # of the prompt, that the prefill node held already
    decode_time: float = 0.0
    decode_speed: float = 0.0
    first_token_time: float = 0.0
    prompt_tokens_recomputed: int = 0
    kv_bytes: int = 0
    kv_codec: str = ""
    kv_paths: tuple[str, ...] = ()
    resumed: int = 0
    canary_time: float = 0.0
    admission_time: float = 0.0  # waiting for memory on this node
    queue_time: float = 0.0
    prefill_time: float = 0.0
    fetch_time: float = 0.0
    exposed_transfer_time: float = 0.0
    inject_time: float = 0.0
    total_time: float = 0.0
    finish_reason: str = "length"
    seed: int | None = None  # of a sampled answer: the same one gives the same answer again

    @property
    def spared_tokens(self) -> int:
        """Of the prompt, that nobody computed for this request. What this node held and the prefill node computed all
        the same was not moved, and no more than that."""
        return self.prefill_cached_tokens if self.kv_paths else self.cached_tokens


class TokenOutput(msgspec.Struct, frozen=True):
    """One token, the text that it completes, and how likely it was where someone asked."""

    token: int
    text: str
    choice: int = 0
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None  # with a choice's last token


class Admitted:
    """The memory is there: the first thing that an answer brings."""


class Progress(msgspec.Struct, frozen=True):
    """How much of a prompt is here. By llama.cpp's names: its clients have bars for them."""

    total: int
    cache: int  # held before the request came
    processed: int  # those included
    time_ms: int  # since the memory was there


Item = TokenOutput | Admitted | Progress | BaseException | None


class Generation:
    """One request's answer while it is being written: iterate for tokens, then `metrics` is complete."""

    def __init__(self, rules: GenerationParams, metrics: DecodeMetrics, request_id: str = "") -> None:
        self.rules, self.metrics, self.request_id = rules, metrics, request_id
        self.made_at = time.perf_counter()
        self.begun_at = self.made_at if rules.arrived_at is None else rules.arrived_at
        self.deadline = time.monotonic() + rules.timeout_s - (self.made_at - self.begun_at)
        self.ended = False
        self.gave_up: DisaggError | None = None
        self._stop: Callable[[DisaggError], None] = lambda error: None
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._deliver: Callable[[Item], None] = self._items.put
        self._lock = threading.Lock()
        self._told, self._told_at = -1, 0.0

    def put(self, item: Item) -> None:
        """The next token, or the end: None, or the error there was."""
        with self._lock:
            self.ended = item is None or isinstance(item, BaseException)
            self._deliver(item)

    def was_read(self, tokens: int) -> None:
        """So many of the prompt's tokens are here. Told to who asked: the first and the last news always."""
        if not self.rules.progress:
            return
        now, metrics = time.perf_counter(), self.metrics
        with self._lock:
            early = now - self._told_at < _PROGRESS_S and tokens < metrics.prompt_tokens
            if self.ended or early or tokens <= self._told:
                return
            self._told, self._told_at = tokens, now
            passed_ms = round(1000 * (now - self.made_at - metrics.admission_time))
            self._deliver(Progress(metrics.prompt_tokens, metrics.cached_tokens, tokens, passed_ms))

    def listen(self, deliver: Callable[[Item], None]) -> None:
        """From now on every item goes to `deliver`, on whatever thread it comes from; those that wait go first."""
        with self._lock:
            while not self._items.empty():
                deliver(self._items.get())
            self._deliver = deliver

    @property
    def cancelled(self) -> bool:
        return self.gave_up is not None

    def cancel(self, error: DisaggError | None = None) -> None:
        """Nobody wants it any more, or its time is over: a transfer stops at once, writing at the next token."""
        if self.ended or self.gave_up:
            return
        self.gave_up = error or Cancelled("the client is gone")
        self._stop(self.gave_up)

    def on_cancel(self, stop: Callable[[DisaggError], None]) -> None:
        self._stop = stop
        self.require_wanted(stop)

    def require_wanted(self, stop: Callable[[DisaggError], None] | None = None) -> None:
        """Raises why it is no longer wanted, unless `stop` deals with it."""
        if self.gave_up and stop:
            stop(self.gave_up)
        elif self.gave_up:
            raise self.gave_up

    def forget(self) -> None:
        """It is over: what could have stopped it is let go."""
        self._stop = lambda error: None

    def pieces(self) -> Iterator[TokenOutput]:
        while (item := self._items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, TokenOutput):
                yield item

    def __iter__(self) -> Iterator[int]:
        return (piece.token for piece in self.pieces())
