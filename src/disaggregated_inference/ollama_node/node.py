"""A node in front of an Ollama that runs already. Whole answers only: its cache neither leaves it nor comes in.

It looks like any other node from outside, and says what it is: `exports` and `imports` are false, there is no
tokenizer, and what is not known (tokens of a prompt that it held already) is left out instead of made up.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from disaggregated_inference.errors import (
    ContextTooLong,
    DisaggError,
    EngineFailed,
    EngineUnavailable,
    ModelUnsupported,
    NodeBusy,
    NodeDraining,
)
from disaggregated_inference.node.rates import RateMeter
from disaggregated_inference.ollama_node.client import (
    COUNTS_ALL,
    HONOURS_TRUNCATE,
    GenerateChunk,
    LoadedModel,
    ModelDetails,
    OllamaClient,
    keep_alive_of,
    version_of,
)
from disaggregated_inference.ollama_node.output import OllamaNodeStats, TextMetrics, TextPiece, was_read
from disaggregated_inference.ollama_node.requests import ParsedPrompt, TextRequest, WarmRequest

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # an answer about its health is good for so long
_UNLOAD_S = 2.0
_KNOWN_S = 5.0  # so long a model that is in memory is taken to be the one that it was
_AGAIN_S = 5.0  # until loading is tried again after it failed
_MOST_TOKEN_BYTES = 8  # text with more bytes to a token is hardly ever seen: so few tokens it has at least
_TOKEN_BYTES = 4  # about
_CHAT_TOKEN_BYTES = 3  # about, on the safe side: a chat's messages are dropped without a trace
_IMAGE_TOKENS = 768  # as Ollama itself guesses where it looks for room
_FEWEST_TOKEN_BYTES = 2  # and with fewer as hardly: so few bytes to a token of the window surely fit
_UNKNOWN_WINDOW = 4096
_NOT_ASKED = "Ollama was not asked yet"
_CUTS = (
    "this Ollama ({}) would cut the prompt in silence. One of 0.12.6 or later refuses only what really does not fit;"
    " a larger --ollama-context helps where the model has the window"
)


class OllamaNode:
    def __init__(
        self, ollama: OllamaClient, role: str, most_window: int, keep_alive: str, slots: int, queue: int
    ) -> None:
        self.ollama, self.role, self.slots, self.queue = ollama, role, slots, queue
        self.epoch = secrets.token_hex(8)
        self.draining = self.loading = False
        self.shown: ModelDetails | None = None
        self.version = ""
        self.running: LoadedModel | None = None
        self.reason = _NOT_ASKED  # why nobody can be served; empty when they can
        self.open = self.tokens_read = self.tokens_written = 0
        self.reading, self.writing, self.seen = RateMeter(), RateMeter(), OllamaNodeStats()
        self.window = min(_UNKNOWN_WINDOW, most_window)  # tokens, prompt and answer together
        self._most_window = most_window
        self._keep_alive = {} if not keep_alive else {"keep_alive": keep_alive_of(keep_alive)}
        self._looking: asyncio.Task[None] | None = None
        self._looked_at = self._introduced_at = 0.0
        self._silent_since: float | None = None
        self._unloadable = ""
        self._continues: bool | None = None

    @property
    def stalled_s(self) -> float:
        """How long Ollama has not answered what it was asked about itself. Of the engine inside it says nothing."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    async def introduce(self) -> None:
        """Who the model is. Raises what is in the way."""
        self.version = await self.ollama.version()
        shown = await self.ollama.show()
        if shown.lacks("completion"):
            raise ModelUnsupported(f"{self.ollama.model} does not write text: Ollama has it for embeddings")
        self.shown, self._introduced_at = shown, time.monotonic()
        self.window = self.ollama.window = min(shown.window or _UNKNOWN_WINDOW, self._most_window)

    async def require_model(self) -> None:
        """Before the node listens: whoever starts it is still looking. An Ollama that is not there yet may come."""
        try:
            await self.ollama.version()
        except DisaggError as error:
            return log.warning("%s; until then this node is unhealthy", error)
        else:
            await self.introduce()
        finally:
            await self.ollama.close()  # the loop that serves is another one

    def stop_taking(self) -> None:
        self.draining = True

    async def look(self) -> None:
        """How Ollama is; where it takes its time to say so, how it was, and `stalled_s` grows."""
        await asyncio.wait({self.look_soon()}, timeout=_LOOK_S)

    def look_soon(self) -> "asyncio.Task[None]":
        """One question at a time, whoever asks."""
        if self._looking is None or (self._looking.done() and time.monotonic() - self._looked_at > _LOOK_S):
            self._looking = asyncio.create_task(self._look())
        return self._looking

    def doubt(self) -> None:
        """It is away, or has lost the model: it may be another one when it is back."""
        self.shown, self._continues, self._looked_at = None, None, 0.0

    async def _look(self) -> None:
        self._silent_since = self._silent_since or time.monotonic()
        if self.reason == _NOT_ASKED:
            self.reason = f"Ollama at {self.ollama.url} was asked how it is and has not answered yet"
        try:
            self.running = await self.ollama.running() if self.shown else None
            if not self.running or time.monotonic() - self._introduced_at > _KNOWN_S:  # it may have been removed
                await self.introduce()
                self.running = self.running or await self.ollama.running()
            self.reason, self._silent_since = self._unloadable, None
        except DisaggError as error:
            self.running, self.reason = None, str(error)
        self._looked_at = time.monotonic()

    async def keep_ready(self) -> None:
        """Load the model before anyone needs it; where that fails, again after a while, until it is there once."""
        while not self.draining:
            await self.look()
            if self.shown:
                try:
                    await self.load()
                    self._unloadable = ""
                    return
                except DisaggError as error:
                    self._unloadable = str(error)
                    log.warning("the model is not loaded: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def load(self) -> None:
        self.loading = True
        try:
            await self.ollama.load(self._common())
        finally:
            self.loading, self._looked_at = False, 0.0

    async def unload(self) -> None:
        """It says that it is done a moment before it is."""
        await self.ollama.load({"keep_alive": 0})
        for _ in range(20):
            if not await self.ollama.running():
                break
            await asyncio.sleep(_UNLOAD_S / 20)
        self._looked_at = 0.0

    def health(self) -> dict[str, Any]:
        """As of the last look."""
        state = (
            "draining" if self.draining else "unhealthy" if self.reason else "loading" if self.loading else "healthy"
        )
        running = msgspec.to_builtins(self.running) if self.running else None
        return {
            "status": state,
            "model": self.ollama.model,
            "loaded": self.running is not None,
            "backend": "ollama",
            "role": self.role,
            "epoch": self.epoch,
            "stalled_s": round(self.stalled_s, 3),
            "reason": self.reason,
            "ollama": {"url": self.ollama.url, "version": self.version, "running": running},
        }

    def about_model(self) -> dict[str, Any]:
        if self.shown is None:
            raise EngineUnavailable(self.reason)
        return {
            "model": self.ollama.model,
            "context_window": self.window,
            "vocabulary": None,
            "eos_tokens": [],
            "fingerprint": None,
            "exports": False,
            "imports": False,
            "tokenizer": "none",
            "identity": {"architecture": self.shown.architecture, "parameters": self.shown.parameter_count},
            "capabilities": self.shown.capabilities,
        }

    def status(self) -> dict[str, Any]:
        running = min(self.open, self.slots)
        return self.health() | {
            "context_window": self.window,
            "kv_token_bytes": 0,
            "waiting": self.open,
            "waiting_tokens": 0,
            "running": running,
            "exports": False,
            "imports": False,
            "tokenizer": "none",
            "queue": {"waiting": self.open - running, "retry_after_s": 1},
            "slots": {"used": running, "most": self.slots},
            "kv": {"limit_bytes": 0, "reserved_bytes": 0, "held_bytes": 0},
            "integrity_faults": 0,
            "prompt_tokens_computed": self.tokens_read,
            "tokens_written": self.tokens_written,
            "rates": msgspec.to_builtins({"decode": self.writing.seen(), "local_prefill": self.reading.seen()}),
        }

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around every request: Ollama has a line of its own, and it is not to grow without a bound."""
        if self.draining:
            raise NodeDraining("this node is stopping and takes no new requests")
        if self.open >= self.slots + self.queue:
            raise NodeBusy(f"{self.open} requests are at this Ollama already")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    async def warm(self, asked: WarmRequest) -> TextMetrics:
        """Read a prompt, so that a request which begins the same way finds it held. One token is written, because
        none means without an end to Ollama."""
        writing = OllamaGeneration(self, asked.one_token())
        async with aclosing(writing.pieces()) as pieces:
            async for _ in pieces:
                pass
        return writing.metrics

    async def require_continuable(self) -> None:
        """Whether an assistant's message at the end of a chat is gone on with, or closed and answered: that is the chat
        template's business, and it does not say. A letter more makes a token more, or a whole turn's tokens."""
        if self._continues is None:
            turns = [{"role": "user", "content": "A"}], [{"role": "user", "content": "A"}, _LETTER]
            counts = [(await self.warm(WarmRequest(messages=turn))).prompt_tokens or 0 for turn in turns]
            self._continues = 0 < counts[1] - counts[0] <= 2
        if not self._continues:
            raise ModelUnsupported(
                f"Ollama's template of {self.ollama.model} ends an assistant's message:"
                " an answer that was begun elsewhere cannot be gone on with"
            )

    def _common(self) -> dict[str, Any]:
        """Of every request. The same always: another `num_ctx` has Ollama load the model again. `truncate` and `shift`
        as true, its defaults, have it forget the beginning in silence."""
        return {"options": {"num_ctx": self.window}, "truncate": False, "shift": False, **self._keep_alive}

    def asked_of(self, asked: TextRequest, shown: ModelDetails) -> tuple[str, dict[str, Any]]:
        path, body = asked.body(shown)
        common = self._common()
        common["options"] |= asked.options(shown)
        return path, {"model": self.ollama.model, "stream": True} | common | body


_LETTER = {"role": "assistant", "content": "A"}


class OllamaGeneration:
    """One answer while it is being written; then `metrics` is whole."""

    def __init__(self, node: OllamaNode, asked: TextRequest) -> None:
        self._node, self._asked, self._read = node, asked, ParsedPrompt(asked)
        self.metrics = TextMetrics()
        self._key, self._new = "", False

    async def pieces(self) -> AsyncGenerator[TextPiece, None]:
        began_at, node = time.perf_counter(), self._node
        shown = await self._introduced()
        if self._asked.written_text and self._asked.messages is not None:
            await node.require_continuable()
        self._require_room()
        path, body = node.asked_of(self._asked, shown)
        self.metrics.seed = body["options"].get("seed") if self._asked.temperature else None
        self._key = self._read.key(body.get("think"))
        is_new = node.seen.is_new(self._read.turns, self._read.tools)
        self._new = is_new and self._asked.context is None  # a warm context: it was read
        try:
            async with aclosing(node.ollama.lines(path, body)) as lines:
                async for line in lines:
                    if piece := _piece(line):
                        self.metrics.first_token_time = self.metrics.first_token_time or time.perf_counter() - began_at
                        yield piece
                    if line.done:
                        self._end(line)
        except EngineUnavailable:
            node.doubt()
            raise
        finally:
            self.metrics.total_time = time.perf_counter() - began_at
        yield TextPiece(finish_reason=self.metrics.finish_reason)

    async def _introduced(self) -> ModelDetails:
        if self._node.shown is None:
            await self._node.introduce()
        assert self._node.shown
        return self._node.shown

    @property
    def _least_tokens(self) -> int:
        return _size_bytes(self._read.words) // _MOST_TOKEN_BYTES

    @property
    def _about_tokens(self) -> int:
        token_bytes = _CHAT_TOKEN_BYTES if self._read.in_chat else _TOKEN_BYTES
        return _size_bytes(self._read.all) // token_bytes + self._read.images * _IMAGE_TOKENS

    def _require_room(self) -> None:
        """What cannot fit, however few tokens it is, is refused before it costs anything. Of a version that would cut
        it in silence also what may not fit: it reads on for minutes, whoever leaves, and its counts come last."""
        least, window = self._least_tokens + self._asked.limit, self._node.window
        if least > window:
            raise ContextTooLong(least, window, "at least ")
        about = self._about_tokens + self._asked.limit
        if about > window and version_of(self._node.version) < HONOURS_TRUNCATE:
            raise ContextTooLong(about, window, "about ", _CUTS.format(self._node.version))

    def _end(self, line: GenerateChunk) -> None:
        metrics = self.metrics
        if line.done_reason not in ("stop", "length", "", None):
            what = "broke its answer off" if metrics.first_token_time else "wrote nothing"
            raise EngineFailed(f"Ollama {what}: it says {line.done_reason!r} where an answer should end")
        metrics.completion_tokens, metrics.finish_reason = line.eval_count, line.done_reason or "stop"
        metrics.prompt_tokens = self._counted(line.prompt_eval_count)
        metrics.load_time, metrics.prefill_time = line.load_duration / 1e9, line.prompt_eval_duration / 1e9
        metrics.decode_time = line.eval_duration / 1e9
        known = line.load_duration + line.prompt_eval_duration + line.eval_duration
        metrics.queue_time = max(0.0, (line.total_duration - known) / 1e9)
        self._require_whole()
        self._measure()

    def _counted(self, told: int | None) -> int | None:
        if version_of(self._node.version) >= COUNTS_ALL:
            return told or None
        return self._node.seen.counted(self._key, told)

    def _require_whole(self) -> None:
        """Versions that do not know `truncate` cut a prompt in silence, or drop messages; the counts give it away."""
        version, count, window = version_of(self._node.version), self.metrics.prompt_tokens or 0, self._node.window
        if version >= HONOURS_TRUNCATE:
            return
        least, surely_fits = self._least_tokens, _FEWEST_TOKEN_BYTES * window // _MOST_TOKEN_BYTES
        dropped = version >= COUNTS_ALL and least > max(count, surely_fits)
        if count >= window or dropped:
            raise ContextTooLong(max(least, window + 1), window, "at least ")
        if count + self.metrics.completion_tokens > window:  # it forgot the beginning to go on
            raise ContextTooLong(count + self.metrics.completion_tokens, window)

    def _measure(self) -> None:
        """The first token is made of the prompt's last logits: its time is in the reading."""
        node, metrics = self._node, self.metrics
        node.tokens_written += metrics.completion_tokens
        later, at_once = metrics.completion_tokens - 1, max(node.open, 1)
        if later > 0 and metrics.decode_time:
            metrics.decode_speed = later / metrics.decode_time
            node.writing.note(at_once, later * at_once, metrics.decode_time)
        if self._new and metrics.prompt_tokens and metrics.prefill_time:
            self._measure_reading(metrics.prompt_tokens)

    def _measure_reading(self, tokens: int) -> None:
        """A node that never wrote more than a token has no step to hold it against: it passes Ollama's word on, and
        does not have anyone plan with it."""
        node, metrics = self._node, self.metrics
        decode_speed = metrics.decode_speed or node.writing.expect(1)
        if decode_speed and not was_read(metrics.prefill_time, 1 / decode_speed):
            return
        node.tokens_read += tokens
        metrics.prefill_speed = tokens / metrics.prefill_time
        if decode_speed:
            node.reading.note(tokens, tokens, metrics.prefill_time)


def _size_bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _piece(line: GenerateChunk) -> TextPiece | None:
    said = line.message
    text, thinking = line.response or said.content or "", line.thinking or said.thinking or ""
    piece = TextPiece(text, thinking, said.tool_calls or [])
    return piece if piece.text or piece.thinking or piece.tool_calls else None
