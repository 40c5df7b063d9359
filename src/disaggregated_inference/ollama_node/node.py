"""A node in front of an Ollama that already runs. It serves whole requests only: Ollama neither exports nor imports KV.

From outside it looks like any other node and says what it is: `exports` and `imports` are false, and there is no
tokenizer. What Ollama does not tell (such as the tokens of a cached prompt) is left out, not made up.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec

from disaggregated_inference.api import (
    LoadedModel,
    ModelIdentity,
    ModelInfo,
    NodeHealth,
    NodeStatus,
    OllamaStatus,
    QueueDepth,
    Rates,
    Role,
    SlotStatus,
    StoredModel,
    TokenizerContent,
)
from disaggregated_inference.errors import (
    DisaggError,
    EngineUnavailable,
    ModelUnsupported,
    NodeBusy,
    NodeDraining,
    NotOffered,
)
from disaggregated_inference.node import RateMeter
from disaggregated_inference.observe import ReadingsSampler
from disaggregated_inference.ollama_node.client import ModelDetails, OllamaClient, keep_alive_of
from disaggregated_inference.ollama_node.output import SentPrompts
from disaggregated_inference.ollama_node.requests import TextRequest
from disaggregated_inference.timeouts import OllamaTimeouts

log = logging.getLogger(__name__)

_UNKNOWN_WINDOW = 4096
_NOT_CHECKED = "Ollama was not checked yet"


class OllamaNode:
    def __init__(
        self,
        ollama: OllamaClient,
        role: Role,
        max_window: int,
        keep_alive: str,
        slots: int,
        queue: int,
        timeouts: OllamaTimeouts = OllamaTimeouts(),
    ) -> None:
        self.ollama, self.role, self.slots, self.queue, self.timeouts = ollama, role, slots, queue, timeouts
        self.epoch = secrets.token_hex(8)
        self.identity = self.trusted_link = ""  # for its status
        self.readings: ReadingsSampler | None = None
        self.draining = self.loading = False
        self.details: ModelDetails | None = None
        self.version = ""
        self.running: LoadedModel | None = None
        self.reason = _NOT_CHECKED  # why no request can be served; empty when all is well
        self.open_requests = self.prompt_tokens = self.generated_tokens = 0
        self.prefill_rates, self.decode_rates, self.prompts = RateMeter(), RateMeter(), SentPrompts()
        self.window = min(_UNKNOWN_WINDOW, max_window)  # tokens of prompt and completion together
        self._max_window = max_window
        self._keep_alive = {} if not keep_alive else {"keep_alive": keep_alive_of(keep_alive)}
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed_at = self._identified_at = 0.0
        self._silent_since: float | None = None
        self._load_error = ""
        self.continues: bool | None = None  # whether the chat template continues an assistant message; None: unknown

    @property
    def stalled_s(self) -> float:
        """How long Ollama has not answered health checks. It tells nothing about its engine."""
        return 0.0 if self._silent_since is None else time.monotonic() - self._silent_since

    async def identify(self) -> ModelDetails:
        """Read version and model from Ollama. Raises what is wrong with them."""
        self.version = await self.ollama.version()
        details = await self.ollama.show()
        if details.lacks("completion"):
            raise ModelUnsupported(f"{self.ollama.model} cannot generate text: it is an embedding model")
        self.details, self._identified_at = details, time.monotonic()
        self.window = self.ollama.window = min(details.window or _UNKNOWN_WINDOW, self._max_window)
        return details

    async def require_model(self) -> None:
        """Check the model before the node listens, while the user is still watching. Ollama itself may start later."""
        try:
            await self.ollama.version()
        except DisaggError as error:
            return log.warning("%s; until then this node is unhealthy", error)
        else:
            await self.identify()
        finally:
            await self.ollama.close()  # the server has another event loop

    def drain(self) -> int:
        self.draining = True
        return self.open_requests

    def retry_after_s(self, error: DisaggError) -> int:
        return 1

    def heartbeat(self) -> bytes:
        """What a silent stream sends: its reader can tell a slow Ollama from one that does not answer."""
        self._start_refresh()
        return b": alive %.1f\n\n" % self.stalled_s

    async def refresh(self) -> None:
        """Check Ollama. Where that takes long, the last result stays, and `stalled_s` grows."""
        await asyncio.wait({self._start_refresh()}, timeout=self.timeouts.health_s)

    def _start_refresh(self) -> "asyncio.Task[None]":
        """One check at a time, and a result is good for a while."""
        is_old = time.monotonic() - self._refreshed_at > self.timeouts.health_s
        if self._refreshing is None or (self._refreshing.done() and is_old):
            self._refreshing = asyncio.create_task(self._refresh())
        return self._refreshing

    def forget_model(self) -> None:
        """Ollama is away, or has lost the model: it may have another one when it is back."""
        self.details, self.continues, self._refreshed_at = None, None, 0.0

    async def _refresh(self) -> None:
        self._silent_since = self._silent_since or time.monotonic()
        if self.reason == _NOT_CHECKED:
            self.reason = f"Ollama at {self.ollama.url} has not answered a health check yet"
        try:
            self.running = await self.ollama.running() if self.details else None
            if not self.running or time.monotonic() - self._identified_at > self.timeouts.identity_s:
                await self.identify()
                self.running = self.running or await self.ollama.running()
            self.reason, self._silent_since = self._load_error, None
        except DisaggError as error:
            self.running, self.reason = None, str(error)
        self._refreshed_at = time.monotonic()

    async def load_at_start(self) -> None:
        """Load the model before the first request needs it, and retry until that works."""
        while not self.draining:
            await self.refresh()
            if self.details:
                try:
                    await self.load()
                    self._load_error = ""
                    return
                except DisaggError as error:
                    self._load_error = str(error)
                    log.warning("the model is not loaded: %s", error)
            await asyncio.sleep(self.timeouts.reload_s)

    async def load(self) -> None:
        self.loading = True
        try:
            await self.ollama.load(self._common())
        finally:
            self.loading, self._refreshed_at = False, 0.0

    async def unload(self) -> None:
        """Ollama answers a moment before the model is really unloaded."""
        await self.ollama.load({"keep_alive": 0})
        for _ in range(20):
            if not await self.ollama.running():
                break
            await asyncio.sleep(self.timeouts.unload_s / 20)
        self._refreshed_at = 0.0

    async def health(self) -> NodeHealth:
        await self.refresh()
        return self._health()

    def _health(self) -> NodeHealth:
        working: Literal["loading", "healthy"] = "loading" if self.loading else "healthy"
        return NodeHealth(
            status="draining" if self.draining else "unhealthy" if self.reason else working,
            model=self.ollama.model,
            loaded=self.running is not None,
            backend="ollama",
            role=self.role,
            epoch=self.epoch,
            stalled_s=round(self.stalled_s, 3),
            reason=self.reason,
            ollama=OllamaStatus(url=self.ollama.url, version=self.version, running=self.running),
        )

    async def tokenizer(self) -> TokenizerContent:
        raise NotOffered("Ollama does not share its tokenizer: send it text")

    async def model_info(self) -> ModelInfo:
        await self.refresh()
        if self.details is None:
            raise EngineUnavailable(self.reason)
        return ModelInfo(
            model=self.ollama.model,
            context_window=self.window,
            exports=False,
            imports=False,
            tokenizer="none",
            identity=ModelIdentity(self.details.architecture, self.details.parameter_count),
            stored=await self._stored(self.details),
            capabilities=None if self.details.capabilities is None else tuple(self.details.capabilities),
        )

    async def _stored(self, details: ModelDetails) -> StoredModel:
        """Without its size if Ollama does not say it soon: it serves all the same."""
        size_bytes = 0
        with suppress(DisaggError, TimeoutError):
            async with asyncio.timeout(self.timeouts.health_s):
                size_bytes = await self.ollama.size_bytes()
        return StoredModel(
            format=details.details.format,
            quantization=details.details.quantization_level,
            parameters=details.parameter_count,
            size_bytes=size_bytes,
        )

    async def status(self) -> NodeStatus:
        await self.refresh()
        running = min(self.open_requests, self.slots)
        return NodeStatus(
            **msgspec.structs.asdict(self._health()),
            context_window=self.window,
            waiting=self.open_requests,
            running=running,
            working=running,
            readings=self.readings.latest() if self.readings else None,
            exports=False,
            imports=False,
            tokenizer="none",
            identity=self.identity,
            trusted_link=self.trusted_link,
            queue=QueueDepth(self.open_requests - running),
            slots=SlotStatus(running, self.slots),
            prompt_tokens_computed=self.prompt_tokens,
            tokens_written=self.generated_tokens,
            rates=Rates(decode=tuple(self.decode_rates.stats()), local_prefill=tuple(self.prefill_rates.stats())),
        )

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Around every request: Ollama has its own queue, and this keeps it bounded."""
        if self.draining:
            raise NodeDraining("this node is stopping and takes no new requests")
        if self.open_requests >= self.slots + self.queue:
            raise NodeBusy(f"this Ollama already has {self.open_requests} requests: try again later")
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    def _common(self) -> dict[str, Any]:
        """In every request, and always the same: another `num_ctx` makes Ollama reload the model. With its defaults for
        `truncate` and `shift`, Ollama would drop the start of a long prompt silently."""
        return {"options": {"num_ctx": self.window}, "truncate": False, "shift": False, **self._keep_alive}

    def ollama_request(self, params: TextRequest, details: ModelDetails) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        path, body = params.body(details)
        common = self._common()
        common["options"] |= params.options(details)
        return path, {"model": self.ollama.model, "stream": True} | common | body
