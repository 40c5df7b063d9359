"""A node: one process with one model in one engine, and its roles."""

import asyncio
from dataclasses import dataclass
from typing import Literal

import msgspec

from disaggregated_inference.api import (
    KVMemoryStatus,
    ModelInfo,
    NodeHealth,
    NodeStatus,
    PathStatus,
    QueueDepth,
    Rates,
    Role,
    SlotStatus,
    StoredModel,
    TicketEndings,
    TokenizerContent,
)
from disaggregated_inference.kv_transfer import format_address
from disaggregated_inference.models import ModelFiles, storage_of
from disaggregated_inference.node.decode import DecodeNode
from disaggregated_inference.node.kv_memory import KVMemory
from disaggregated_inference.node.prefill import PrefillNode
from disaggregated_inference.node.trust import Trust
from disaggregated_inference.observe import ReadingsSampler


@dataclass(frozen=True, slots=True)
class Node:
    """Its methods do not block the event loop."""

    model: ModelFiles
    kv_memory: KVMemory
    prefill: PrefillNode | None = None
    decode: DecodeNode | None = None
    readings: ReadingsSampler | None = None

    @property
    def roles(self) -> list[PrefillNode | DecodeNode]:
        return [role for role in (self.prefill, self.decode) if role]

    @property
    def trust(self) -> Trust:
        return self.roles[0].trust

    @property
    def role(self) -> Role:
        return "both" if self.prefill and self.decode else "prefill" if self.prefill else "decode"

    @property
    def kv_addresses(self) -> tuple[str, ...]:
        return tuple(map(format_address, self.prefill.kv_addresses)) if self.prefill else ()

    @property
    def epoch(self) -> str:
        """Of this run: a restarted node has another."""
        return self.roles[0].epoch

    async def health(self) -> NodeHealth:
        """Live, without a call to the scheduler's thread: it may be busy."""
        kv_memory, scheduler = self.kv_memory, self.kv_memory.scheduler
        alive = scheduler.alive and (self.prefill is None or self.prefill.kv_server.listener.alive)
        working: Literal["draining", "loading", "healthy"] = (
            "draining" if kv_memory.draining else "loading" if scheduler.loading else "healthy"
        )
        return NodeHealth(
            status=working if alive else "unhealthy",
            model=self.model.name,
            loaded=kv_memory.engine.loaded,
            backend=kv_memory.engine.name,
            role=self.role,
            epoch=self.epoch,
            stalled_s=round(scheduler.stalled_s, 3),
        )

    async def model_info(self) -> ModelInfo:
        return await asyncio.to_thread(self._model_info)

    def _model_info(self) -> ModelInfo:
        spec = self.kv_memory.engine.spec
        return ModelInfo(
            model=self.model.name,
            context_window=spec.context_window,
            vocabulary=spec.vocabulary,
            eos_tokens=spec.eos_tokens,
            fingerprint=self.kv_memory.engine.fingerprint,
            text_identity=self.model.tokenizer.text_identity,
            stored=StoredModel(**storage_of(self.model)._asdict()),
        )

    async def tokenizer(self) -> TokenizerContent:
        return await asyncio.to_thread(self._tokenizer)

    def _tokenizer(self) -> TokenizerContent:
        own = self.model.tokenizer
        return TokenizerContent(tokenizer=own.json, chat_template=own.chat_template, special=own.special)

    async def load(self) -> None:
        """No thread waits for the load: other requests need the threads meanwhile."""
        self.kv_memory.require_open()
        await asyncio.wrap_future(self.kv_memory.scheduler.post(self.kv_memory.load))

    async def unload(self) -> None:
        await asyncio.wrap_future(self.kv_memory.scheduler.post(self.kv_memory.unload))

    def drain(self) -> int:
        self.kv_memory.draining = True
        return sum(role.open_requests for role in self.roles)

    def retry_after_s(self, error: BaseException | None = None) -> int:
        """When a refused request may come back; without an error, a new small request."""
        known: int | None = getattr(error, "retry_after_s", None)
        return known or max(admission.retry_after_s() for admission in self.kv_memory.admissions)

    async def status(self) -> NodeStatus:
        engine, kv_memory, prefill, decode = self.kv_memory.engine, self.kv_memory, self.prefill, self.decode
        roles, batch = self.roles, kv_memory.scheduler.batch
        # Prompts of peer checks, on either side, belong to no request.
        checked = decode.kv_source.peer_checks.tokens_computed if decode else 0
        served = prefill.chunked_prefill.canary_tokens if prefill else 0
        return NodeStatus(
            **msgspec.structs.asdict(await self.health()),
            dtype=engine.dtype,
            threads=engine.threads,
            context_window=engine.spec.context_window,
            kv_token_bytes=engine.spec.kv_token_bytes(engine.dtype),
            waiting=sum(role.open_requests for role in roles),
            waiting_tokens=sum(role.waiting_tokens for role in roles),
            running=len(batch.running),
            working=kv_memory.scheduler.working,
            exports=prefill is not None,
            imports=decode is not None,
            prompt_logprobs=engine.prompt_logprobs,
            queue=QueueDepth(sum(admission.waiting for admission in kv_memory.admissions), self.retry_after_s()),
            slots=SlotStatus(kv_memory.held_slots, engine.max_batch),
            kv=_memory_status(kv_memory),
            prefixes=msgspec.to_builtins(kv_memory.prefixes.stats()),
            integrity_faults=kv_memory.faults,
            prompt_tokens_computed=engine.counters.prompt_tokens - checked - served,
            tokens_written=decode.requests.completion_tokens if decode else 0,
            canary_tokens=checked,
            steps=batch.steps,
            tickets=len(prefill.tickets) if prefill else 0,
            endings=TicketEndings(**prefill.tickets.endings) if prefill else TicketEndings(),
            kv_addresses=self.kv_addresses,
            identity=self.trust.identity.name if self.trust.identity else "",
            kv_security=self.trust.kv_security if prefill else msgspec.UNSET,
            trusted_link=self.trust.trusted_link,
            paths=_paths(decode) if decode else (),
            peers=tuple(decode.kv_source.peer_checks.stats()) if decode else (),
            rates=Rates(
                prefill=tuple(prefill.chunked_prefill.rates.stats()) if prefill else (),
                decode=tuple(batch.rates.stats()),
                local_prefill=tuple(decode.kv_source.prefill_rates.stats()) if decode else (),
            ),
            readings=self.readings.latest() if self.readings else None,
        )


def _memory_status(kv_memory: KVMemory) -> KVMemoryStatus:
    return KVMemoryStatus(
        limit_bytes=kv_memory.admission.limit_bytes,
        reserved_bytes=kv_memory.admission.held_bytes,
        total_limit_bytes=sum(admission.limit_bytes for admission in kv_memory.admissions),
        total_reserved_bytes=kv_memory.reserved_bytes,
        peak_reserved_bytes=sum(admission.peak_bytes for admission in kv_memory.admissions),
        held_bytes=kv_memory.held_bytes,
        peak_held_bytes=kv_memory.peak_held_bytes,
    )


def _paths(decode: DecodeNode) -> tuple[PathStatus, ...]:
    return tuple(msgspec.convert(path, PathStatus, from_attributes=True) for path in decode.kv_source.paths.known())
